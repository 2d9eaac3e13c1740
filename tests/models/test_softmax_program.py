"""The Triton program of the softmax, in Triton's interpreter where there is no GPU, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.compilers import device_of_programs

pytestmark = pytest.mark.parametrize("device", [device_of_programs()])


def expected(scores, targets, smoothing):
    exact = scores.double().requires_grad_()
    losses = functional.cross_entropy(exact, targets, reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return losses.detach(), gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("count", "vocabulary"), [(1, 1), (3, 2), (5, 31), (4, 200), (2, 2049), (2, 17_192), (2, 66_000)]
)
def test_losses_and_gradients_are_those_of_float64(device, count, vocabulary, dtype, smoothing):
    from gatewise.models import fused_softmax

    generator = torch.Generator().manual_seed(vocabulary)
    wide = (3 * torch.randn(count, vocabulary + 3, generator=generator)).to(dtype).to(device)
    scores, beside = wide[:, :vocabulary], wide[:, vocabulary:].clone()
    targets = torch.randint(vocabulary, (count,), generator=generator).to(device)
    losses = torch.full((count,), torch.nan, device=device)
    truth, gradient = expected(scores.clone(), targets, smoothing)
    before = scores.clone()
    fused_softmax.launch(scores, targets, losses, smoothing, gradient=False)
    assert torch.equal(scores, before)
    torch.testing.assert_close(losses.double(), truth, rtol=3e-6, atol=3e-6)
    losses.fill_(torch.nan)
    fused_softmax.launch(scores, targets, losses, smoothing, gradient=True)
    torch.testing.assert_close(losses.double(), truth, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(scores.double(), gradient, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(wide[:, vocabulary:], beside)


@pytest.mark.parametrize("vocabulary", [31, 66_000])
def test_extreme_scores_keep_their_meaning(device, vocabulary):
    from gatewise.models import fused_softmax

    scores = torch.zeros(4, vocabulary, device=device)
    scores[0, 3] = 400.0
    scores[1, 3] = torch.nan
    scores[2] = -torch.inf
    scores[2, 5] = 1.0
    scores[3, 4] = -torch.inf
    losses = torch.empty(4, device=device)
    targets = torch.tensor([0, 0, 5, 0], device=device)
    fused_softmax.launch(scores, targets, losses, 0.0, gradient=True)
    assert losses[0] == 400.0
    assert scores[0, 3] == 1.0
    assert losses[1].isnan()
    assert losses[2] == 0.0
    assert not scores[2].any()
    assert losses[3].item() == pytest.approx(torch.tensor(vocabulary - 1.0).log().item(), rel=1e-6)
