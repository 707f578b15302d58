"""Evaluation: its numbers against loops over hand-written rounds, the command from end to end, speed, the metrics."""

import json
import math
import socket
from pathlib import Path

import evaluate as evaluate_library
import pytest
import torch
from matplotlib.image import imread
from scipy.stats import mannwhitneyu

from modeling_dspark import Engine
from modeling_dspark.schedule_settings import DraftSettings
from tests.builders import VOCAB, tiny_drafter, tiny_target
from training.confidence import pair
from training.confidence.rounds import Prompt, join, make_engine, record, rounds_of
from training.evaluation import runs as evaluation_runs
from training.evaluation import timing
from training.evaluation.evaluation import EvaluateArguments, evaluate
from training.evaluation.figures import acceptance_figures, calibration_figures, speed_figures, threshold_sweep
from training.evaluation.report import EvalReport


ROOT = Path(__file__).resolve().parents[2]

# Verified drafts, accepted drafts, new tokens, confidence logits. The last round ends the text at its second draft, and
# the one before it drafted nothing.
ROUNDS = [
    (3, 3, 4, [2.0, 1.0, 0.5]),
    (3, 0, 1, [-1.0, 0.2, 0.1]),
    (3, 1, 2, [0.3, -0.4, 2.0]),
    (3, 2, 3, [1.1, 0.6, -0.7]),
    (1, 1, 2, [0.9]),
    (1, 0, 1, [-0.2]),
    (0, 0, 1, []),
    (2, 2, 2, [1.5, 0.8]),
]
VERIFIED, ACCEPTED, NEW_TOKENS, LOGITS = map(list, zip(*ROUNDS, strict=True))
TEMPERATURES = [1.5, 0.5, 2.0]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def replay(rounds, threshold, temperatures):
    """Drafts verified, drafts accepted and tokens of every round, cut where a draft's confidence is below a threshold."""
    verified = accepted = tokens = 0
    for checked, kept, new, logits in rounds:
        length = 0
        while length < checked and sigmoid(logits[length] / temperatures[length]) >= threshold:
            length += 1
        verified += length
        accepted += min(kept, length)
        tokens += new if length >= kept else length + 1
    return verified, accepted, tokens


def calibration_by_loop(rounds, position, temperatures):
    """ECE, AUC and Brier of the survival up to a position."""
    pairs = []
    for checked, kept, _, logits in rounds:
        if checked > position:
            product = 1.0
            for index in range(position + 1):
                product *= sigmoid(logits[index] / temperatures[index])
            pairs.append((product, float(kept > position)))
    error = 0.0
    for number in range(20):
        inside = [pair for pair in pairs if min(int(pair[0] * 20), 19) == number]
        error += abs(sum(confidence - outcome for confidence, outcome in inside)) / len(pairs)
    kept, lost = ([confidence for confidence, outcome in pairs if outcome == value] for value in (1.0, 0.0))
    area = mannwhitneyu(kept, lost).statistic / (len(kept) * len(lost)) if kept and lost else None
    return error, area, sum((confidence - outcome) ** 2 for confidence, outcome in pairs) / len(pairs)


class TestNumbers:
    def test_acceptance_by_hand(self):
        figures = acceptance_figures(verified=VERIFIED, accepted=ACCEPTED, new_tokens=NEW_TOKENS)
        assert (figures["rounds"], figures["new_tokens"], figures["acceptance_length"]) == (8, 16, 2.0)
        assert (figures["drafts_per_round"], figures["verify_rate"]) == (16 / 8, 9 / 16)
        # Position 0 was verified in 7 rounds and kept in 5. Of these, 4 verified position 1 (one ended before), which 3 kept; ...
        assert figures["tried_by_position"] == [7, 4, 2]
        assert figures["acceptance_rate_by_position"] == [5 / 7, 3 / 4, 1 / 2]

    def test_drafts_behind_the_end_of_a_text_were_not_verified(self):
        """Given as the engine counts them: the text ended at the second of four drafts, of which three would do."""
        raw = acceptance_figures(verified=[4], accepted=[3], new_tokens=[2])
        assert raw["verify_rate"] == 1.0
        assert raw["tried_by_position"] == [1, 1, 0, 0]
        assert raw["acceptance_rate_by_position"] == [1.0, 1.0, None, None]

    def test_nothing_verified(self):
        figures = acceptance_figures(verified=[0], accepted=[0], new_tokens=[1], num_draft_positions=2)
        assert (figures["acceptance_length"], figures["verify_rate"]) == (1.0, None)
        assert figures["acceptance_rate_by_position"] == [None, None]

    @pytest.mark.parametrize(
        ("columns", "match"),
        [
            (([], [], []), "at least one"),
            (([1], [1, 1], [1]), "as many"),
            (([1], [2], [3]), "Round 0 has `verified` 1"),
            (([2, 2], [1, 1], [2, 3]), "Round 1"),
            (([2], [0], [0]), "new_tokens"),
        ],
    )
    def test_impossible_rounds(self, columns, match):
        with pytest.raises(ValueError, match=match):
            acceptance_figures(**dict(zip(("verified", "accepted", "new_tokens"), columns, strict=True)))
        with pytest.raises(ValueError, match="`num_draft_positions` is 1"):
            acceptance_figures(verified=[2], accepted=[0], new_tokens=[1], num_draft_positions=1)

    @pytest.mark.parametrize("temperatures", [None, TEMPERATURES])
    def test_calibration_is_the_loop(self, temperatures):
        figures = calibration_figures(logits=LOGITS, accepted=ACCEPTED, verified=VERIFIED, temperatures=temperatures)
        assert figures["counts"] == [7, 5, 4]
        assert figures["survived"] == [5 / 7, 3 / 5, 1 / 4]
        assert (figures["after"] is None) == (temperatures is None)
        scales = {"before": [1.0] * 3} | ({} if temperatures is None else {"after": temperatures})
        for name, scale in scales.items():
            for position in range(3):
                error, area, brier = calibration_by_loop(ROUNDS, position, scale)
                assert figures[name]["ece"][position] == pytest.approx(error, abs=1e-12)
                assert figures[name]["auc"][position] == pytest.approx(area, abs=1e-12)
                assert figures[name]["brier"][position] == pytest.approx(brier, abs=1e-12)
            assert figures["means"][name]["ece"] == pytest.approx(sum(figures[name]["ece"]) / 3)

    def test_positions_that_were_never_verified_are_left_out(self):
        figures = calibration_figures(logits=[[0.5] * 4, [0.1] * 4], accepted=[1, 1], verified=[2, 1])
        assert figures["counts"] == [2, 1]
        assert figures["before"]["auc"] == [None, None]  # all outcomes of a position agree
        json.dumps(figures, allow_nan=False)
        with pytest.raises(ValueError, match="no figures of confidence"):
            calibration_figures(logits=[[]], accepted=[0], verified=[0])
        with pytest.raises(ValueError, match="Round 0 has 2 verified drafts and 1 logits"):
            calibration_figures(logits=[[0.5]], accepted=[0], verified=[2])
        with pytest.raises(ValueError, match="`temperatures` must be 2"):
            calibration_figures(logits=[[0.5, 0.5]], accepted=[0], verified=[2], temperatures=[1.0])

    @pytest.mark.parametrize("temperatures", [None, TEMPERATURES])
    def test_the_sweep_is_the_loop(self, temperatures):
        recorded = {"accepted": ACCEPTED, "verified": VERIFIED, "logits": LOGITS}
        thresholds = [0.0, 0.45, 0.55, 0.6, 0.7, 1.0]
        points = threshold_sweep(join([recorded], 3), NEW_TOKENS, temperatures=temperatures, thresholds=thresholds)
        assert [point.threshold for point in points] == thresholds
        seen = set()
        for point in points:
            verified, accepted, tokens = replay(ROUNDS, point.threshold, temperatures or [1.0] * 3)
            seen.add(verified)
            assert point.drafts_per_round == verified / 8
            assert point.acceptance_length == tokens / 8
            assert point.verify_rate == (accepted / verified if verified else None)
        assert len(seen) >= 4  # of the thresholds, some differ
        assert (points[0].acceptance_length, points[-1].acceptance_length) == (2.0, 1.0)

    def test_speed(self):
        pairs = [((10, 2.0), (10, 1.0)), ((30, 3.0), (28, 2.0)), ((20, 4.0), (20, 2.5))]
        records = [
            {
                "plain": dict(zip(("tokens", "seconds"), plain, strict=True)),
                "assisted": dict(zip(("tokens", "seconds"), assisted, strict=True)),
            }
            for plain, assisted in pairs
        ]
        speed = speed_figures(records)
        assert (speed.num_prompts, speed.plain) == (3, pytest.approx(60 / 9))
        assert speed.assisted == pytest.approx(58 / 5.5)
        assert speed.ratio == pytest.approx((58 / 5.5) / (60 / 9))
        low, high = speed.interval
        # All resamples lie between the slowest and the fastest prompt; 95 % of them within the interval.
        assert 1.4 <= low < speed.ratio < high <= 2.0
        assert speed_figures(records) == speed
        assert speed_figures(records[:1]).interval is None


def markov_pair(*, wrong_every=3, doubtful_every=None, drafter_fields=None, **fields):
    """A target whose next token depends on the last one alone, and a drafter that knows it but after some tokens.

    After every `wrong_every`-th token the draft is wrong, and after every `doubtful_every`-th (by default the same ones)
    the drafter's confidence is `sigmoid(-2)`; elsewhere it is `sigmoid(2)`.
    """
    target = tiny_target("llama", eos_token_id=None, **fields)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    drafter = tiny_drafter(target, markov_rank=33, eos_token_id=None, **(drafter_fields or {}))
    tokens = torch.arange(VOCAB)
    with torch.no_grad():
        states = target.model.norm(target.model.embed_tokens.weight)
        following = (states @ target.lm_head.weight.T).argmax(dim=1)
        wrong = tokens % wrong_every == 0
        for token in tokens[wrong].tolist():
            states[token] = states[(following != following[token]).nonzero()[token % 5, 0]]
        doubtful = wrong if doubtful_every is None else tokens % doubtful_every == 0
        drafter.norm.weight.zero_()
        drafter.markov_head.markov_w1.weight.copy_(torch.cat([states, doubtful[:, None].float()], dim=1))
        drafter.markov_head.markov_w2.weight.copy_(torch.cat([target.lm_head.weight, torch.zeros(VOCAB, 1)], dim=1))
        if drafter.confidence_head is not None:
            head = drafter.confidence_head.proj
            head.weight.zero_()
            head.weight[0, -1] = -4.0
            head.bias.fill_(2.0)
    return target, drafter


def decode(engine, *, max_new_tokens=40, count=8):
    prompts = [Prompt(index, (5 + index, 20 + 3 * index % 40)) for index in range(count)]
    finished = record(engine, prompts, max_new_tokens=max_new_tokens, batch_size=12)
    records = [rounds_of(statistics, all_rounds=True) for _, statistics in sorted(finished, key=lambda pair: pair[0])]
    return {name: [value for each in records for value in each[name]] for name in records[0]}


def with_threshold(drafter, target, threshold, *, do_sample=False):
    """The engine as a user's `assistant_confidence_threshold` runs it."""
    settings = DraftSettings(drafter.config.block_size, schedule="confidence", confidence_threshold=threshold)
    return Engine(drafter, target, settings=settings, do_sample=do_sample, eos_token_ids=[], record_confidence=True)


class TestSweepAgainstTheEngine:
    def test_exact_where_a_cut_loses_nothing(self):
        """Confidence is low before wrong drafts only: a run with the threshold has the rounds of the one without."""
        target, drafter = markov_pair()
        full = decode(make_engine(drafter, target, 0.0))
        assert len(set(full["accepted"])) >= 3
        (point,) = threshold_sweep(join([full], 4), full["new_tokens"], temperatures=None, thresholds=[0.5])
        run = decode(with_threshold(drafter, target, 0.5))
        rounds = len(run["new_tokens"])
        assert rounds == len(full["new_tokens"])
        assert sum(run["verified"]) < sum(full["verified"])
        assert point.drafts_per_round == sum(run["verified"]) / rounds
        assert point.acceptance_length == sum(run["new_tokens"]) / rounds
        assert point.verify_rate == sum(run["accepted"]) / sum(run["verified"])

    def test_close_where_a_cut_loses_drafts(self):
        """Confidence knows little: rounds of the run begin elsewhere, which moves its averages a little."""
        target, drafter = markov_pair(wrong_every=4, doubtful_every=5)
        full = decode(make_engine(drafter, target, 1.0), count=36)
        (point,) = threshold_sweep(join([full], 4), full["new_tokens"], temperatures=None, thresholds=[0.5])
        run = decode(with_threshold(drafter, target, 0.5, do_sample=True), count=36)
        rounds = len(run["new_tokens"])
        without = sum(full["new_tokens"]) / len(full["new_tokens"])
        assert point.acceptance_length < 0.9 * without  # it loses something
        assert point.acceptance_length == pytest.approx(sum(run["new_tokens"]) / rounds, rel=0.1)
        assert point.drafts_per_round == pytest.approx(sum(run["verified"]) / rounds, rel=0.15)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, tiny_tokenizer):
    """A pair on disk and prompts of two sets; one prompt is too long."""
    folder = tmp_path_factory.mktemp("evaluation")
    target, drafter = markov_pair(doubtful_every=4, drafter_fields={"confidence_temperatures": [1.5, 0.8, 1.2, 2.0]})
    target.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    save(drafter, folder, "drafter")
    letters = "abcdefghijklmnop"
    records = [
        {"text": letter + "xyz"[: index % 3], "source": "mn"[index % 2], "kind": "all"}
        for index, letter in enumerate(letters)
    ]
    records.append({"text": "q" * 50, "source": "m", "kind": "all"})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def save(drafter, folder, name):
    drafter.config.target_name_or_path = str(folder / "target")
    drafter.save_pretrained(folder / name)


def arguments(workspace, output, **fields):
    defaults = {"dtype": "float32", "max_new_tokens": 14, "max_prompt_tokens": 40, "batch_size": 3, "no_speed": True}
    paths = {"prompts": workspace / "prompts.jsonl", "output": output, "drafter": workspace / "drafter"}
    return EvaluateArguments(**({name: str(path) for name, path in paths.items()} | defaults | fields))


def recorded_rounds(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return {
        line["prompt"]: list(zip(line["verified"], line["accepted"], line["new_tokens"], line["logits"], strict=True))
        for line in lines
    }


class TestCommand:
    def test_the_report_is_what_loops_over_the_rounds_give(self, workspace, tmp_path):
        report = evaluate(arguments(workspace, tmp_path, thresholds=[0.5, 0.0]))
        by_prompt = recorded_rounds(tmp_path / "rounds.jsonl")
        assert sorted(by_prompt) == list(range(16))
        assert list(report.sets) == ["m", "n"]
        assert [(part.prompts, part.skipped) for part in report.sets.values()] == [(8, 1), (8, 0)]
        assert (report.pooled.prompts, report.pooled.skipped) == (16, 1)
        groups = {
            "m": [index for index in by_prompt if index % 2 == 0],
            "n": [index for index in by_prompt if index % 2],
            "pooled": list(by_prompt),
        }
        for name, part in (report.sets | {"pooled": report.pooled}).items():
            rounds = [each for index in groups[name] for each in by_prompt[index]]
            tokens = sum(each[2] for each in rounds)
            assert tokens == 13 * len(groups[name])  # the prefill gives the first of 14
            figures = part.acceptance
            assert (figures["rounds"], figures["new_tokens"]) == (len(rounds), tokens)
            assert figures["acceptance_length"] == tokens / len(rounds)
            assert figures["verify_rate"] == sum(each[1] for each in rounds) / sum(each[0] for each in rounds)
            for position in range(4):
                tried = [each[1] > position for each in rounds if each[0] > position and each[1] >= position]
                assert figures["acceptance_rate_by_position"][position] == sum(tried) / len(tried)
                for key, scale in (("before", [1.0] * 4), ("after", [1.5, 0.8, 1.2, 2.0])):
                    error, area, brier = calibration_by_loop(rounds, position, scale)
                    assert part.calibration[key]["ece"][position] == pytest.approx(error, abs=1e-12)
                    assert part.calibration[key]["auc"][position] == pytest.approx(area, abs=1e-12)
                    assert part.calibration[key]["brier"][position] == pytest.approx(brier, abs=1e-12)
            assert [point.threshold for point in part.thresholds] == [0.0, 0.5]
            for point in part.thresholds:
                verified, accepted, tokens = replay(rounds, point.threshold, [1.5, 0.8, 1.2, 2.0])
                assert point.acceptance_length == tokens / len(rounds)
                assert point.drafts_per_round == verified / len(rounds)
                assert point.verify_rate == accepted / verified

    def test_what_it_writes(self, workspace, tmp_path, capsys):
        output = tmp_path / "out"
        report = evaluate(arguments(workspace, output, no_speed=False, speed_limit=2))
        assert sorted(path.name for path in output.iterdir()) == [
            "acceptance.png",
            "reliability.png",
            "report.json",
            "report.md",
            "rounds.jsonl",
            "speed.jsonl",
            "thresholds.png",
        ]
        text = (output / "report.json").read_text()
        assert EvalReport.from_json(text) == report
        assert EvalReport.from_json(text).to_json() == text
        assert str(workspace) not in text
        assert {"cpu", "torch", "transformers", "git_commit", "threads"} <= set(report.environment)
        assert len(report.drafter["fingerprint"]) == len(report.target["fingerprint"]) == 16
        assert report.settings["prompts"] == "prompts.jsonl"
        assert report.settings["group_by"] == "source"
        assert report.notes == ()

        speeds = [json.loads(line) for line in (output / "speed.jsonl").read_text().splitlines()[1:]]
        assert [each["prompt"] for each in speeds] == [0, 1, 2, 3]
        assert [part.speed.num_prompts for part in report.sets.values()] == [2, 2]
        assert report.pooled.speed.num_prompts == 4
        rates = {name: 56 / sum(each[name]["seconds"] for each in speeds) for name in ("plain", "assisted")}
        assert report.pooled.speed.plain == pytest.approx(rates["plain"])
        assert report.pooled.speed.ratio == pytest.approx(rates["assisted"] / rates["plain"])
        assert report.timing["schedule"] == "throughput"

        page = (output / "report.md").read_text()
        assert page.strip() in capsys.readouterr().out
        for name, part in (report.sets | {"pooled": report.pooled}).items():
            assert f"| {name} | {part.prompts} | {part.skipped} |" in page
            assert f"{part.acceptance['acceptance_length']:.3f}" in page
        assert page.count("\n## ") == 5
        widths = {line.count("|") for line in page.split("## Acceptance")[1].split("##")[0].splitlines() if line}
        assert widths == {8}

    def test_plots_show_something(self, workspace, tmp_path):
        evaluate(arguments(workspace, tmp_path))
        for name in ("acceptance", "thresholds", "reliability"):
            pixels = imread(tmp_path / f"{name}.png")
            coloured = (pixels[..., :3].max(axis=-1) - pixels[..., :3].min(axis=-1)) > 0.2
            assert pixels.shape[0] > 300
            assert coloured.mean() > 2e-4, name

    def test_fields_of_a_report_are_checked(self, workspace, tmp_path):
        text = evaluate(arguments(workspace, tmp_path, limit=1)).to_json()
        data = json.loads(text)
        with pytest.raises(ValueError, match="format"):
            EvalReport.from_json(json.dumps(data | {"format": 0}))
        with pytest.raises(ValueError, match="EvalReport has the fields"):
            EvalReport.from_json(json.dumps(data | {"more": 0}))
        with pytest.raises(ValueError, match="SetReport"):
            EvalReport.from_json(json.dumps(data | {"pooled": {}}))
        data["pooled"]["thresholds"][0]["more"] = 1
        with pytest.raises(ValueError, match="ThresholdPoint"):
            EvalReport.from_json(json.dumps(data))

    def test_reports_of_release_0_1_are_read(self, workspace, tmp_path):
        report = evaluate(arguments(workspace, tmp_path, limit=1))
        old = report.to_json()
        for new, name in (
            ("acceptance_length", "accepted_length"),
            ("acceptance_rate_by_position", "acceptance_by_position"),
            ("num_draft_positions", "num_slots"),
        ):
            assert f'"{new}"' in old
            old = old.replace(f'"{new}"', f'"{name}"')
        assert EvalReport.from_json(old) == report

    @pytest.mark.parametrize("block_size", [1, 7])
    def test_other_block_sizes_and_no_temperatures(self, workspace, tmp_path, block_size):
        _, drafter = markov_pair(drafter_fields={"block_size": block_size})
        save(drafter, workspace, f"block{block_size}")
        report = evaluate(arguments(workspace, tmp_path, drafter=str(workspace / f"block{block_size}"), limit=4))
        assert len(report.pooled.acceptance["acceptance_rate_by_position"]) == block_size
        assert report.pooled.calibration["after"] is None
        assert report.pooled.calibration["means"]["after"] is None
        assert "training.calibrate" in report.notes[0]
        assert "training.calibrate" in (tmp_path / "report.md").read_text()
        assert (tmp_path / "reliability.png").stat().st_size > 5000

    def test_a_drafter_without_a_confidence_head(self, workspace, tmp_path):
        _, drafter = markov_pair(drafter_fields={"enable_confidence_head": False})
        save(drafter, workspace, "headless")
        report = evaluate(arguments(workspace, tmp_path, drafter=str(workspace / "headless"), no_speed=False, limit=1))
        assert report.pooled.calibration is report.pooled.thresholds is None
        assert report.pooled.acceptance["acceptance_length"] > 1.2
        assert report.pooled.speed.ratio > 0
        assert "no confidence head" in report.notes[0]
        assert "no confidence head" in (tmp_path / "report.md").read_text()
        assert sorted(path.name for path in tmp_path.glob("*.png")) == ["acceptance.png"]
        assert EvalReport.from_json((tmp_path / "report.json").read_text()) == report

    def test_sampled_answers_depend_on_the_seed_only(self, workspace, tmp_path):
        reports = [
            evaluate(arguments(workspace, tmp_path / str(number), temperature=0.9, seed=seed))
            for number, seed in enumerate((3, 3, 4))
        ]
        assert reports[0] == reports[1]
        assert reports[0].pooled.acceptance != reports[2].pooled.acceptance


class Clock:
    """Time that passes with the work of a target: 1 per forward, and 10 for each copy of its LM head.

    That is PyTorch's rule for half precision: it copies the weights of a product with a slice `[1, 1, D]` of longer hidden
    states, as in every prefill of plain `generate`, unless the weights require gradients.
    """

    def __init__(self, target):
        self.now = 0.0
        target.model.register_forward_pre_hook(self.forward)
        target.lm_head.register_forward_pre_hook(self.head)

    def forward(self, *_):
        self.now += 1

    def head(self, module, inputs):
        states = inputs[0]
        is_slice = states.dim() == 3 and states.stride(0) != states.stride(1) * states.shape[1]
        self.now += 10 * (is_slice and not module.weight.requires_grad)

    def perf_counter(self):
        return self.now


class TestSpeed:
    def timed(self, workspace, tmp_path, monkeypatch, name, **fields):
        """An evaluation by the clock of the target that the command loads, and that clock."""
        clocks, load = [], pair.load_target

        def load_target(*given):
            target = load(*given)
            clocks.append(Clock(target))
            monkeypatch.setattr(timing, "time", clocks[-1])
            return target

        monkeypatch.setattr(pair, "load_target", load_target)
        drafter = str(workspace / name)
        return evaluate(arguments(workspace, tmp_path, drafter=drafter, no_speed=False, **fields)), clocks

    def test_a_drafter_without_accepted_drafts_is_no_gain(self, workspace, tmp_path, monkeypatch):
        _, drafter = markov_pair(wrong_every=1)
        drafter.config.default_num_assistant_tokens_schedule = "fixed"
        save(drafter, workspace, "wrong")
        report, clocks = self.timed(workspace, tmp_path, monkeypatch, "wrong")
        assert report.pooled.acceptance["verify_rate"] == 0
        assert len(clocks) == 1  # one target for both methods
        for figures in (*report.sets.values(), report.pooled):
            assert figures.speed.plain == 1  # token per forward: nothing was copied
            assert figures.speed.ratio <= 1

    def test_accepted_drafts_are_a_gain(self, workspace, tmp_path, monkeypatch):
        """The same clock shows what a good drafter saves: here the acceptance length, but for the ends of the texts."""
        _, drafter = markov_pair(wrong_every=100)
        drafter.config.default_num_assistant_tokens_schedule = "fixed"
        save(drafter, workspace, "right")
        report, _ = self.timed(workspace, tmp_path, monkeypatch, "right")
        assert 1.5 < report.pooled.speed.ratio <= report.pooled.acceptance["acceptance_length"]

    def test_methods_take_turns(self, workspace, monkeypatch):
        """Each prompt is answered both ways before the next one, and the way that begins changes."""
        target, drafter = markov_pair()
        calls, call = [], timing.timed_call

        def noted(model, prompt_ids, *, max_new_tokens, arguments):
            assert model is target
            assert all(parameter.requires_grad for parameter in target.parameters())
            calls.append((prompt_ids, "assistant_model" in arguments))
            return call(model, prompt_ids, max_new_tokens=max_new_tokens, arguments=arguments)

        prompts = [Prompt(index, (5 + index, 20)) for index in range(3)]
        monkeypatch.setattr(timing, "timed_call", noted)
        evaluation_runs.record_speed(prompts, drafter=drafter, target=target, max_new_tokens=4, sampling={})
        first, second, third = (prompt.input_ids for prompt in prompts)
        assert calls[:2] == [(first, False), (first, True)]  # to warm up
        assert calls[2:] == [
            (first, False), (first, True), (second, True), (second, False), (third, False), (third, True),
        ]  # fmt: skip


class TestHostileInput:
    def prompts(self, tmp_path, *lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    def test_prompts_file(self, workspace, tmp_path):
        with pytest.raises(ValueError, match="no file `.*missing.jsonl`"):
            evaluate(arguments(workspace, tmp_path / "out", prompts=str(tmp_path / "missing.jsonl")))
        for lines, match in (
            ((), "holds no prompts"),
            (({"text": "ab", "source": "m"}, {"text": "ab"}), "line 2 .* `source`"),
            (({"text": "ab", "source": 3},), "line 1"),
            (({"text": "ab", "source": "m"}, "ab"), "line 2"),
            (({"text": "ab", "source": "pooled"},), "`pooled`"),
            (({"source": "m"},), "`turns`"),
            (({"text": "ab", "source": "m"}, {"text": "x" * 60, "source": "n"}), "set `n` is empty.*40 tokens"),
        ):
            with pytest.raises(ValueError, match=match):
                evaluate(arguments(workspace, tmp_path / "out", prompts=self.prompts(tmp_path, *lines)))
        assert not (tmp_path / "out").exists()

    def test_sets(self, workspace, tmp_path):
        """`source`, else `category`, else all in one; any field can be named."""
        records = [
            {"text": "abc", "category": "m", "language": "n"},
            {"text": "cba", "category": "m", "language": "k"},
        ]
        path = self.prompts(tmp_path, *records)
        assert evaluation_runs.read_sets(path, group_by=None, limit=None)[:2] == ("category", {"m": [0, 1]})
        assert evaluation_runs.read_sets(path, group_by=None, limit=1)[1] == {"m": [0]}
        assert evaluation_runs.read_sets(path, group_by="language", limit=None)[1] == {"n": [0], "k": [1]}
        with pytest.raises(ValueError, match="`group_by`.*`topic`"):
            evaluation_runs.read_sets(path, group_by="topic", limit=None)
        path = self.prompts(tmp_path, {"text": "abc"}, {"text": "cba"})
        assert evaluation_runs.read_sets(path, group_by=None, limit=None)[:2] == (None, {"prompts": [0, 1]})
        report = evaluate(arguments(workspace, tmp_path / "out", prompts=path))
        assert list(report.sets) == ["prompts"]
        path = self.prompts(tmp_path, *({"text": "abc", "source": name} for name in ("a|b\nc", "$x", "_y")))
        evaluate(arguments(workspace, tmp_path / "names", prompts=path))
        assert "| a\\|b c | 1 |" in (tmp_path / "names" / "report.md").read_text()
        assert "pooled" not in (tmp_path / "out" / "report.md").read_text()

    def test_pairs(self, workspace, tmp_path):
        with pytest.raises(ValueError, match="hf download"):
            evaluate(arguments(workspace, tmp_path, drafter="org/name"))
        tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path / "nameless")
        with pytest.raises(ValueError, match="`target`"):
            evaluate(arguments(workspace, tmp_path, drafter=str(tmp_path / "nameless")))

    def test_answers_of_one_token(self, workspace, tmp_path):
        with pytest.raises(ValueError, match="larger `max_new_tokens`"):
            evaluate(arguments(workspace, tmp_path, max_new_tokens=1, limit=1))
        report = evaluate(arguments(workspace, tmp_path / "two", max_new_tokens=2, limit=1))
        assert report.pooled.acceptance["verify_rate"] is None  # nothing is drafted for the last token
        assert report.pooled.calibration is None
        assert any("verified" in note for note in report.notes)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"batch_size": 0},
            {"limit": 0},
            {"speed_limit": -1},
            {"temperature": -1.0},
            {"temperature": math.nan},
            {"thresholds": []},
            {"thresholds": [1.5]},
            {"dtype": "int8"},
        ],
    )
    def test_wrong_arguments(self, workspace, tmp_path, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            arguments(workspace, tmp_path, **wrong)


class TestMetricModules:
    """Loaded by path, without a network."""

    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch):
        def refuse(*_):
            raise OSError("a test must not connect")

        monkeypatch.setattr(socket.socket, "connect", refuse)

    def load(self, name, tmp_path):
        return evaluate_library.load(str(ROOT / "training" / "evaluation" / "metrics" / name), cache_dir=str(tmp_path))

    def test_speculative_acceptance(self, tmp_path):
        metric = self.load("speculative_acceptance", tmp_path)
        expected = acceptance_figures(
            verified=VERIFIED, accepted=ACCEPTED, new_tokens=NEW_TOKENS, num_draft_positions=5
        )
        inputs = {"predictions": VERIFIED, "references": ACCEPTED, "new_tokens": NEW_TOKENS}
        assert metric.compute(**inputs, num_draft_positions=5) == expected
        for start in (0, 3):
            metric.add_batch(**{name: values[start : 3 if start == 0 else None] for name, values in inputs.items()})
        assert metric.compute(num_draft_positions=5) == expected
        assert expected["acceptance_length"] == 2.0
        assert "acceptance_length" in metric.inputs_description
        with pytest.raises(ValueError, match="new_tokens"):
            metric.compute(predictions=[1], references=[1])

    def test_confidence_calibration(self, tmp_path):
        metric = self.load("confidence_calibration", tmp_path)
        inputs = {"predictions": LOGITS, "references": ACCEPTED, "verified": VERIFIED}
        figures = metric.compute(**inputs, temperatures=TEMPERATURES)
        assert figures == calibration_figures(
            logits=LOGITS, accepted=ACCEPTED, verified=VERIFIED, temperatures=TEMPERATURES
        )
        error, area, brier = calibration_by_loop(ROUNDS, 1, TEMPERATURES)
        assert figures["after"]["ece"][1] == pytest.approx(error, abs=1e-12)
        assert figures["after"]["auc"][1] == pytest.approx(area, abs=1e-12)
        assert figures["after"]["brier"][1] == pytest.approx(brier, abs=1e-12)
        assert metric.compute(**inputs)["after"] is None
