"""`gatewise generate`: let a trained language model write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a run, or a model.safetensors.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "The ",
    length: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="Below 1 cautious, above bold, 0 always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the K likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold P together.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed writes the same. [default: another each time]")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="auto, or a kernel by name.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
) -> None:
    """Let a trained language model write, token by token.

    \b
    Examples:
      gatewise generate --checkpoint runs/demo --prompt "The value"
      gatewise generate --checkpoint runs/demo --temperature 0.5 --top-p 0.9
      gatewise generate --checkpoint runs/demo --seed 1 --length 1000
    """  # noqa: D301 - \b keeps the lines of the examples apart
    import secrets

    from rich.console import Console

    from gatewise.cli.language_model_run import sample
    from gatewise.cli.recipe import SampleOptions
    from gatewise.cli.saved_model import load_model
    from gatewise.models.decoding import check_sampling
    from gatewise.training.processes import join_processes

    options = SampleOptions(prompt=prompt, length=length, temperature=temperature, top_k=top_k, top_p=top_p)
    check_sampling(temperature, top_k or None, top_p)
    with join_processes(device) as processes:
        model, tokenizer = load_model(checkpoint, processes.device, kernel)
        sample(Console(), model, tokenizer, options, secrets.randbits(32) if seed is None else seed)
