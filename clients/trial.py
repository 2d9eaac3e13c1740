"""The report of a client's program: its numbers, the layers that it called, and the kernels that ran."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from gatewise.nn.classes import OURS, class_of_pytorch
from gatewise.selection.profiled_kernels import kernels_among

WAYS = ("pytorch", "plain", "gatewise", "eager")
"""The ways to run a program: as it is; as it is, without oneDNN; after the line; after it, on the kernel `eager`."""


class Trial(contextlib.AbstractContextManager["Trial"]):
    """One run of the program of a client, in the way and with the file that the command line names.

    The numbers, and the layers and kernels of calls with gradients, are written when the block ends. Without a command
    line, the way is "gatewise" and the report is printed.

    Args:
        distribution: The name of the client in the package index.
        line: The line of gatewise that the program runs in addition, as its user would write it.

    Attributes:
        gatewise: Whether the program is to run the line.
    """

    def __init__(self, distribution: str, line: str) -> None:
        way, self._file = (*sys.argv[1:3], None)[:2] if len(sys.argv) > 2 else ("gatewise", None)
        self.gatewise = way in ("gatewise", "eager")
        self._report: dict[str, Any] = {"client": distribution, "version": version(distribution), "line": line}
        self._numbers: dict[str, list[float]] = {}
        self._saved: list[dict[str, Any]] = []
        self._called: set[nn.Module] = set()
        self._calls = 0
        self._kernels: set[str] = set()
        self._profiles: dict[nn.Module, torch.profiler.profile] = {}
        torch.backends.mkldnn.set_flags(way != "plain")

    def __enter__(self) -> Self:
        """Set all seeds, and begin to record layers and kernels."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        self._hooks = (
            nn.modules.module.register_module_forward_pre_hook(self._before),
            nn.modules.module.register_module_forward_hook(self._after, always_call=True),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the report, unless the program has failed."""
        for hook in self._hooks:
            hook.remove()
        if error is not None:
            return
        self._report |= {
            "torch": torch.__version__,
            "numbers": self._numbers,
            "layers": self.layers(self._called),
            "calls": self._calls,
            "kernels": sorted(self._kernels),
            "saved": self._saved,
        }
        text = json.dumps(self._report)
        if self._file is None:
            print(text)
        else:
            Path(self._file).write_text(text, "utf-8")

    def compare(self, name: str, values: Any) -> None:
        """Add numbers that must be the same with and without the line.

        Args:
            name: The plural of their name.
            values: Any number of them, as a number, a list, an array or a tensor.
        """
        found = values.detach().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        self._numbers.setdefault(name, []).extend(found.astype(np.float64).ravel().tolist())

    def saved(self, how: str, before: Any, after: Any, model: nn.Module) -> None:
        """Say that a model was saved and loaded.

        Args:
            how: The functions of the client.
            before: The results of the model that was saved.
            after: Those of the loaded one.
            model: The loaded model.
        """
        same = np.allclose(np.asarray(before), np.asarray(after), rtol=1e-4, atol=1e-4)
        self._saved.append({"how": how, "same": same, "layers": self.layers(model.modules())})

    @staticmethod
    def layers(modules: Iterable[nn.Module]) -> dict[str, int]:
        """Return the number of recurrent layers and cells of each class of gatewise and PyTorch.

        Args:
            modules: Any modules.
        """
        found: Counter[str] = Counter()
        for module in modules:
            theirs = class_of_pytorch(module)
            if theirs is not None:
                found[f"{'gatewise' if isinstance(module, OURS) else 'torch.nn'}.{theirs.__name__}"] += 1
        return dict(sorted(found.items()))

    def _before(self, module: nn.Module, arguments: Any) -> None:
        if class_of_pytorch(module) is None or not torch.is_grad_enabled():
            return
        self._calls += 1
        if module not in self._called:  # the profiler would make every call many times as long
            self._called.add(module)
            self._profiles[module] = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiles[module].__enter__()

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        profile = self._profiles.pop(module, None)
        if profile is not None:
            profile.__exit__(None, None, None)
            self._kernels |= kernels_among({event.key for event in profile.events() or ()}, backward=False).keys()
