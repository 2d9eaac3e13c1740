"""The layer: its parameters, its projections, and the effect of every option."""

import pytest
import torch

import gatewise
from gatewise.nn import Attention


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["bias", "v", "weight_key", "weight_query"]),
        ({"layer_norm": True}, ["bias", "norm_bias", "norm_weight", "v", "weight_key", "weight_query"]),
        ({"score": "general"}, ["weight"]),
        ({"score": "dot"}, []),
    ],
)
def test_parameters_are_those_of_the_score_and_all_get_a_gradient(options, names):
    torch.manual_seed(0)
    attention = Attention(6, 6, **options)
    assert sorted(name for name, _ in attention.named_parameters()) == names
    query = torch.randn(5, 2, 6, requires_grad=True)
    attention(query, torch.randn(7, 2, 6), [7, 3]).square().sum().backward()
    assert query.grad.any()
    assert all(parameter.grad.any() for parameter in attention.parameters())


def test_additive_is_its_formula():
    torch.manual_seed(0)
    attention = Attention(6, 5, 4)
    query, source = torch.randn(3, 2, 6), torch.randn(7, 2, 5)
    total = (query @ attention.weight_query.T)[:, None] + source @ attention.weight_key.T + attention.bias
    weights = torch.softmax(total.tanh() @ attention.v, 1)  # [T, S, B]
    expected = torch.einsum("tsb,sbv->tbv", weights, source)
    torch.testing.assert_close(attention(query, source), expected)


def test_keys_may_be_computed_once():
    attention = Attention(6, 5, 4)
    query, source = torch.randn(2, 6), torch.randn(7, 2, 5)
    assert torch.equal(attention(query, source), attention(query, source, keys=attention.keys(source)))


def test_kernel_is_passed_on():
    attention = Attention(6, 6)
    attention.kernel = "nonsense"
    with pytest.raises(gatewise.KernelRefused, match="nonsense"):
        attention(torch.randn(5, 2, 6), torch.randn(7, 2, 6))


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((0, 5), {}, "`query_size` must be a positive integer"),
        ((6, 5), {"score": "dot"}, "`source_size` must be query_size = 6, got 5"),
        ((6, 6), {"score": "dot", "layer_norm": True}, "`layer_norm` must be False"),
        ((6, 6), {"score": "concat"}, "`score` must be"),
    ],
)
def test_bad_arguments_say_what_to_change(arguments, options, text):
    with pytest.raises(gatewise.ArgumentError, match=text):
        Attention(*arguments, **options)


@pytest.mark.parametrize("score", ["additive", "general"])
def test_inputs_of_other_sizes_are_named(score):
    attention = Attention(6, 5, score=score)
    query, source = torch.randn(4, 2, 6), torch.randn(7, 2, 5)
    with pytest.raises(gatewise.ShapeError, match=r"`query` must be of query_size = 6 features"):
        attention(query[..., :5], source)
    with pytest.raises(gatewise.ShapeError, match=r"`source` must be of source_size = 5 features"):
        attention(query, source[..., :4])
    with pytest.raises(gatewise.ArgumentError, match="`query` must be a tensor, got list"):
        attention([query], source)
