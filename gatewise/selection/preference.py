"""The user's choice of a kernel: by argument, by `use_kernel`, or by environment variable."""

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
    """A kernel's name or "auto", the policy for "auto", and where the user named the kernel."""

    kernel: str
    policy: str
    source: str


FREE = Preference(AUTO, _POLICIES[0], "")
"""The preference if the user named nothing, which is always this object."""

# The environment variables, and their keys in the mapping inside `os.environ`.
_KERNEL, _POLICY = "GATEWISE_KERNEL", "GATEWISE_POLICY"
_KERNEL_KEY, _POLICY_KEY = os.environ.encodekey(_KERNEL), os.environ.encodekey(_POLICY)

# The argument of the innermost `use_kernel` block of the running context.
_context: ContextVar[tuple[str, str | None] | None] = ContextVar("gatewise_preference", default=None)


@contextlib.contextmanager
def use_kernel(kernel: str, *, policy: str | None = None) -> Iterator[None]:
    """Run every recurrent layer in the block on one kernel; if it cannot run a call, raise instead of falling back.

    Args:
        kernel: One of `gatewise.kernel_names()`, or "auto", which cancels a surrounding block.
        policy: The policy of "auto": "predict" (by predicted time; deterministic) or "measure" (time all kernels that
            accept, once for each kind of problem, and store the times). Default: the surrounding policy.

    Raises:
        KernelRefused: No kernel has that name (raised at once), or the kernel refuses a call (raised by the call).
        ArgumentError: The policy is unknown.

    Examples:
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
    """Return the preference for a call: the argument, otherwise `use_kernel`, GATEWISE_KERNEL, or "auto".

    Args:
        argument: The argument of the call; a preference that was read before is returned unchanged.
    """
    context = _context.get()
    if context is None and argument == AUTO:
        # The most frequent case, in as few operations as possible.
        try:
            known = os.environ._data  # type: ignore[attr-defined]
            if _KERNEL_KEY not in known and _POLICY_KEY not in known:
                return FREE
        except AttributeError:  # os.environ was replaced by another mapping
            pass
    if isinstance(argument, Preference):
        return argument
    policy = (context and context[1]) or _environment(_POLICY, _POLICY_KEY) or _POLICIES[0]
    if policy not in _POLICIES:
        raise ArgumentError(sentence("GATEWISE_POLICY", " or ".join(map(repr, _POLICIES)), repr(policy)))
    if argument != AUTO:
        if not isinstance(argument, str):
            check_name(argument, "kernel")
        return _named(argument, policy, "kernel", "named by the argument `kernel`")
    if context is not None:
        return Preference(context[0], policy, "named by `use_kernel`" if context[0] != AUTO else "")
    named = _environment(_KERNEL, _KERNEL_KEY)
    if named and named != AUTO:
        return _named(named, policy, "GATEWISE_KERNEL", "named by GATEWISE_KERNEL")
    return FREE if policy == FREE.policy else Preference(AUTO, policy, "")


@functools.lru_cache(maxsize=64)
def _named(name: str, policy: str, argument: str, source: str) -> Preference:
    check_name(name, argument)
    return Preference(name, policy, source)


def _environment(name: str, key: bytes | str) -> str | None:
    # Read in every call, so that changes take effect at once. For a variable that is not set, os.environ.get raises and
    # catches two errors, which takes longer than all other checks of a call; so its inner mapping is asked first.
    environment = os.environ
    try:
        if key not in environment._data:  # type: ignore[attr-defined]
            return None
    except AttributeError:  # os.environ was replaced by another mapping
        pass
    return environment.get(name)


def check_name(name: object, argument: str) -> None:
    """Check that a name is "auto" or the name of a kernel.

    Raises:
        ArgumentError: The name is not a string.
        KernelRefused: No kernel has this name; the message lists all names.
    """
    if not isinstance(name, str):
        advice = "gatewise.kernel_names() lists them."
        raise ArgumentError(sentence(argument, "'auto' or the name of a kernel", repr(name), advice))
    if name != AUTO and name not in kernel_names():
        known = ", ".join(map(repr, (AUTO, *kernel_names())))
        raise KernelRefused(sentence(argument, f"one of {known}", repr(name)))
