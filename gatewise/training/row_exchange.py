"""The exchange of the rows of an embedding's gradient in place of the whole matrix, and where it saves time.

It is for embeddings whose gradients are not exchanged as factors (`factor_exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from gatewise.training.processes import Finish, Processes

_LEAST_SAVING = 4
"""The factor by which rows must be fewer bytes than their matrix to be sent in its place.

Rows are copied and added besides. On two H200s, 7 % of the bytes saved time and 45 % cost some
(`benchmarks/results/scale.jsonl`: rows of 1500 numbers, of 10,000 words, with 700 and 4,480 tokens in each process);
nothing was measured between them.
"""


def saves_time(table: torch.Tensor, rows: torch.Tensor, numbers: Sequence[int], *, bfloat16: bool) -> bool:
    """Return whether an all-gather of rows moves far fewer bytes than an all-reduce of their matrix.

    Args:
        table: The matrix.
        rows: The row numbers of this process.
        numbers: The numbers of rows of all processes; -1 for a process that must send the whole matrix.
        bfloat16: Whether gradients are sent in bfloat16.
    """
    item = 2 if bfloat16 else table.element_size()
    row = table[0].numel() * item + rows.element_size()
    # A process receives n - 1 parts in an all-gather, and in an all-reduce 2 (n - 1) / n of the matrix.
    return min(numbers) >= 0 and _LEAST_SAVING * len(numbers) * max(numbers) * row < 2 * table.numel() * item


class EmbeddingRows:
    """The exchange of those rows of the gradient of an embedding that occur in the batches of the processes.

    Args:
        processes: The processes.
        rows: The row numbers of this process, int64 [N] with repetitions.
        table_rows: The number of rows of the embedding.
        most: The largest number of rows of a process.
        bfloat16: Whether the rows are sent in bfloat16.
    """

    def __init__(self, processes: Processes, rows: torch.Tensor, table_rows: int, most: int, *, bfloat16: bool) -> None:
        self._processes, self._bfloat16 = processes, bfloat16
        self._rows = rows
        # A row that occurs several times is sent once, and zeros otherwise: the number of different rows would have to
        # be read from the device. Which of its places has the row makes no difference to the sum.
        places = torch.arange(len(rows), device=rows.device)
        place_of_row = places.new_empty(table_rows).index_put_((rows,), places)
        self._repeated = (place_of_row[rows] != places).unsqueeze(1)
        self._missing = most - len(rows)
        # The row numbers are on their way while the backward pass runs.
        self._all_rows = processes.start_all_gather(functional.pad(self._rows, (0, self._missing)))

    def start(self, gradient: torch.Tensor) -> Finish:
        """Send the rows of a gradient, which is zero in all others, and set them to zero.

        Returns:
            A function that waits for the rows of all processes, and adds them to the gradient, which is then the mean.
        """
        values = (gradient[self._rows] / self._processes.count).masked_fill(self._repeated, 0.0)
        if self._bfloat16:
            values = values.bfloat16()
        all_values = self._processes.start_all_gather(functional.pad(values, (0, 0, 0, self._missing)))
        gradient.index_fill_(0, self._rows, 0.0)

        def finish() -> None:
            for rows, theirs in zip(self._all_rows(), all_values(), strict=True):
                # The sum of a row has one number other than zero, so that its order makes no difference.
                gradient.index_add_(0, rows, theirs.to(gradient.dtype))

        return finish
