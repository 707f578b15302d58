"""The benchmark of the training step, at toy sizes."""

import json

import pytest

from benchmarks import training_step
from benchmarks.lib.resident import in_fresh_process


SMALL = (
    "--threads 1 --positions 64 --vocabulary 300 --hidden 16 --rank 4 --sequences 1 --tokens 40 --anchors 6 --layers 1"
)
SMALL += " --step-vocabulary 300 --target-layers 3 --repeats 1"


def test_both_ways_give_the_same_loss_and_are_reported(tmp_path, monkeypatch, capsys):
    peaks = {"ours": 2.0, "naive": 8.0}
    monkeypatch.setattr(training_step, "in_fresh_process", lambda command, argv, label: {"peak": peaks[argv[-2]]})
    output = tmp_path / "step.json"
    assert training_step.main([*SMALL.split(), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["complete"]
    assert [(case["part"], case["dtype"]) for case in report["results"]] == [
        (part, dtype) for part in ("loss", "step") for dtype in ("float32", "bfloat16")
    ]
    for case in report["results"]:
        # The second step of a way comes after an update by the first; bf16 sums differ in order.
        assert case["loss_difference"] < (1e-5 if (case["part"], case["dtype"]) == ("loss", "float32") else 2e-2)
        assert case["memory_ratio"] == 0.25
        slack = 1e-3 / case["naive_seconds"]  # of rounding: these are milliseconds
        assert case["time_ratio"] == pytest.approx(case["ours_seconds"] / case["naive_seconds"], rel=slack, abs=slack)
    assert training_step.step_table(report["results"]) in capsys.readouterr().out


@pytest.mark.parametrize("way", ["ours", "naive"])
def test_a_fresh_process_prints_its_peak(way, capsys):
    assert training_step.main([*SMALL.split(), "--only", "loss", way, "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] >= 0


def test_a_process_that_fails_is_an_error():
    with pytest.raises(ValueError, match="nonsense"):
        in_fresh_process("training_step", ["--dtype", "nonsense"], "nothing")
