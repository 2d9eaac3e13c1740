"""Complete models built from gatewise layers, and the functions that generate text and translations with them."""

from gatewise.models.classifier import SequenceClassifier
from gatewise.models.decoding import generate, restrict
from gatewise.models.language_model import LanguageModel
from gatewise.models.search import Search, Translation
from gatewise.models.seq2seq import Seq2Seq
from gatewise.models.translation import translate

__all__ = [
    "LanguageModel",
    "Search",
    "Seq2Seq",
    "SequenceClassifier",
    "Translation",
    "generate",
    "restrict",
    "translate",
]
