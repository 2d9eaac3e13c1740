"""The models' errors for tokens, targets and options that do not fit."""

import re
from types import SimpleNamespace

import pytest
import torch

from gatewise.contract.errors import ArgumentError, DtypeError, ShapeError
from gatewise.models import LanguageModel, Search, Seq2Seq, SequenceClassifier, generate, translate

TOKENS, LENGTHS = torch.zeros(3, 2, dtype=torch.int64), torch.tensor([3, 2])


def with_token(token):
    found = TOKENS.clone()
    found[2, 1] = token
    return found


def batch_of(**given):
    usual = {"source": TOKENS, "source_lengths": LENGTHS, "inputs": TOKENS, "targets": TOKENS + 1}
    return SimpleNamespace(**usual | {"token_weight": torch.tensor(0.25)} | given)


def language_model(**options):
    return LanguageModel(10, 4, 5, **options)


def refused(error, message, call):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("token", [10, -1])
@pytest.mark.parametrize("word_dropout", [0.0, 0.5])
def test_a_language_model_names_the_token_that_it_does_not_know(token, word_dropout):
    model, wrong = language_model(word_dropout=word_dropout), with_token(token)
    expected = f"must be numbers from 0 to 9, got {token} at [2, 1]."
    refused(ArgumentError, f"`tokens` {expected}", lambda: model(wrong))
    refused(ArgumentError, f"`inputs` {expected}", lambda: model.loss(batch_of(inputs=wrong)))
    refused(ArgumentError, f"`targets` {expected}", lambda: model.loss(batch_of(targets=wrong)))
    expected = f"`tokens` must be numbers from 0 to 9, got {token} at [0, 0]."
    refused(ArgumentError, expected, lambda: next(generate(model, torch.tensor([token]))))


@pytest.mark.parametrize("input_feeding", [False, True])
@pytest.mark.parametrize("wrong", [12, -1])
def test_a_translation_model_names_the_token_that_it_does_not_know(input_feeding, wrong):
    model = Seq2Seq(10, 12, 4, 6, input_feeding=input_feeding)
    of_source = f"`source` must be numbers from 0 to 9, got {wrong} at [2, 1]."
    of_target = f"must be numbers from 0 to 11, got {wrong} at [2, 1]."
    tokens = with_token(wrong)
    refused(ArgumentError, of_source, lambda: model(tokens, LENGTHS, TOKENS))
    refused(ArgumentError, f"`inputs` {of_target}", lambda: model(TOKENS, LENGTHS, tokens))
    refused(ArgumentError, f"`inputs` {of_target}", lambda: model.loss(batch_of(inputs=tokens)))
    refused(ArgumentError, f"`targets` {of_target}", lambda: model.loss(batch_of(targets=tokens)))
    refused(ArgumentError, of_source, lambda: translate(model.eval(), tokens, LENGTHS, Search(1, 2)))
    memory, state = model.encode(TOKENS, LENGTHS)
    expected = f"`tokens` must be numbers from 0 to 11, got {wrong} at [1]."
    refused(ArgumentError, expected, lambda: model.step(torch.tensor([0, wrong]), memory, state))


def test_tokens_are_integers_in_a_tensor():
    model, translator = language_model(), Seq2Seq(10, 12, 4, 6)
    refused(DtypeError, "`tokens` must be integers, got torch.float32.", lambda: model(TOKENS.float()))
    refused(ArgumentError, "`tokens` must be a tensor of integers, got list.", lambda: model([[1]]))
    refused(DtypeError, "`targets` must be integers, got", lambda: model.loss(batch_of(targets=TOKENS.float())))
    for each in (model, translator):
        expected = "`targets` must be of shape [3, 2], got [2, 2]."
        refused(ShapeError, expected, lambda each=each: each.loss(batch_of(targets=TOKENS[:2])))
    expected = "`lengths` must be a tensor of integers, got list."
    refused(ArgumentError, expected, lambda: translator.encode(TOKENS, [3, 2]))
    expected = "`source` must be a tensor of tokens [S, B], got [2]."
    refused(ShapeError, expected, lambda: translate(translator, TOKENS[0], LENGTHS, Search(1, 2)))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_a_mean_loss_needs_a_token(shape):
    model, tokens = language_model(), torch.zeros(shape, dtype=torch.int64)
    expected = f"`inputs` must be of at least one token, [T, B], got {list(shape)}."
    refused(ShapeError, expected, lambda: model.loss(batch_of(inputs=tokens, targets=tokens)))
    logits, _ = model(tokens)
    assert logits.shape == (*shape, 10)


def test_targets_are_in_the_order_of_the_inputs():
    for model in (language_model(), Seq2Seq(10, 12, 4, 6)):
        for targets in (TOKENS.t(), TOKENS.flatten()):  # as many, but of other steps and sequences
            expected = f"`targets` must be of shape [3, 2], got {list(targets.shape)}."
            refused(ShapeError, expected, lambda model=model, targets=targets: model.loss(batch_of(targets=targets)))
        expected = "`targets` must be a tensor of integers, got ndarray."
        refused(ArgumentError, expected, lambda model=model: model.loss(batch_of(targets=TOKENS.numpy())))


def test_a_loss_needs_tokens_of_steps_and_sequences():
    model, tokens = language_model(), TOKENS[:, 0]
    expected = "`inputs` must be a tensor of tokens [T, B], got [3]."
    refused(ShapeError, expected, lambda: model.loss(batch_of(inputs=tokens, targets=tokens)))
    assert model(tokens)[0].shape == (3, 10)  # one sequence
    refused(
        ShapeError,
        "`tokens` must be tokens [T, B], or [T] of one sequence, got [3, 2, 1].",
        lambda: model(TOKENS[..., None]),
    )
    expected = "`targets` must be int64, got torch.int32. Convert them with .long()."
    refused(DtypeError, expected, lambda: model.loss(batch_of(targets=TOKENS.int())))


def test_a_stack_of_layers_needs_a_state_for_each():
    model = language_model(last_hidden_size=3)
    _, state = model(TOKENS)
    for wrong, got in ((state[:1], "1 of them"), ("ab", "str")):
        expected = f"`state` must be a pair (h, c) for each of 2 layers, got {got}."
        refused(ArgumentError, expected, lambda wrong=wrong: model(TOKENS, wrong))


@pytest.mark.parametrize("input_feeding", [False, True])
def test_a_translation_model_names_the_shape_that_does_not_fit(input_feeding):
    model = Seq2Seq(10, 12, 4, 6, input_feeding=input_feeding)
    expected = "`source` must be a tensor of tokens [S, B], got [3]."
    refused(ShapeError, expected, lambda: model(TOKENS[:, 0], LENGTHS[:1], TOKENS))
    for source, lengths in ((TOKENS[:0], LENGTHS * 0), (TOKENS[:, :0], LENGTHS[:0])):
        expected = f"`source` must be at least one token and one sentence, [S, B], got {list(source.shape)}."
        inputs = TOKENS[:, : source.shape[1]]
        refused(ShapeError, expected, lambda given=(source, lengths, inputs): model(*given))
    for inputs in (TOKENS[:0], TOKENS[:, :1], TOKENS[:, 0]):
        got = f"got {list(inputs.shape)}."
        expected = f"`inputs` must be one or more tokens for each sentence, [T, B] with B = 2, {got}"
        refused(ShapeError, expected, lambda inputs=inputs: model(TOKENS, LENGTHS, inputs))
    memory, state = model.encode(TOKENS, LENGTHS)
    for tokens in (TOKENS[0, :1], TOKENS):
        expected = f"`tokens` must be one token for each sentence, [2], got {list(tokens.shape)}."
        refused(ShapeError, expected, lambda tokens=tokens: model.step(tokens, memory, state))


@pytest.mark.parametrize("smoothing", [2, 1.0, -0.1, float("nan"), "0.1"])
def test_label_smoothing_that_is_assigned_is_checked_by_the_next_loss(smoothing):
    model = Seq2Seq(10, 12, 4, 6)
    model.label_smoothing = smoothing
    expected = "`label_smoothing` must be a probability in [0, 1), got "
    refused(ArgumentError, expected, lambda: model.loss(batch_of()))
    model.label_smoothing = 0
    assert model.loss(batch_of())[0].isfinite()


def test_a_pooling_that_is_assigned_is_checked_by_the_next_call():
    model = SequenceClassifier(3, 4, 5)
    model.pooling = "sum"
    expected = "`pooling` must be one of mean, last, max, got 'sum'."
    refused(ArgumentError, expected, lambda: model(torch.zeros(5, 2, 3)))


def test_what_a_model_is_standardized_by_is_checked_before_anything_is_set():
    model, good = SequenceClassifier(3, 0, 5), torch.arange(12.0).reshape(4, 3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = "`inputs` must be a tensor of steps [N, F] with F = 3, N at least 1, got "
    for wrong, got in ((good[None], [1, 4, 3]), (good[:0], [0, 3]), (good[:, :2], [4, 2]), (good.numpy(), "ndarray")):
        refused(ShapeError, f"{expected}{got}.", lambda wrong=wrong: model.standardize(wrong))
    expected = "`targets` must be a tensor of numbers [N], N at least 1, got "
    for wrong, got in ((good, [4, 3]), (good[:0, 0], [0]), ([1.0], "list")):
        refused(ShapeError, f"{expected}{got}.", lambda wrong=wrong: model.standardize(good, wrong))
    for number in (float("nan"), float("inf")):
        expected = "`inputs` must be finite numbers, got infinity or NaN."
        refused(ArgumentError, expected, lambda number=number: model.standardize(good * number))
        expected = "`targets` must be finite numbers, got infinity or NaN."
        refused(ArgumentError, expected, lambda number=number: model.standardize(good, good[:, 1] * number))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_mean_loss_needs_a_sequence():
    for classes in (4, 0):
        model, targets = SequenceClassifier(3, classes, 5), torch.zeros(0, dtype=torch.int64)
        batch = SimpleNamespace(inputs=torch.zeros(5, 0, 3), lengths=None, targets=targets)
        expected = "`inputs` must be of at least one sequence, [T, B, F], got [5, 0, 3]."
        refused(ShapeError, expected, lambda model=model, batch=batch: model.loss(batch))
        assert len(model(batch.inputs)) == 0


def test_a_classifier_names_what_does_not_fit():
    inputs, model, regression = torch.zeros(5, 2, 3), SequenceClassifier(3, 4, 5), SequenceClassifier(3, 0, 5)

    def loss(model, targets):
        return lambda: model.loss(SimpleNamespace(inputs=inputs, lengths=None, targets=targets))

    refused(ArgumentError, "`targets` must be numbers from 0 to 3, got 4 at [1].", loss(model, torch.tensor([0, 4])))
    refused(ShapeError, "`targets` must be of shape [2], got [1].", loss(model, torch.tensor([0])))
    expected = "`targets` must be one number for each sequence, [2], got"
    refused(ArgumentError, "`targets` must be a tensor of numbers, got list.", loss(regression, [0.0, 1.0]))
    for shape in ([1], [2, 1]):  # which would be broadcast
        refused(ShapeError, f"{expected} {shape}.", loss(regression, torch.zeros(shape)))
    expected = "`inputs` must be a tensor [T, B, F] of F = 3 features, got"
    refused(ShapeError, f"{expected} [5, 2, 4].", lambda: model(torch.zeros(5, 2, 4)))
    refused(ShapeError, f"{expected} ndarray.", lambda: model(inputs.numpy()))
    for pooling in ("mean", "max", "last"):
        model = SequenceClassifier(3, 4, 5, pooling=pooling)
        refused(ShapeError, "`inputs` must be of at least one step", lambda model=model: model(inputs[:0]))
        expected = "`lengths` must be a tensor of integers, got list."
        refused(ArgumentError, expected, lambda model=model: model(inputs, [5, 4]))


@pytest.mark.parametrize(
    ("make", "option", "value", "expectation"),
    [
        *(
            (make, option, value, "a positive integer")
            for make, options in (
                (LanguageModel, ("hidden_size", "num_layers", "vocabulary_size")),
                (Seq2Seq, ("source_size", "decoder_layers", "attention_size")),
                (SequenceClassifier, ("input_size", "num_layers")),
            )
            for option in options
            for value in ("4", 2.5, -1, True)
        ),
        *(
            (make, option, value, "a probability in [0, 1)")
            for make, option in (
                (LanguageModel, "embedding_dropout"),
                (Seq2Seq, "label_smoothing"),
                (SequenceClassifier, "dropout"),
            )
            for value in ("0.5", None, True, float("nan"), 1)
        ),
        *(
            (make, option, "no", "True or False")
            for make, option in (
                (LanguageModel, "locked"),
                (LanguageModel, "tied"),
                (Seq2Seq, "input_feeding"),
                (SequenceClassifier, "bidirectional"),
            )
        ),
        (SequenceClassifier, "bidirectional", 2, "True or False"),
        (SequenceClassifier, "classes", "4", "at least 2, or 0 to predict a number"),
        (LanguageModel, "last_hidden_size", 2.5, "an integer"),
        (LanguageModel, "activation_penalty", float("inf"), "a finite number"),
        (LanguageModel, "change_penalty", "1", "0 or more"),
        (Seq2Seq, "padding", "a", "an integer, the number of a token"),
        (Search, "forbidden", 2, "a sequence of tokens"),
        (Search, "forbidden", ("a",), "a sequence of tokens, which are integers"),
    ],
)
def test_options_of_models_are_checked(make, option, value, expectation):
    usual = {
        LanguageModel: {"vocabulary_size": 10, "embedding_size": 4, "hidden_size": 5},
        Seq2Seq: {"source_size": 10, "target_size": 10, "embedding_size": 4, "hidden_size": 6},
        SequenceClassifier: {"input_size": 3, "classes": 4, "hidden_size": 5},
        Search: {"beginning": 1, "end": 2},
    }[make]
    with pytest.raises(ArgumentError, match=re.escape(f"`{option}` must be {expectation}, got ")):
        make(**usual | {option: value})


@pytest.mark.parametrize("forbidden", [3, "ab", ["a"], [1.5]])
def test_forbidden_tokens_are_integers(forbidden):
    with pytest.raises(ArgumentError, match="`forbidden` must be a sequence of tokens"):
        next(generate(language_model(), torch.tensor([1]), forbidden=forbidden))
