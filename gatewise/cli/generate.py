"""`gatewise generate`: generate text with a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a run, or a model.safetensors.")],
    prompt: Annotated[str, typer.Option(help="The beginning of the text.")] = "The ",
    length: Annotated[int, typer.Option(min=1, help="The number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="The number that divides the logits; 0: always the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with total probability P.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default="random")] = None,
    kernel: Annotated[str | None, typer.Option(help="auto, or the name of a kernel.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
) -> None:
    """Generate text with a trained language model, token by token.

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
