"""Translation of a stream of lines."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console

from gatewise.cli.nmt_alignment import draw_alignment
from gatewise.cli.saved_translator import Translator
from gatewise.contract.errors import CorpusError
from gatewise.data.encoding import BINARY, encoding_of
from gatewise.models import Search, Translation


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Options for the output of a line.

    Attributes:
        numbered: Whether the line number and the score are written too.
        replace_unknown: Whether an unknown token is replaced by the source token with the largest attention weight.
        attention: The file for the alignment of the first line; None for no file.
    """

    numbered: bool = False
    replace_unknown: bool = False
    attention: Path | None = None


def translate_lines(
    translator: Translator,
    search: Search,
    lines: Iterable[bytes],
    out: TextIO,
    notes: TextIO,
    at_once: int,
    output: Output,
) -> None:
    """Translate line by line, and write the translations of one batch of lines before the next is read.

    Args:
        translator: The model.
        search: The search for translations.
        lines: The lines in UTF-8, with line ends.
        out: The stream for the translations, in the order of the lines.
        notes: The stream for progress and notes.
        at_once: The number of lines that are translated together.
        output: Options for the output of a line.

    Raises:
        CorpusError: A line is not UTF-8; the translations of all lines before it have been written.
    """
    count = unknown = 0
    drawing = output.attention
    with _progress(notes) as show:
        for sentences, problem in _batches(lines, at_once):
            full = [row for row, sentence in enumerate(sentences) if sentence]
            found = dict(zip(full, translator.translate([sentences[row] for row in full], search), strict=True))
            for row, sentence in enumerate(sentences):
                unknown += _unknown(translator, sentence)
                if drawing and found.get(row):
                    _draw(translator, sentence, found[row][0], drawing)
                    drawing = None
                for text in _texts(translator, sentence, found.get(row), count + row, output):
                    out.write(f"{text}\n")
            out.flush()
            count += len(sentences)
            show(count)
            if problem is not None:
                raise problem
    if unknown:
        print(f"{unknown:,} words are not in the vocabulary; the model read them as <unk>.", file=notes)
    if drawing:
        print(f"{drawing} was not written, because there was no line to translate.", file=notes)


def _batches(lines: Iterable[bytes], at_once: int) -> Iterator[tuple[list[str], CorpusError | None]]:
    """Yield batches of sentences with normalised spaces, the last batch with the error of the next line if any."""
    waiting: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            encoding = encoding_of(line[error.start :])
            advice = f"Convert the input first, for example by: iconv -f {encoding} -t utf-8"
            if encoding == BINARY:
                advice = (
                    "It holds NUL characters: it is damaged, not text, or text in another encoding. Give text in UTF-8."
                )
            found = f"its byte {error.start} is 0x{line[error.start]:02x}"
            yield waiting, CorpusError(f"line {number:,} of the input is not UTF-8: {found}. {advice}")
            return
        waiting.append(" ".join(text.split()))
        if len(waiting) == at_once:
            yield waiting, None
            waiting = []
    if waiting:
        yield waiting, None


def _texts(
    translator: Translator, sentence: str, found: list[Translation] | None, number: int, output: Output
) -> Iterator[str]:
    if not found:
        yield f"{number} |||  ||| 0.0000" if output.numbered else ""
        return
    for translation in found:
        text = (
            _with_copies(translator, sentence, translation) if output.replace_unknown else translator.text(translation)
        )
        yield f"{number} ||| {text} ||| {translation.score:.4f}" if output.numbered else text


def _with_copies(translator: Translator, sentence: str, translation: Translation) -> str:
    """Return the translation with unknown words replaced by words of the source."""
    words = sentence.split()
    unknown, text = translator.target.unknown, []
    places = translation.attention.argmax(-1).tolist()
    # Only vocabularies of words have an unknown token, and their source tokens are words.
    for token, place in zip(translation.tokens, places, strict=False):
        text.append(words[place] if token == unknown and place < len(words) else translator.target.decode([token]))
    return " ".join(text) if unknown is not None else translator.text(translation)


def _unknown(translator: Translator, sentence: str) -> int:
    unknown = translator.source.unknown
    return 0 if unknown is None else int((translator.source.encode(sentence) == unknown).sum())


def _draw(translator: Translator, sentence: str, translation: Translation, path: Path) -> None:
    source = translator.source.pieces(translator.source.encode(sentence).tolist())
    target = [*translator.target.pieces(translation.tokens), "</s>"]
    draw_alignment(path, source, target, translation.attention)


@contextlib.contextmanager
def _progress(notes: TextIO) -> Iterator[Callable[[int], None]]:
    """Show how many lines are done on the terminal, unless the terminal also shows the translations."""
    console = Console(file=notes)
    if not console.is_terminal or sys.stdout.isatty():
        yield lambda count: None
        return
    with console.status("translating") as status:
        yield lambda count: status.update(f"{count:,} lines translated")
