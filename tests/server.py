"""Imported first by the server that starts processes (`tests/programs.py`): what it imports is no garbage."""

import gc
import os


def _begin():
    # Each full search of a process would go through all that the server has imported, and copy its pages.
    gc.freeze()
    gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_begin)
