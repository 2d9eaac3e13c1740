"""`gatewise explain`: which kernel a call would run and why, its memory, and what would make it faster."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import torch
import typer

from gatewise.cli.explain_nmt import explain_nmt
from gatewise.cli.explain_report import as_data, as_text
from gatewise.cli.option_names import naming
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.ranges import COUNT, LAYERS, SIZE
from gatewise.nn import GRU, LSTM, RNN
from gatewise.selection import AUTO
from gatewise.selection.advice import advise, largest_batch
from gatewise.selection.explain import explain as explain_call
from gatewise.training.json_values import to_json

app = typer.Typer(add_completion=False)
app.command("nmt")(explain_nmt)

_CALL, _WHERE = "The call", "Where"
_LAYERS = {
    "lstm": LSTM,
    "gru": GRU,
    "rnn_tanh": functools.partial(RNN, nonlinearity="tanh"),
    "rnn_relu": functools.partial(RNN, nonlinearity="relu"),
}
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


@app.callback(invoke_without_command=True)
def explain(
    context: typer.Context,
    shape: Annotated[
        str,
        typer.Option(
            "--input", metavar="T,B,I", help="Time steps, batch size and input features.", rich_help_panel=_CALL
        ),
    ] = "",
    hidden: Annotated[
        int | None, typer.Option(help="The number of hidden units.", show_default=False, rich_help_panel=_CALL)
    ] = None,
    cell: Annotated[str, typer.Option(help=f"One of {', '.join(_LAYERS)}.", rich_help_panel=_CALL)] = "lstm",
    layers: Annotated[int, typer.Option(help="The number of layers.", rich_help_panel=_CALL)] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.", rich_help_panel=_CALL)] = "fp32",
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Whether the layers have two directions.", rich_help_panel=_CALL)
    ] = False,
    proj: Annotated[int, typer.Option(help="The projection size; 0: no projection.", rich_help_panel=_CALL)] = 0,
    bias: Annotated[
        bool, typer.Option("--bias/--no-bias", help="Whether the layers have biases.", rich_help_panel=_CALL)
    ] = True,
    dropout: Annotated[
        float, typer.Option(help="The dropout probability between layers.", rich_help_panel=_CALL)
    ] = 0.0,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="Whether lengths of padded sequences are given.", rich_help_panel=_CALL)
    ] = False,
    resets: Annotated[
        bool, typer.Option("--resets", help="Whether episodes begin inside sequences.", rich_help_panel=_CALL)
    ] = False,
    inference: Annotated[
        bool, typer.Option("--inference", help="Without a backward pass.", rich_help_panel=_CALL)
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="In a CUDA graph, where CPU time does not count.", rich_help_panel=_CALL)
    ] = False,
    tf32: Annotated[
        bool | None,
        typer.Option(
            "--tf32/--no-tf32", help="Whether TF32 is allowed; default: PyTorch's setting.", rich_help_panel=_CALL
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="The option memory of the layer: normal or lean.", rich_help_panel=_CALL)
    ] = NORMAL,
    kernel: Annotated[
        str, typer.Option(help="auto, or the name of the only kernel that may run.", rich_help_panel=_CALL)
    ] = AUTO,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"A GPU by name: {', '.join(Device.names()[:-1])}. Default: the GPU of this machine, or its CPU.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_WHERE)] = False,
) -> None:
    """Show which kernel a call of a layer would run, why, and what would make it faster.

    The call is given by its sizes, and nothing is computed.

    \b
    Examples:
      gatewise explain --input 35,20,1500 --hidden 1500 --layers 2
      gatewise explain --input 100,64,512 --hidden 512 --dtype bf16 --gpu h200
      gatewise explain --input 400,32,80 --hidden 320 --bidirectional --lengths
      gatewise explain --cell gru --input 100,64,512 --hidden 512 --gpu h200
      gatewise explain --input 1,1,256 --hidden 256 --inference --gpu l4 --json
      gatewise explain nmt --memory-budget 8GB --gpu h200

    The exit status is 1 if the named kernel refuses the call.
    """  # noqa: D301 - \b keeps the lines of the examples apart
    if context.invoked_subcommand is not None:
        return
    if not shape:
        raise ArgumentError("`--input` is missing. For example: gatewise explain --input 100,64,512 --hidden 512")
    if hidden is None:
        raise ArgumentError("`--hidden` is missing. For example: gatewise explain --input 100,64,512 --hidden 512")
    SIZE.check("--hidden", hidden)
    LAYERS.check("--layers", layers)
    if cell not in _LAYERS:
        raise ArgumentError(sentence("--cell", f"one of {', '.join(_LAYERS)}", repr(cell)))
    if proj and cell != "lstm":
        raise ArgumentError(sentence("--proj", f"0 with --cell {cell}", proj, "Only LSTMs have a projection."))
    if not 0 <= proj < hidden:
        raise ArgumentError(sentence("--proj", f"0 or more, and less than `--hidden` {hidden}", proj))
    decision = _decision(
        cell,
        _sizes(shape),
        options={
            "hidden_size": hidden,
            "num_layers": layers,
            "bidirectional": bidirectional,
            "bias": bias,
            "dropout": dropout,
            "memory": memory,
        }
        | ({"proj_size": proj} if proj else {}),
        dtype=_dtype(dtype),
        lengths=lengths,
        resets=resets,
        training=not inference,
        captured=graph,
        tf32=tf32,
        kernel=kernel,
        device=_device(gpu),
    )
    suggestions = advise(decision.problem, decision.device, kernel)
    batch = largest_batch(decision.problem, decision.device, kernel)
    if as_json:
        typer.echo(to_json(as_data(decision, suggestions, batch), indent=2))
    else:
        typer.echo(as_text(decision, suggestions, batch))
    if decision.chosen is None:
        raise typer.Exit(1)


def _sizes(shape: str) -> tuple[int, int, int]:
    parts = shape.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        advice = "For example --input 100,64,512: 100 steps, 64 sequences, 512 features."
        raise ArgumentError(sentence("--input", "three positive integers T,B,I", repr(shape), advice))
    time, batch, features = (int(part) for part in parts)
    for size in (time, batch, features):
        COUNT.check("--input", size)
    return time, batch, features


def _dtype(name: str) -> torch.dtype:
    if name.lower() not in _DTYPES:
        raise ArgumentError(sentence("--dtype", f"one of {', '.join(_DTYPES)}", repr(name)))
    return _DTYPES[name.lower()]


def _device(gpu: str | None) -> Device:
    if gpu is not None:
        with naming({"device": "--gpu"}):
            return Device.named(gpu)
    return Device.probe("cuda" if torch.cuda.is_available() else "cpu")


def _decision(
    cell: str,
    shape: tuple[int, int, int],
    *,
    options: dict[str, Any],
    dtype: torch.dtype,
    lengths: bool,
    resets: bool,
    training: bool,
    captured: bool,
    tf32: bool | None,
    kernel: str,
    device: Device,
) -> Decision:
    layer = _LAYERS[cell](shape[2], device="meta", dtype=dtype, **options)
    library = torch.backends.cudnn
    with library.flags(
        enabled=library.enabled,
        benchmark=library.benchmark,
        deterministic=library.deterministic,
        allow_tf32=library.allow_tf32 if tf32 is None else tf32,
    ):
        options = {"dtype": dtype, "training": training, "captured": captured and device.kind == "cuda"}
        return explain_call(layer, shape, lengths=lengths, resets=resets, device=device, kernel=kernel, **options)
