"""A character model in a plain PyTorch loop, which needs no changes for `gatewise.LSTM`."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gatewise

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
STEPS, BATCH, EPOCHS = 15, 12, 15

torch.manual_seed(0)
characters = sorted(set(TEXT))
codes = torch.tensor([characters.index(character) for character in TEXT])
streams = codes[: len(codes) // BATCH * BATCH].view(BATCH, -1).t()  # [time, B]: each column is contiguous text

embedding = nn.Embedding(len(characters), 24)
layer = gatewise.LSTM(24, 64)
output = nn.Linear(64, len(characters))
parameters = [*embedding.parameters(), *layer.parameters(), *output.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=0.01)

for epoch in range(EPOCHS):
    state, total, pieces = None, 0.0, 0
    for start in range(0, len(streams) - STEPS, STEPS):
        features, state = layer(embedding(streams[start : start + STEPS]), state)
        state = (state[0].detach(), state[1].detach())  # truncated backpropagation through time
        targets = streams[start + 1 : start + STEPS + 1]
        loss = cross_entropy(output(features).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        total, pieces = total + loss.item(), pieces + 1
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1:2d}  loss {total / pieces:.3f}")

text, state = "the q", None
with torch.no_grad():
    for _ in range(40):
        fresh = text if state is None else text[-1]
        codes_in = torch.tensor([[characters.index(character)] for character in fresh])
        features, state = layer(embedding(codes_in), state)
        text += characters[output(features[-1, 0]).argmax()]
print(text)
