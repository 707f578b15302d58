import copy
import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.lib.measure import (
    ASSISTED,
    PLAIN,
    Difference,
    first_difference,
    measure,
    pooled_run,
    pooled_speed,
    warm_up,
)
from benchmarks.lib.options import DEFAULT_DRAFTER, EVAL_PROMPTS
from benchmarks.lib.pair import check_drafter, load_prompts
from benchmarks.lib.report import markdown_table, verdict, write_json
from modeling_dspark import RunStatistics
from training.common.environment import environment


PROMPT = [5, 6, 7, 8]
BLOCK = 3  # of the drafter in conftest.py


def test_both_methods_answer_alike_and_every_call_is_timed(target, methods):
    warm_up(target, PROMPT, methods, max_new_tokens=2)
    calls = []
    measurement = measure(target, PROMPT, methods, max_new_tokens=9, repeats=3, on_call=lambda: calls.append(1))
    expected = target.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False)[0, len(PROMPT) :].tolist()
    assert measurement.tokens(PLAIN) == measurement.tokens(ASSISTED) == expected
    assert len(calls) == 6
    assert [len(measurement.calls[name]) for name in methods] == [3, 3]
    median = statistics.median(call.seconds for call in measurement.calls[PLAIN])
    assert measurement.tokens_per_second(PLAIN) == pytest.approx(9 / median)
    assert measurement.ratio() == pytest.approx(measurement.seconds(PLAIN) / measurement.seconds(ASSISTED))


def test_the_method_that_starts_alternates(target, methods, monkeypatch):
    order = []

    def record(target, prompt_ids, *, max_new_tokens, arguments):
        order.append(ASSISTED if arguments else PLAIN)
        return SimpleNamespace(tokens=[1], seconds=1.0)

    monkeypatch.setattr("training.evaluation.timing.timed_call", record)
    measure(target, PROMPT, methods, max_new_tokens=1, repeats=2)
    assert order == [PLAIN, ASSISTED, ASSISTED, PLAIN]
    order.clear()
    measure(target, PROMPT, methods, max_new_tokens=1, repeats=1, first=1)
    assert order == [ASSISTED, PLAIN]


def test_a_repeat_count_below_one_is_refused(target, methods):
    with pytest.raises(ValueError, match="`repeats` must be at least 1, got 0"):
        measure(target, PROMPT, methods, max_new_tokens=1, repeats=0)


def test_a_perfect_drafter_is_counted_as_one(target, methods):
    run = measure(target, PROMPT, methods, max_new_tokens=1 + 2 * (BLOCK + 1)).run()
    assert run.new_tokens == [BLOCK + 1, BLOCK + 1]  # the prefill gave the first token
    assert run.acceptance_rate_by_position == [1.0] * BLOCK


def test_pooling_weighs_every_round_the_same_and_leaves_its_parts_alone():
    one = RunStatistics(2, drafted=[2, 2], verified=[2, 2], accepted=[2, 0], new_tokens=[3, 1])
    two = RunStatistics(2, drafted=[2], verified=[1], accepted=[1], new_tokens=[2])
    before = copy.deepcopy(one)
    pooled = pooled_run([one, two])
    assert pooled.acceptance_length == pytest.approx(6 / 3)
    assert pooled.tried_by_position == [3, 1]
    assert pooled.acceptance_rate_by_position == pytest.approx([2 / 3, 1.0])
    assert one == before
    with pytest.raises(ValueError, match="`runs`"):
        pooled_run([])
    with pytest.raises(ValueError, match="block sizes"):
        pooled_run([one, RunStatistics(3)])


def test_speeds_are_pooled_as_tokens_over_seconds(target, methods):
    measurement = measure(target, PROMPT, methods, max_new_tokens=4)
    slow = replace(measurement.calls[PLAIN][0], tokens=[1], seconds=9.0)
    fast = replace(measurement.calls[PLAIN][0], tokens=[1, 2, 3], seconds=1.0)
    items = [replace(measurement, calls={PLAIN: [call]}) for call in (slow, fast)]
    assert pooled_speed(items, PLAIN) == pytest.approx(4 / 10)


def test_equal_outputs_have_no_difference(target):
    assert first_difference(target, PROMPT, [1, 2], [1, 2]) is None
    assert "identical" in verdict(None, 2, "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_is_judged_by_the_targets_own_logits(target, dtype):
    target.to(dtype)
    difference = first_difference(target, PROMPT, [9, 10, 11], [9, 10, 12, 13])
    with torch.no_grad():
        logits = target(torch.tensor([[*PROMPT, 9, 10]])).logits[0, -1].float()
    assert (difference.position, difference.plain_token, difference.assisted_token) == (2, 11, 12)
    assert difference.logit_gap == pytest.approx(float((logits[11] - logits[12]).abs()), abs=1e-6)
    larger = logits[[11, 12]].abs().max().to(dtype)
    above = torch.nextafter(larger, torch.tensor(torch.inf, dtype=dtype))
    assert difference.dtype_step == pytest.approx(float(above - larger), rel=1e-3)


def test_an_output_that_ends_early_is_different_without_a_gap(target):
    difference = first_difference(target, PROMPT, [9, 10], [9])
    assert difference == Difference(1, 10, None)
    assert "DIFFERENT" in verdict(difference, 2, "bfloat16")


def test_verdicts_name_the_place_and_the_gap():
    difference = Difference(4, 1, 2, logit_gap=0.125, dtype_step=0.0625)
    assert "new token 5" in verdict(difference, 9, "bfloat16")
    assert "0.125 apart (one bfloat16 step there is 0.0625)" in verdict(difference, 9, "bfloat16")
    assert verdict(difference, 9, "float32").startswith("DIFFERENT")


def test_a_table_lines_up():
    lines = markdown_table(("set", "x"), [("a", 1.5), ("longer", 10)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith(":|")


def test_json_is_replaced_in_one_step(tmp_path):
    path = write_json(tmp_path / "new" / "report.json", {"a": [1, -2.5], "b": ["x", 1], "c": []})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1, -2.5], "b": ["x", 1], "c": []}
    assert "[1, -2.5]" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_the_environment_says_what_a_number_depends_on():
    facts = environment("float32")
    assert facts["cpu"]
    assert facts["threads"] == torch.get_num_threads()
    assert {"date", "cores", "torch", "transformers", "python", "git_commit", "git_dirty", "dtype"} <= set(facts)


def test_prompts_come_by_source(prompts_file, tmp_path):
    assert [len(records) for records in load_prompts(prompts_file).values()] == [2, 2]
    assert list(load_prompts(prompts_file, 1)) == ["gsm8k", "mbpp"]
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no prompts"):
        load_prompts(tmp_path / "empty.jsonl")


def test_the_shipped_prompts_are_seventeen_of_each_set_with_their_licences():
    sets = load_prompts(EVAL_PROMPTS)
    assert {source: len(records) for source, records in sets.items()} == dict.fromkeys(
        ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "arena-hard-v2"), 17
    )
    assert all(record["license"] and record["category"] and record["turns"] for of in sets.values() for record in of)


@pytest.mark.parametrize("name", [DEFAULT_DRAFTER, "./nowhere", "nowhere", "/nowhere/at/all"])
def test_a_missing_drafter_folder_says_how_to_make_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"make demo.*dspark package"):
        check_drafter(name)


def test_an_unpackaged_drafter_is_refused(drafter, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "dspark"}')
    with pytest.raises(ValueError, match="dspark package"):
        check_drafter(str(tmp_path))
