"""Reading order: its own inverse, padding stays behind the rows."""

import hypothesis
import hypothesis.strategies as st
import torch

from gatewise.kernels.eager.reading import Reading


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.integers(1, 6).flatmap(lambda time: st.lists(st.integers(0, time), min_size=1, max_size=5)))
def test_a_reverse_reading_reverses_each_row_within_its_length(lengths):
    time = max(*lengths, 1)
    sequence = torch.randn(time, len(lengths), 2)
    reading = Reading.of(sequence, torch.tensor(lengths), reverse=True)
    turned = reading.turned(sequence)
    for row, length in enumerate(lengths):
        assert torch.equal(turned[:length, row], sequence[:length, row].flip(0))
        assert torch.equal(turned[length:, row], sequence[length:, row])
    assert torch.equal(reading.turned(turned), sequence)


def test_without_lengths_a_reverse_reading_is_a_flip():
    sequence = torch.randn(4, 3, 2)
    assert torch.equal(Reading.of(sequence, None, reverse=True).turned(sequence), sequence.flip(0))
    assert Reading.of(sequence, None, reverse=False).turned(sequence) is sequence


def test_masked_started_and_finished_follow_the_lengths():
    sequence = torch.full((3, 3, 1), float("nan"))
    sequence[:2, 0], sequence[:3, 2] = 1.0, 2.0
    reading = Reading.of(sequence, torch.tensor([2, 0, 3]), reverse=False)
    masked = reading.masked(sequence)
    assert masked[:, :, 0].T.tolist() == [[1, 1, 0], [0, 0, 0], [2, 2, 2]]
    initial = torch.tensor([[7.0], [8.0], [9.0]])
    assert reading.started(initial)[:, 0].tolist() == [7, 0, 9]
    assert reading.finished(masked, initial)[:, 0].tolist() == [1, 8, 2]
