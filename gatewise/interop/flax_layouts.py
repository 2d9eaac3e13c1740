"""The weight layouts of Flax, linen and nnx.

| name | gates | matrices | biases |
|---|---|---|---|
| `flax` | one tensor each | [I, H], [H, H] | one [H] each |
| `flax-nnx` | i f g o | [I, 4H], [H, 4H] | one [4H] |
| `flax-nnx-lstm` | one tensor each | [I, H], [H, H] | one [H] each |
| `flax-gru` | one tensor each | [I, H], [H, H] | one [H] each, and a second one of n |
| `flax-nnx-gru` | r z n | [I, 3H], [H, 3H] | one [3H] |
| `flax-rnn` | one | [I, H], [H, H] | one [H] |
| `flax-nnx-rnn` | one | [I, H], [H, H] | one [H] |
"""

from __future__ import annotations

from gatewise.cells import GRU, RNN
from gatewise.interop.weight_layout import Bias, Form, Matrix, Places, WeightLayout

_FLAX_PLACES = Places(
    "{name}/cell",
    "{name}/cell",
    "{name}/{direction}/cell",
    "{name}/{direction}/cell",
    ("forward_rnn", "backward_rnn"),
    ("rnn", "bidirectional"),
)

FLAX_LAYOUTS = (
    WeightLayout(
        name="flax",
        system="LSTMCell, OptimizedLSTMCell of Flax linen",
        gates="ifgo",
        input=Matrix("i{gate}/kernel", Form.COLUMNS, None),
        recurrent=Matrix("h{gate}/kernel", Form.COLUMNS, None),
        bias=Bias(("h{gate}/bias",)),
        places=_FLAX_PLACES,
    ),
    WeightLayout(
        name="flax-nnx",
        system="OptimizedLSTMCell of Flax nnx",
        gates="ifgo",
        input=Matrix("dense_i/kernel", Form.COLUMNS, 1),
        recurrent=Matrix("dense_h/kernel", Form.COLUMNS, 1),
        bias=Bias(("dense_h/bias",)),
        places=_FLAX_PLACES,
    ),
    WeightLayout(
        name="flax-nnx-lstm",
        system="LSTMCell of Flax nnx",
        gates="ifgo",
        input=Matrix("i{gate}/kernel", Form.COLUMNS, None),
        recurrent=Matrix("h{gate}/kernel", Form.COLUMNS, None),
        bias=Bias(("h{gate}/bias",)),
        places=_FLAX_PLACES,
        spelled=(("if/kernel", "if_/kernel"),),
    ),
    WeightLayout(
        name="flax-gru",
        system="GRUCell of Flax linen",
        gates="rzn",
        input=Matrix("i{gate}/kernel", Form.COLUMNS, None),
        recurrent=Matrix("h{gate}/kernel", Form.COLUMNS, None),
        bias=Bias(("i{gate}/bias", "h{gate}/bias"), second="n"),
        places=_FLAX_PLACES,
        cell=GRU(),
    ),
    WeightLayout(
        name="flax-nnx-gru",
        system="GRUCell of Flax nnx",
        gates="rzn",
        input=Matrix("dense_i/kernel", Form.COLUMNS, 1),
        recurrent=Matrix("dense_h/kernel", Form.COLUMNS, 1),
        bias=Bias(("dense_i/bias",)),
        places=_FLAX_PLACES,
        cell=GRU(),
    ),
    WeightLayout(
        name="flax-rnn",
        system="SimpleCell of Flax linen without residual connection",
        gates="z",
        input=Matrix("i/kernel", Form.COLUMNS, 1),
        recurrent=Matrix("h/kernel", Form.COLUMNS, 1),
        bias=Bias(("i/bias",)),
        places=_FLAX_PLACES,
        cell=RNN(),
    ),
    WeightLayout(
        name="flax-nnx-rnn",
        system="SimpleCell of Flax nnx without residual connection",
        gates="z",
        input=Matrix("dense_i/kernel", Form.COLUMNS, 1),
        recurrent=Matrix("dense_h/kernel", Form.COLUMNS, 1),
        bias=Bias(("dense_i/bias",)),
        places=_FLAX_PLACES,
        cell=RNN(),
    ),
)
"""The layouts of the LSTMs, GRUs and RNNs of Flax."""
