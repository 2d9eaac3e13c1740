"""What a program calls."""

import gc
import sys


def profile(call, note):
    """Run `call` with `note` as `sys.setprofile`'s function, but without what garbage collection would call.

    Finalizers and callbacks that other tests of the process have left (Hypothesis registers one) are run by whatever
    call a collection happens to fall into.
    """
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
