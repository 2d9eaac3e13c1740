"""The attention weights of a translation, as words, as a picture, or as an HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import torch

from gatewise.contract.errors import ArgumentError, MissingExtra, sentence
from gatewise.files import write_bytes

SUFFIXES = (".png", ".html")
_INK = 0.85
"""The attention weight above which a number is printed in white, on a dark background."""


def check_alignment_path(path: Path) -> None:
    """Check that a file name ends in .png or .html, before anything is translated."""
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(sentence("attention", "a file that ends in .png or .html", str(path)))


def alignment_words(source: Sequence[str], target: Sequence[str], attention: torch.Tensor) -> list[str]:
    """Return for each target token the source token with the largest attention weight, and this weight.

    Args:
        source: The tokens of the sentence.
        target: The tokens of the translation; the first rows of `attention`, or all of them.
        attention: The attention weights [T, S].
    """
    shares, places = attention.max(-1)
    # The row of the end token, which `target` does not contain, is left out.
    rows = zip(target, places.tolist(), shares.tolist(), strict=False)
    return [f"{word} < {source[place]} ({share:.0%})" for word, place, share in rows]


def draw_alignment(path: Path, source: Sequence[str], target: Sequence[str], attention: torch.Tensor) -> None:
    """Draw attention weights as a grid of target tokens over source tokens, to a .png or .html file.

    Args:
        path: The file.
        source: The tokens of the sentence.
        target: The tokens of the translation, with the end token.
        attention: The attention weights [T, S].

    Raises:
        ArgumentError: The file name has another suffix.
        CheckpointError: The file cannot be written; an existing file is unchanged.
        MissingExtra: The file is a .png and matplotlib is not installed.
    """
    check_alignment_path(path)
    page = path.suffix.lower() == ".html"
    write_bytes(path, (_page if page else _picture)(source, target, attention))


def _picture(source: Sequence[str], target: Sequence[str], attention: torch.Tensor) -> bytes:
    import io

    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra.for_package("matplotlib", "drawing the alignment", "train") from None
    figure = Figure(figsize=(1.6 + 0.42 * len(source), 1.2 + 0.36 * len(target)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(attention.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    # matplotlib would parse text between dollar signs as a formula.
    axes.set_xticks(range(len(source)), [_plain(word) for word in source], rotation=45, ha="left")
    axes.set_yticks(range(len(target)), [_plain(word) for word in target])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="attention", shrink=0.8)
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    return content.getvalue()


def _plain(word: str) -> str:
    return word.replace("$", r"\$")


_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse } td { width: 2.6rem; height: 1.8rem; text-align: center; font-size: 12px }
th { font-weight: 500; padding: .2rem .5rem } thead th { writing-mode: vertical-rl; transform: rotate(180deg) }
tbody th { text-align: right }
"""


def _page(source: Sequence[str], target: Sequence[str], attention: torch.Tensor) -> bytes:
    head = "".join(f"<th>{html.escape(word)}</th>" for word in source)
    rows = []
    for word, shares in zip(target, attention.tolist(), strict=True):
        cells = "".join(_cell(share, one, word) for share, one in zip(shares, source, strict=True))
        rows.append(f"<tr><th>{html.escape(word)}</th>{cells}</tr>")
    title = html.escape(" ".join(target))
    return (
        f'<!doctype html>\n<html><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><table><thead><tr><th></th>{head}</tr></thead>\n<tbody>" + "\n".join(rows) + "</tbody></table>\n"
        "<p>Each row shows how much attention a token of the translation paid to the tokens of the sentence.</p>"
        "</body></html>\n"
    ).encode()


def _cell(share: float, source: str, target: str) -> str:
    title = html.escape(f"{target} < {source}: {share:.1%}", quote=True)
    text = f"{share:.0%}" if share >= 0.1 else ""
    color = "#fff" if share > _INK else "#222"
    return f'<td title="{title}" style="background:rgba(8,81,156,{share:.3f});color:{color}">{text}</td>'
