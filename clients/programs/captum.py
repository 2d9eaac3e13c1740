"""Attributions of a classifier: gradients of inputs and layers, perturbations, and noise."""

import torch
from captum.attr import (
    FeatureAblation,
    GradientShap,
    IntegratedGradients,
    LayerConductance,
    LayerIntegratedGradients,
    NeuronGradient,
    NoiseTunnel,
    Saliency,
)
from torch import nn

import gatewise
from clients.trial import Trial


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.classify(self.embedding(words))

    def classify(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].mean(1))


with Trial("captum", "gatewise.accelerate(model)") as trial:
    model = Classifier().eval()
    words = torch.randint(30, (4, 9))
    x = torch.randn(4, 9, 12)
    if trial.gatewise:
        gatewise.accelerate(model)
    layers = LayerIntegratedGradients(model, model.embedding)
    trial.compare("attributions", layers.attribute(words, target=1, n_steps=8))
    for method in (IntegratedGradients, Saliency, FeatureAblation):
        trial.compare("attributions", method(model.classify).attribute(x, target=2))
    shap = GradientShap(model.classify)
    trial.compare("attributions", shap.attribute(x, baselines=torch.zeros(2, 9, 12), target=0, n_samples=4))
    trial.compare("attributions", LayerConductance(model.classify, model.head).attribute(x, target=1, n_steps=8))
    trial.compare("attributions", NeuronGradient(model.classify, model.head).attribute(x, 1))
    x = x.clone().requires_grad_()
    trial.compare("attributions", NoiseTunnel(Saliency(model.classify)).attribute(x, target=1, nt_samples=4))
