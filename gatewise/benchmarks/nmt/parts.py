"""The parts of a training step that memory is given to, in the order of tables."""

from __future__ import annotations

ATTENTION, LSTM, OUTPUT, OTHER, BACKWARD, WEIGHTS = "attention", "LSTM", "output", "other", "backward", "weights"
PARTS = (ATTENTION, LSTM, OUTPUT, OTHER, BACKWARD, WEIGHTS)
