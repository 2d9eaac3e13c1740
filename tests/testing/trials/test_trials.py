"""Trials find wrong results and reduce them to small ones; the library's own kernels are correct."""

import dataclasses
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from gatewise import testing
from gatewise.contract.saved import OutputGradients
from gatewise.functional.reversal import Reversal
from gatewise.kernels.eager import eager
from gatewise.testing.trials import Refused, Setting, Wrong, __main__, call, session, shrunk, trial, trials, verdict
from gatewise.testing.trials.call import call_of, rounding_of
from gatewise.testing.trials.run import Outcome, outcomes_of
from gatewise.testing.trials.session import Tally, run_session
from gatewise.testing.trials.setting import program_of
from gatewise.testing.trials.tensors import make
from gatewise.testing.trials.times import PARTS
from tests.pairwise import each_value, exhaustive, pairwise
from tests.programs import processes_that_start_fast

# The same settings on every machine; for others and for more: python -m gatewise.testing.trials --device cpu.
SEEDS = [(0, 8), *(pytest.param(seed, 30, marks=pytest.mark.exhaustive) for seed in range(21))]
SECONDS = 10.0  # on a GPU

pytestmark = pytest.mark.usefixtures("passes_alone")

MODES = ["eager", "explicit", "inference", "no_grad", "compile"]
# Compiling takes most of the time of a trial; the test of right and wrong results compiles in `make test`, too.
SELDOM_COMPILED = [*MODES[:-1], pytest.param("compile", marks=pytest.mark.exhaustive)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "settings"), SEEDS)
def test_kernels_are_right_in_random_settings(seed, settings):
    outcomes = list(trials("cpu", seed, math.inf, settings))
    wrong = [f"{outcome.lines}\n{program_of(outcome.setting)}" for outcome in outcomes if outcome.lines]
    assert not wrong, "\n\n".join(wrong)
    assert sum(not outcome.refused for outcome in outcomes) > settings // 2


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_right_in_random_settings_on_a_gpu():
    tally = run_session("cuda", 0, SECONDS, 0, 1)
    assert not tally.wrong, tally.wrong
    assert tally.tried > 5


@pytest.fixture
def changed(monkeypatch):
    """Change the results of the kernel `eager` with a function."""

    def install(change):
        original = type(eager).forward
        monkeypatch.setattr(type(eager), "forward", lambda self, *given: change(original(self, *given), *given))

    return install


def with_wrong_last_step(result, problem, inputs):
    # What is wrong only where there are more than three units.
    if problem.hidden_size < 4:
        return result
    return result._replace(y=torch.cat([result.y[:-1], result.y[-1:] * 1.01]))


@pytest.mark.parametrize("mode", SELDOM_COMPILED)
def test_resets_that_are_ignored_are_wrong(mode, monkeypatch):
    setting = Setting(
        time=5, batch=3, hidden_size=4, bidirectional=True, mode=mode, batch_first=True, lengths="int64", resets="uint8"
    )
    trial(setting)
    original = type(eager).forward

    def without_resets(self, problem, inputs):
        return original(self, problem, inputs._replace(resets=torch.zeros_like(inputs.resets)))

    monkeypatch.setattr(type(eager), "forward", without_resets)
    with pytest.raises(Wrong):
        trial(setting)


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        *each_value(pairwise(["eager", "inference", "no_grad"], ["", "int64"])),
        *(pytest.param("compile", lengths, marks=pytest.mark.exhaustive) for lengths in ("", "int64")),
    ],
)
def test_sequences_that_are_read_forward_are_wrong(mode, lengths, monkeypatch):
    setting = Setting(time=5, batch=3, hidden_size=4, mode=mode, lengths=lengths, reverse=True, above="y h c", seed=1)
    trial(setting)
    monkeypatch.setattr(Reversal, "reordered", lambda self, sequence: sequence.clone())
    with pytest.raises(Wrong):
        trial(setting)


RATES = ["weight_dropout", "recurrent_dropout", "candidate_dropout", "zoneout", "zoneout_others"]


@pytest.mark.parametrize(
    ("rate", "mode"),
    [
        *each_value(pairwise(RATES, ["eager", "no_grad"])),
        *(pytest.param(rate, "compile", marks=pytest.mark.exhaustive) for rate in RATES),
    ],
)
def test_masks_other_than_those_of_the_reference_are_wrong(rate, mode, monkeypatch):
    setting = Setting(time=9, batch=3, hidden_size=8, mode=mode, **{rate: 0.5})
    trial(setting)
    monkeypatch.setattr(call, "seed_masks", lambda: torch.manual_seed(1))
    with pytest.raises(Wrong):
        trial(setting)


def test_the_gradient_of_a_dropped_matrix_is_held_to_the_error_of_its_kept_elements(monkeypatch):
    # The kept elements of one gradient are small sums of large terms: PyTorch's float32 errors are 3e-6 of them, and
    # 3e-7 of all elements.
    setting = Setting(
        time=42,
        batch=19,
        input_size=3,
        num_layers=2,
        kernel="eager",
        lengths="uint8",
        states="given",
        above="y h c",
        reverse=True,
        weight_dropout=0.5,
        calls=1,
        seed=1538881930,
    )
    trial(setting)
    original = type(eager).backward

    def wrong(self, *given):
        found = original(self, *given)
        return found._replace(weights=tuple(weight * (1 + 5e-5) for weight in found.weights))

    monkeypatch.setattr(type(eager), "backward", wrong)
    with pytest.raises(Wrong, match="call 1: dweight_ih_l0: relative error 5"):
        trial(setting)


@pytest.mark.parametrize(
    ("cell", "rate"),
    [
        ("lstm", "zoneout"),
        pytest.param("lstm", "zoneout_others", marks=pytest.mark.exhaustive),
        ("gru", "zoneout"),  # its only state is the hidden one
        pytest.param("layer_norm_lstm", "zoneout", marks=pytest.mark.exhaustive),
        ("layer_norm_lstm", "zoneout_others"),
    ],
)
@pytest.mark.parametrize("mode", ["eager", *exhaustive("no_grad"), SELDOM_COMPILED[-1]])
def test_a_nan_is_seen_in_units_that_keep_their_state(mode, cell, rate):
    for seed in range(1 if mode == "compile" else 4):
        trial(Setting(time=6, batch=2, hidden_size=2, cell=cell, mode=mode, poison="x", seed=seed, **{rate: 0.5}))


@pytest.mark.parametrize("mode", MODES)
def test_a_right_result_passes_and_a_wrong_one_does_not(changed, mode):
    setting = Setting(time=3, batch=2, hidden_size=5, kernel="eager", mode=mode, above="y h c")
    trial(setting)
    changed(with_wrong_last_step)
    with pytest.raises(Wrong, match="call 1: y: relative error"):
        trial(setting)


def test_a_result_with_a_nan_is_wrong(changed):
    def poisoned(result, problem, inputs):
        return result._replace(c_n=torch.full_like(result.c_n, torch.nan))

    changed(poisoned)
    with pytest.raises(Wrong, match="c_n: 4 of 4 values are NaN"):
        trial(Setting(hidden_size=4, kernel="eager"))


def test_a_wrong_gru_is_found(changed):
    setting = Setting(time=3, batch=2, hidden_size=5, kernel="eager", states="learned", above="y h", cell="gru")
    trial(setting)
    changed(with_wrong_last_step)
    with pytest.raises(Wrong, match="call 1: y: relative error"):
        trial(setting)


@pytest.mark.parametrize("states", ["none", "given", "learned"])
def test_each_state_of_an_slstm_is_judged(changed, states):
    setting = Setting(
        time=3, batch=2, hidden_size=5, kernel="eager", cell="slstm", states=states, above="y h c", lengths="int64"
    )
    trial(setting)

    def with_wrong_normalizers(result, problem, inputs):
        factors = torch.tensor([1, 1.001, 1]).repeat_interleave(problem.hidden_size)
        return result._replace(c_n=result.c_n * factors)

    changed(with_wrong_normalizers)
    with pytest.raises(Wrong, match="call 1: c_n: relative error"):
        trial(setting)


@pytest.mark.parametrize("cell", ["layer_norm_lstm", *exhaustive("layer_norm_gru"), "peephole_lstm"])
@pytest.mark.parametrize(
    "options",
    [{"mode": "eager", "memory": "lean"}, pytest.param({"mode": "compile"}, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_wrong_gradient_of_a_parameter_is_found(cell, options, monkeypatch):
    setting = Setting(time=3, batch=2, hidden_size=5, cell=cell, resets="bool", **options)
    trial(setting)
    original = type(eager).backward

    def wrong(self, *given):
        found = original(self, *given)
        return found._replace(weights=(*found.weights[:-1], found.weights[-1] * 1.001))

    monkeypatch.setattr(type(eager), "backward", wrong)
    with pytest.raises(Wrong, match="call 1: d"):
        trial(setting)


def test_parameters_that_the_cell_states_do_not_depend_on_need_no_gradient():
    trial(Setting(batch=3, hidden_size=4, cell="layer_norm_lstm", states="given", above="c"))


def test_a_gradient_that_is_left_out_is_wrong(monkeypatch):
    original = type(eager).backward
    left_out = lambda self, *given: original(self, *given)._replace(x=None)  # noqa: E731
    monkeypatch.setattr(type(eager), "backward", left_out)
    with pytest.raises(Wrong, match="dx: missing"):
        trial(Setting(time=3, hidden_size=4, kernel="eager"))


def test_a_result_of_another_dtype_is_wrong(changed):
    changed(lambda result, problem, inputs: result._replace(y=result.y.double()))
    with pytest.raises(Wrong, match=r"y: .* torch.float64, expected .* torch.float32"):
        trial(Setting(time=3, hidden_size=4, kernel="eager", mode="no_grad"))


def test_what_is_stale_after_values_change_is_wrong(changed):
    seen = {}

    def remembered(result, problem, inputs):
        # A cache that goes by the address of the input.
        return seen.setdefault(inputs.x.data_ptr(), result)

    changed(remembered)
    steady = Setting(time=2, hidden_size=4, kernel="eager", mode="no_grad", calls=4)
    trial(steady)
    seen.clear()
    with pytest.raises(Wrong, match="call 3: "):
        trial(Setting(**{**steady.changed(), "changes": True}))


def test_what_a_call_raises_is_wrong(changed):
    def failing(result, problem, inputs):
        raise RuntimeError("no such luck")

    changed(failing)
    with pytest.raises(Wrong, match="RuntimeError: no such luck"):
        trial(Setting(kernel="eager"))


def test_a_kernel_that_refuses_is_told_apart():
    with pytest.raises(Refused):
        trial(Setting(kernel="persistent", dtype="float64"))


def test_a_failure_is_made_as_small_as_it_can_be(changed):
    changed(with_wrong_last_step)
    large = Setting(
        time=5, batch=3, input_size=3, hidden_size=9, num_layers=2, kernel="eager", lengths="int32", x="gaps", calls=3
    )

    def fails(setting):
        try:
            trial(setting)
        except Wrong:
            return True
        return False

    assert fails(large)
    assert shrunk(large, fails) == Setting(hidden_size=4, kernel="eager", calls=1)


@pytest.fixture
def budgets_of(monkeypatch):
    """Let budgets be multiplied by a function of their number of perturbations."""
    original = verdict.Budget.allowed.fget

    def install(factor):
        def allowed(self):
            return {name: value * factor(self.perturbations) for name, value in original(self).items()}

        monkeypatch.setattr(verdict.Budget, "allowed", property(allowed))

    return install


@pytest.fixture
def perturbed(monkeypatch):
    """Return a list of the numbers of perturbations that are measured."""
    original, found = verdict.Budget.perturb, []

    def perturb(self):
        original(self)
        found.append(self.perturbations)

    monkeypatch.setattr(verdict.Budget, "perturb", perturb)
    return found


def test_a_budget_that_is_exceeded_grows_until_it_is_not(budgets_of, perturbed):
    setting = Setting(time=3, batch=2, hidden_size=8, kernel="eager", above="y h c")
    budgets_of(lambda perturbations: float(perturbations > 2))
    trial(setting)
    assert perturbed == [1, 2, 3]
    perturbed.clear()
    budgets_of(lambda perturbations: 0.0)
    with pytest.raises(Wrong, match="call 1: y: relative error"):
        trial(setting)
    assert perturbed == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("units", "most"), [(8, 8), (7, 64)])
def test_budgets_of_few_units_grow_for_longer(monkeypatch, perturbed, units, most):
    monkeypatch.setattr(verdict, "_NEAR", math.inf)
    monkeypatch.setattr(verdict.Budget, "allowed", property(lambda self: dict.fromkeys(self._exact, 0.0)))
    with pytest.raises(Wrong, match="call 1: y: relative error"):
        trial(Setting(time=2, batch=2, hidden_size=units, kernel="eager"))
    assert perturbed == list(range(1, most + 1))


def test_budgets_that_are_exceeded_by_far_do_not_grow_for_longer(changed, perturbed):
    changed(lambda result, problem, inputs: result._replace(y=result.y * 1.01))
    with pytest.raises(Wrong, match="call 1: y: relative error"):
        trial(Setting(time=2, batch=2, hidden_size=2, kernel="eager"))
    assert len(perturbed) == 8


def test_perturbing_one_by_one_gives_the_budget_of_as_many_at_once():
    _, (problem, inputs, above, *_) = make(Setting(time=3, batch=2, hidden_size=5, above="y h c"))
    exact = testing.named(problem, *testing.oracle(problem, inputs, above))
    budget = verdict.Budget(problem, inputs, above, exact, "cpu")
    found = [budget.allowed]
    for _ in range(3):
        budget.perturb()
        found.append(budget.allowed)
    assert found == [testing.budgets(problem, inputs, above, exact, "cpu", nudges=nudges) for nudges in range(4)]
    assert all(found[0][name] <= found[3][name] for name in exact)
    assert found[0] != found[3]


@pytest.mark.parametrize(("kernel", "dtype"), [("aten", "float32"), ("eager", "float64"), ("eager", "float32")])
def test_the_kernel_aten_is_held_to_pytorch_without_cudnn(monkeypatch, kernel, dtype):
    original, found = verdict.Budget.__init__, []

    def begun(*given, **options):
        found.append(torch.backends.cudnn.enabled)
        original(*given, **options)

    monkeypatch.setattr(verdict.Budget, "__init__", begun)
    trial(Setting(time=2, kernel=kernel, dtype=dtype))
    assert found[0] == (kernel == "eager")
    assert torch.backends.cudnn.enabled


def test_the_oracle_does_not_use_cudnn(monkeypatch):
    found = []
    original = torch.nn.LSTM.forward

    def forward(self, *given):
        found.append(torch.backends.cudnn.enabled)
        return original(self, *given)

    monkeypatch.setattr(torch.nn.LSTM, "forward", forward)
    _, (problem, inputs, above, *_) = make(Setting(time=3, batch=2, hidden_size=5))
    testing.oracle(problem, inputs, above)
    assert found == [False]
    assert torch.backends.cudnn.enabled


def test_small_steps_have_their_reference_on_the_cpu():
    small, large = (Setting(time=2000, batch=9, hidden_size=size, device="cuda") for size in (20, 1000))
    assert [verdict.reference_device(small, choice) for choice in verdict.REFERENCES] == ["cpu", "cpu", "cuda"]
    assert [verdict.reference_device(large, choice) for choice in verdict.REFERENCES] == ["cuda", "cpu", "cuda"]


def test_numbers_too_small_to_be_normal_may_be_taken_for_zero():
    tiny = 2.0**-130
    small = torch.full((4,), tiny)
    assert verdict._underflow(small, 2 * tiny) > 1
    assert verdict._underflow(small.half(), 1.0) == 2**-23
    assert verdict._underflow(small, 1.0) < 2**-124


def test_tensors_that_cannot_be_judged_are_counted(budgets_of):
    setting = Setting(time=3, batch=2, hidden_size=5, kernel="eager", states="learned", above="y h c")
    assert [outcome.unjudged for outcome in outcomes_of([setting])] == [0]
    budgets_of(lambda nudges: float("inf"))
    (outcome,) = outcomes_of([setting])
    assert outcome.unjudged == len(["y", "h_n", "c_n", "dx", "dh0", "dc0"]) + 4


def test_settings_that_are_right_only_for_the_other_selection_are_counted(monkeypatch, budgets_of):
    factor = [0.0]
    budgets_of(lambda perturbations: factor[0])
    setting = Setting(time=3, batch=2, hidden_size=8, kernel="eager", above="y h c")

    def select_otherwise(self, wide):
        factor[0] = wide
        return True

    tally = Tally()
    for before, wide, wrong in ((1.0, 1.0, 0), (0.0, 1.0, 0), (0.0, 0.5, 0), (0.0, 0.0, 1)):
        factor[0] = before
        choose = functools.partialmethod(select_otherwise, wide)
        monkeypatch.setattr(verdict.Budget, "select_otherwise", choose)
        (outcome,) = outcomes_of([setting])
        tally.count(outcome, "")
        assert bool(outcome.lines) == bool(wrong)
        assert outcome.selected_otherwise == (before < wide)
    assert (tally.tried, len(tally.wrong), tally.selected_otherwise) == (4, 1, 2)


def test_gradients_beyond_the_dtype_of_a_parameter_cannot_be_judged():
    setting = Setting(time=9, batch=3, hidden_size=6, dtype="float16", autocast="bfloat16", kernel="eager", calls=1)
    tensors, asked = make(setting)
    call = call_of(setting, tensors)
    with rounding_of(setting):
        result, gradients, masks = call.backward(call.forward())
    factor = 1e6
    above = OutputGradients(*(None if each is None else each.double() * factor for each in asked.above))
    judge = verdict.Judge(setting, asked._replace(above=above))
    weights = tuple((each.double() * factor).half() for each in gradients.weights)
    assert all(each.isinf().any() for each in weights)
    found = gradients._replace(x=(gradients.x.double() * factor).half(), weights=weights)
    assert judge.complaints((result, found, masks)) == []
    assert judge.unjudged == len(["dx", "dh0", "dc0", *weights])


def test_the_program_that_is_printed_shows_the_failure():
    program = program_of(Setting(kernel="persistent", dtype="float64"))
    with pytest.raises(Refused):
        exec(program, {})


def test_the_command_counts_and_records(tmp_path, capsys):
    record = tmp_path / "trials.jsonl"
    assert __main__.main(["--device", "cpu", "--seconds", "30", "--most", "3", "--record", str(record)]) == 0
    count, sentence = capsys.readouterr().out.split(" ", 1)
    assert int(count) >= 3  # settings that were begun together are all tried
    assert sentence.startswith("settings, 0 wrong")
    assert json.loads(record.read_text()).items() >= {"wrong": 0, "selected_otherwise": 0}.items()


def test_the_command_says_what_the_time_was_spent_on(tmp_path, capsys):
    record = tmp_path / "trials.jsonl"
    __main__.main(["--device", "cpu", "--seconds", "30", "--most", "3", "--record", str(record), "--reference", "cpu"])
    assert re.search(r"settings a second in \d+ s; .*calls \d+%, .*reference \d+%", capsys.readouterr().out)
    found = json.loads(record.read_text())
    assert found["reference"] == "cpu"
    assert found["seconds_of_parts"].keys() == set(PARTS)
    assert 0 < sum(found["seconds_of_parts"].values()) <= found["seconds"] + 0.5


FIVE, SEVEN = Setting(time=5), Setting(time=7)
FAILED = Outcome(FIVE, ("call 1: y: relative error 1, allowed 0",))


def _sends(pipe, messages, status):
    for message in messages:
        pipe.send(message)
    if status is None:
        time.sleep(600)
    os._exit(status)


def _received(tally, *messages, status=None):
    """Return a process, and its pipe, that has sent messages and does not end, or ends with a status."""
    context = processes_that_start_fast()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_sends, args=(there, messages, status), daemon=True)
    process.start()
    there.close()
    found = session._Process(process)
    for _ in messages:
        assert here.poll(60)
        assert found.receive(here, tally)
    return here, found


def test_results_before_a_setting_that_hangs_are_kept():
    tally = Tally()
    messages = ("begun", [FIVE]), ("found", Outcome(FIVE), ""), ("begun", [SEVEN]), ("at", SEVEN)
    pipe, process = _received(tally, *messages)
    process.stop(pipe, tally)
    assert process.process.exitcode == -signal.SIGKILL
    assert (tally.tried, len(tally.wrong), len(tally.unfinished)) == (1, 0, 1)
    assert "time=7" in tally.unfinished[0]
    assert "time=5" not in tally.unfinished[0]


def test_a_call_that_hangs_for_long_is_wrong():
    tally = Tally()
    pipe, process = _received(tally, ("begun", [FIVE, SEVEN]), ("at", SEVEN))
    process.since -= 61
    process.stop(pipe, tally)
    ((program, said),) = tally.wrong
    assert not tally.unfinished
    assert said.startswith("still running when the time was over, after 61 s of: Setting(time=7); Setting(time=5)")
    exec(program, {})


def test_settings_that_take_long_together_are_not_wrong():
    tally, process = Tally(), session._Process(Ended())
    for message in (("begun", [FIVE, SEVEN]), ("at", FIVE), ("at", SEVEN), ("at", FIVE)):
        process.receive(Sent([message]), tally)
        process.since -= 50
    process.stop(Sent([]), tally)
    assert not tally.wrong
    assert len(tally.unfinished) == 1


@pytest.mark.parametrize("message", [("found", Outcome(FIVE), ""), ("found", FAILED, "program")])
def test_a_setting_that_is_counted_is_not_counted_again(message):
    tally = Tally()
    pipe, process = _received(tally, ("begun", [FIVE]), ("at", FIVE), message)
    process.since -= 61
    process.stop(pipe, tally)
    assert (tally.tried, len(tally.wrong), tally.unfinished) == (1, len(message[1].lines), [])


def test_the_time_of_reducing_a_failure_is_not_that_of_a_setting():
    tally = Tally()
    found = ("at", FIVE), ("found", FAILED, "program"), ("shrinking", FIVE)
    pipe, process = _received(tally, ("begun", [FIVE]), *found)
    process.since -= 61
    process.stop(pipe, tally)
    assert tally.wrong == [("program", f"{FIVE}: {FAILED.lines[0]}")]
    assert not tally.unfinished


def test_a_process_that_dies_is_wrong():
    tally = Tally()
    messages = ("begun", [FIVE, SEVEN]), ("at", SEVEN), ("found", Outcome(FIVE), ""), ("at", SEVEN)
    pipe, process = _received(tally, *messages, status=3)
    with pytest.raises(EOFError):
        process.receive(pipe, tally)
    process.died(tally)
    ((_, said),) = tally.wrong
    assert said.startswith("process ended with 3, ")
    assert "time=7" in said
    assert "time=5" not in said


@pytest.mark.parametrize("settings", [0, 1])
def test_a_process_that_fails_says_where(settings):
    tally, process = Tally(), session._Process(Ended())
    for message in [("begun", [FIVE]), ("at", FIVE)][: 2 * settings]:
        process.receive(Sent([message]), tally)
    assert not process.receive(Sent([("failed", "ValueError: no such luck")]), tally)
    ((program, said),) = tally.wrong
    assert said.startswith("ValueError: no such luck, after ")
    assert ("time=5" in said) == ("time=5" in program) == bool(settings)


class Ended:
    """A process that has ended."""

    exitcode = 0

    def kill(self):
        pass

    def join(self, seconds):
        pass


class Sent(list):
    """A pipe with messages."""

    def poll(self):
        return bool(self)

    def recv(self):
        return self.pop(0)


@pytest.mark.parametrize("reference", ["auto", "cpu"])
def test_a_failure_is_counted_before_it_is_reduced_by_the_same_reference(monkeypatch, reference):
    large, reports, references = Setting(time=4, batch=2), [], []

    def outcomes(settings, given):
        references.append(given)
        return [Outcome(own, FAILED.lines if own.time > 1 else ()) for own in settings]

    monkeypatch.setattr(session, "trials", lambda *given, **options: outcomes([large], options["reference"]))
    monkeypatch.setattr(session, "outcomes_of", outcomes)
    session._run(lambda *sent: reports.append(sent), "cpu", 0, 1.0, 1, 0, 0, reference)
    program, smaller = (program_of(own, reference=reference) for own in (large, Setting(time=2, calls=1)))
    assert reports == [
        ("found", Outcome(large, FAILED.lines), program),
        ("shrinking", large),
        ("shrunk", program, smaller),
    ]
    assert set(references) == {reference}
    tally = run_session("cpu", 0, 1.0, 1, 1, reference=reference)
    assert [program for program, _ in tally.wrong] == [smaller]
    assert ("reference='cpu'" in smaller) == (reference == "cpu")
    exec(smaller, {})


TELLS = """
import sys
from gatewise.testing.trials import __main__, session
count = session.Tally.count
def counted(self, *given):
    count(self, *given)
    print("counted", self.tried, flush=True)
session.Tally.count = counted
sys.exit(__main__.main())
"""


def _run_that_tells(out, words):
    os.dup2(out.fileno(), sys.stdout.fileno())
    session.get_context = lambda way: processes_that_start_fast()
    count = Tally.count

    def counted(self, *given):
        count(self, *given)
        print("counted", self.tried, flush=True)

    Tally.count = counted
    sys.exit(__main__.main(words))


def test_a_run_whose_process_is_terminated_prints_its_results(tmp_path):
    record, context = tmp_path / "trials.jsonl", processes_that_start_fast()
    here, there = context.Pipe(duplex=False)
    words = ["--device", "cpu", "--seconds", "600", "--processes", "1", "--record", str(record)]
    run = context.Process(target=_run_that_tells, args=(there, words))
    run.start()
    there.close()
    limit = threading.Timer(120, run.kill)
    limit.start()
    try:
        with open(here.fileno(), closefd=False) as printed:
            while printed.readline() not in ("counted 2\n", ""):
                pass
            run.terminate()
            out = printed.read()
        run.join()
    finally:
        limit.cancel()
    assert "settings, 0 wrong" in out
    assert "interrupted" in out
    assert json.loads(record.read_text())["interrupted"]
    assert run.exitcode == 143


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_terminated_prints_its_results(tmp_path, number, status, processes):
    record = tmp_path / "trials.jsonl"
    command = [sys.executable, "-c", TELLS, "--device", "cpu", "--seconds", "600"]
    command += ["--processes", str(processes), "--record", str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True) as run:
        limit = threading.Timer(120, os.killpg, (run.pid, signal.SIGKILL))
        limit.start()
        try:
            while run.stdout.readline() not in ("counted 2\n", ""):
                pass
            os.killpg(run.pid, number)
            out, _ = run.communicate(timeout=60)
        finally:
            limit.cancel()
    assert "settings, 0 wrong" in out
    assert "interrupted" in out
    found = json.loads(record.read_text())
    assert found["interrupted"]
    assert found["wrong"] == 0
    assert found["settings"] >= 2
    assert run.returncode == status


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (__main__.Terminated, 143)])
@pytest.mark.parametrize("wrong", [False, True])
def test_the_exit_status_says_how_a_run_was_interrupted(monkeypatch, error, status, wrong):
    def interrupted(*_, tally, **__):
        tally.count(FAILED if wrong else Outcome(FIVE), "program")
        raise error

    monkeypatch.setattr(__main__, "run_session", interrupted)
    assert __main__.main(["--device", "cpu"]) == (1 if wrong else status)


def test_large_products_in_tf32_are_counted():
    tally, large = Tally(), Setting(batch=7, hidden_size=257, allow_tf32=True, kernel="persistent")
    for time_steps, memory in ((99, "normal"), (100, "normal"), (100, "lean")):
        tally.count(Outcome(dataclasses.replace(large, time=time_steps, memory=memory)), "")
    assert tally.kinds == {"mode eager": 3, "kernel persistent": 3, "large TF32": 1}


def test_slow_settings_are_listed():
    tally = Tally()
    tally.count(Outcome(Setting(time=7), seconds={"calls": 1.0, "reference": 20.0}), "")
    assert tally.slow == ["21.0 s (calls 1.0 s, reference 20.0 s): Setting(time=7)"]


def test_settings_of_another_seed_can_have_the_same_sizes(monkeypatch):
    from gatewise.testing.trials import run
    from gatewise.testing.trials.draw import sizes

    monkeypatch.setattr(
        run, "outcomes_of", lambda settings, reference, at: [run.Outcome(setting) for setting in settings]
    )

    def widths(seed, of_sizes):
        return {outcome.setting.hidden_size for outcome in trials("cpu", seed, 60, 60, of_sizes)}

    assert widths(1, 7) <= set(sizes(7, "cpu").widths)
    assert not widths(1, 8) <= set(sizes(7, "cpu").widths)


@pytest.mark.parametrize("given", [["--seconds", "nan"], ["--processes", "0"], ["--most", "-1"], ["--seed", "-1"]])
def test_numbers_out_of_range_are_refused_by_name(given, capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--device", "cpu", *given])
    assert f"`{given[0]}` must be" in capsys.readouterr().err
