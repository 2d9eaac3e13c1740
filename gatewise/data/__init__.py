"""Text for language models: corpora, tokenizers, and streams that are read in windows.

Nothing here knows what a model is. The way through::

    corpus = python_topics()  # or corpus_from_files(...), corpus_from_file(...)
    tokenizer = build_tokenizer("bpe", corpus.train, size=2000)
    stream = TokenStream(tokenizer.encode(corpus.train), batch_size=20, window=35)
    for window in stream.windows(epoch=0):
        ...  # window.inputs, window.targets: [T, B]
"""

from gatewise.data.corpus import Corpus, corpus_from_file, corpus_from_files, python_topics, read_text
from gatewise.data.stream import TokenStream, Window
from gatewise.data.tokenizers import (
    TOKENIZERS,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    WordTokenizer,
    build_tokenizer,
    load_tokenizer,
    stream_text,
)
from gatewise.data.unigram import unigram_perplexity

__all__ = [
    "TOKENIZERS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Corpus",
    "TokenStream",
    "Tokenizer",
    "Window",
    "WordTokenizer",
    "build_tokenizer",
    "corpus_from_file",
    "corpus_from_files",
    "load_tokenizer",
    "python_topics",
    "read_text",
    "stream_text",
    "unigram_perplexity",
]
