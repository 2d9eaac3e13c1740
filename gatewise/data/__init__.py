"""Data sets and batches for training: token streams, labelled sequences and sentence pairs.

Nothing in this package knows which model is trained. For a language model:

    corpus = python_topics()  # or corpus_from_files(...), corpus_from_file(...)
    tokenizer = build_tokenizer("bpe", corpus.train, size=2000)
    stream = TokenStream(tokenizer.encode(corpus.train), batch_size=20, window=35)
    for window in stream.windows(epoch=0):
        ...  # window.inputs, window.targets: [T, B]

For a sequence classifier or regressor:

    train, valid, test = divide_sequences(read_sequences("steps.csv"))  # or digits(), synthetic()
    targets = class_numbers(train, classes_of(train))
    for batch in SequenceBatches(train, targets, batch_size=64, shuffle=True).windows(epoch=0):
        ...  # batch.inputs: [T, B, F], batch.lengths, batch.targets: [B]

For translation:

    train, valid, test = divide_parallel(phrases("de", "en"))  # or read_parallel("train.de", "train.en")
    source, target = build_vocabularies("bpe", train, size=1000)
    pairs = encode_all(source, train.source), encode_all(target, train.target)
    for batch in PairBatches(*pairs, batch_tokens=2000, shuffle=True).windows(epoch=0):
        ...  # batch.source: [S, B], batch.source_lengths: [B], batch.inputs, batch.targets: [T, B]
"""

from gatewise.data.corpus import Corpus, corpus_from_file, corpus_from_files, python_topics, read_text
from gatewise.data.long_form import Columns
from gatewise.data.pair_batches import PairBatch, PairBatches
from gatewise.data.pair_filters import FilterReport, PairFilter, filter_pairs
from gatewise.data.parallel import ParallelText, divide_parallel, read_parallel
from gatewise.data.phrase_examples import phrases
from gatewise.data.sentences import (
    SentenceVocabulary,
    build_vocabularies,
    encode_all,
    load_vocabularies,
    vocabularies_to_json,
)
from gatewise.data.sequence_batches import EqualBatch, RaggedBatch, SequenceBatches
from gatewise.data.sequence_examples import digits, synthetic
from gatewise.data.sequence_files import read_sequences
from gatewise.data.sequences import Sequences, class_numbers, classes_of, divide_sequences
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
    "Columns",
    "Corpus",
    "EqualBatch",
    "FilterReport",
    "PairBatch",
    "PairBatches",
    "PairFilter",
    "ParallelText",
    "RaggedBatch",
    "SentenceVocabulary",
    "SequenceBatches",
    "Sequences",
    "TokenStream",
    "Tokenizer",
    "Window",
    "WordTokenizer",
    "build_tokenizer",
    "build_vocabularies",
    "class_numbers",
    "classes_of",
    "corpus_from_file",
    "corpus_from_files",
    "digits",
    "divide_parallel",
    "divide_sequences",
    "encode_all",
    "filter_pairs",
    "load_tokenizer",
    "load_vocabularies",
    "phrases",
    "python_topics",
    "read_parallel",
    "read_sequences",
    "read_text",
    "stream_text",
    "synthetic",
    "unigram_perplexity",
    "vocabularies_to_json",
]
