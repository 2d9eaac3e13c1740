"""Random trials: calls of the layer with random combinations of all options, each compared with float64.

    python -m gatewise.testing.trials --seconds 60 --seed 0

Each setting is called several times, interleaved with calls of other settings. The free memory of the allocator is
filled with NaN, and tensors are surrounded by NaN, so that reads of uninitialised memory are detected. A setting that
fails is reduced to a small one that still fails, which is printed as a program:

    from gatewise.testing.trials import Setting, trial

    trial(Setting(time=2, batch=1, input_size=1, hidden_size=1500, dtype="bfloat16", kernel="persistent"))
"""

from gatewise.testing.trials.draw import Sizes, draw, sizes
from gatewise.testing.trials.run import Refused, Wrong, trial, trials
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.shrink import shrunk

__all__ = ["Refused", "Setting", "Sizes", "Wrong", "draw", "shrunk", "sizes", "trial", "trials"]
