"""`gatewise translate`: translate lines with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def translate(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a run, or a model.safetensors.")],
    beam_size: Annotated[int, typer.Option(min=1, help="Beam size; 1: greedy.")] = 5,
    length_penalty: Annotated[float, typer.Option(help="0 favours short translations, 1 is neutral.")] = 1.0,
    n_best: Annotated[int, typer.Option(min=1, help="Translations of each line, at most the beam size.")] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Write line number and score too.")] = False,
    replace_unknown: Annotated[
        bool, typer.Option("--replace-unknown", help="Copy the source word for <unk> (only with --tokens word).")
    ] = False,
    attention: Annotated[
        Path | None, typer.Option(help="PNG or HTML file for the alignment of the first line.", metavar="FILE")
    ] = None,
    batch_lines: Annotated[int, typer.Option(min=1, help="Lines that are read before the first is translated.")] = 64,
    kernel: Annotated[str | None, typer.Option(help="auto, or the name of a kernel.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
) -> None:
    """Translate lines from standard input to standard output.

    An empty line stays an empty line. With --n-best or --scores a line is

        line number ||| translation ||| score

    The line number starts at 0; the score is log p / ((5 + tokens) / 6)^length penalty.

    \b
    Examples:
      echo "5. März 2024" | gatewise translate --checkpoint runs/nmt
      gatewise translate --checkpoint runs/nmt < news.de > news.en
      gatewise translate --checkpoint runs/nmt --n-best 3 < news.de
      echo "vor 3 Tagen" | gatewise translate --checkpoint runs/nmt
          --attention alignment.html
    """  # noqa: D301 - \b keeps the lines of the examples apart
    import sys

    from gatewise.cli.nmt_alignment import check_alignment_path
    from gatewise.cli.nmt_translation import Output, translate_lines
    from gatewise.cli.saved_translator import load_translator
    from gatewise.contract.errors import ArgumentError, sentence
    from gatewise.data import WordTokenizer
    from gatewise.files import refuse_overwriting
    from gatewise.training.processes import join_processes

    if attention is not None:
        check_alignment_path(attention)
        refuse_overwriting(
            {"--attention": attention}, {"--checkpoint": checkpoint, "standard input": Path("/dev/stdin")}
        )
    with join_processes(device) as processes:
        translator = load_translator(checkpoint, processes.device, kernel)
        kind = translator.target.tokenizer.kind
        if replace_unknown and kind != WordTokenizer.kind:
            advice = "Leave it out: only words are copied."
            raise ArgumentError(
                sentence(
                    "--replace-unknown", "given for a model of --tokens word", f"a model of --tokens {kind}", advice
                )
            )
        search = translator.search(beam_size, length_penalty, n_best)
        output = Output(numbered=scores or n_best > 1, replace_unknown=replace_unknown, attention=attention)
        # At a terminal, the user expects each translation before typing the next line.
        if sys.stdin is None:
            advice = "Give the lines, for example by: gatewise translate ... < FILE"
            raise ArgumentError(sentence("standard input", "open", "a closed one", advice))
        at_once = 1 if sys.stdin.isatty() else batch_lines
        translate_lines(translator, search, sys.stdin.buffer, sys.stdout, sys.stderr, at_once, output)
