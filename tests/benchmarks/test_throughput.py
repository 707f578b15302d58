import json
import sys
from collections import Counter

import pytest
import torch

from benchmarks import memory, profile, throughput
from benchmarks.lib.closed_loop import ClosedLoop, Slice, Workload, check_policies, default_policies, make_engine
from benchmarks.lib.references import AssistedLoop, BatchedGenerate
from benchmarks.lib.resident import resident
from benchmarks.lib.throughput_summary import ratio_interval, report_conditions, summarize_level
from modeling_dspark import CostProfile, generate_mixin


BLOCK = 3  # of the drafter in conftest.py
PROMPTS = [[5, 6, 7, 8], [9], [10, 11], [12, 13, 14], [15, 16, 17, 18, 19, 20]]


@pytest.fixture
def mixing_pair(pair):
    """A target that looks at all of its context, so that the drafter is right at times, and that ends some texts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in pair.target.model.layers:
            layer.self_attn.o_proj.weight.normal_(std=0.05, generator=generator)
    workload = Workload(PROMPTS, max_new_tokens=9)
    texts = [greedy(pair.target, *workload.request(number)) for number in range(12)]
    pair.target.generation_config.eos_token_id = next(text[3] for text in texts if text[3] not in text[:3])
    return pair


def greedy(target, prompt, limit):
    output = target.generate(prompt[None], max_new_tokens=limit, do_sample=False)
    return output[0, len(prompt) :].tolist()


def run_options(prompts_file, output, *more):
    options = ["--prompts", str(prompts_file), "--max-new-tokens", "6", "--seconds", "0.04", "--slice-seconds", "0.02"]
    return [*options, "--dtype", "float32", "--output", str(output), *more]


def test_limits_are_ragged_and_the_order_of_prompts_is_fixed():
    one, other = (Workload(PROMPTS, max_new_tokens=96, seed=3) for _ in range(2))
    limits = [one.request(number)[1] for number in range(200)]
    assert (min(limits), max(limits), one.max_length) == (48, 128, 6 + 128)
    assert len(set(limits[:20])) == 20
    order = [one.request(number)[0].tolist() for number in range(10)]
    assert order == [other.request(number)[0].tolist() for number in range(10)]
    assert order[:5] == order[5:]
    assert sorted(order[:5]) == sorted(PROMPTS)
    with pytest.raises(ValueError, match="`prompts`"):
        Workload([], max_new_tokens=96)
    with pytest.raises(ValueError, match="`max_new_tokens` must be at least 4, got 3"):
        Workload(PROMPTS, max_new_tokens=3)


@pytest.mark.parametrize("policy", default_policies(BLOCK))
def test_a_loop_stays_full_and_says_what_plain_greedy_decoding_says(mixing_pair, fake_costs, policy):
    workload, in_flight = Workload(PROMPTS, max_new_tokens=9), []
    loop = ClosedLoop(make_engine(mixing_pair, policy, costs=fake_costs), workload, 3)
    step = loop.engine.step
    loop.engine.step = lambda: in_flight.append(len(loop.engine.requests)) or step()
    measured = loop.run_until(110)
    assert set(in_flight) == {3}
    assert len(loop.texts) > 9
    for number, text in loop.texts.items():
        expected = greedy(mixing_pair.target, *workload.request(number))
        assert text == (expected if number >= 3 else expected[: len(text)])
    assert any(len(text) < workload.request(number)[1] for number, text in loop.texts.items() if number >= 3)
    assert measured.tokens == loop.num_tokens >= 110
    assert measured.steps == len(in_flight)
    assert 0 < measured.decoding_tokens < measured.tokens
    assert 0 < measured.decoding_seconds < measured.seconds
    assert measured.counts["new_tokens"] <= measured.tokens - len(loop.texts)  # prefills gave one each


def test_every_policy_gets_the_same_requests_in_the_same_order(mixing_pair, fake_costs):
    given = {}
    for policy in ("plain", "fixed3", "throughput"):
        loop = ClosedLoop(make_engine(mixing_pair, policy, costs=fake_costs), Workload(PROMPTS, max_new_tokens=9), 2)
        add, seen = loop.engine.add_request, given.setdefault(policy, [])
        loop.engine.add_request = lambda prompt, add=add, seen=seen, **limit: (
            seen.append((prompt.tolist(), limit)) or add(prompt, **limit)
        )
        loop.run_until(60)
    shortest = min(map(len, given.values()))
    assert shortest > 6
    assert len({json.dumps(requests[:shortest]) for requests in given.values()}) == 1


def test_slices_begin_where_the_last_one_ended(pair):
    def started():
        return ClosedLoop(make_engine(pair, "fixed3"), Workload(PROMPTS, max_new_tokens=9), 2)

    loop, other = started(), started()
    slices = [loop.run_until(goal) for goal in (20, 33, 33, 60)]
    whole = other.run_until(loop.num_tokens)
    assert (slices[2].tokens, slices[2].seconds) == (0, 0.0)
    assert sum(item.tokens for item in slices) == whole.tokens == loop.num_tokens >= 60
    assert sum(item.steps for item in slices) == whole.steps
    for name in ("rounds", "new_tokens", "verified", "plain"):
        assert sum(item.counts[name] for item in slices) == whole.counts[name]


def test_references_say_the_same_and_count_to_their_own_limits(mixing_pair, monkeypatch):
    workload = Workload(PROMPTS, max_new_tokens=9)
    batched = BatchedGenerate(mixing_pair, workload, 4, num_tokens=100)
    batched.warm_up()
    measured = batched.run_until(140)
    monkeypatch.setattr(generate_mixin, "decode", None)  # the packed loop would fail
    assisted = AssistedLoop(mixing_pair, workload)
    counted = assisted.run_until(20)
    for loop in (batched, assisted):
        for number, text in loop.texts.items():
            assert text == greedy(mixing_pair.target, *workload.request(number))
    assert measured.tokens == batched.num_tokens - 100 == sum(map(len, batched.texts.values()))
    assert batched.run_until(140) == Slice(0, 0.0)
    assert len(batched.texts) % 4 == 0
    assert counted.counts["rounds"] > 0


def test_a_ratio_comes_with_the_interval_of_its_slices():
    even, other = [Slice(10, 1.0), Slice(10, 1.0)], [Slice(10, 2.0), Slice(10, 4.0)]
    # Drawn in pairs, the three possible ratios are 2, 4, and 3 for one of each.
    assert ratio_interval(even, other) == {"value": 3.0, "low": 2.0, "high": 4.0}
    twice = [Slice(7, 1.0), Slice(9, 3.0), Slice(8, 2.0)]
    slow = [Slice(item.tokens, 2 * item.seconds) for item in twice]
    assert ratio_interval(twice, slow) == {"value": 2.0, "low": 2.0, "high": 2.0}
    unpaired = ratio_interval(twice, even)
    assert unpaired["value"] == pytest.approx(24 / 6 / 10, abs=1e-4)
    assert unpaired["low"] < unpaired["value"] < unpaired["high"]
    assert ratio_interval(even, other[:1]) == {"value": 2.0, "low": None, "high": None}


def test_a_level_compares_with_plain_and_with_the_best_fixed_length():
    counts = Counter(rounds=8, new_tokens=20, verified=12, plain=2)
    slices = {
        "plain": [Slice(10, 2.0, 8, 1.0), Slice(10, 2.0, 3, 1.0)],
        "fixed1": [Slice(10, 1.25), Slice(10, 1.25)],
        "fixed2": [Slice(10, 1.6), Slice(10, 1.6)],
        "throughput": [Slice(10, 1.0, 8, 0.5, 4, counts=counts), Slice(10, 1.0)],
    }
    texts = {name: {0: [1, 2], 1: [3]} for name in slices} | {"throughput": {0: [1, 2], 1: [4], 2: [5]}}
    level = summarize_level(slices, texts, concurrency=4)
    assert (level["best_fixed"], level["ratio_to_best_fixed"]["throughput"]["value"]) == ("fixed1", 1.25)
    entry = level["policies"]["throughput"]
    assert (entry["tokens_per_second"], entry["tokens_per_second_per_request"]) == (10.0, 2.5)
    assert entry["ratio_to_plain"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    # The second slice of this policy has no step in which nothing joined.
    assert entry["decoding"]["tokens_per_second"] == 16.0
    assert entry["decoding"]["ratio_to_plain"] == {"value": 2.0, "low": None, "high": None}
    assert level["policies"]["fixed1"]["decoding"] is None
    assert (entry["tau"], entry["mean_verified_tokens"], entry["plain_share"]) == (2.5, 1.5, 0.25)
    assert entry["same_text"] == {"compared": 2, "equal": 1}


def test_an_interrupted_run_keeps_its_levels_and_a_complete_one_is_drawn(
    pair, prompts_file, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(throughput, "load_pair", lambda *_: pair)
    original, calls = throughput.measure_level, []

    def measure_level(*arguments, concurrency, **keywords):
        calls.append(concurrency)
        if calls == [1, 2]:
            raise KeyboardInterrupt
        return original(*arguments, concurrency=concurrency, **keywords)

    monkeypatch.setattr(throughput, "measure_level", measure_level)
    output = tmp_path / "results" / "throughput.json"
    options = run_options(prompts_file, output, "--concurrency", "1", "2")
    assert throughput.main(options) == 130
    assert not output.exists()
    partial = output.with_suffix(".partial.json")
    report = json.loads(partial.read_text())
    assert ([level["concurrency"] for level in report["levels"]], report["complete"]) == ([1], False)
    assert throughput.main(options) == 0
    assert calls == [1, 2, 1, 2]
    assert not partial.exists()
    report = json.loads(output.read_text())
    assert report["complete"] is True
    assert set(report["load"]["cores_used_by_others"]) == {"before", "during"}
    one, two = report["levels"]
    assert list(one["policies"]) == [*default_policies(BLOCK), "transformers", "transformers_loop"]
    assert "transformers_loop" not in two["policies"]
    assert {"git_commit", "threads", "cpu"} <= set(report["environment"])
    for level in (one, two):
        for entry in level["policies"].values():
            ratio = entry["ratio_to_plain"]
            assert len(entry["slices"]["seconds"]) >= 3
            assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert report["cost_profile"]["verify"] == {"counts": [1, 101], "seconds": [1.0, 3.0]}
    assert (two["policies"]["plain"]["tau"], two["policies"]["plain"]["mean_verified_tokens"]) == (1.0, 0.0)
    assert two["policies"]["fixed3"]["tau"] > 1  # the drafter is always right
    assert all(entry["same_text"]["equal"] == entry["same_text"]["compared"] for entry in two["policies"].values())
    assert throughput.main(["--plot", str(output), "--output", str(tmp_path / "images")]) == 0
    images = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert images == ["throughput.png", "throughput_per_request.png"]
    assert throughput.main(["--plot", str(output), "--output", str(tmp_path), "--policies", "fixed9"]) == 2
    assert report_conditions(report) in capsys.readouterr().out


def test_useless_drafts_come_from_a_drafter_with_random_weights(pair, prompts_file, tmp_path, monkeypatch):
    before = {name: weight.clone() for name, weight in pair.drafter.named_parameters()}
    monkeypatch.setattr(throughput, "load_pair", lambda *_: pair)
    output = tmp_path / "random.json"
    assert throughput.main(run_options(prompts_file, output, "--drafter", "random", "--concurrency", "2")) == 0
    report = json.loads(output.read_text())
    assert "random weights" in report["drafter"]["name"]
    assert list(report["levels"][0]["policies"]) == ["plain", "throughput"]
    assert report["levels"][0]["best_fixed"] is None
    for name in ("fc.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        assert not torch.equal(pair.drafter.get_parameter(name), before[name])


def test_policies_that_there_are_not_are_named(pair, prompts_file, tmp_path, monkeypatch, capsys):
    for policies in (["plain", "fixed4"], ["plain", "plain"]):
        with pytest.raises(ValueError, match=f"at most once, got '{policies[1]}'"):
            check_policies(policies, BLOCK)
    with pytest.raises(ValueError, match="must hold 'plain'"):
        check_policies(["fixed1"], BLOCK)
    monkeypatch.setattr(throughput, "load_pair", lambda *_: pair)
    assert throughput.main(run_options(prompts_file, tmp_path / "a.json", "--policies", "plain", "fast")) == 2
    assert "'fast'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [throughput, profile, memory])
def test_commands_explain_themselves(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command.parse_options(["--help"])
    assert ended.value.code == 0
    assert f"python -m {command.__name__}" in capsys.readouterr().out


def test_a_profile_is_printed_written_and_drawn(pair, fake_costs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(profile, "load_pair", lambda *_: pair)
    paths = [tmp_path / "new" / name for name in ("costs.json", "sglang.json", "costs.png")]
    assert profile.main(["--json", str(paths[0]), "--sglang", str(paths[1]), "--plot", str(paths[2])]) == 0
    loaded = CostProfile.load(paths[0])
    assert (loaded.verify, loaded.draft) == (fake_costs.verify, fake_costs.draft)
    assert json.loads(paths[1].read_text()) == fake_costs.to_sglang(BLOCK)
    assert paths[2].stat().st_size > 10_000
    assert "\n| 101 " in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_what_decoding_adds_to_the_loaded_models(pair):
    arguments = {"assistant_model": pair.drafter, "num_assistant_tokens_schedule": "fixed"}
    report = memory.measure(pair.target, [[5, 6, 7], [8]], max_new_tokens=20, arguments=arguments)
    assert report["peak"] >= report["resident_after_loading"] > 10
    assert report["decoding"] == pytest.approx(report["peak"] - report["resident_after_loading"], abs=0.2)
    assert set(report["weights"]) == {"target", "drafter"}
    assert resident("VmHWM") >= report["peak"] - 1
    with pytest.raises(ValueError, match="has no VmNothing"):
        resident("VmNothing")
