"""What the user asked for: by argument, by `use_kernel`, by environment."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from gatewise.contract.errors import ArgumentError, KernelRefused, sentence
from gatewise.selection.admit import kernel_names

AUTO = "auto"
_POLICIES = ("predict", "measure")


class Preference(NamedTuple):
    """A kernel's name or "auto", the policy for "auto", and who asked."""

    kernel: str
    policy: str
    source: str


# What applies where nobody asked for anything.
_FREE = Preference(AUTO, _POLICIES[0], "")

# Our variables, and their names as the mapping of `os.environ` has them.
_KERNEL, _POLICY = "GATEWISE_KERNEL", "GATEWISE_POLICY"
_KEYS = {name: os.environ.encodekey(name) for name in (_KERNEL, _POLICY)}

# The one piece of state: what `use_kernel` set for the running context.
_context: ContextVar[tuple[str, str | None] | None] = ContextVar("gatewise_preference", default=None)


@contextlib.contextmanager
def use_kernel(kernel: str, *, policy: str | None = None) -> Iterator[None]:
    """Run every LSTM in the block on one kernel; a kernel that cannot run a call raises instead of falling back.

    Args:
        kernel: One of `gatewise.kernel_names()`, or "auto" to choose freely again inside another block.
        policy: How "auto" chooses: "predict" (from stated work; pure, reproducible) or "measure" (times the kernels
            that accept once for each kind of problem, and remembers). Default: the surrounding policy.

    Raises:
        KernelRefused: No kernel has that name (at once), or the kernel refuses a call (there, with the decision).
        ArgumentError: The policy is unknown.

    Example:
        >>> import torch, gatewise
        >>> lstm = gatewise.LSTM(4, 8)
        >>> with gatewise.use_kernel("eager"):
        ...     y, (h_n, c_n) = lstm(torch.randn(5, 2, 4))
    """
    check_name(kernel, "kernel")
    if policy is not None and policy not in _POLICIES:
        raise ArgumentError(sentence("policy", " or ".join(map(repr, _POLICIES)), repr(policy)))
    token = _context.set((kernel, policy))
    try:
        yield
    finally:
        _context.reset(token)


def preference(argument: str | Preference = AUTO) -> Preference:
    """Return what applies to a call: argument, then `use_kernel`, then GATEWISE_KERNEL, then "auto".

    Args:
        argument: Of the call; or a preference that was read before, which is returned.
    """
    if isinstance(argument, Preference):
        return argument
    context = _context.get()
    if context is None and argument == AUTO:
        # The usual call, in as few steps as can be.
        try:
            known = os.environ._data  # type: ignore[attr-defined]
            if _KEYS[_KERNEL] not in known and _KEYS[_POLICY] not in known:
                return _FREE
        except AttributeError:  # os.environ was exchanged for another mapping
            pass
    policy = (context and context[1]) or _environment(_POLICY) or _POLICIES[0]
    if policy not in _POLICIES:
        raise ArgumentError(sentence("GATEWISE_POLICY", " or ".join(map(repr, _POLICIES)), repr(policy)))
    if argument != AUTO:
        if not isinstance(argument, str):
            check_name(argument, "kernel")
        return _named(argument, policy, "kernel", "named by the argument `kernel`")
    if context is not None:
        return Preference(context[0], policy, "named by `use_kernel`" if context[0] != AUTO else "")
    named = _environment(_KERNEL)
    if named and named != AUTO:
        return _named(named, policy, "GATEWISE_KERNEL", "named by GATEWISE_KERNEL")
    return Preference(AUTO, policy, "")


@functools.lru_cache(maxsize=64)
def _named(name: str, policy: str, argument: str, source: str) -> Preference:
    check_name(name, argument)
    return Preference(name, policy, source)


def _environment(name: str) -> str | None:
    # Read in every call, so that a change counts at once. For a name that is not set, os.environ.get raises and catches
    # two errors, which takes longer than all other checks of a call; its mapping of encoded names is asked first.
    environment = os.environ
    try:
        if _KEYS[name] not in environment._data:  # type: ignore[attr-defined]
            return None
    except AttributeError:  # os.environ was exchanged for another mapping
        pass
    return environment.get(name)


def check_name(name: object, argument: str) -> None:
    """Raise unless this is "auto" or the name of a kernel.

    Raises:
        ArgumentError: It is no name at all.
        KernelRefused: No kernel has this name; the message lists those that are known.
    """
    if not isinstance(name, str):
        advice = "gatewise.kernel_names() lists them."
        raise ArgumentError(sentence(argument, "'auto' or the name of a kernel", repr(name), advice))
    if name != AUTO and name not in kernel_names():
        known = ", ".join(map(repr, (AUTO, *kernel_names())))
        raise KernelRefused(sentence(argument, f"one of {known}", repr(name)))
