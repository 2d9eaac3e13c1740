"""The printed decision, on a machine without a GPU."""

import pytest
import torch

import gatewise
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError


@pytest.fixture
def lstm():
    return gatewise.LSTM(512, 512, device="meta")


@pytest.mark.parametrize("device", ["h200", "t4", "cpu", Device.named("h200").replace(name="an invented GPU " * 9)])
@pytest.mark.parametrize("lengths", [None, True])
def test_every_kernel_its_verdict_and_figures_in_80_columns(lstm, device, lengths):
    decision = gatewise.explain(lstm, (100, 64, 512), device=device, dtype=torch.bfloat16, lengths=lengths)
    text = str(decision)
    assert max(len(line) for line in text.splitlines()) <= 80
    for verdict in decision.verdicts:
        assert verdict.kernel in text
        if verdict.accepted:
            assert verdict.seconds > 0
            assert verdict.peak_bytes > 0
        for refusal in verdict.refusals:
            assert refusal.actual.split()[0] in text
            assert refusal.allowed.split()[0] in text
    assert f"* {decision.chosen}" in text


def test_an_h200_in_full(lstm):
    decision = gatewise.explain(lstm, (100, 64, 512), device="h200", dtype=torch.float16, training=False)
    first, second, third = str(decision).splitlines()[:3]
    assert first == "problem  T 100, B 64, I 512, H 512, float16, inference"
    assert second == "device   NVIDIA H200 (sm_90, 132 multiprocessors, cuDNN 9.19.0)"
    assert third == "chosen   persistent (least predicted time)"
    assert decision.verdict("cudnn").algorithm == "PERSIST_STATIC"


def test_a_shape_and_a_tensor_say_the_same():
    module = gatewise.LSTM(8, 16, batch_first=True)
    x = torch.zeros(3, 5, 8)
    assert gatewise.explain(module, x) == gatewise.explain(module, (3, 5, 8))
    problem = gatewise.explain(module, x).problem
    assert (problem.time, problem.batch) == (5, 3)
    assert gatewise.explain(module, (5, 8)).problem.batch == 1


def test_what_is_explained_is_what_runs():
    module = gatewise.LSTM(8, 16, num_layers=2, dropout=0.5, kernel="eager")
    decision = gatewise.explain(module, (5, 3, 8))
    assert decision.chosen == "eager"
    assert decision.problem.dropout == 0.5
    assert gatewise.explain(module.eval(), (5, 3, 8)).problem.dropout == 0


def test_autocast_counts_as_in_the_call(monkeypatch):
    layer, x = gatewise.LSTM(8, 16), torch.randn(5, 3, 8)

    def dtype(given, **options):
        return gatewise.explain(layer, given, **options).problem.dtype

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x, x.half(), (5, 3, 8)):
            assert dtype(given) is layer(x)[0].dtype is torch.bfloat16
        assert gatewise.explain(layer.stream(3), (3, 8)).problem.dtype is torch.bfloat16
        assert gatewise.explain(layer.stream(3), torch.zeros(3, 8)).problem.dtype is torch.bfloat16
        assert dtype(x.double()) is torch.float64
        assert dtype(x, dtype=torch.float16) is torch.float16
        assert dtype((5, 3, 8), device="h200") is torch.float32  # autocast is off for GPUs
    # Without a GPU, PyTorch does not switch autocast on for GPUs.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert dtype((5, 3, 8), device="h200") is torch.get_autocast_dtype("cuda")
    assert dtype(x) is torch.float32


def test_a_torch_module_is_explained_as_after_accelerate():
    assert gatewise.explain(torch.nn.LSTM(8, 16), (5, 3, 8)).chosen == "aten"


def test_a_refusing_named_kernel_is_explained_without_raising():
    decision = gatewise.explain(gatewise.LSTM(8, 16), (5, 3, 8), kernel="cudnn")
    assert decision.chosen is None
    assert "chosen   none" in str(decision)


def test_bad_arguments_say_what_to_give(lstm):
    with pytest.raises(ShapeError, match=r"\(T, B, 512\)"):
        gatewise.explain(lstm, (100, 64, 511), device="h200")
    with pytest.raises(DeviceError, match=r"explain\(\.\.\., device='h200'\)"):
        gatewise.explain(lstm, (100, 64, 512))
    with pytest.raises(ArgumentError, match="h200, h100"):
        Device.named("h2000")
    with pytest.raises(DeviceError, match=r"`device` must be cuda, cuda:N or one of h200, h100, .* got 'h2000'"):
        gatewise.explain(lstm, (100, 64, 512), device="h2000")
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 512)])
    with pytest.raises(ArgumentError, match=r"`x` must be a tensor or a shape, .* PackedSequence\. Give the padded"):
        gatewise.explain(lstm, packed, device="h200")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(DeviceError, match=rf"a GPU of this machine, where PyTorch finds \d+, got '{missing}'"):
        gatewise.explain(lstm, (100, 64, 512), device=missing)
    with pytest.raises(DeviceError, match=r"`device` must be cuda, .* got 3\.5"):
        gatewise.explain(lstm, (100, 64, 512), device=3.5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((-5, 3, 512), "`x` must be a shape of sizes from 0 up, got (-5, 3, 512)."),
        ((5, -3, 512), "`x` must be a shape of sizes from 0 up, got (5, -3, 512)."),
        ((5.0, 3, 512), "`x` must be a tensor or a shape, integers, got (5.0, 3, 512)."),
        (("5", 3, 512), "`x` must be a tensor or a shape, integers, got ('5', 3, 512)."),
        (5, "`x` must be a tensor or a shape, integers, got 5."),
        (None, "`x` must be a tensor or a shape, integers, got None."),
    ],
)
def test_a_shape_is_integers_from_zero_up(lstm, shape, message):
    with pytest.raises(ArgumentError) as raised:
        gatewise.explain(lstm, shape, device="h200")
    assert str(raised.value) == message
    assert gatewise.explain(lstm, (0, 3, 512), device="h200").chosen


def test_what_is_no_layer_and_no_dtype_is_named(lstm):
    with pytest.raises(
        ArgumentError, match=r"`module` must be a recurrent layer of gatewise or PyTorch, got Linear\. Of a"
    ):
        gatewise.explain(torch.nn.Linear(4, 4), (5, 3, 4))
    for dtype in ("float32", torch.int64):
        with pytest.raises(DtypeError, match=f"`dtype` must be a floating-point type .* got {dtype!r}"):
            gatewise.explain(lstm, (5, 3, 512), device="h200", dtype=dtype)


def test_a_described_gpu_is_never_measured(lstm, monkeypatch):
    monkeypatch.setenv("GATEWISE_POLICY", "measure")
    for device in ("h200", Device.named("h200")):
        decision = gatewise.explain(lstm, (100, 64, 512), device=device, dtype=torch.bfloat16)
        assert decision.chosen == "persistent"
        assert not any(verdict.measured for verdict in decision.verdicts)


@pytest.mark.parametrize("name", sorted(set(Device.names()) - {"cpu"}))
def test_the_numbers_of_a_described_gpu_go_together(name):
    device = Device.named(name)
    rates = dict(device.matmul_rates)
    assert rates["float64"] <= rates["float32"] <= rates.get("tf32", rates["float16"]) <= rates["float16"]
    assert ("bfloat16" in rates) == (device.capability >= (8, 0))
    assert 40 <= device.multiprocessors <= 170
    assert 1e11 < device.memory_bandwidth < 1e13
