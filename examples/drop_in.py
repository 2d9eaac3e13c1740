"""Replace the LSTMs of an existing model; parameters, state_dict and results stay the same."""

import copy

import torch
from torch import Tensor, nn

import gatewise


class Tagger(nn.Module):
    """Any model of yours, written with torch.nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.encoder = nn.LSTM(32, 64, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
        self.output = nn.Linear(128, 7)

    def forward(self, words: Tensor) -> Tensor:
        features, _ = self.encoder(self.embedding(words))
        return self.output(features)


torch.manual_seed(0)
before = Tagger().eval()
after = gatewise.accelerate(copy.deepcopy(before))

words = torch.randint(100, (8, 20))
difference = (before(words) - after(words)).abs().max().item()
print(f"encoder: {type(before.encoder).__module__}.LSTM -> {type(after.encoder).__module__}.LSTM")
print(f"largest difference of the outputs: {difference:.1e}")
print(f"same parameter names: {list(before.state_dict()) == list(after.state_dict())}")
