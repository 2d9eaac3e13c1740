"""The LSTM operators of SystemML with the same matrices, and those of a BiLSTM, on any kernel.

`gatewise.interop.systemds` has the operators in the form of SystemDS 3.4.0, with caches in place of the state.
"""

from gatewise.interop.systemml.operators import bilstm, bilstm_backward, init, lstm, lstm_backward
from gatewise.interop.systemml.sparse import DENSITY
from gatewise.interop.systemml.state import State

__all__ = ["DENSITY", "State", "bilstm", "bilstm_backward", "init", "lstm", "lstm_backward"]
