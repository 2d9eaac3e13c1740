"""`gatewise explain`: decisions for calls that are not made, on devices that the machine need not have."""

from __future__ import annotations

import itertools
import json

import pytest

from gatewise import kernel_names
from gatewise.contract.device import Device

LARGE = ("explain", "--input", "35,20,1500", "--hidden", 1500, "--layers", 2)


def section(out: str, title: str) -> list[str]:
    lines = out.splitlines()
    start = lines.index(title) + 1
    return lines[start : lines.index("", start)] if "" in lines[start:] else lines[start:]


OPTIONS = (), ("--lengths", "--bidirectional"), ("--inference", "--dtype", "fp16")


# All options on one device, and one option on each other device: columns do not depend on combinations. What would help
# takes seconds to find on some devices; on one of them, an H200, the test below looks at the columns too.
LONG = ("h200", "h100", "h100-pcie", "b200")
# Devices that are described as others are.
ALIKE = ("a100-40gb", "a10", "l40s", "rtx3090", "rtx4090", "rtx5090", "rtx6000")
CASES = [
    pytest.param(name, options, marks=pytest.mark.exhaustive if name in LONG + ALIKE else ())
    for name, options in [
        *[("h200", options) for options in OPTIONS],
        *zip([name for name in (*Device.names(), None) if name != "h200"], itertools.cycle(OPTIONS), strict=False),
    ]
]


@pytest.mark.parametrize(("gpu", "options"), CASES)
def test_it_fits_80_columns_and_names_every_kernel_on_every_device(gatewise, gpu, options):
    answer = gatewise(*LARGE, *options, *(("--gpu", gpu) if gpu else ()))
    assert answer.status == 0
    assert answer.err == ""
    assert max(map(len, answer.out.splitlines())) <= 80
    assert "\x1b" not in answer.out
    for name in kernel_names():
        assert f" {name} " in answer.out


def test_the_large_ptb_model_on_an_h200(gatewise):
    out = gatewise(*LARGE, "--gpu", "h200").out
    assert max(map(len, out.splitlines())) <= 80
    assert all(f" {name} " in out for name in kernel_names())
    pytorch = section(out, "torch.nn.LSTM would run")
    assert pytorch[0].startswith("  cudnn: STANDARD")
    assert "    - num_layers is 2, allowed: 1" in pytorch
    assert "    - hidden_size is 1500, allowed: multiples of 128 up to 1024" in pytorch
    assert "largest batch that fits in 140 GiB" in section(out, "memory, predicted")[1]
    helping = section(out, "what would help, predicted")
    assert any(line.startswith("  fp32 -> bf16") and "x speed" in line for line in helping)
    assert any(line.startswith("  B 20 -> 24") and "x seq/s" in line for line in helping)


def test_a_persistent_algorithm_leaves_nothing_to_explain(gatewise):
    out = gatewise("explain", "--input", "100,64,512", "--hidden", 512, "--dtype", "fp16", "--gpu", "a100").out
    assert section(out, "torch.nn.LSTM would run")[0].startswith("  cudnn: PERSIST_STATIC,")
    assert "because" not in out


def test_pytorch_knows_no_lean_memory(gatewise):
    out = gatewise("explain", "--input", "100,64,512", "--hidden", 512, "--memory", "lean", "--gpu", "v100").out
    assert section(out, "torch.nn.LSTM would run")[0].startswith("  cudnn: STANDARD")


@pytest.mark.parametrize(("gpu", "chosen"), [("cpu", "aten"), ("h200", None), ("v100", "cudnn")])
def test_a_gru_is_beside_pytorchs_gru(gatewise, gpu, chosen):
    words = ("explain", "--cell", "gru", "--input", "100,64,512", "--hidden", 512, "--dtype", "fp16", "--gpu", gpu)
    answer = gatewise(*words)
    assert answer.status == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    pytorch = section(answer.out, "torch.nn.GRU would run")
    if gpu == "h200":
        assert pytorch[0].startswith("  cudnn: STANDARD")
        assert "    - cell is gru on sm_90, allowed: lstm, rnn; gru on sm_70" in pytorch
    else:
        assert pytorch[0].startswith("  cudnn: PERSIST_STATIC" if gpu == "v100" else "  aten: native loop")
        assert json.loads(gatewise(*words, "--json").out)["chosen"] == chosen


@pytest.mark.parametrize("cell", ["rnn_tanh", pytest.param("rnn_relu", marks=pytest.mark.exhaustive)])
def test_an_rnn_is_beside_pytorchs_rnn_which_runs_on_cudnn(gatewise, cell):
    words = ("explain", "--cell", cell, "--input", "100,64,512", "--hidden", 512)
    answer = gatewise(*words, "--gpu", "v100")
    assert (answer.status, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80
    pytorch = section(answer.out, "torch.nn.RNN would run")
    assert pytorch[0].startswith("  cudnn: STANDARD")
    assert "    - hidden_size is 512, allowed: at most 384 (forward), 256 (backward)" in pytorch
    data = json.loads(gatewise(*words, "--gpu", "h200", "--dtype", "fp16", "--json").out)
    assert data["chosen"] == "persistent"
    assert data["pytorch"]["algorithm"] == "PERSIST_STATIC"


def test_lengths_are_a_packed_batch_to_pytorch(gatewise):
    out = gatewise("explain", "--input", "100,64,512", "--hidden", 512, "--lengths", "--gpu", "v100").out
    assert section(out, "torch.nn.LSTM would run")[0].startswith("  cudnn (packed): STANDARD")


def test_pytorch_has_no_resets(gatewise):
    words = "explain", "--input", "10,4,16", "--hidden", 16, "--gpu", "h200"
    out = gatewise(*words, "--resets").out
    assert "chosen   persistent" in out
    assert section(out, "torch.nn.LSTM would run") == section(gatewise(*words).out, "torch.nn.LSTM would run")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (("--bidirectional",), "2 directions"),
        (("--proj", 64), "P 64"),
        (("--no-bias",), "no bias"),
        (("--dropout", 0.5), "dropout 0.5"),
        (("--lengths",), "lengths on the GPU"),
        (("--resets",), "resets"),
        (("--inference",), "inference"),
        (("--memory", "lean"), "lean memory"),
        (("--dtype", "bf16"), "bfloat16"),
        (("--tf32",), "TF32 allowed"),
        (("--layers", 3), "3 layers"),
        (("--cell", "gru"), "gru"),
        (("--cell", "rnn_relu"), "rnn_relu"),
    ],
)
def test_every_option_reaches_the_problem(gatewise, option, expected):
    # Few kernels can run on a V100, so that the choice takes less time.
    words = ("explain", "--input", "10,4,8", "--hidden", 128, "--layers", 2, "--gpu", "v100")
    off = ("--no-tf32",) if option == ("--tf32",) else ()
    problem = lambda *more: json.loads(gatewise(*words, *more, "--json").out)["problem"]  # noqa: E731
    assert expected in problem(*option)
    assert expected not in problem(*off)


def test_the_json_has_what_the_text_has(gatewise):
    data = json.loads(gatewise(*LARGE, "--gpu", "h200", "--json").out)
    assert [kernel["kernel"] for kernel in data["kernels"]] == list(kernel_names())
    assert data["device"] == "NVIDIA H200"
    chosen = next(kernel for kernel in data["kernels"] if kernel["kernel"] == data["chosen"])
    assert chosen["accepted"]
    assert data["memory"]["peak"] == chosen["peak_bytes"]
    assert data["memory"]["largest_batch"] > 1000
    refusals = data["pytorch"]["not_persistent"]["PERSIST_STATIC"]
    assert {"quantity": "num_layers", "actual": "2", "allowed": "1", "advice": ""} in refusals
    assert all(advice["gain"] > 1 for advice in data["advice"])


def test_a_named_kernel_that_refuses_is_status_1_and_shows_what_would_make_it_run(gatewise):
    answer = gatewise(*LARGE, "--no-tf32", "--gpu", "h200", "--kernel", "persistent")
    assert answer.status == 1
    assert "chosen   none ('persistent' was named" in answer.out
    helping = section(answer.out, "what would help, predicted")
    assert any("runs" in line and "persistent" in line for line in helping)
    answer = gatewise(*LARGE, "--gpu", "cpu", "--kernel", "cudnn", "--json")
    assert answer.status == 1
    assert json.loads(answer.out)["chosen"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--input", "35,20", "--hidden", 8), "`--input` must be three positive integers T,B,I, got '35,20'"),
        (("--input", "35,0,4", "--hidden", 8), "three positive integers"),
        (("--input", "35,2,x", "--hidden", 8), "three positive integers"),
        (("--input", "5,2,4"), "`--hidden` is missing. For example: gatewise explain --input 100,64,512 --hidden 512"),
        (("--input", "5,2,4", "--hidden", 0), "`--hidden` must be a positive integer, got 0"),
        (("--input", "5,2,4", "--hidden", 8, "--proj", 8), "`--proj` must be"),
        (("--input", "5,2,4", "--hidden", 8, "--dtype", "int8"), "`--dtype` must be one of fp32"),
        (("--input", "5,2,4", "--hidden", 8, "--cell", "rnn"), "`--cell` must be one of lstm, gru, rnn_tanh, rnn_relu"),
        (
            ("--input", "5,2,4", "--hidden", 8, "--cell", "rnn_relu", "--proj", 4),
            "`--proj` must be 0 with --cell rnn_relu, got 4",
        ),
        (("--input", "5,2,4", "--hidden", 8, "--gpu", "h2000"), "`--gpu` must be one of h200, h100"),
        (("--input", "5,2,4", "--hidden", 8, "--kernel", "cuddn"), "got 'cuddn'"),
    ],
)
def test_bad_input_is_one_sentence(gatewise, words, message):
    answer = gatewise("explain", *words)
    assert answer.refused
    assert message in " ".join(answer.err.split())
    assert "Traceback" not in answer.err
