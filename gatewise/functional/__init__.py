"""The functional interface: a recurrent layer as explicit passes, and as one differentiable function."""

from gatewise.functional.differentiable import lstm
from gatewise.functional.explicit import Gradients, Output, RepeatedForwardWarning, State, backward, forward

__all__ = ["Gradients", "Output", "RepeatedForwardWarning", "State", "backward", "forward", "lstm"]
