"""Makes the references beside this file: weights, an input and the output that TensorFlow or Flax computed from them.

Run it where both are installed (pip install tensorflow-cpu flax); made with TensorFlow 2.21.0 and Flax 0.12.8. Every
file has x [T, B, I], y [T, B, D*H], and the variables under `weights/` by the names that their system gives them.
"""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from flax import nnx
from flax.traverse_util import flatten_dict

HERE = Path(__file__).parent
TIME, BATCH, FEATURES, UNITS = 5, 2, 3, 2
generator = np.random.default_rng(7)


def normal(*shape):
    return generator.standard_normal(shape).astype("f4")


def lstm_block(x, kernel, bias, forget_bias):
    """Run the operator behind LSTMBlockCell, the fused form of BasicLSTMCell, over all steps."""
    zeros, peephole = tf.zeros((BATCH, UNITS)), tf.zeros(UNITS)
    return tf.raw_ops.BlockLSTM(
        seq_len_max=tf.constant(TIME, tf.int64),
        x=x,
        cs_prev=zeros,
        h_prev=zeros,
        w=kernel,
        wci=peephole,
        wcf=peephole,
        wco=peephole,
        b=bias,
        forget_bias=forget_bias,
        cell_clip=-1.0,
        use_peephole=False,
    ).h.numpy()


def save(name, x, y, variables):
    np.savez(HERE / f"{name}.npz", x=x, y=y, **{f"weights/{key}": value for key, value in variables.items()})


def tensorflow_references():
    x = normal(TIME, BATCH, FEATURES)
    y, variables = x, {}
    for layer in range(2):
        kernel, bias = normal(y.shape[-1] + UNITS, 4 * UNITS), normal(4 * UNITS)
        place = f"rnn/multi_rnn_cell/cell_{layer}/lstm_cell"
        variables |= {f"{place}/kernel": kernel, f"{place}/bias": bias}
        y = lstm_block(y, kernel, bias, 1.0)
    save("tf1_basic", x, y, variables)

    y, variables = x, {}
    for layer in range(2):
        outputs = []
        for direction, step in (("fw", 1), ("bw", -1)):
            kernel, bias = normal(y.shape[-1] + UNITS, 4 * UNITS), normal(4 * UNITS)
            place = f"cudnn_lstm/stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{direction}"
            variables |= {
                f"{place}/cudnn_compatible_lstm_cell/kernel": kernel,
                f"{place}/cudnn_compatible_lstm_cell/bias": bias,
            }
            outputs.append(lstm_block(y[::step], kernel, bias, 0.0)[::step])
        y = np.concatenate(outputs, -1)
    save("tf1_cudnn", x, y, variables)


def flax_references():
    def rnn():
        return nn.RNN(nn.OptimizedLSTMCell(UNITS))

    x = normal(BATCH, TIME, FEATURES)
    for name, module in (("flax", rnn()), ("flax_bidirectional", nn.Bidirectional(rnn(), rnn()))):
        parameters = module.init(jax.random.key(0), x)
        parameters = jax.tree.map(lambda value: jnp.asarray(normal(*value.shape)), parameters)
        y = np.asarray(module.apply(parameters, x))
        variables = {key: np.asarray(value) for key, value in flatten_dict(parameters, sep="/").items()}
        save(name, x.swapaxes(0, 1), y.swapaxes(0, 1), variables)


def nnx_references():
    cells = {"lstm": nnx.LSTMCell, "optimized": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell, "rnn": nnx.SimpleCell}
    keys = nnx.Rngs(0)

    def rnn(cell):
        return nnx.RNN(cell(FEATURES, UNITS, rngs=keys), rngs=keys)

    modules = {f"nnx_{name}": rnn(cell) for name, cell in cells.items()}
    modules["nnx_bidirectional"] = nnx.Bidirectional(rnn(nnx.LSTMCell), rnn(nnx.LSTMCell), rngs=keys)
    x = normal(BATCH, TIME, FEATURES)
    for name, module in modules.items():
        state = nnx.state(module, nnx.Param)
        state = jax.tree.map(lambda value: jnp.asarray(normal(*value.shape)), state)
        nnx.update(module, state)
        variables = {"/".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(state)}
        save(name, x.swapaxes(0, 1), np.asarray(module(x)).swapaxes(0, 1), variables)


if __name__ == "__main__":
    tensorflow_references()
    flax_references()
    nnx_references()
