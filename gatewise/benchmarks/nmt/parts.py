"""The parts of a training step to which memory is assigned, in the order of the tables."""

from __future__ import annotations

ATTENTION, LSTM, OUTPUT, OTHER, BACKWARD, WEIGHTS = "attention", "LSTM", "output", "other", "backward", "weights"
PARTS = (ATTENTION, LSTM, OUTPUT, OTHER, BACKWARD, WEIGHTS)
