"""Makes the references of xLSTM beside this file, as make.py does those of other systems.

Run it where xlstm 2.0.6 is installed (pip install xlstm==2.0.6). The output y is that of the cell, before the
normalization of the layer; the input x of a layer with a convolution is the convolved input beside the input.
"""

from pathlib import Path

import numpy as np
import torch
from xlstm.blocks.slstm.cell import sLSTMCell_cuda
from xlstm.blocks.slstm.layer import sLSTMLayer, sLSTMLayerConfig

HERE = Path(__file__).parent
TIME, BATCH, UNITS = 5, 2, 6


def main():
    torch.manual_seed(0)
    for name, heads, kernel_size in (("xlstm", 2, 0), ("xlstm_one_head", 1, 0), ("xlstm_convolved", 3, 4)):
        options = {"embedding_dim": UNITS, "num_heads": heads, "conv1d_kernel_size": kernel_size, "dtype": "float32"}
        layer = sLSTMLayer(sLSTMLayerConfig(**options, backend="vanilla"))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter))
        found = []
        layer.slstm_cell.register_forward_hook(lambda _, __, result, found=found: found.append(result[0]))
        x = torch.randn(BATCH, TIME, UNITS)
        layer(x)
        (y,) = found  # [B, heads, T, units of a head]
        given = x if not kernel_size else torch.cat([layer.conv_act_fn(layer.conv1d(x)), x], -1)
        weights = {f"weights/{key}": value for key, value in layer.state_dict().items()}
        cell, other = layer.slstm_cell, sLSTMCell_cuda(layer.slstm_cell.config, skip_backend_init=True)
        cuda = dict(weights)
        cuda["weights/slstm_cell._recurrent_kernel_"] = other._recurrent_kernel_ext2int(
            cell._recurrent_kernel_int2ext(cell._recurrent_kernel_)
        )
        cuda["weights/slstm_cell._bias_"] = other._bias_ext2int(cell._bias_int2ext(cell._bias_))
        tensors = {"x": given.transpose(0, 1), "y": y.permute(2, 0, 1, 3).flatten(2)}
        for suffix, content in (("", cuda), ("_vanilla", weights)):
            arrays = {key: value.detach().numpy() for key, value in (tensors | content).items()}
            np.savez(HERE / f"{name}{suffix}.npz", **arrays)


if __name__ == "__main__":
    main()
