"""`gatewise explain`: which kernel a call would run, why, what it needs, and what would make it faster."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated, Any

import torch
import typer

from gatewise.contract.criterion import Refusal
from gatewise.contract.decision import Decision, Verdict, format_bytes, format_seconds
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import Layout
from gatewise.kernels.cudnn.criteria import why_not_persistent
from gatewise.nn import LSTM
from gatewise.selection import AUTO
from gatewise.selection.advice import Advice, advise, largest_batch, memory
from gatewise.selection.explain import explain as explain_call
from gatewise.selection.pytorch import decide_as_pytorch

app = typer.Typer(add_completion=False)

_COLUMNS = 80
_CALL, _WHERE = "The call", "Where"
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@app.command()
def explain(
    shape: Annotated[
        str,
        typer.Option("--input", metavar="T,B,I", help="Time steps, batch, input features.", rich_help_panel=_CALL),
    ],
    hidden: Annotated[int, typer.Option(help="Hidden units.", rich_help_panel=_CALL)],
    layers: Annotated[int, typer.Option(help="Layers.", rich_help_panel=_CALL)] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.", rich_help_panel=_CALL)] = "fp32",
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Two directions.", rich_help_panel=_CALL)
    ] = False,
    proj: Annotated[int, typer.Option(help="Features of a projection; 0: none.", rich_help_panel=_CALL)] = 0,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Biases.", rich_help_panel=_CALL)] = True,
    dropout: Annotated[float, typer.Option(help="Between layers.", rich_help_panel=_CALL)] = 0.0,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="Unequal lengths, beside the input.", rich_help_panel=_CALL)
    ] = False,
    inference: Annotated[
        bool, typer.Option("--inference", help="No backward pass follows.", rich_help_panel=_CALL)
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="In a CUDA graph: the device's time alone.", rich_help_panel=_CALL)
    ] = False,
    tf32: Annotated[
        bool | None,
        typer.Option("--tf32/--no-tf32", help="Default: PyTorch's setting.", rich_help_panel=_CALL),
    ] = None,
    keep: Annotated[
        str, typer.Option("--memory", help="normal or lean, in training.", rich_help_panel=_CALL)
    ] = "normal",
    kernel: Annotated[str, typer.Option(help="auto, or the only one that may run.", rich_help_panel=_CALL)] = AUTO,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"A GPU by name: {', '.join(Device.names()[:-1])}. Default: this machine's, or its CPU.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.", rich_help_panel=_WHERE)] = False,
) -> None:
    """Say which kernel a call would run and why, and what would help. Nothing runs.

    \b
    Examples:
      gatewise explain --input 35,20,1500 --hidden 1500 --layers 2
      gatewise explain --input 100,64,512 --hidden 512 --dtype bf16 --gpu h200
      gatewise explain --input 400,32,80 --hidden 320 --bidirectional --lengths
      gatewise explain --input 1,1,256 --hidden 256 --inference --gpu l4 --json

    The status is 1 when the kernel that was named refuses the call.
    """  # noqa: D301 - \b keeps the lines of the examples apart
    decision = _decision(
        _sizes(shape),
        options={
            "hidden_size": hidden,
            "num_layers": layers,
            "bidirectional": bidirectional,
            "proj_size": proj,
            "bias": bias,
            "dropout": dropout,
            "memory": keep,
        },
        dtype=_dtype(dtype),
        lengths=lengths,
        training=not inference,
        captured=graph,
        tf32=tf32,
        kernel=kernel,
        device=_device(gpu),
    )
    suggestions = advise(decision.problem, decision.device, kernel)
    batch = largest_batch(decision.problem, decision.device, kernel)
    if as_json:
        typer.echo(json.dumps(_as_data(decision, suggestions, batch), indent=2))
    else:
        typer.echo(_as_text(decision, suggestions, batch))
    if decision.chosen is None:
        raise typer.Exit(1)


def _sizes(shape: str) -> tuple[int, int, int]:
    parts = shape.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        advice = "For example --input 100,64,512: 100 steps, 64 sequences, 512 features."
        raise ArgumentError(sentence("--input", "three positive integers T,B,I", repr(shape), advice))
    time, batch, features = (int(part) for part in parts)
    return time, batch, features


def _dtype(name: str) -> torch.dtype:
    if name.lower() not in _DTYPES:
        raise ArgumentError(sentence("--dtype", f"one of {', '.join(_DTYPES)}", repr(name)))
    return _DTYPES[name.lower()]


def _device(gpu: str | None) -> Device:
    if gpu is not None:
        return Device.named(gpu)
    return Device.probe("cuda" if torch.cuda.is_available() else "cpu")


def _decision(
    shape: tuple[int, int, int],
    *,
    options: dict[str, Any],
    dtype: torch.dtype,
    lengths: bool,
    training: bool,
    captured: bool,
    tf32: bool | None,
    kernel: str,
    device: Device,
) -> Decision:
    layer = LSTM(shape[2], device="meta", dtype=dtype, **options)
    library = torch.backends.cudnn
    with library.flags(
        enabled=library.enabled,
        benchmark=library.benchmark,
        deterministic=library.deterministic,
        allow_tf32=library.allow_tf32 if tf32 is None else tf32,
    ):
        options = {"dtype": dtype, "training": training, "captured": captured and device.kind == "cuda"}
        return explain_call(layer, shape, lengths=lengths, device=device, kernel=kernel, **options)


def _of_pytorch(decision: Decision) -> tuple[Verdict, dict[str, tuple[Refusal, ...]]]:
    """Return what `torch.nn.LSTM` would run, and which demands of cuDNN's persistent algorithms are unmet."""
    own = decide_as_pytorch(decision.problem, decision.device)
    unmet = why_not_persistent(own.problem, own.device) if own.chosen == "cudnn" else {}
    return own.verdict(own.chosen or ""), unmet


def _as_text(decision: Decision, suggestions: tuple[Advice, ...], batch: int) -> str:
    lines = [str(decision), "", "torch.nn.LSTM would run", *_pytorch_lines(decision)]
    lines += ["", "memory, predicted", *_memory_lines(decision, batch)]
    lines += ["", "what would help, predicted", *_advice_lines(decision, suggestions)]
    return "\n".join(lines)


def _pytorch_lines(decision: Decision) -> list[str]:
    runs, unmet = _of_pytorch(decision)
    packed = " (packed)" if decision.problem.layout is not Layout.DENSE else ""
    lines = _wrapped("  ", f"{runs.kernel}{packed}: {runs.algorithm}, {format_seconds(runs.seconds)} predicted")
    for algorithm, refusals in unmet.items():
        lines.append(f"  not {algorithm}, because")
        for refusal in refusals:
            lines += _wrapped("    - ", str(refusal))
    return lines


def _memory_lines(decision: Decision, batch: int) -> list[str]:
    needed, device = memory(decision), decision.device
    if needed is None:
        return ["  none: nothing would run"]
    parts = f"weights {format_bytes(needed.weights)}, inputs {format_bytes(needed.inputs)}"
    lines = _wrapped("  ", f"{parts}, at the peak {format_bytes(needed.peak)} more: {format_bytes(needed.total)}")
    if device.memory_bytes:
        whole = f"{format_bytes(device.memory_bytes)} (in 90 % of it, this layer alone)"
        lines += _wrapped("  ", f"largest batch that fits in {whole}: {f'{batch:,}' if batch else 'none'}")
    return lines


def _advice_lines(decision: Decision, suggestions: tuple[Advice, ...]) -> list[str]:
    if not suggestions:
        effect = "gains 5 % or more" if decision.chosen else "makes the kernel run"
        return [f"  no neighbouring shape, dtype or layout {effect}"]
    width = min(40, max(len(str(advice)) for advice in suggestions))
    lines = []
    for advice in suggestions:
        verdict_there = advice.decision.verdict(advice.decision.chosen or "")
        figures = f"{_gain(advice, decision)}  {verdict_there.kernel}, {format_seconds(verdict_there.seconds)}"
        first, *rest = textwrap.wrap(str(advice), width)
        lines.append(f"  {first:<{width}}  {figures}")
        lines += [f"  {line}" for line in rest]
    return lines


def _gain(advice: Advice, decision: Decision) -> str:
    if advice.gain == float("inf"):
        return f"{'runs':<10}"
    unit = "seq/s" if advice.decision.problem.batch != decision.problem.batch else "speed"
    return f"{advice.gain:>5.3g}x {unit}"


def _wrapped(lead: str, text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=lead, subsequent_indent=" " * len(lead))


def _as_data(decision: Decision, suggestions: tuple[Advice, ...], batch: int) -> dict[str, Any]:
    runs, unmet = _of_pytorch(decision)
    needed = memory(decision)
    return {
        "problem": str(decision.problem),
        "device": decision.device.name,
        "chosen": decision.chosen,
        "reason": decision.reason,
        "kernels": [_verdict_data(found) for found in decision.verdicts],
        "pytorch": {
            **_verdict_data(runs),
            "not_persistent": {name: [_refusal_data(one) for one in refusals] for name, refusals in unmet.items()},
        },
        "memory": {
            "weights": needed and needed.weights,
            "inputs": needed and needed.inputs,
            "peak": needed and needed.peak,
            "total": needed and needed.total,
            "largest_batch": batch,
        },
        "advice": [
            {
                "changes": [change.text for change in advice.changes],
                "gain": None if advice.gain == float("inf") else advice.gain,
                "kernel": advice.decision.chosen,
                "seconds": advice.decision.verdict(advice.decision.chosen or "").seconds,
            }
            for advice in suggestions
        ],
    }


def _verdict_data(found: Verdict) -> dict[str, Any]:
    return {
        "kernel": found.kernel,
        "accepted": found.accepted,
        "algorithm": found.algorithm,
        "seconds": found.seconds,
        "measured": found.measured,
        "peak_bytes": found.peak_bytes,
        "refusals": [_refusal_data(refusal) for refusal in found.refusals],
    }


def _refusal_data(refusal: Refusal) -> dict[str, str]:
    return {
        "quantity": refusal.quantity,
        "actual": refusal.actual,
        "allowed": refusal.allowed,
        "advice": refusal.advice,
    }
