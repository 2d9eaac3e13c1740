"""The part of the decoder: LSTM layers over whole translations, or a loop over steps with input feeding."""

from __future__ import annotations

import dataclasses

import torch

from gatewise import feeding
from gatewise.planning.translation.lstm import lstm
from gatewise.planning.translation.setting import Setting, parameter_bytes
from gatewise.planning.way import Part, Recomputation, Way

KEPT, AGAIN = "kept", "again"
_OF_ATTENTION = ("queries", "contexts", "attention", "values")


def decoder(setting: Setting) -> Part:
    """Return the part of the decoder's layers.

    Raises:
        KernelRefused: The kernel that the model names cannot run the call.
    """
    model = setting.model
    if not model.input_feeding:
        return lstm("decoder", model.decoder, setting.shape.target, setting, lengths=False)  # type: ignore[arg-type]
    usual, lean = _way(setting, recompute=False), _way(setting, recompute=True)
    again = Recomputation(usual.kept - lean.kept, 0, _gate_seconds(setting))
    lean = dataclasses.replace(lean, seconds=usual.seconds + again.product_seconds, recomputation=again)
    return Part("decoder", (usual, lean), parameter_bytes(model.decoder))


def sizes_of(setting: Setting) -> feeding.Problem:
    """Return the sizes of the decoder's call with input feeding."""
    model, shape = setting.model, setting.shape
    return feeding.Problem(
        time=shape.target,
        source=shape.source,
        batch=shape.batch,
        units=model.hidden_size,
        layers=model.decoder_layers,
        embedding_size=model.target_embedding.embedding_dim,
        features=model.attention.hidden_size if model.attention.score == "additive" else 0,
        value_size=model.attention.source_size,
        layer_norm=model.attention.layer_norm,
        dtype=setting.dtype,
        dropout=bool(model.dropout.p),
        layer_dropout=bool(model.layer_dropout.p),
        allow_tf32=setting.rounds_float32,
    )


def kept_bytes(setting: Setting, kernel: str, *, of_attention: bool, recompute: bool = False) -> int:
    """Return the size in bytes of the tensors that the loop keeps for its layers, or for attention.

    Args:
        setting: The step.
        kernel: The attention kernel.
        of_attention: Whether to count the tensors of attention; otherwise those of the layers.
        recompute: Whether gates are recomputed.
    """
    problem = sizes_of(setting).replace(recompute=recompute, attention_kernel=kernel)
    found = feeding.kept(problem, setting.device)
    return sum(
        spec.nbytes for name, specs in found.items() if (name in _OF_ATTENTION) == of_attention for spec in specs
    )


def _way(setting: Setting, *, recompute: bool) -> Way:
    model, rows = setting.model, setting.shape.target * setting.shape.batch
    sizes, element = sizes_of(setting).replace(recompute=recompute), setting.dtype.itemsize
    embedded = rows * model.target_embedding.embedding_dim
    workspace = feeding.workspace_bytes(sizes)
    copies = _copied_bytes(setting) if not recompute else _copied_bytes(setting) // 6
    return Way(
        AGAIN if recompute else KEPT,
        "step by step, gates recomputed" if recompute else "step by step",
        _loop_seconds(setting),
        # Under autocast the embeddings are kept in float32 beside their converted copy.
        kept=kept_bytes(setting, "auto", of_attention=False, recompute=recompute) + setting.autocast * 4 * embedded,
        forward_scratch=workspace,
        # The gradients of the outputs and of the embeddings.
        backward_scratch=workspace + copies + (rows * model.hidden_size + embedded) * element,
        decision=feeding.decide(sizes, setting.pace),
    )


def _copied_bytes(setting: Setting) -> int:
    """Return the size in bytes of the operand copies that the products after the loop make on a GPU."""
    sizes, rows = sizes_of(setting), setting.shape.target * setting.shape.batch
    if setting.device.kind != "cuda" or setting.dtype != torch.float32:
        return 0
    if sizes.halves:  # float16 operands of the products with the gate gradients of two layers, and the rows' scales
        return 2 * rows * (2 * sizes.units + sizes.embedding_size) * torch.float16.itemsize
    return 4 * rows * 4 * sizes.units * 2  # measured on an H200


def _loop_seconds(setting: Setting) -> float:
    """Predict the time of the loop, forward and backward: a chain of small products and launches."""
    layers, device = setting.model.decoder_layers, setting.device
    products = 3 * parameter_bytes(setting.model.decoder) / 4 * 2.0 * setting.shape.batch * setting.shape.target
    busy = products / device.matmul_rate(setting.dtype, allow_tf32=sizes_of(setting).allow_tf32)
    # There are two launches per layer and direction, and three for attention; a small product takes as long as two.
    return busy + setting.shape.target * (6 + 4 * layers) * 2 * device.launch_seconds


def _gate_seconds(setting: Setting) -> float:
    """Predict the time of recomputing gates: one product per layer over all steps, and two passes over the gates."""
    model, rows = setting.model, setting.shape.target * setting.shape.batch
    sizes, device = sizes_of(setting), setting.device
    gates = 4 * model.hidden_size * model.decoder_layers
    inputs = (sizes.embedding_size + model.hidden_size * (2 * model.decoder_layers)) / model.decoder_layers
    flops = 2.0 * rows * gates * inputs
    traffic = 4.0 * rows * gates * setting.dtype.itemsize
    return flops / device.matmul_rate(setting.dtype, allow_tf32=sizes.allow_tf32) + traffic / device.memory_bandwidth
