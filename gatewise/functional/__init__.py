"""The calls: an LSTM as explicit passes and as one differentiable function."""

from gatewise.functional.explicit import (
    Gradients,
    Output,
    RepeatedForwardWarning,
    State,
    backward,
    forward,
)
from gatewise.functional.lstm import lstm

__all__ = ["Gradients", "Output", "RepeatedForwardWarning", "State", "backward", "forward", "lstm"]
