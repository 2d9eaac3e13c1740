"""A model whose implementation is wrong for one batch, with a trusted one for comparison."""

from __future__ import annotations

import contextlib

import torch
from echo_model import Echoes, EchoModel

from gatewise.training.reference import Reference

WRONG = ("loss", "gradient", "state")


class FaultyModel(EchoModel):
    """An `EchoModel` which returns NaN for one batch, unless it runs inside the context `trusted`.

    Attributes:
        wrong: The value that is NaN: one of `WRONG`.
        losses: The losses of all training batches, outside of `trusted` and inside of it.
    """

    def __init__(self, batch=None, wrong="loss", **sizes) -> None:
        super().__init__(**sizes)
        self.batch, self.wrong, self.is_trusted = batch, wrong, False
        self.losses = []

    @contextlib.contextmanager
    def trusted(self):
        self.is_trusted = True
        try:
            yield
        finally:
            self.is_trusted = False

    def loss(self, batch, state=None):
        loss, (memory, nothing) = super().loss(batch, state)
        if self.batch is not None and not self.is_trusted and batch.x.shape == self.batch.x.shape:
            # Nothing synchronises with the device, so that a CUDA graph can capture it.
            factor = torch.where((batch.x == self.batch.x).all(), torch.nan, 1.0)
            if self.wrong == "loss":
                loss = loss * factor
            elif self.wrong == "gradient" and loss.requires_grad:
                loss.register_hook(lambda gradient: gradient * factor.to(gradient.dtype))
            elif self.wrong == "state":
                memory = memory * factor
        if self.training and not loss.is_cuda:
            self.losses.append(loss.item())
        return loss, (memory, nothing)

    def reference(self) -> Reference:
        return Reference(context=self.trusted, name="the trusted one", running="the kernel new", advice="Go on so.")


def faulty_model(number=None, epoch=0, wrong="loss", data=None, seed=0, **sizes) -> FaultyModel:
    """Return a model that is wrong for one batch of `Echoes`, or for none if no number is given."""
    batch = None if number is None else next((data or Echoes()).windows(epoch, number))
    torch.manual_seed(seed)
    return FaultyModel(batch, wrong, **sizes)
