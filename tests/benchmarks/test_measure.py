import copy
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks import demo, latency
from benchmarks.breakdown import measure_breakdown
from benchmarks.environment import environment
from benchmarks.measure import (
    ASSISTED,
    PLAIN,
    Difference,
    first_difference,
    measure,
    pooled_run,
    pooled_speed,
    warm_up,
)
from benchmarks.pair import DEFAULT_DRAFTER, Pair, check_drafter, load_prompts
from benchmarks.report import markdown_table, verdict, write_json
from hub_upload.package import package
from modeling_dspark import DSparkConfig, DSparkModel, RunStatistics


ROOT = Path(__file__).resolve().parents[2]
VOCAB, HIDDEN, BLOCK = 199, 64, 3
PROMPT = [5, 6, 7, 8]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture
def target():
    """A random target whose next token depends on the last token alone, so that a drafter can be right by construction."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=VOCAB, num_hidden_layers=5, head_dim=16, tie_word_embeddings=False, **sizes, **special
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@pytest.fixture
def drafter(target):
    """Drafts exactly what the target would say: the Markov head is the target, the backbone adds nothing."""
    config = DSparkConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        target_layer_ids=[0, 2],
        num_target_layers=5,
        mask_token_id=VOCAB - 1,
        markov_rank=HIDDEN,
        block_size=BLOCK,
        pad_token_id=0,
    )
    model = DSparkModel(config).eval()
    with torch.no_grad():
        model.norm.weight.zero_()
        embedded = target.model.embed_tokens.weight
        model.markov_head.markov_w1.weight.copy_(target.model.norm(embedded))
        model.markov_head.markov_w2.weight.copy_(target.lm_head.weight)
    return model


@pytest.fixture
def tokenizer():
    words = ["<unk>", "user", "assistant", *(f"w{index}" for index in range(VOCAB - 3))]
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", pad_token="<unk>", chat_template=TEMPLATE
    )


@pytest.fixture
def pair(target, drafter, tokenizer):
    return Pair(target, drafter, tokenizer)


@pytest.fixture
def methods(drafter):
    return {PLAIN: {}, ASSISTED: {"assistant_model": drafter}}


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"turns": [f"w{index} w7"], "source": source} for index in range(2) for source in ("gsm8k", "mbpp")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


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

    monkeypatch.setattr("benchmarks.measure.timed_call", record)
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
    assert run.acceptance_by_position == [1.0] * BLOCK


def test_pooling_weighs_every_round_the_same_and_leaves_its_parts_alone():
    one = RunStatistics(2, drafted=[2, 2], verified=[2, 2], accepted=[2, 0], new_tokens=[3, 1])
    two = RunStatistics(2, drafted=[2], verified=[1], accepted=[1], new_tokens=[2])
    before = copy.deepcopy(one)
    pooled = pooled_run([one, two])
    assert pooled.accepted_length == pytest.approx(6 / 3)
    assert pooled.tried_by_position == [3, 1]
    assert pooled.acceptance_by_position == pytest.approx([2 / 3, 1.0])
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


def test_the_shipped_prompts_are_four_of_each_set_with_their_licences():
    sets = load_prompts(ROOT / "benchmarks" / "prompts_eval_small.jsonl")
    assert {source: len(records) for source, records in sets.items()} == dict.fromkeys(
        ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "arena-hard-v2"), 4
    )
    assert all(record["license"] and record["category"] and record["turns"] for of in sets.values() for record in of)


@pytest.mark.parametrize("name", [DEFAULT_DRAFTER, "./nowhere", "nowhere", "/nowhere/at/all"])
def test_a_missing_drafter_folder_says_how_to_make_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"make demo.*hub_upload package"):
        check_drafter(name)


def test_an_unpackaged_drafter_is_refused(drafter, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "dspark"}')
    with pytest.raises(ValueError, match="hub_upload package"):
        check_drafter(str(tmp_path))


def test_a_breakdown_accounts_for_all_rounds_and_leaves_no_trace(pair, methods):
    before = [set(vars(owner)) for owner in (pair.target, pair.drafter)]
    report = measure_breakdown(pair, [PROMPT, PROMPT], methods, max_new_tokens=1 + 2 * (BLOCK + 1))
    assert [set(vars(owner)) for owner in (pair.target, pair.drafter)] == before
    assert report[PLAIN]["rounds"] == 2 * 2 * (BLOCK + 1)
    assert report[ASSISTED]["rounds"] == 2 * 2
    calls = {part: entry["calls"] for part, entry in report[ASSISTED]["parts"].items()}
    assert (calls["target forward"], calls["draft backbone"], calls["base logits"]) == (4, 4, 4)
    assert calls["sequential and confidence head"] == 4 * BLOCK
    assert sum(entry["share"] for entry in report[ASSISTED]["parts"].values()) == pytest.approx(1, abs=1e-3)
    assert all(entry["ms_per_round"] > 0 for entry in report[ASSISTED]["parts"].values())


def test_a_latency_run_writes_its_report(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(latency, "load_pair", lambda *arguments: pair)
    output = tmp_path / "results" / "latency.json"
    options = ["--prompts", str(prompts_file), "--max-new-tokens", "9", "--repeats", "2", "--dtype", "float32"]
    options += ["--threads", "1", "2", "--peer", "prompt_lookup", "--breakdown", "--output", str(output)]
    threads = torch.get_num_threads()
    assert latency.main(options) == 0
    assert torch.get_num_threads() == threads
    report = json.loads(output.read_text())
    assert report["complete"] is True
    assert [section["threads"] for section in report["sections"]] == [1, 2]
    section = report["sections"][0]
    entry, overall = section["sets"]["gsm8k"], section["overall"]
    speeds = entry["tokens_per_second"]
    assert list(speeds) == [PLAIN, ASSISTED, "prompt_lookup"]
    assert entry["ratio"][ASSISTED] == pytest.approx(speeds[ASSISTED] / speeds[PLAIN], rel=1e-2)
    assert entry["new_tokens"] == {PLAIN: 18, ASSISTED: 18, "prompt_lookup": 18}
    assert (entry["tau"], entry["acceptance_by_position"]) == (BLOCK + 1, [1.0] * BLOCK)
    ratios = [of_set["ratio"][ASSISTED] for of_set in section["sets"].values()]
    assert overall["geometric_mean_ratio"][ASSISTED] == pytest.approx((ratios[0] * ratios[1]) ** 0.5, rel=1e-3)
    assert overall["min_ratio"][ASSISTED] == min(ratios)
    assert overall["differences"] == {"count": 0, "largest_logit_gap": None}
    assert set(section["breakdown"]) == {PLAIN, ASSISTED}
    assert "### 2 threads" in capsys.readouterr().out


def test_an_interrupted_latency_run_keeps_what_is_complete(pair, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "load_pair", lambda *arguments: pair)
    original, calls = latency.measure_set, []

    def measure_set(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    monkeypatch.setattr(latency, "measure_set", measure_set)
    output = tmp_path / "latency.json"
    options = ["--prompts", str(prompts_file), "--max-new-tokens", "5", "--repeats", "1", "--output", str(output)]
    assert latency.main(options) == 130
    assert not output.exists()
    report = json.loads((tmp_path / "latency.partial.json").read_text())
    assert report["complete"] is False
    assert list(report["sections"][0]["sets"]) == ["gsm8k"]


def test_an_interrupted_demo_sums_up_what_it_knows(pair, methods, monkeypatch, capsys):
    monkeypatch.setattr(demo, "start", lambda options, prompts: (pair, methods))
    original, calls = demo.show_prompt, []

    def show_prompt(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    monkeypatch.setattr(demo, "show_prompt", show_prompt)
    assert demo.main(["--prompt", "w5", "--prompt", "w6", "--max-new-tokens", "5"]) == 130
    output = capsys.readouterr().out
    assert "Interrupted after 1 of 2 prompts" in output
    assert "geometric mean over 1 prompts" in output


def test_the_demo_runs_on_a_packaged_drafter_without_importing_the_package(target, drafter, tokenizer, tmp_path):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("# A test drafter\n")
    package(tmp_path / "drafter", tmp_path / "build" / "drafter")
    program = (
        "import sys; from benchmarks.demo import main; status = main(sys.argv[1:]); "
        "sys.exit('modeling_dspark was imported' if 'modeling_dspark' in sys.modules else status)"
    )
    options = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "build" / "drafter")]
    options += ["--dtype", "float32", "--max-new-tokens", "9", "--threads", "1", "--prompt", "w5 w6", "--prompt", "w9"]
    result = subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "identical outputs: 2 of 2 (float32)" in result.stdout
    assert f"acceptance by position: {' '.join(['1.00'] * BLOCK)}" in result.stdout
    assert "[2/2] yours: w9" in result.stdout
