"""Random trials: calls with every option there is, drawn at random, each held to float64.

    python -m gatewise.testing.trials --seconds 60 --seed 0

Each setting is called several times, between calls of other settings, on an allocator whose free memory is full of NaN,
and between walls of NaN, so that a read of memory that nobody wrote shows. A setting that fails is made as small as it
can be while it still fails, and is printed as a program:

    from gatewise.testing.trials import Setting, trial

    trial(Setting(time=2, batch=1, input_size=1, hidden_size=1500, dtype="bfloat16", kernel="persistent"))
"""

from gatewise.testing.trials.draw import Sizes, draw, sizes
from gatewise.testing.trials.run import Refused, Wrong, trial, trials
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.shrink import shrunk

__all__ = ["Refused", "Setting", "Sizes", "Wrong", "draw", "shrunk", "sizes", "trial", "trials"]
