"""The reading order is its own inverse, and padding stays at the end of each sequence."""

import hypothesis
import hypothesis.strategies as st
import torch

from gatewise.kernels.eager.reading_order import ReadingOrder


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.integers(1, 6).flatmap(lambda time: st.lists(st.integers(0, time), min_size=1, max_size=5)))
def test_the_reverse_order_reverses_each_sequence_within_its_length(lengths):
    time = max(*lengths, 1)
    sequence = torch.randn(time, len(lengths), 2)
    order = ReadingOrder.of(sequence, torch.tensor(lengths), reverse=True)
    reversed_ = order.reordered(sequence)
    for row, length in enumerate(lengths):
        assert torch.equal(reversed_[:length, row], sequence[:length, row].flip(0))
        assert torch.equal(reversed_[length:, row], sequence[length:, row])
    assert torch.equal(order.reordered(reversed_), sequence)


def test_without_lengths_the_reverse_order_is_a_flip():
    sequence = torch.randn(4, 3, 2)
    assert torch.equal(ReadingOrder.of(sequence, None, reverse=True).reordered(sequence), sequence.flip(0))
    assert ReadingOrder.of(sequence, None, reverse=False).reordered(sequence) is sequence


def test_masks_and_states_follow_the_lengths():
    sequence = torch.full((3, 3, 1), float("nan"))
    sequence[:2, 0], sequence[:3, 2] = 1.0, 2.0
    order = ReadingOrder.of(sequence, torch.tensor([2, 0, 3]), reverse=False)
    masked = order.masked(sequence)
    assert masked[:, :, 0].T.tolist() == [[1, 1, 0], [0, 0, 0], [2, 2, 2]]
    initial = torch.tensor([[7.0], [8.0], [9.0]])
    assert order.initial_state(initial)[:, 0].tolist() == [7, 0, 9]
    assert order.final_state(masked, initial)[:, 0].tolist() == [1, 8, 2]


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    st.integers(1, 6).flatmap(lambda time: st.lists(st.integers(0, time), min_size=1, max_size=5)),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_border_is_between_the_same_steps_in_both_directions(lengths, reverse, seed):
    time, batch = max(*lengths, 1), len(lengths)
    resets = torch.rand(time, batch, generator=torch.Generator().manual_seed(seed)) < 0.4
    order = ReadingOrder.of(torch.zeros(time, batch, 2), torch.tensor(lengths), reverse, resets)
    for row, length in enumerate(lengths):
        read = list(range(length))[::-1] if reverse else list(range(length))
        for place, step in enumerate(read):
            if place == 0:
                begins = not reverse and bool(resets[0, row])
            else:
                begins = bool(resets[max(step, read[place - 1]), row])
            assert bool(order.carries[place, row, 0]) is not begins
        assert order.carries[length:, row].all()
