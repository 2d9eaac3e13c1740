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


class TranslationScorer:
    """Scores translations against one reference each.

    What the scores need of the references is computed once, so that scoring further translations takes less time.

    Args:
        references: The references, at least one.
        language: The language of references and translations, such as ``"en"``; it determines how BLEU splits them
            into words.

    Raises:
        MissingExtra: sacrebleu is not installed.

    References:
        Post: A Call for Clarity in Reporting BLEU Scores, 2018. Popović: chrF, 2015.
    """

    def __init__(self, references: Sequence[str], language: str) -> None:
        library = metrics()
        core = language.replace("-", "_").partition("_")[0].lower()
        tokenize = "zh" if core == "zh" else "char" if core in _BY_CHARACTER else "13a"
        self._references = list(references)
        self._bleu = library.BLEU(tokenize=tokenize, references=[self._references])
        self._chrf = library.CHRF(references=[self._references])

    def __call__(self, translations: Sequence[str]) -> TranslationScores:
        """Return the scores of one translation for each reference, in their order.

        Raises:
            ValueError: There are more or fewer translations than references.
        """
        pairs = list(zip(translations, self._references, strict=True))
        found = list(translations)
        return TranslationScores(
            bleu=self._bleu.corpus_score(found, None).score,
            chrf=self._chrf.corpus_score(found, None).score,
            exact=sum(translation == reference for translation, reference in pairs) / len(pairs),
            bleu_signature=str(self._bleu.get_signature()),
            chrf_signature=str(self._chrf.get_signature()),
        )
