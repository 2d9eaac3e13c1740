"""A classifier of sequences, trained by `NeuralNetClassifier` inside a grid search of scikit-learn."""

import pickle

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

import gatewise
from clients.trial import Trial


class Classifier(nn.Module):
    def __init__(self, hidden_size: int = 24) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, hidden_size, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden_size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1]).softmax(-1)


class Accelerated(Callback):
    def on_train_begin(self, net: NeuralNetClassifier, **options: object) -> None:
        gatewise.accelerate(net.module_)


with Trial("skorch", "gatewise.accelerate(net.module_)  # in a callback") as trial:
    x = np.random.randn(96, 12, 6).astype(np.float32)
    y = (x.mean((1, 2)) > 0).astype(np.int64) + (x[:, -1, 0] > 0.5)
    net = NeuralNetClassifier(
        Classifier,
        max_epochs=4,
        lr=0.05,
        optimizer=torch.optim.Adam,
        callbacks=[Accelerated()] if trial.gatewise else [],
        verbose=0,
    )
    search = GridSearchCV(net, {"module__hidden_size": [8, 24]}, cv=2, scoring="neg_log_loss")
    search.fit(x, y)
    best = search.best_estimator_
    trial.compare("losses", [*best.history[:, "train_loss"], *best.history[:, "valid_loss"]])
    trial.compare("scores", search.cv_results_["mean_test_score"])
    loaded = pickle.loads(pickle.dumps(best))
    trial.saved("pickle", best.predict_proba(x), loaded.predict_proba(x), loaded.module_)
