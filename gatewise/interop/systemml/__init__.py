"""The LSTM operators of SystemML and the BiLSTM of SystemDS, with the same matrices, on any kernel."""

from gatewise.interop.systemml.operators import bilstm, bilstm_backward, init, lstm, lstm_backward
from gatewise.interop.systemml.sparse import DENSITY
from gatewise.interop.systemml.state import State

__all__ = ["DENSITY", "State", "bilstm", "bilstm_backward", "init", "lstm", "lstm_backward"]
