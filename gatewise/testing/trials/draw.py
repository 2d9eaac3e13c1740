"""Random settings: combinations of all options that the layer accepts."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from gatewise.cells import SHIPPED, Cell, cell_named
from gatewise.contract.errors import ArgumentError
from gatewise.contract.pytorch import in_pytorch
from gatewise.derivation.row import combinations_of
from gatewise.nn.arguments import checked_candidate_dropout
from gatewise.testing.trials.setting import LARGE_TF32_HIDDEN, LARGE_TF32_TOKENS, Setting

_T = TypeVar("_T")

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "list")
_MOST_VALUES = {"cuda": 24_000_000, "cpu": 60_000}
_LONGEST = {"cuda": 2000, "cpu": 60}
_LARGEST_BATCH = {"cuda": 600, "cpu": 20}
_WIDEST = {"cuda": 1700, "cpu": 70}
_SLOW, _LONGEST_OF_SLOW = ("eager", "aten"), 150  # loops over steps in Python, or in PyTorch
_OF_PYTORCH = ("auto", "aten", "cudnn")
_OTHER_CELLS = tuple(cell.name for cell in SHIPPED if cell.name != "lstm")
# The reference is a loop over steps in Python: of these cells always, of the others with lengths, resets or masks.
_LOOPS = tuple(cell.name for cell in SHIPPED if not in_pytorch(cell))
_RATES = (0.1, 0.5)
_LONGEST_WITH_RESETS = 600  # the reference is a loop over the steps of the longest episode
_WORK = {"cuda": 2e11, "cpu": 2e8}
DTYPES = {"cuda": ("bfloat16", "float16", "float32", "float32", "float64"), "cpu": ("float32", "float64")}
"""The dtypes of parameters to draw from, by device."""
_FAMILIES = {"cuda": 600, "cpu": 0}
_LARGE_TF32 = 0.08  # the share of families that are `large_tf32`, which next to no other family is
_WIDEST_LARGE_TF32 = 640  # units; with more, the weights of two layers and 700 tokens are too many values
_CELLS_OF_PYTORCH = tuple(cell.name for cell in SHIPPED if in_pytorch(cell))
_COMPILED = (
    *("hidden_size", "batch", "bidirectional", "proj_size", "dtype", "autocast", "allow_tf32", "kernel", "cell"),
    *("recurrent_dropout", "candidate_dropout", "zoneout", "zoneout_others"),
)
"""The options on which most of the code depends that kernels compile."""


def _marks_candidate(cell: Cell) -> bool:
    try:
        return checked_candidate_dropout(0.5, cell) > 0
    except ArgumentError:
        return False


_WITH_CANDIDATE = tuple(cell.name for cell in SHIPPED if _marks_candidate(cell))


_NORMALIZED = tuple(cell.name for cell in SHIPPED if combinations_of(cell).places)


class Sizes(NamedTuple):
    """The sizes to draw from: for each residue modulo 16 three widths and one batch size.

    Some kernels are compiled for every width, so that processes that draw from the same sizes share compiled kernels.
    """

    widths: tuple[int, ...]
    batches: tuple[int, ...]


def sizes(seed: int, device: str) -> Sizes:
    """Return random sizes, which depend only on the seed and the device."""
    generator = random.Random(seed)

    def one(largest: int, residue: int) -> int:
        # Uniform in the logarithm.
        size = int(largest ** generator.random()) // 16 * 16 + residue
        return size - 16 if size > largest else size or 16

    widths = [one(_WIDEST[device], residue) for residue in range(16) for _ in range(3)]
    batches = [one(_LARGEST_BATCH[device], residue) for residue in range(16)]
    return Sizes(tuple(widths), tuple(batches))


def families(seed: int, device: str, kernels: Sequence[str]) -> list[Setting]:
    """Return random settings from which others take the options that kernels are compiled for.

    On a GPU the compilation of a kernel takes longer than its calls, so that settings which share kernels are cheaper.
    On a CPU nothing is compiled; there are no families.

    Args:
        seed: The seed; equal seeds give equal families.
        device: "cpu" or "cuda".
        kernels: The names of the kernels that a setting may name.
    """
    generator, own_sizes = random.Random(seed), sizes(seed, device)
    large = int(_LARGE_TF32 * _FAMILIES[device]) if "persistent" in kernels else 0
    ordinary = range(_FAMILIES[device] - large)
    found = [draw(generator, device, kernels, DTYPES[device], own_sizes) for _ in ordinary]
    return found + [_large_tf32(generator, device, own_sizes) for _ in range(large)]


def _large_tf32(generator: random.Random, device: str, sizes: Sizes) -> Setting:
    """Return a family that is `large_tf32`, as are most settings that are drawn like it."""
    while True:
        hidden, batch = generator.randint(LARGE_TF32_HIDDEN, _WIDEST_LARGE_TF32), generator.choice(sizes.batches)
        cell = generator.choice(("lstm", *_CELLS_OF_PYTORCH))
        family = Setting(
            time=-(-LARGE_TF32_TOKENS // batch),
            batch=batch,
            input_size=hidden,
            hidden_size=hidden,
            num_layers=2,
            bidirectional=generator.random() < 0.3,
            proj_size=generator.randint(1, hidden - 1) if cell == "lstm" and generator.random() < 0.3 else 0,
            allow_tf32=True,
            device=device,
            kernel="persistent",
            cell=cell,
            recurrent_dropout=generator.choice(_RATES) if cell != "lstm" and generator.random() < 0.2 else 0.0,
        )
        if family.large_tf32 and _is_small_enough(family):
            return family


def draw(
    generator: random.Random,
    device: str,
    kernels: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sizes,
    like: Setting | None = None,
) -> Setting:
    """Return a random setting.

    Each of the rarer options is off in most settings, so that most settings combine a few of them with usual values.

    Args:
        generator: The random number generator.
        device: "cpu" or "cuda".
        kernels: The names of the kernels that a setting may name.
        dtypes: The names of the dtypes of parameters.
        sizes: The widths and batch sizes to draw from.
        like: A setting of whose family the setting is: it has the same sizes, dtypes, kernel and cell.
    """
    shared = {} if like is None else {name: getattr(like, name) for name in _COMPILED}
    while True:
        drawn = _drawn(generator, device, kernels, dtypes, sizes, like)
        drawn = dataclasses.replace(drawn, **shared)
        if like is not None and like.large_tf32:
            least = -(-LARGE_TF32_TOKENS // like.batch)
            drawn = dataclasses.replace(drawn, time=max(drawn.time, least), num_layers=max(drawn.num_layers, 2))
        setting = _settled(drawn)
        if _is_small_enough(setting):
            return setting


def _is_small_enough(setting: Setting) -> bool:
    """Return whether a setting takes so little memory and time that many others can be tried."""
    work = 8.0 * setting.time * setting.batch * setting.hidden_size * setting.num_layers
    work *= (1 + setting.bidirectional) * (setting.hidden_size + setting.input_size)
    return setting.size <= _MOST_VALUES[setting.device] and work <= _WORK[setting.device]


def _drawn(
    generator: random.Random,
    device: str,
    kernels: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sizes,
    like: Setting | None,
) -> Setting:
    def rarely(value: _T, usual: _T, chance: float = 0.15) -> _T:
        return value if generator.random() < chance else usual

    hidden = generator.choice(sizes.widths) if like is None else like.hidden_size
    time = min(_LONGEST[device], max(1, int(_LONGEST[device] ** generator.random()) + generator.randrange(16)))
    kernel = rarely("auto", generator.choice(kernels), 0.4)
    cell = rarely(generator.choice(_OTHER_CELLS), "lstm", 0.4)
    dtype = generator.choice(dtypes)
    halves = [name for name in ("bfloat16", "float16") if name in dtypes or device == "cuda"]
    modes = ["inference", "no_grad", "explicit", "explicit"]
    modes += ["graph", "graph", "stream", "ddp"] if device == "cuda" else []
    layers = rarely(generator.choice((2, 2, 3, 4)), 1, 0.4)
    return Setting(
        time=time,
        batch=generator.choice(sizes.batches),
        input_size=rarely(hidden, generator.choice(sizes.widths), 0.3),
        hidden_size=hidden,
        num_layers=layers,
        bidirectional=rarely(True, False, 0.3),
        proj_size=rarely(generator.randint(1, hidden - 1) if hidden > 1 else 0, 0, 0.1),
        bias=rarely(False, True),
        dtype=dtype,
        autocast=rarely(generator.choice(halves), "", 0.35) if halves and dtype != "float64" else "",
        allow_tf32=generator.random() < 0.5,
        dropout=rarely(generator.choice(_RATES), 0.0) if layers > 1 else 0.0,
        device=device,
        kernel=kernel,
        memory=rarely("lean", "normal"),
        mode=rarely("compile", rarely(generator.choice(modes), "eager", 0.5), 0.02),
        together=rarely(True, False),
        batch_first=rarely(True, False, 0.3),
        packed=rarely(True, False, 0.1),
        lengths=rarely(generator.choice(_INTEGERS), "", 0.35),
        lengths_on_cpu=generator.random() < 0.4,
        x=rarely(generator.choice(("by row", "gaps", "every other step", "one row")), "dense", 0.3),
        states=generator.choice(("none", "given", "learned")),
        x_learned=rarely(False, True),
        weights=rarely(generator.choice(("odd", "odd", "flat", "transposed")), "walls", 0.6),
        frozen=rarely(generator.randint(1, 4), 0),
        above=rarely(generator.choice(("h", "c", "h c", "y c", "sum")), generator.choice(("y", "y h c")), 0.4),
        poison=rarely(generator.choice(("x", "padding", "padding", "padding")), "nowhere"),
        changes=rarely(True, False, 0.3),
        calls=generator.choice((3, 3, 4, 5)),
        seed=generator.randrange(2**31),
        cell=cell,
        resets=rarely(generator.choice(("bool", "bool", "uint8", "int64")), "", 0.1),
        reverse=rarely(True, False, 0.1),
        weight_dropout=rarely(generator.choice(_RATES), 0.0, 0.05),
        recurrent_dropout=rarely(generator.choice(_RATES), 0.0, 0.05),
        candidate_dropout=rarely(generator.choice(_RATES), 0.0, 0.05),
        zoneout=rarely(generator.choice(_RATES), 0.0, 0.05),
        zoneout_others=rarely(generator.choice(_RATES), 0.0, 0.05),
    )


def _settled(setting: Setting) -> Setting:
    """Return the setting with options changed that contradict each other."""

    def change(**options: object) -> None:
        nonlocal setting
        setting = dataclasses.replace(setting, **options)

    if setting.kernel in _SLOW or setting.cell in _LOOPS:
        change(time=min(setting.time, _LONGEST_OF_SLOW))
    if setting.hidden_size == 1 and setting.cell in _NORMALIZED:
        # The gradient through a normalized single unit is 0, so that any rounding error is infinitely large beside it.
        change(hidden_size=2)
    if setting.cell not in _WITH_CANDIDATE:
        change(candidate_dropout=0.0)
    if not all(map(math.isfinite, cell_named(setting.cell).initial_states.values())):
        change(zoneout=0.0, zoneout_others=0.0)
    if not setting.has_c:
        change(zoneout_others=0.0)
    if setting.cell != "lstm" or setting.regularised:
        change(proj_size=0)
    if setting.mode == "explicit" and (setting.cell != "lstm" or setting.regularised or setting.weight_dropout):
        change(mode="eager")  # the explicit passes are those of an LSTM
    if setting.regularised:
        change(time=min(setting.time, _LONGEST_OF_SLOW))
    if not setting.has_c:
        outputs = [name for name in setting.above.split() if name != "c"] or ["h"]
        change(above=" ".join(outputs))
    if setting.poison == "x" and setting.above == "c":
        # At the last step, the output gate has no gradient, or one of 0, which is NaN after a product with NaN.
        change(poison="nowhere")
    if setting.packed:
        change(lengths="", batch_first=False, poison="nowhere", resets="")
    if setting.resets:
        change(time=min(setting.time, _LONGEST_WITH_RESETS))
    if not setting.lengths:
        change(lengths_on_cpu=False)
    if setting.lengths == "list":
        change(lengths_on_cpu=True)
    if setting.lengths in ("int8", "uint8") and setting.time > 100:
        change(lengths="int32")
    if setting.poison == "padding" and not setting.lengths:
        change(poison="nowhere")
    if setting.reverse and (setting.bidirectional or setting.packed or setting.resets or setting.dropout):
        change(reverse=False)
    if setting.reverse and setting.mode == "explicit":
        change(mode="eager")
    if setting.dropout and not setting.regularised:
        # PyTorch's own operators draw masks that the reference does not know.
        if setting.cell == "lstm" and not setting.weight_dropout and not setting.reverse:
            change(mode="explicit")
        elif setting.kernel in _OF_PYTORCH:
            change(dropout=0.0)
    if setting.mode == "graph" and (setting.packed or setting.lengths_on_cpu):
        change(mode="eager")  # lengths on the CPU are copied to the GPU in each call, which cannot be captured
    if setting.mode in ("compile", "ddp", "explicit"):
        change(autocast="")
    if setting.mode == "explicit" and setting.above == "sum":
        change(above="y h c")
    if not setting.training:
        change(above="y h c", together=False)
    if setting.mode == "graph":
        change(together=False)
    if setting.packed or setting.together or setting.lengths == "list" or setting.x == "one row":
        change(changes=False)  # a tensor that is overwritten must own its memory, and must not be in use
    if setting.device == "cpu":
        change(allow_tf32=False)
    return setting
