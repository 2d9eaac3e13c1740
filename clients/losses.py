"""The losses of a training that `lightning` runs inside a client."""

from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the same library under its other name
    from pytorch_lightning import Callback


class Losses(Callback):
    """The loss of every batch.

    Attributes:
        values: The losses.
    """

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Keep the loss of a batch."""
        self.values.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))
