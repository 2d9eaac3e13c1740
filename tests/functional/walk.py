"""The walk of a tensor through the package: the files whose code reads a variable that holds it, in order."""

import dis
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import gatewise

PACKAGE = Path(gatewise.__file__).parent
NESTING = 3  # levels of tuples and lists in which the tensor is looked for


class Stay(NamedTuple):
    """An unbroken stretch of reads in one file.

    Attributes:
        file: The file, relative to the package.
        reads: The functions and variables, `function:variable`, without repetition.
    """

    file: str
    reads: list[str]


class Walk(NamedTuple):
    """The stays of a tensor in turn."""

    stays: list[Stay]

    @property
    def files(self):
        """Return the files, in the order of the first stay."""
        return list(dict.fromkeys(stay.file for stay in self.stays))

    @property
    def returns(self):
        """Return how many stays are in a file that the tensor had left before."""
        return len(self.stays) - len(self.files)

    @property
    def counts(self):
        """Return the numbers of stays, files and returns."""
        return len(self.stays), len(self.files), self.returns

    def __str__(self):
        """Return the stays, one a line, with what is read there."""
        return "\n".join(f"{stay.file:40} {', '.join(stay.reads)}" for stay in self.stays)


def walk(call, tensor):
    """Make a call and return the walk of a tensor, by identity of its storage, through the package.

    Views are the same tensor, and so is a tuple or list with the tensor in it; what an operator computes is another.
    """
    storage, stays = tensor.untyped_storage()._cdata, []

    def trace(frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            for name in _loads(code).get(frame.f_lasti, ()):
                if _holds(frame.f_locals.get(name), storage):
                    file = str(Path(code.co_filename).relative_to(PACKAGE))
                    if not stays or stays[-1].file != file:
                        stays.append(Stay(file, []))
                    read = f"{code.co_name}:{name}"
                    if read not in stays[-1].reads:
                        stays[-1].reads.append(read)
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # without a frame that asks for them, Python 3.12 traces no opcodes at first
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return Walk(stays)


@functools.cache
def _loads(code):
    """Return the names of the local variables that an instruction reads, by its offset."""
    found = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            names = instruction.argval
            found[instruction.offset] = names if isinstance(names, tuple) else (names,)
    return found


def _holds(value, storage, nesting=NESTING):
    if isinstance(value, torch.Tensor):
        try:
            return value.untyped_storage()._cdata == storage
        except NotImplementedError:  # a tensor of `torch.func`
            return False
    return nesting > 0 and isinstance(value, tuple | list) and any(_holds(each, storage, nesting - 1) for each in value)


if __name__ == "__main__":  # print the walks of one forward pass on the CPU
    for kernel in ("eager", "auto"):
        for training in (True, False):
            layer, x = gatewise.LSTM(3, 4, kernel=kernel), torch.randn(5, 2, 3)
            with torch.set_grad_enabled(training):
                layer(x)
                found = walk(lambda: layer(x), x)  # noqa: B023  called at once
            print(f"{kernel}, {'training' if training else 'inference'}: stays, files, returns {found.counts}")
            print(found, end="\n\n")
