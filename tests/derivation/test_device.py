"""The CUDA code that is generated for the cells of the library."""

import hashlib

import pytest

from gatewise.cells import GRU, LSTM, RNN, CappedLSTM, CoupledLSTM
from gatewise.derivation.device import device_code

# The text of each cell, by its hash: measured times and tests on GPUs are of these very texts. Whoever changes the
# generated code on purpose puts the new hashes here, and runs the tests on a GPU again.
TEXTS = {
    LSTM(): "95ac431d34dc5430",
    GRU(): "f482d6991374a4fc",
    RNN("tanh"): "1eebc13cd44db6a8",
    RNN("relu"): "2792ddb33968d6f9",
    CoupledLSTM(): "2739f44fd3e61b6c",
    CappedLSTM(): "b367abde23c72768",
}


@pytest.mark.parametrize("cell", TEXTS, ids=repr)
def test_the_generated_text_is_the_one_that_was_tested_on_gpus(cell):
    assert hashlib.sha256(device_code(cell).text.encode()).hexdigest().startswith(TEXTS[cell])
