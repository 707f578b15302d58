"""What the machine was doing: the reading, the refusal, the marks, and the intervals of ratios."""

import multiprocessing
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import latency, training_step
from benchmarks.lib import machine
from benchmarks.lib.intervals import DRAWS, drawn, edges, speed_draws
from benchmarks.lib.latency_summary import ratio_draws
from benchmarks.lib.machine import Machine, Snapshot, conditions
from benchmarks.lib.measure import ASSISTED, PLAIN, Call, Measurement
from benchmarks.lib.options import CommandParser, drafting_arguments
from benchmarks.lib.pair import load_pair


FACTS = {"cpu": "A CPU", "threads": 2, "cores": 4, "dtype": "float32", "git_commit": "0123456789", "git_dirty": False}
FACTS |= {"torch": "2", "load_average_1min": 0.1}


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_others_are_what_the_machine_did_less_our_own_work():
    before, after = Snapshot(10.0, own=1.0, total=50.0), Snapshot(14.0, own=2.0, total=57.0)
    assert before.others_until(after) == pytest.approx((7 - 1) / 4)
    assert before.others_until(Snapshot(14.0, own=9.0, total=57.0)) == 0.0  # counters of unlike resolution
    assert before.others_until(Snapshot(14.0, own=2.0, total=None)) is None


@pytest.mark.skipif(not machine._COUNTERS.is_file(), reason="needs /proc/stat")
def test_work_of_another_process_is_seen_and_our_own_is_not():
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
    other.start()
    try:
        start = Snapshot.take()
        spin(0.5)
        end = Snapshot.take()
    finally:
        other.terminate()
        other.join()
    own = (end.own - start.own) / (end.time - start.time)
    total = (end.total - start.total) / (end.time - start.time)
    assert own > 0.1
    assert start.others_until(end) == pytest.approx(max(0.0, total - own))


@pytest.fixture
def busy(monkeypatch):
    """Other processes use a core before, and half a core during a measurement."""
    snapshots = iter([Snapshot(0, 0, 0), Snapshot(2, 0, 2), Snapshot(12, 6, 13), Snapshot(12, 6, 13)])
    monkeypatch.setattr(Snapshot, "take", lambda: next(snapshots))
    monkeypatch.setattr(machine, "load_average", lambda: 1.25)
    monkeypatch.setattr(machine, "BUSY_CORES_PER_CORE", 0.125)
    monkeypatch.setattr(machine, "_num_cores", lambda: 2)


def test_a_busy_machine_is_refused_with_both_ways_out(busy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(latency, "load", pytest.fail)  # nothing is loaded before the reading
    output = tmp_path / "latency.json"
    assert latency.main(["--output", str(output)]) == 2
    message = capsys.readouterr().err
    assert "other processes use 1.00 cores (load average over a minute 1.25)" in message
    assert "tolerates 0.25 of its 2 cores" in message
    assert "Wait until it is quiet, or pass `--allow-busy`" in message
    assert not output.exists()


def test_a_busy_machine_that_is_allowed_is_marked(busy):
    load = Machine(allow_busy=True).load()
    assert load["cores_used_by_others"] == {"before": 1.0, "during": 0.5}
    assert load["load_average_1min"] == {"before": 1.25, "after": 1.25}
    assert (load["busy"], load["allow_busy"], load["limit"]) == (True, True, 0.25)
    text = conditions({"environment": FACTS, "load": load}, batch="batch size 1", repeats="3 repeats")
    assert "A CPU, 2 of 4 cores, float32, batch size 1, 3 repeats, commit 012345678" in text
    assert "1.00 cores before and 0.50 during" in text
    assert "**Measured on a busy machine" in text


def test_a_machine_that_becomes_busy_is_marked_too(monkeypatch):
    snapshots = iter([Snapshot(0, 0, 0), Snapshot(2, 0, 0.1), Snapshot(12, 6, 16.1)])
    monkeypatch.setattr(Snapshot, "take", lambda: next(snapshots))
    monkeypatch.setattr(machine, "BUSY_CORES_PER_CORE", 0.125)
    monkeypatch.setattr(machine, "_num_cores", lambda: 2)
    assert Machine().load()["busy"]


def test_without_counters_the_load_average_decides(monkeypatch):
    monkeypatch.setattr(machine, "_machine_seconds", lambda: None)
    monkeypatch.setattr(machine, "BUSY_CORES_PER_CORE", 0.125)
    monkeypatch.setattr(machine, "_num_cores", lambda: 2)
    monkeypatch.setattr(machine, "load_average", lambda: 0.9)
    with pytest.raises(ValueError, match=r"busy: load average over a minute 0.9, and"):
        Machine()
    monkeypatch.setattr(machine, "load_average", lambda: 0.2)
    assert Machine().load()["cores_used_by_others"] == {"before": None, "during": None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_method_gets_the_target_as_users_load_it(target, drafter, tokenizer, tmp_path, monkeypatch, dtype):
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("benchmarks.lib.pair.load_drafter", lambda *_: drafter.to(getattr(torch, dtype)))
    monkeypatch.setattr("benchmarks.lib.pair.check_drafter", lambda *_: None)
    pair = load_pair(str(tmp_path), "any", dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    state = {name: (weight.requires_grad, weight.dtype) for name, weight in pair.target.named_parameters()}
    assert state == {name: (weight.requires_grad, weight.dtype) for name, weight in expected.named_parameters()}
    assert all(required for required, _ in state.values())
    latency.warm_up(pair.target, [5, 6], {PLAIN: {}, ASSISTED: {"assistant_model": pair.drafter}})
    assert all(weight.requires_grad for weight in pair.target.parameters())


def measurements(plain, assisted, tokens=(10, 30)):
    def calls(seconds, count):
        return [Call(list(range(count)), value) for value in seconds]

    return [
        Measurement([1], {PLAIN: calls(p, count), ASSISTED: calls(a, count)})
        for p, a, count in zip(plain, assisted, tokens, strict=True)
    ]


def test_a_speed_up_that_is_the_same_everywhere_has_no_spread():
    plain = [[1.0, 2.0, 3.0], [5.0, 4.0, 6.0]]
    draws = ratio_draws(measurements(plain, [[value / 2 for value in row] for row in plain]))[ASSISTED]
    assert draws.shape == (DRAWS,)
    assert torch.equal(draws, torch.full((DRAWS,), 2.0, dtype=torch.float64))


def test_intervals_cover_prompts_and_repeats():
    """Two prompts with speed-ups of 1 and 3 in equal time: a draw has 1, 3, or 1.5 for one of each."""
    draws = ratio_draws(measurements([[3.0], [3.0]], [[3.0], [1.0]], tokens=(6, 6)))[ASSISTED]
    assert sorted(set(draws.round(decimals=6).tolist())) == [1.0, 1.5, 3.0]
    assert edges(draws) == (1.0, 3.0)
    # One prompt whose repeats differ: medians of three draws from (1, 2, 4) seconds.
    draws = ratio_draws(measurements([[4.0, 4.0, 4.0]], [[1.0, 2.0, 4.0]], tokens=(6,)))[ASSISTED]
    assert set(draws.tolist()) == {4.0, 2.0, 1.0}


def test_drawn_speeds_are_sums_over_sums_of_medians():
    prompts, repeats = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[[0, 0, 1], [1, 1, 0]], [[0, 0, 0], [1, 1, 1]]])
    speeds = speed_draws([10, 20], [[1.0, 3.0], [2.0, 8.0]], prompts=prompts, repeats=repeats)
    assert speeds.tolist() == [30 / (1 + 8), 40 / (2 + 8)]
    assert int(drawn(3, (4,)).max()) == 2


def test_options_are_read_with_hyphens_and_underscores(monkeypatch):
    spellings = [["--max-new-tokens", "7"], ["--max_new_tokens=7"], ["--max_new_tokens", "7"]]
    assert [latency.parse_options(given).max_new_tokens for given in spellings] == [7, 7, 7]
    assert training_step.parse_options(["--slots", "9"]).positions == 9  # the name in the release before
    options = latency.parse_options(["--output", "my_file.json", "--confidence_threshold", "0.3"])
    assert options.output == "my_file.json"
    assert drafting_arguments(options) == {"assistant_confidence_threshold": 0.3}
    monkeypatch.setattr("sys.argv", ["latency", "--max_new_tokens", "8"])
    assert latency.parse_options().max_new_tokens == 8


def test_help_has_the_examples_of_the_docstring(capsys):
    with pytest.raises(SystemExit):
        CommandParser("some", "What it does.\n\n    python -m benchmarks.some --flag").parse_args(["--help"])
    assert "python -m benchmarks.some --flag" in capsys.readouterr().out
