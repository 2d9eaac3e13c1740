"""Sequences of different lengths in one batch, in any order and without packing."""

import torch

import gatewise

torch.manual_seed(0)
layer = gatewise.LSTM(input_size=8, hidden_size=16, bidirectional=True)
batch = torch.randn(10, 3, 8)  # [T, B, I]; what follows the end of a sequence is never read
lengths = torch.tensor([4, 10, 1])

output, (h_n, c_n) = layer(batch, lengths=lengths)
print("output is zero after each end:", [bool((output[length:, row] == 0).all()) for row, length in enumerate(lengths)])

# A row of the batch is what the sequence would be alone, in both directions.
alone, _ = layer(batch[:4, :1])
print("row 0 equals sequence 0 alone:", torch.allclose(output[:4, :1], alone, atol=1e-6))
