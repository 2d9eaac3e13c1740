"""Reading a profile: the operators and GPU kernels that belong to a range, for events as a GPU records them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gatewise.nn import profile


def event(name, start, end, *, device="CPU", id=0, thread=1, fwd_thread=0, sequence_nr=-1, annotation=False):
    return SimpleNamespace(
        name=name,
        id=id,
        thread=thread,
        fwd_thread=fwd_thread,
        sequence_nr=sequence_nr,
        is_user_annotation=annotation,
        device_type=SimpleNamespace(name=device),
        time_range=SimpleNamespace(start=start, end=end),
    )


@pytest.fixture
def span():
    made = profile.Range(7)
    made._first, made._last = 10, 13  # autograd created the nodes 11 and 12 in between
    return made


def read(span, *events):
    (found,) = profile.read([event(span.name, 100, 200, annotation=True, id=1), *events], [span])
    return dict(found.forward), dict(found.backward)


def test_operators_on_the_thread_and_in_the_time_of_the_range(span):
    forward, _ = read(
        span,
        event("aten::inside", 110, 120),
        event("aten::before", 50, 60),
        event("aten::after", 201, 210),
        event("aten::elsewhere", 110, 120, thread=2),
    )
    assert forward == {span.name: 1, "aten::inside": 1}


def test_gpu_kernels_belong_where_they_were_launched_not_when_they_ran(span):
    forward, _ = read(
        span,
        event("cuLaunchKernelEx", 150, 151, id=40),
        event("recurrent_forward", 900, 950, device="CUDA", id=40),
        event("cudaLaunchKernel", 250, 251, id=41),
        event("somebody_elses", 160, 170, device="CUDA", id=41),
    )
    assert forward == {span.name: 1, "cuLaunchKernelEx": 1, "recurrent_forward": 1}


def test_a_graph_launches_several_kernels_at_once(span):
    steps = [event("step_forward", 300 + step, 301 + step, device="CUDA", id=42) for step in range(3)]
    forward, _ = read(span, event("cudaGraphLaunch", 150, 151, id=42), *steps)
    assert forward["step_forward"] == 3


def test_an_operator_with_the_number_of_a_launch_launched_nothing(span):
    forward, _ = read(span, event("aten::mm", 110, 120, id=40), event("a_kernel", 300, 310, device="CUDA", id=40))
    assert "a_kernel" not in forward


def test_the_mark_on_the_gpus_side_is_no_kernel(span):
    forward, _ = read(
        span,
        event("cudaLaunchKernel", 110, 120, id=1),
        event(span.name, 110, 200, device="CUDA", id=1, annotation=True),
    )
    assert forward == {span.name: 1, "cudaLaunchKernel": 1}


def test_the_backward_pass_is_what_its_nodes_did(span):
    _, backward = read(
        span,
        event("LSTMFunctionBackward", 500, 600, thread=2, fwd_thread=1, sequence_nr=11),
        event("aten::mm", 510, 520, thread=2),
        event("cuLaunchKernelEx", 530, 531, thread=2, id=50),
        event("recurrent_backward", 800, 810, device="CUDA", id=50),
        event("OthersBackward", 610, 700, thread=2, fwd_thread=1, sequence_nr=13),
        event("aten::of_others", 620, 630, thread=2),
        event("EarlierBackward", 710, 720, thread=2, fwd_thread=1, sequence_nr=10),
        event("ThreadBackward", 730, 740, thread=2, fwd_thread=9, sequence_nr=11),
    )
    assert backward == {"LSTMFunctionBackward": 1, "aten::mm": 1, "cuLaunchKernelEx": 1, "recurrent_backward": 1}


def test_nested_nodes_count_what_they_did_once(span):
    _, backward = read(
        span,
        event("autograd::engine::evaluate_function: X", 500, 600, thread=2, fwd_thread=1, sequence_nr=11),
        event("X", 505, 595, thread=2, fwd_thread=1, sequence_nr=11),
        event("aten::mm", 510, 520, thread=2),
    )
    assert backward["aten::mm"] == 1
