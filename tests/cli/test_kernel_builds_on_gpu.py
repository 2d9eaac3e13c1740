"""On a GPU, training, evaluation and search compile nothing that was not compiled ahead."""

from __future__ import annotations

import pytest
import torch
from test_kernel_builds import pairs

from gatewise.cli.nmt_builds import TranslationCalls, translation_builds
from gatewise.contract import triton_kernels
from gatewise.contract.device import Device
from gatewise.data import PairBatches
from gatewise.kernels.cuda import toolchain
from gatewise.models import Search, Seq2Seq, translate
from gatewise.training.precision import arithmetic, autocast

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("feeding", [True, False])
def test_a_run_compiles_nothing_that_was_not_compiled_ahead(monkeypatch, tmp_path, feeding, precision):
    pytest.importorskip("triton")
    known, sources, compile_afresh = {}, [], toolchain.compile_afresh
    monkeypatch.setattr(triton_kernels, "_compiled", lambda: known)
    monkeypatch.setattr(toolchain, "compile_afresh", lambda *given: sources.append(given[0]) or compile_afresh(*given))
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    # Fewer units are never rounded to TF32, and batches of fewer tokens have no float16 factors; the second layer of a
    # decoder without input feeding has them.
    units, tokens = (320, 1500) if precision == "tf32" else (128, 600)
    model = Seq2Seq(50, 50, 64, units, 2, 2, input_feeding=feeding, label_smoothing=0.1, dropout=0.1, device=GPU)
    train, valid = (PairBatches(pairs(count), pairs(count), tokens, shuffle=True, device=GPU) for count in (400, 90))
    searched = [(9, 7), (30, 40)]
    calls = TranslationCalls(model, train.shapes_by_count(), valid.shapes_by_count(), searched)
    device = Device.probe(GPU)
    for each in translation_builds(calls, precision, device):
        each.compile()
    compiled, ahead = set(known), len(sources)
    assert compiled
    assert ahead
    with arithmetic(precision), autocast(precision, GPU):
        for batch in train.windows():
            model.loss(batch)[0].backward()
        model.eval()
        for batch in valid.windows():
            with torch.no_grad():
                model.loss(batch)
        for steps, rows in searched:
            source, lengths = torch.full((steps, rows), 5, device=GPU), torch.full((rows,), steps, device=GPU)
            translate(model, source, lengths, Search(1, 2, (0, 1)))
    assert set(known) == compiled
    # Not the kernel "stepwise", nor what only some layouts of tensors need.
    passes = {"forward.cu", "backward.cu", "cell.cu", "attend.cu", "operands.cu"}
    passes |= {"half_rows.cu", "half_columns.cu", "half_results.cu"}
    assert not [each for each in sources[ahead:] if each.name in passes and "stepwise" not in each.parts]
