"""How good translations are: BLEU and chrF by sacrebleu, and how many are exactly right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gatewise.contract.errors import MissingExtra

_BY_CHARACTER = ("ja", "ko", "th", "lo", "km", "my")
"""Languages written without spaces, for which sacrebleu has no tokenizer of its own without more packages."""


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationScores:
    """Scores of a corpus of translations.

    Attributes:
        bleu: BLEU, 0 to 100.
        chrf: chrF, 0 to 100.
        exact: Share of translations that equal their reference.
        bleu_signature: How sacrebleu computed BLEU.
        chrf_signature: How sacrebleu computed chrF.
    """

    bleu: float
    chrf: float
    exact: float
    bleu_signature: str
    chrf_signature: str

    def figures(self) -> dict[str, float]:
        """Return the numbers by the names under which they are shown."""
        return {"BLEU": self.bleu, "chrF": self.chrf, "exact": self.exact}


def score_translations(translations: Sequence[str], references: Sequence[str], language: str) -> TranslationScores:
    """Score translations against one reference each.

    Args:
        translations: At least one.
        references: As many.
        language: Of both, such as ``"en"``; decides how BLEU divides them into words.

    Raises:
        MissingExtra: sacrebleu is not installed.

    References:
        Post: A Call for Clarity in Reporting BLEU Scores, 2018. Popović: chrF, 2015.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ModuleNotFoundError:
        raise MissingExtra.for_package("sacrebleu", "scoring translations", "train") from None
    core = language.replace("-", "_").partition("_")[0].lower()
    tokenize = "zh" if core == "zh" else "char" if core in _BY_CHARACTER else "13a"
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    pairs = list(zip(translations, references, strict=True))
    answers, wanted = list(translations), [list(references)]
    return TranslationScores(
        bleu=bleu.corpus_score(answers, wanted).score,
        chrf=chrf.corpus_score(answers, wanted).score,
        exact=sum(answer == reference for answer, reference in pairs) / len(pairs),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )
