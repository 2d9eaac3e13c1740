"""Forward and backward as two calls without autograd: the state between them is an opaque value."""

import torch
from torch.autograd import grad

from gatewise import functional

torch.manual_seed(0)
module = torch.nn.LSTM(input_size=8, hidden_size=16, dtype=torch.float64)
weights = module.all_weights
x = torch.randn(12, 4, 8, dtype=torch.float64)

(y, state), saved = functional.forward(x, None, weights)
print("the forward pass ran on:", saved.kernel)

dy = torch.randn_like(y)
gradients = functional.backward(saved, dy)  # does not repeat the forward pass

expected, _ = module(x)
(dw_hh,) = grad(expected, module.weight_hh_l0, dy)
difference = (gradients.weights[0][1] - dw_hh).abs().max().item()
print(f"largest difference to autograd, recurrent weights: {difference:.1e}")
