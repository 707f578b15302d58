"""The numbers that README, the pages and the model card quote are those of the committed measurement."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import study_time
from benchmarks.head import head_table
from benchmarks.head_rounds import rounds_table
from benchmarks.lib.report import latency_tables, speed_tables
from benchmarks.lib.study_report import (
    acceptance_table,
    confidence_tables,
    curve_table,
    depth_table,
    margin_table,
    tau_table,
)
from benchmarks.lib.throughput_summary import throughput_table
from benchmarks.training_step import step_table


ROOT = Path(__file__).parents[2]
RESULTS = Path("docs") / "results.md"
CARD = Path("hub_upload") / "repos" / "dspark-smollm2-135m-instruct" / "README.md"


@pytest.mark.parametrize(
    ("page", "tables"),
    [(RESULTS, latency_tables), (CARD, lambda report: speed_tables(report["sections"]))],
    ids=["results", "card"],
)
def test_quoted_tables(page, tables):
    report = json.loads((ROOT / "benchmarks" / "results" / "latency.json").read_text())
    assert tables(report) in (ROOT / page).read_text()


def test_times_are_measured_on_a_quiet_machine():
    """The load is read before a model is loaded; ratios have three repeats and an interval."""
    for name in ("latency", "throughput"):
        report = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert report["load"]["busy"] is False
        assert report["environment"]["git_dirty"] is False
    assert report["settings"]["policies"]
    latency = json.loads((ROOT / "benchmarks" / "results" / "latency.json").read_text())
    assert latency["settings"]["repeats"] >= 3
    for section in latency["sections"]:
        low, high = section["overall"]["geometric_mean_interval"]["assisted"]
        assert 1.0 < low < section["overall"]["geometric_mean_ratio"]["assisted"] < high


def test_the_first_screen_quotes_the_measurement():
    report = json.loads((ROOT / "benchmarks" / "results" / "latency.json").read_text())
    screen = (ROOT / "README.md").read_text().split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+x) \| ([\d.]+x) \| ([\d.]+) \|$", screen, re.MULTILINE)
    assert rows == [
        (
            str(section["threads"]),
            f"{section['overall']['geometric_mean_ratio']['assisted']:.2f}x",
            f"{section['overall']['min_ratio']['assisted']:.2f}x",
            f"{section['overall']['tau']:.2f}",
        )
        for section in report["sections"]
    ]
    for section in report["sections"]:
        low, high = section["overall"]["geometric_mean_interval"]["assisted"]
        assert f"{low:.2f}x to {high:.2f}x" in screen
    assert {"bfloat16": "bf16", "float32": "fp32"}[report["environment"]["dtype"]] in screen
    assert report["environment"]["cpu"] in screen
    equality = json.loads((ROOT / "benchmarks" / "results" / "equality.json").read_text())
    assert equality["num_equal"] == len(equality["prompts"])
    assert equality["environment"]["dtype"] == "float32"
    for page in ("README.md", RESULTS):
        text = " ".join((ROOT / page).read_text().split())
        sentence = (
            f"in fp32, all of {equality['num_equal']} evaluation prompts give the same text of up to "
            f"{equality['max_new_tokens']} tokens"
        )
        assert sentence in text.replace("In fp32", "in fp32")


def test_the_measurement_is_of_the_shipped_drafter():
    import hashlib

    report = json.loads((ROOT / "benchmarks" / "results" / "latency.json").read_text())
    weights = (ROOT / CARD.parent / "model.safetensors").read_bytes()
    assert report["drafter"]["sha256"] == hashlib.sha256(weights).hexdigest()


def test_the_calibration_is_the_one_that_is_described():
    calibration = json.loads((ROOT / CARD.parent / "calibration.json").read_text())
    config = json.loads((ROOT / CARD.parent / "config.json").read_text())
    assert calibration["temperatures"] == config["confidence_temperatures"]
    before, after = ([f"{value:.2%}" for value in calibration[name]] for name in ("ece_before", "ece_after"))
    table = (ROOT / "docs" / "calibration.md").read_text()
    assert all(f"{one} -> {other}" in table for one, other in zip(before, after, strict=True))
    mean = sum(calibration["ece_after"]) / len(after)
    assert f"-> {mean:.2%}" in table
    assert mean <= 0.015
    fitted = json.loads((ROOT / "benchmarks" / "results" / "calibration.json").read_text())
    refitted = json.loads((ROOT / "benchmarks" / "results" / "refit_confidence.json").read_text())
    losses = f"{refitted['loss_before']:.3f} nats per position before, {refitted['loss_after']:.3f}"
    assert f"weight decay of {refitted['weight_decay']}: {losses}" in " ".join(table.split())
    assert f"{fitted['fitted']['ece']:.2%}".replace("%", " %") in table
    assert fitted["held_out"]["temperatures"] == calibration["temperatures"]


def test_the_shipped_drafter_is_better_than_the_one_before_on_every_set():
    names = ("evaluation_second_run", "evaluation")
    reports = [json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in names]
    assert reports[0]["settings"] == reports[1]["settings"]
    page = (ROOT / "docs" / "training.md").read_text()
    for name in (*reports[0]["sets"], "pooled"):
        both = [{**report["sets"], "pooled": report["pooled"]}[name] for report in reports]
        before, after = (each["acceptance"]["acceptance_length"] for each in both)
        assert after > before
        cells = [f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.1%}"]
        assert [name, *cells] in [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]


def test_quoted_throughput():
    report = json.loads((ROOT / "benchmarks" / "results" / "throughput.json").read_text())
    assert throughput_table(report) in (ROOT / RESULTS).read_text()
    assert [level["concurrency"] for level in report["levels"]] == [1, 2, 4, 8, 16, 32]


def test_quoted_fine_tuning():
    page = " ".join((ROOT / "docs" / "training.md").read_text().split())
    names = {"domain": "gains {0} on HumanEval and {1} on MBPP", "domain_shipped": "changes by {0} and {1}"}
    for name, sentence in names.items():
        report = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        before, after = report["before"]["tau"], report["after"]["tau"]
        assert sentence.format(*(f"{after[name] / before[name] - 1:+.1%}" for name in ("humaneval", "mbpp"))) in page
        assert (report["steps"], report["domain"], report["environment"]["git_dirty"]) == (200, "code", False)
        if name == "domain":
            assert f"in 200 steps, which took {report['train_minutes']} minutes" in page


def test_quoted_speed_of_the_fused_head():
    report = json.loads((ROOT / "benchmarks" / "results" / "head.json").read_text())
    assert head_table(report["results"]) in (ROOT / "docs" / "fused-head.md").read_text()
    least = {
        ("bfloat16", 49152, 1): 2.5,
        ("bfloat16", 151936, 1): 2.0,
        ("float32", 49152, 1): 1.3,
        ("float32", 151936, 1): 1.1,
    }
    for case in report["results"]:
        bound = least.get(
            (case["dtype"], case["vocabulary"], case["rows"]), 2.0 if case["dtype"] == "bfloat16" else 1.0
        )
        assert case["ratio"] >= (bound if case["temperature"] == 0 else 1.5)
        if case["dtype"] == "bfloat16" and case["rows"] == 1 and case["temperature"] == 0:
            assert case["of_floor"] >= 0.9


def test_quoted_rounds_of_the_fused_head():
    report = json.loads((ROOT / "benchmarks" / "results" / "head_rounds.json").read_text())
    assert rounds_table(report["results"]) in (ROOT / "docs" / "fused-head.md").read_text()
    assert all(case["interval"][0] > 1 for case in report["results"])
    assert {(case["rows"], case["temperature"]) for case in report["results"]} == {
        (rows, temperature) for rows in (1, 8) for temperature in (0.0, 1.0)
    }


def test_quoted_time_and_memory_of_the_training_step():
    """The loss: at most a quarter of the memory and 1.15 of the time of whole logits; a step: leaner and not slower."""
    report = json.loads((ROOT / "benchmarks" / "results" / "training_step.json").read_text())
    page = (ROOT / "docs" / "training.md").read_text()
    assert step_table(report["results"]) in page
    assert f"commit `{report['environment']['git_commit'][:7]}`" in page
    assert (report["complete"], report["environment"]["git_dirty"]) == (True, False)
    cases = {(case["part"], case["dtype"]): case for case in report["results"]}
    assert set(cases) == {(part, dtype) for part in ("loss", "step") for dtype in ("float32", "bfloat16")}
    for (part, dtype), case in cases.items():
        assert case["memory_ratio"] <= (0.25 if part == "loss" else 1.0)
        assert case["time_ratio"] <= (1.15 if part == "loss" else 1.0)
        assert case["loss_difference"] < (1e-5 if (part, dtype) == ("loss", "float32") else 1e-2)
        if part == "loss":
            assert (case["positions"], case["vocabulary"]) == (2048, 151936)


def kept_more(results):
    """How many more drafts a round DSpark keeps than DFlash, the token of the target left out."""
    named = {case["drafter"]: sum(map(sum, case["rounds"].values())) for case in results}
    per_round = {name: named["plain target"] / named[name] - 1 for name in ("dspark", "dflash")}
    return f"{per_round['dspark'] / per_round['dflash'] - 1:.0%}"


def test_quoted_longer_study_and_time():
    """Three drafters trained for longer, and what all of them take."""
    folder, page = ROOT / "benchmarks" / "results", (ROOT / "docs" / "results.md").read_text()
    report = json.loads((folder / "study_long.json").read_text())
    results, steps = report["results"], f"{report['steps']:,}"
    for table in (tau_table(results, "main"), margin_table(results), acceptance_table(results)):
        assert table in page
    assert f"{kept_more(results)} more after {steps}" in " ".join(page.split())
    epochs = 2 * report["steps"] / report["conversations"]
    assert f"({steps} steps, {epochs:.1f} epochs)" in page
    time = json.loads((folder / "study_time.json").read_text())
    assert study_time.tables(time) in page
    assert f"one thread, after {time['context']} tokens" in page
    assert time["environment"]["threads"] == 1
    by_name = {(case["drafter"], case["steps"]): case for case in time["results"]}
    for name, shorter in (("dspark", 800), ("eagle", 800)):
        assert by_name[name, shorter]["draft_ms"] == by_name[name, report["steps"]]["draft_ms"]
    assert by_name["dspark", 800]["draft_ms"][-1] < by_name["eagle", 800]["draft_ms"][-1] / 3
    for measured in (report, time):
        assert not measured["environment"]["git_dirty"]


def test_quoted_study():
    """Every table of the page, and what it says of data, steps and seed."""
    report = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())
    page = (ROOT / "docs" / "results.md").read_text()
    results = report["results"]
    groups = {case["group"] for case in results} - {"references"}
    tables = [*(tau_table(results, group) for group in groups), margin_table(results), acceptance_table(results)]
    tables += [depth_table(results), curve_table(results, [100, 200, 400, 600, 800])]
    tables += [table.partition("\n\n")[2] for table in confidence_tables(report["confidence"])]
    for table in tables:
        assert table in page
    text = " ".join(page.split())
    assert f"DSpark keeps {kept_more(results)} more drafts per round than DFlash after {report['steps']} steps" in text
    conversations = f"{report['conversations']:,} conversations"
    for fact in (conversations, f"{report['steps']} steps", f"seed {report['seed']}", "12 prompts of each set"):
        assert fact in page
    assert set(report["answers"].values()) == {12}
    assert f"calibrated on {report['confidence']['calibration_prompts']} training prompts" in page
    assert not report["environment"]["git_dirty"]
