"""`gatewise convert`: convert the weights of recurrent layers between systems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


def _print_layouts(wanted: bool) -> None:
    if not wanted:
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from gatewise.interop.layouts import GATEWISE, LAYOUTS

    table = Table("layout", "system", box=box.SIMPLE_HEAD, show_edge=False)
    for layout in LAYOUTS.values():
        table.add_row(layout.name, layout.system)
    table.add_row(GATEWISE, "gatewise.Recurrent, with the cell of the other layout")
    Console().print(table)
    raise typer.Exit


@app.command(no_args_is_help=True)
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The file to read.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to write.", show_default=False)],
    source_layout: Annotated[str, typer.Option("--from", help="Layout of SOURCE.", show_default=False)],
    target_layout: Annotated[
        str | None,
        typer.Option("--to", help="Layout of TARGET. Default: that of PyTorch's layer; gatewise if PyTorch has none."),
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="The name of a layer to convert; repeatable, in this order. Default: all.")
    ] = None,
    stack: Annotated[
        bool, typer.Option("--stack", help="Stack the layers into one module, in the order of the model.")
    ] = False,
    pair: Annotated[
        bool, typer.Option("--pair", help="Combine every two layers into the two directions of one layer.")
    ] = False,
    forget_bias: Annotated[
        float | None,
        typer.Option(help="The argument forget_bias of the cells in TensorFlow 1.", show_default="1"),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="The number of heads of an sLSTM.", show_default="1")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
    layouts: Annotated[
        bool,
        typer.Option(
            "--layouts", help="List the layouts, and convert nothing.", callback=_print_layouts, is_eager=True
        ),
    ] = False,
) -> None:
    """Convert the weights of the recurrent layers in a file to the layout of another system.

    The suffixes of the files give their formats: .safetensors, .npz, .keras,
    .weights.h5, .h5, or a TensorFlow checkpoint (.ckpt, or any name for which
    there is an .index file). If the conversion fails, TARGET is not changed.

    \b
    Examples:
      gatewise convert model.keras lstm.safetensors --from keras --stack
      gatewise convert old.h5 lstm.safetensors --from keras-cudnn
      gatewise convert model.ckpt-1000 lstm.npz --from tf1-cudnn
      gatewise convert model.ckpt lstm.npz --from tf1-basic
          --layer my/cell --forget-bias 0
      gatewise convert lstm.safetensors lstm.weights.h5 --from torch --to keras
      gatewise convert model.keras gru.safetensors --from keras-gru
      gatewise convert model.keras rnn.safetensors --from keras-rnn
      gatewise convert haste.safetensors lstm.safetensors --from haste-layer-norm
      gatewise convert lstm.safetensors block.safetensors --from gatewise
          --to xlstm-slstm --heads 4
      gatewise convert --layouts
    """  # noqa: D301 - \b keeps the lines of the examples apart
    del layouts
    from rich.console import Console

    from gatewise.cli.option_names import naming
    from gatewise.interop.files.formats import convert_file
    from gatewise.interop.layouts import default_target, layouts_of_conversion

    target_layout = target_layout or default_target(source_layout)
    known, _ = layouts_of_conversion(source_layout, target_layout)
    options = {"pair": pair, "stack": stack, "forget_bias": forget_bias, "heads": heads}
    if not overwrite:
        _refuse_existing(source, target)
    with naming({"the target": "TARGET", "the source": "SOURCE", "layers": "--layer"}):
        done = convert_file(source, target, source_layout, target_layout, layers=layer or (), **options)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for found in done.stacks:
        name = f"{found.name}: " if found.name else ""
        console.print(f"  {name}{found}")
    if done.left:
        shown = ", ".join(done.left[:3]) + (", ..." if len(done.left) > 3 else "")
        console.print(
            f"Left out, in no {known.layer} of the layout {source_layout}: "
            f"{len(done.left)} tensor{'' if len(done.left) == 1 else 's'} ({shown})",
            markup=False,
        )
    if len(done.stacks) > 1 and known.in_stacks:
        console.print(f"These are separate {known.layer}s. --stack combines them into one.")
    console.print(f"Wrote {target} in the layout {target_layout}.")


def _refuse_existing(source: Path, target: Path) -> None:
    """Raise if the target is an existing file or checkpoint; the source itself is refused elsewhere."""
    from gatewise.contract.errors import ArgumentError, sentence
    from gatewise.files import same_file
    from gatewise.interop.files.tensorflow import checkpoint_files

    written = checkpoint_files(target) if target.suffix == ".ckpt" else (target,)
    if any(file.is_file() for file in written) and not same_file(source, target):
        advice = "Replace it by `--overwrite`, or choose another name."
        raise ArgumentError(sentence("TARGET", "a file that does not exist yet", str(target), advice))
