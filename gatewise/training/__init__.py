"""Training that can be interrupted and resumed at any time: loop, checkpoints, schedules, distributed processes.

This package does not depend on what is trained. A model is any `torch.nn.Module` with a method ``loss(batch, state)``
(see `Trainable`); the data is any object with batches (see `Batches`).
"""

from gatewise.training.checkpoint import read_tensors, write_tensors
from gatewise.training.history import Evaluation, perplexity
from gatewise.training.loop import evaluate, fit
from gatewise.training.options import TrainingOptions
from gatewise.training.protocols import Batches, Trainable
from gatewise.training.reference import Reference
from gatewise.training.run_folder import RunFolder

__all__ = [
    "Batches",
    "Evaluation",
    "Reference",
    "RunFolder",
    "Trainable",
    "TrainingOptions",
    "evaluate",
    "fit",
    "perplexity",
    "read_tensors",
    "write_tensors",
]
