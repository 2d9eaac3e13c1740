"""The encoder-decoder with attention, compared with a plain float64 program, row by row without padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gatewise.contract.errors import ArgumentError
from gatewise.data.pair_batches import PairBatches
from gatewise.models import Seq2Seq

SMALL = {"source_size": 11, "target_size": 13, "embedding_size": 6, "hidden_size": 8}


def pairs(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def sentences(size, lengths):
        return [torch.randint(3, size, (length,), generator=generator) for length in lengths]

    source, target = sentences(11, [1, 7, 4, 3, 7][:count]), sentences(13, [5, 2, 6, 1, 4][:count])
    (batch,) = PairBatches(source, target, 100).windows()
    return batch


def model(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return Seq2Seq(**SMALL | options).to(dtype)


def plain_logits(model, source, inputs):
    """Compute one row as a textbook would: torch.nn modules, one token at a time, nothing shared with the model."""
    state, layers = dict(model.named_parameters()), len(model.encoder)
    values = functional.embedding(source, state.get("source_embedding.weight", model.target_embedding.weight))
    for number in range(layers):
        ours = model.encoder[number]
        lstm = nn.LSTM(ours.input_size, ours.hidden_size, ours.num_layers, bidirectional=ours.bidirectional).double()
        values, (final, _) = torch.func.functional_call(lstm, dict(ours.named_parameters()), (values,))
        final = torch.cat(tuple(final)) if ours.bidirectional else final[-1]
    start = model.start.weight @ final + model.start.bias
    hidden, cell = (part.view(model.decoder_layers, -1) for part in start.chunk(2))
    hidden, attended, logits = list(hidden.tanh()), torch.zeros(8, dtype=values.dtype), []
    cell = list(cell)
    for token in inputs:
        below = model.target_embedding.weight[token]
        if model.input_feeding:
            below = torch.cat([below, attended])
        for layer in range(model.decoder_layers):
            if model.input_feeding:
                weights = list(model.decoder[layer].parameters())
            else:
                weights = [getattr(model.decoder, f"{name}_l{layer}") for name in
                           ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]  # fmt: skip
            gates = weights[0] @ below + weights[2] + weights[1] @ hidden[layer] + weights[3]
            i, f, g, o = gates.chunk(4)
            cell[layer] = f.sigmoid() * cell[layer] + i.sigmoid() * g.tanh()
            below = hidden[layer] = o.sigmoid() * cell[layer].tanh()
        attention = model.attention
        if attention.score == "additive":
            total = attention.weight_query @ below + values @ attention.weight_key.t() + attention.bias
            if attention.layer_norm:
                total = functional.layer_norm(total, total.shape[-1:], attention.norm_weight, attention.norm_bias)
            scores = total.tanh() @ attention.v
        elif attention.score == "general":
            scores = values @ (below @ attention.weight)
        else:
            scores = values @ below
        context = scores.softmax(0) @ values
        attended = (model.attended.weight @ torch.cat([below, context])).tanh()
        last = attended if model.narrowed is None else model.narrowed.weight @ attended
        logits.append(model.output.weight @ last + model.output.bias)
    return torch.stack(logits)


OPTIONS = [
    {},
    {"input_feeding": False},
    {"score": "dot"},
    {"score": "general", "input_feeding": False},
    {"attention_size": 5, "attention_layer_norm": True},
    {"encoder_layers": 1, "decoder_layers": 1},
    {"encoder_layers": 3, "decoder_layers": 3, "input_feeding": False},
    {"tied": "target"},
    {"tied": "all", "source_size": 13, "embedding_size": 8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(map(str, options.items())) or "default")
def test_logits_loss_and_gradients_are_those_of_a_plain_program(options):
    ours, batch = model(**options), pairs()
    logits = ours(batch.source, batch.source_lengths, batch.inputs)
    losses, counts = [], 0
    for row in range(5):
        source = batch.source[: batch.source_lengths[row], row]
        steps = int((batch.targets[:, row] != 0).sum())
        wanted = plain_logits(ours, source, batch.inputs[:steps, row])
        torch.testing.assert_close(logits[:steps, row], wanted, rtol=1e-10, atol=1e-12)
        losses.append(functional.cross_entropy(wanted, batch.targets[:steps, row], reduction="sum"))
        counts += steps
    names, parameters = zip(*ours.named_parameters(), strict=True)
    expected_loss = torch.stack(losses).sum() / counts
    expected = torch.autograd.grad(expected_loss, parameters)
    loss, state = ours.loss(batch)
    assert state is None
    # The weight of a token is a float32 number.
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, found, wanted in zip(names, torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert wanted.abs().max() > 0, name


@pytest.mark.parametrize("feeding", [True, False])
def test_steps_one_by_one_are_the_whole(feeding):
    ours, batch = model(input_feeding=feeding).eval(), pairs()
    whole = ours(batch.source, batch.source_lengths, batch.inputs)
    memory, state = ours.encode(batch.source, batch.source_lengths)
    for tokens, wanted in zip(batch.inputs, whole, strict=True):
        logits, state, attention = ours.step(tokens, memory, state)
        torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention[:, 0]))
        beyond = torch.arange(attention.shape[1]) >= batch.source_lengths[:, None]
        assert not attention[beyond].any()


def test_rows_of_memory_and_state_go_their_own_ways():
    ours, batch = model().eval(), pairs()
    rows = torch.tensor([3, 0, 3])
    memory, state = (part.select(rows) for part in ours.encode(batch.source, batch.source_lengths))
    logits, _, _ = ours.step(batch.inputs[0, rows], memory, state)
    whole = ours(batch.source, batch.source_lengths, batch.inputs)
    torch.testing.assert_close(logits, whole[0, rows])


def test_input_feeding_lets_a_step_know_what_the_last_one_attended_to():
    def reach(feeding):
        ours, batch = model(input_feeding=feeding), pairs()
        ours.attended.weight.requires_grad_()
        memory, state = ours.encode(batch.source, batch.source_lengths)
        state = state._replace(attended=state.attended.requires_grad_())
        _, after, _ = ours.step(batch.inputs[0], memory, state)
        (gradient,) = torch.autograd.grad(after.hidden.sum(), state.attended, allow_unused=True)
        return gradient

    assert reach(True).abs().max() > 0
    assert reach(False) is None


def test_label_smoothing_changes_the_training_loss_alone():
    batch = pairs()
    smooth, sharp = model(label_smoothing=0.2), model()
    wanted = functional.cross_entropy(
        sharp(batch.source, batch.source_lengths, batch.inputs).flatten(0, 1),
        batch.targets.flatten(),
        ignore_index=0,
        label_smoothing=0.2,
    )
    torch.testing.assert_close(smooth.loss(batch)[0], wanted, rtol=1e-6, atol=0)
    assert not torch.isclose(wanted, sharp.loss(batch)[0], rtol=1e-5)
    assert torch.equal(smooth.eval().loss(batch)[0], sharp.eval().loss(batch)[0])


@pytest.mark.parametrize("option", [{"dropout": 0.5}, {"layer_dropout": 0.5}, {"word_dropout": 0.5}])
@pytest.mark.parametrize("feeding", [True, False])
def test_dropout_acts_in_training_alone(option, feeding):
    batch = pairs()
    ours, without = model(input_feeding=feeding, **option), model(input_feeding=feeding)
    assert not torch.equal(ours.loss(batch)[0], without.loss(batch)[0])
    assert not torch.equal(ours.loss(batch)[0], ours.loss(batch)[0])
    assert torch.equal(ours.eval().loss(batch)[0], without.eval().loss(batch)[0])


@pytest.mark.parametrize("feeding", [True, False])
def test_word_dropout_drops_all_embeddings_of_a_token_on_either_side(feeding):
    ours, batch = model(input_feeding=feeding, word_dropout=0.5), pairs()
    found = []
    for table in (ours.source_embedding, ours.target_embedding):
        table.register_forward_hook(lambda _module, _inputs, output: output.retain_grad())
        table.register_forward_hook(lambda _module, inputs, output: found.append((inputs[0], output)))
    ours.loss(batch)[0].backward()
    assert len(found) == 2
    for tokens, embedded in found:
        read = embedded.grad.abs().sum(-1) > 0
        kinds = {int(token): read[tokens == token] for token in tokens.unique() if token != ours.padding}
        assert all(each.all() or not each.any() for each in kinds.values())
        assert len({bool(each.any()) for each in kinds.values()}) == 2  # some are dropped, some are not


def test_weight_dropout_acts_on_every_recurrent_matrix_in_training_alone():
    batch, ours = pairs(), model(input_feeding=False, encoder_layers=3, weight_dropout=0.5)
    assert all(layer.weight_dropout == 0.5 for layer in (*ours.encoder, ours.decoder))
    without = model(input_feeding=False, encoder_layers=3)
    assert not torch.equal(ours.loss(batch)[0], without.loss(batch)[0])
    assert torch.equal(ours.eval().loss(batch)[0], without.eval().loss(batch)[0])


def test_tied_weights_are_one():
    target = model(tied="target")
    assert target.output.weight is target.target_embedding.weight
    assert target.source_embedding.weight is not target.target_embedding.weight
    every = model(tied="all", source_size=13)
    assert every.source_embedding.weight is every.target_embedding.weight is every.output.weight


def test_a_nan_in_one_sentence_stays_there():
    ours, batch = model().eval(), pairs()
    clean = ours(batch.source, batch.source_lengths, batch.inputs)
    with torch.no_grad():
        ours.source_embedding.weight[int(batch.source[0, 1])] = torch.nan
    touched = (batch.source == batch.source[0, 1]).any(0)
    found = ours(batch.source, batch.source_lengths, batch.inputs)
    assert found[:, touched].isnan().all()
    assert torch.equal(found[:, ~touched], clean[:, ~touched])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_size": 7}, "even"),
        ({"hidden_size": 0}, "positive"),
        ({"decoder_layers": 0}, "positive"),
        ({"dropout": 1.0}, "probability"),
        ({"word_dropout": 1.0}, "probability"),
        ({"weight_dropout": 1.0, "input_feeding": False}, "probability"),
        ({"weight_dropout": 0.1}, "input feeding"),
        ({"label_smoothing": -0.1}, "probability"),
        ({"tied": "both"}, "one of none, target, all"),
        ({"tied": "all"}, "joint vocabulary: the sizes are 11 and 13"),
        ({"score": "cosine"}, "score"),
    ],
)
def test_what_cannot_be_built_is_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        model(**wrong)
