"""Scores of translations: BLEU and chrF by sacrebleu, and the fraction of exact matches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType

from gatewise.contract.errors import MissingExtra

_BY_CHARACTER = ("ja", "ko", "th", "lo", "km", "my")
"""Languages without spaces for which sacrebleu has no tokenizer unless more packages are installed."""


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationScores:
    """The scores of a set of translations.

    Attributes:
        bleu: The BLEU score, 0 to 100.
        chrf: The chrF score, 0 to 100.
        exact: The fraction of translations that equal their reference.
        bleu_signature: sacrebleu's signature of the BLEU score.
        chrf_signature: sacrebleu's signature of the chrF score.
    """

    bleu: float
    chrf: float
    exact: float
    bleu_signature: str
    chrf_signature: str

    def figures(self) -> dict[str, float]:
        """Return the scores by the names under which they are shown."""
        return {"BLEU": self.bleu, "chrF": self.chrf, "exact": self.exact}


def metrics() -> ModuleType:
    """Return `sacrebleu.metrics`.

    Raises:
        MissingExtra: sacrebleu is not installed.
    """
    try:
        import sacrebleu.metrics
    except ModuleNotFoundError:
        raise MissingExtra.for_package("sacrebleu", "scoring translations", "train") from None
    return sacrebleu.metrics


def score_translations(translations: Sequence[str], references: Sequence[str], language: str) -> TranslationScores:
    """Score translations against one reference each.

    Args:
        translations: The translations, at least one.
        references: The references, one for each translation.
        language: The language of both, such as ``"en"``; it determines how BLEU splits them into words.

    Raises:
        MissingExtra: sacrebleu is not installed.

    References:
        Post: A Call for Clarity in Reporting BLEU Scores, 2018. Popović: chrF, 2015.
    """
    library = metrics()
    core = language.replace("-", "_").partition("_")[0].lower()
    tokenize = "zh" if core == "zh" else "char" if core in _BY_CHARACTER else "13a"
    bleu, chrf = library.BLEU(tokenize=tokenize), library.CHRF()
    pairs = list(zip(translations, references, strict=True))
    hypotheses, wanted = list(translations), [list(references)]
    return TranslationScores(
        bleu=bleu.corpus_score(hypotheses, wanted).score,
        chrf=chrf.corpus_score(hypotheses, wanted).score,
        exact=sum(translation == reference for translation, reference in pairs) / len(pairs),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )
