"""Sequential temperature scaling: the figures, the fit, the recorded rounds, and what the command writes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from modeling_dspark import DSparkConfig, DSparkModel
from tests.builders import tiny_drafter, tiny_target
from training.confidence import calibration as calibration_module
from training.confidence.calibration import CalibrateArguments, HoldoutArguments, calibrate, split_records
from training.confidence.outputs import table, write_temperatures
from training.confidence.rounds import Prompt, join, make_engine, record, rounds_of
from training.confidence.scaling import (
    TEMPERATURE_GRID,
    Rounds,
    auc,
    brier,
    calibration_report,
    ece_floor,
    expected_calibration_error,
    fit_temperatures,
    reliability_bins,
    survival,
)


def draw(count=200, levels=None):
    """Confidences (with `levels`, of few distinct values, so that there are ties) and outcomes unrelated to them."""
    confidence = torch.rand(count, dtype=torch.float64)
    if levels:
        confidence = (confidence * levels).round() / levels
    return confidence, torch.rand(count) < 0.4


def synthetic_rounds(count, temperatures, *, seed=0, spread=1.5):
    """Rounds whose survival is exact once the logits are divided by `temperatures`; kept drafts by coin flips."""
    generator = torch.Generator().manual_seed(seed)
    num_draft_positions = len(temperatures)
    exact = spread * torch.randn(count, num_draft_positions, generator=generator, dtype=torch.float64) + 0.7
    kept = torch.rand(count, num_draft_positions, generator=generator, dtype=torch.float64) < torch.sigmoid(exact)
    return Rounds.of(exact * torch.tensor(temperatures, dtype=torch.float64), kept.long().cumprod(1).sum(1))


class TestFigures:
    @pytest.mark.parametrize("levels", [None, 7, 20])
    def test_ece_is_the_double_loop(self, levels):
        confidence, outcome = draw(levels=levels)
        expected = 0.0
        for b in range(20):
            inside = [
                i for i, c in enumerate(confidence.tolist()) if b / 20 <= c < (b + 1) / 20 or (b == 19 and c == 1.0)
            ]
            if inside:
                mean = sum(confidence[i].item() for i in inside) / len(inside)
                share = sum(outcome[i].item() for i in inside) / len(inside)
                expected += len(inside) / 200 * abs(mean - share)
        # fp64 sums in another order.
        assert expected_calibration_error(confidence, outcome) == pytest.approx(expected, abs=1e-12)

    def test_ece_by_hand(self):
        confidence = torch.tensor([0.1, 0.2, 0.8, 1.0])
        outcome = torch.tensor([False, True, True, True])
        # Two bins: means 0.15 and 0.9, shares 0.5 and 1, half of the examples each.
        assert expected_calibration_error(confidence, outcome, num_bins=2) == pytest.approx(0.225)
        assert expected_calibration_error(torch.tensor([0.0, 1.0]), torch.tensor([False, True])) == 0.0

    @pytest.mark.parametrize("levels", [None, 3])
    def test_auc_is_the_share_of_pairs(self, levels):
        score, outcome = draw(levels=levels)
        wins = [
            1.0 if one > other else 0.5 if one == other else 0.0
            for one in score[outcome].tolist()
            for other in score[~outcome].tolist()
        ]
        assert auc(score, outcome) == pytest.approx(sum(wins) / len(wins), abs=1e-12)

    def test_auc_by_hand(self):
        assert auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])) == 0.75
        assert auc(torch.tensor([0.5, 0.5]), torch.tensor([False, True])) == 0.5
        assert math.isnan(auc(torch.tensor([0.1, 0.9]), torch.tensor([True, True])))

    def test_brier_is_the_loop(self):
        confidence, outcome = draw()
        expected = sum((c - o) ** 2 for c, o in zip(confidence.tolist(), outcome.tolist(), strict=True)) / 200
        assert brier(confidence, outcome) == pytest.approx(expected, abs=1e-12)

    def test_bins(self):
        bins = reliability_bins(torch.tensor([0.1, 0.3, 0.6]), torch.tensor([True, False, True]), num_bins=4)
        assert bins.counts.tolist() == [1, 1, 1, 0]
        assert_close(bins.confidence[:3], torch.tensor([0.1, 0.3, 0.6]).double())
        assert bins.observed[:3].tolist() == [1.0, 0.0, 1.0]
        assert math.isnan(bins.observed[3])

    def test_the_floor_is_the_mean_ece_of_exact_confidences(self):
        """Simulated; 400 repeats give the mean to about 1 %, and the floor approximates bins as normal."""
        confidence = torch.rand(2000, dtype=torch.float64)
        errors = [expected_calibration_error(confidence, torch.rand(2000) < confidence) for _ in range(400)]
        floor = ece_floor(confidence)
        assert floor == pytest.approx(sum(errors) / 400, rel=0.05)
        assert floor < 0.4 * math.sqrt(20 / 2000)

    def test_wrong_values(self):
        with pytest.raises(ValueError, match="probabilities"):
            expected_calibration_error(torch.tensor([1.5]), torch.tensor([True]))
        with pytest.raises(ValueError, match="one length"):
            expected_calibration_error(torch.tensor([0.5]), torch.tensor([True, False]))


class TestRounds:
    def test_survival_is_the_running_product(self):
        logits = torch.randn(5, 3, dtype=torch.float64)
        temperatures = [0.5, 1.0, 2.0]
        for row, values in enumerate(survival(logits, temperatures).tolist()):
            product = 1.0
            for position, value in enumerate(values):
                product *= 1 / (1 + math.exp(-logits[row, position].item() / temperatures[position]))
                assert value == pytest.approx(product, abs=1e-12)

    def test_a_cut_round_is_left_out_behind_its_cut(self):
        """Whatever stands behind the cut changes nothing, and earlier positions do count."""
        rounds = Rounds.of(torch.randn(4, 3), [3, 1, 0, 2], [3, 3, 1, 2])
        assert [rounds.outcome(position)[0].tolist() for position in range(3)] == [
            [True, True, True, True],
            [True, True, False, True],
            [True, True, False, False],
        ]
        assert [rounds.outcome(position)[1].tolist() for position in range(3)] == [
            [True, True, False, True],
            [True, False, True],
            [True, False],
        ]
        full = synthetic_rounds(300, [1.0, 2.0, 0.5])
        cut = torch.arange(300) % 3 == 0
        verified = torch.where(cut, 1, 3)
        logits = full.logits.clone()
        logits[cut, 1:] = 1e3
        noisy = Rounds.of(logits, full.accepted.minimum(verified), verified)
        plain = Rounds.of(full.logits, full.accepted.minimum(verified), verified)
        assert fit_temperatures(noisy) == fit_temperatures(plain)
        assert calibration_report(noisy, [1.0, 1.5, 1.0]) == calibration_report(plain, [1.0, 1.5, 1.0])
        assert calibration_report(noisy, [1.0] * 3).counts == (300, 200, 200)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            (([1.0], [1]), "logits"),
            (([[1.0]], [1, 1]), "accepted"),
            (([[1.0]], [1], [1, 1]), "verified"),
            (([[1.0]], [2]), "accepted"),
            (([[1.0, 1.0]], [2], [1]), "verified"),
            (([[math.nan]], [1]), "finite"),
        ],
    )
    def test_wrong_rounds(self, arguments, match):
        with pytest.raises(ValueError, match=match):
            Rounds.of(*arguments)

    def test_a_position_that_was_never_verified(self):
        with pytest.raises(ValueError, match="Position 1 .* 2 rounds"):
            fit_temperatures(Rounds.of([[1.0, 1.0], [0.0, 0.0]], [0, 1], [1, 1]))


class TestFit:
    def test_exact_confidences_have_a_small_error(self):
        report = calibration_report(synthetic_rounds(40_000, [1.0] * 4), [1.0] * 4)
        # The ECE of exact confidences scatters around the floor by about a quarter of it.
        for error, floor in zip(report.before.ece, report.ece_floor, strict=True):
            assert error < 2 * floor < 0.02
        assert report.before == report.after

    def test_planted_temperatures_are_found(self):
        """Fitted on one sample, measured on another; 40,000 rounds give a temperature to a few per cent."""
        planted = (0.4, 1.8, 3.0, 0.7)
        fitted = fit_temperatures(synthetic_rounds(40_000, planted))
        for found, true in zip(fitted, planted, strict=True):
            assert found == pytest.approx(true, rel=0.12)
        report = calibration_report(synthetic_rounds(40_000, planted, seed=1), fitted)
        for before, after, floor in zip(report.before.ece, report.after.ece, report.ece_floor, strict=True):
            assert after < min(before / 3, 3 * floor)
        assert report.after.means()["brier"] < report.before.means()["brier"]

    def test_each_position_is_the_best_of_the_grid_given_those_before(self):
        rounds = synthetic_rounds(500, [2.0, 0.5])
        grid = [0.25, 0.5, 1.0, 2.0, 4.0]
        fitted = fit_temperatures(rounds, grid=grid)
        for position in range(2):
            errors = {}
            for candidate in grid:
                values = survival(rounds.logits, [*fitted[:position], candidate, 1.0][:2])[:, position]
                errors[candidate] = expected_calibration_error(values, rounds.accepted > position)
            assert errors[fitted[position]] == min(errors.values())

    def test_order_within_a_position_is_kept(self):
        rounds = synthetic_rounds(2_000, [0.3, 4.0])
        for position, temperature in enumerate(fit_temperatures(rounds)):
            kept = rounds.accepted > position
            raw, scaled = (torch.sigmoid(rounds.logits[:, position] / value) for value in (1.0, temperature))
            assert auc(raw, kept) == auc(scaled, kept)

    def test_indifferent_data_keep_temperature_one(self):
        rounds = Rounds.of(torch.zeros(10, 2), [2, 0] * 5)
        assert fit_temperatures(rounds) == (1.0, 1.0)
        assert min(TEMPERATURE_GRID) == 0.05
        with pytest.raises(ValueError, match="grid"):
            fit_temperatures(rounds, grid=[0.0])
        with pytest.raises(ValueError, match="temperatures"):
            calibration_report(rounds, [1.0])

    def test_a_position_without_two_outcomes_has_no_auc(self):
        report = calibration_report(Rounds.of(torch.zeros(4, 1), [1, 1, 1, 1]), [1.0])
        assert math.isnan(report.after.auc[0])
        assert "nan" in table(report)


class FakeEngine:
    """Decodes nothing: a request's rounds are a function of its prompt; the n-th finished one may raise."""

    num_draft_positions = 4

    def __init__(self, crash_after=None):
        self.running, self.most_running, self.crash_after = [], 0, crash_after

    def add_request(self, input_ids, max_new_tokens):
        assert input_ids.dim() == 1
        generator = torch.Generator().manual_seed(int((input_ids * torch.arange(1, len(input_ids) + 1)).sum()))
        rounds = int(torch.randint(20, 60, (1,), generator=generator))
        # Raw logits are three times what they should be.
        logits = torch.randn(rounds, self.num_draft_positions, generator=generator) * 3 + 1.5
        kept = torch.rand(rounds, self.num_draft_positions, generator=generator) < torch.sigmoid(logits / 3)
        accepted = kept.long().cumprod(1).sum(1).tolist()
        statistics = SimpleNamespace(
            drafted=[0] + [self.num_draft_positions] * rounds,
            verified=[0] + [self.num_draft_positions] * rounds,
            accepted=[0, *accepted],
            new_tokens=[1] + [value + 1 for value in accepted],
            confidence_logits=logits.tolist(),
        )
        request = SimpleNamespace(statistics=statistics, left=rounds)
        self.running.append(request)
        self.most_running = max(self.most_running, len(self.running))
        return request

    def step(self):
        for request in self.running:
            request.left -= 10
        finished = [request for request in self.running if request.left <= 0]
        self.running = [request for request in self.running if request.left > 0]
        if self.crash_after is not None:
            self.crash_after -= len(finished)
            if self.crash_after < 0:
                raise KeyboardInterrupt
        return finished


class TestRecord:
    def prompts(self, count=11):
        return [Prompt(index, (index + 1, 2, 3)) for index in range(count)]

    def test_finished_requests_make_room(self):
        engine = FakeEngine()
        finished = [index for index, _ in record(engine, self.prompts(), max_new_tokens=9, batch_size=3)]
        assert sorted(finished) == list(range(11))
        assert engine.most_running == 3
        assert engine.running == []

    def test_what_is_recorded(self):
        finished = dict(record(FakeEngine(), self.prompts(3), max_new_tokens=9, batch_size=3))
        records = [rounds_of(finished[index]) for index in range(3)]
        statistics = FakeEngine().add_request(torch.tensor([2, 2, 3]), 9).statistics
        assert records[1]["accepted"] == statistics.accepted[1:]
        rounds = join(records, 4)
        assert len(rounds) == sum(len(each["accepted"]) for each in records)
        first = len(records[0]["accepted"])
        # Logits are kept to four decimals.
        assert_close(
            rounds.logits[first : first + len(statistics.confidence_logits)],
            torch.tensor(statistics.confidence_logits, dtype=torch.float64),
            atol=6e-5,
            rtol=0,
        )

    def test_rounds_at_the_end_of_a_text(self):
        """Without drafts: none. Cut before the end: as verified. Ended at a kept draft: nothing is known behind it."""
        statistics = SimpleNamespace(
            drafted=[4, 2, 4, 4, 0],
            verified=[4, 2, 4, 4, 0],
            accepted=[2, 1, 3, 4, 0],
            new_tokens=[3, 2, 3, 2, 1],
            confidence_logits=[[0.0] * 4, [0.0] * 2, [0.0] * 4, [0.0] * 4],
        )
        recorded = rounds_of(statistics)
        assert (recorded["accepted"], recorded["verified"]) == ([2, 1, 3, 2], [4, 2, 3, 2])
        assert join([recorded], 4).logits.shape == (4, 4)
        statistics.confidence_logits.pop()
        with pytest.raises(ValueError, match="4 rounds drafted.*3"):
            rounds_of(statistics)


class TestEngine:
    """Recording with the real engine, on tiny models in fp32."""

    def record(self, *, batch_size, temperature=0.0, count=7):
        torch.manual_seed(0)
        target = tiny_target("llama")
        engine = make_engine(tiny_drafter(target), target, temperature)
        prompts = [Prompt(index, tuple(range(4 + index, 7 + 2 * index))) for index in range(count)]
        finished = record(engine, prompts, max_new_tokens=11, batch_size=batch_size)
        return target, prompts, dict(finished)

    def test_greedy_rounds(self):
        """Texts are as long as the target's own; every block is full but those at the end; company changes nothing."""
        target, prompts, together = self.record(batch_size=3)
        _, _, alone = self.record(batch_size=1)
        for prompt in prompts:
            ids = torch.tensor([prompt.input_ids])
            text = target.generate(ids, max_new_tokens=11, do_sample=False)[0, ids.shape[1] :].tolist()
            statistics = together[prompt.index]
            assert 1 + sum(statistics.new_tokens) == len(text)  # the prefill gives the first token
            recorded, expected = rounds_of(statistics), rounds_of(alone[prompt.index])
            left = 11 - 1
            for tokens, verified in zip(recorded["new_tokens"], statistics.verified, strict=False):
                assert verified == min(4, left - 1)
                left -= tokens
            assert recorded["accepted"] == expected["accepted"]
            assert recorded["verified"] == expected["verified"]
            for row, other, verified in zip(recorded["logits"], expected["logits"], recorded["verified"], strict=True):
                # fp32 sums of other shapes, kept to four decimals.
                assert_close(torch.tensor(row[:verified]), torch.tensor(other[:verified]), atol=3e-4, rtol=1e-4)

    def test_sampled_rounds(self):
        _, _, finished = self.record(batch_size=4, temperature=1.5)
        assert sorted(finished) == list(range(7))
        recorded = [rounds_of(statistics) for statistics in finished.values()]
        rounds = join(recorded, 4)
        assert len(rounds) > 20
        assert int(rounds.accepted.sum()) > 0


@pytest.fixture
def workspace(tmp_path, tiny_tokenizer):
    """A tiny target, its tokenizer, a drafter for it, and prompts."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    tiny_drafter(target, target_name_or_path=str(tmp_path / "target")).save_pretrained(tmp_path / "drafter")
    texts = ["abc def"[: 3 + index % 4] + "xyz"[: index % 3] + "q" * (index // 12) for index in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def arguments(workspace, **fields):
    defaults = {"dtype": "float32", "max_new_tokens": 12, "batch_size": 5}
    paths = {"prompts": workspace / "prompts.jsonl", "output": workspace / "out", "drafter": workspace / "drafter"}
    return CalibrateArguments(**({name: str(path) for name, path in paths.items()} | defaults | fields))


@pytest.fixture
def fake_engine(monkeypatch):
    monkeypatch.setattr(calibration_module, "make_engine", lambda drafter, target, temperature: FakeEngine())


@pytest.mark.usefixtures("fake_engine")
class TestCommand:
    def test_what_it_writes(self, workspace, capsys):
        config_file = workspace / "drafter" / "config.json"
        before = json.loads(config_file.read_text())
        report = calibrate(arguments(workspace))
        assert report.after.means()["ece"] < report.before.means()["ece"]
        # 3 is exact; 700 rounds tell it roughly at the first position, and less at later ones, which few drafts reach.
        assert 2 < report.temperatures[0] < 4.5

        after = json.loads(config_file.read_text())
        assert after.pop("confidence_temperatures") == list(report.temperatures)
        before.pop("confidence_temperatures")
        assert after == before
        assert list(after) == list(before)
        assert DSparkConfig.from_pretrained(workspace / "drafter").confidence_temperatures == list(report.temperatures)
        assert DSparkModel.from_pretrained(workspace / "drafter").config.block_size == 4

        out = workspace / "out"
        assert sorted(path.name for path in out.iterdir()) == [
            "calibration.json",
            "reliability.png",
            "report.json",
            "rounds.jsonl",
        ]
        sglang = json.loads((out / "calibration.json").read_text())
        assert set(sglang) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
        assert (sglang["temperatures"], sglang["dataset"]) == (list(report.temperatures), "prompts.jsonl")
        assert (sglang["ece_before"], sglang["ece_after"]) == (list(report.before.ece), list(report.after.ece))
        full = json.loads((out / "report.json").read_text())
        assert full["num_prompts"] == {"fit": 20, "held_out": 20}
        assert full["num_rounds"] == {"fit": sglang["num_samples"], "held_out": report.counts[0]}
        assert len(full["reliability"]["after"]) == 4
        assert sum(full["reliability"]["after"][3]["counts"]) == report.counts[3]
        assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 4 + 1 + 2  # the table, and where the temperatures and the report are
        assert str(workspace / "drafter" / "config.json") in lines[-2]
        assert lines[-1] == f"written to {out}"

    def test_equal_runs_are_equal_and_a_dry_run_changes_nothing(self, workspace):
        """The temperatures in the drafter's config do not change what is recorded; the split depends on the seed."""
        first = calibrate(arguments(workspace, dry_run=True))
        assert json.loads((workspace / "drafter" / "config.json").read_text())["confidence_temperatures"] is None
        rounds = (workspace / "out" / "rounds.jsonl").read_text()
        settings, *records = map(json.loads, rounds.splitlines())
        assert settings["settings"]["max_new_tokens"] == 12
        assert [each["prompt"] for each in records] == list(range(40))
        assert calibrate(arguments(workspace)) == first
        assert calibrate(arguments(workspace)) == first
        assert (workspace / "out" / "rounds.jsonl").read_text() == rounds
        other = calibrate(arguments(workspace, seed=1, holdout=0.25))
        assert sum(other.counts) < sum(first.counts)

    def test_an_interrupted_run_leaves_nothing(self, workspace, monkeypatch):
        monkeypatch.setattr(calibration_module, "make_engine", lambda *arguments: FakeEngine(crash_after=13))
        with pytest.raises(KeyboardInterrupt):
            calibrate(arguments(workspace))
        assert not (workspace / "out").exists()

    def test_temperatures_that_do_not_help_are_not_used(self, workspace, monkeypatch, caplog):
        """All are 1 then, everywhere, and not what an earlier calibration left."""
        write_temperatures(workspace / "drafter", [2.0] * 4)
        monkeypatch.setattr(calibration_module, "fit_temperatures", lambda rounds: (0.05,) * 4)
        report = calibrate(arguments(workspace))
        assert report.temperatures == (1.0,) * 4
        assert report.after == report.before
        assert json.loads((workspace / "drafter" / "config.json").read_text())["confidence_temperatures"] == [1.0] * 4
        sglang = json.loads((workspace / "out" / "calibration.json").read_text())
        assert (sglang["temperatures"], sglang["ece_after"]) == ([1.0] * 4, sglang["ece_before"])
        full = json.loads((workspace / "out" / "report.json").read_text())
        assert full["fitted"]["temperatures"] == [0.05] * 4
        assert full["fitted"]["ece"] > report.before.means()["ece"]
        assert "all are set to 1" in caplog.text
        assert "end of the grid" in caplog.text

    def test_unusable_drafters(self, workspace):
        with pytest.raises(ValueError, match="local folder"):
            calibrate(arguments(workspace, drafter="org/name"))
        target = tiny_target("llama")
        tiny_drafter(target, enable_confidence_head=False).save_pretrained(workspace / "headless")
        with pytest.raises(ValueError, match="no confidence head"):
            calibrate(arguments(workspace, drafter=str(workspace / "headless")))
        tiny_drafter(target).save_pretrained(workspace / "nameless")
        with pytest.raises(ValueError, match="`target`"):
            calibrate(arguments(workspace, drafter=str(workspace / "nameless")))
        tiny_drafter(target, num_target_layers=9, target_layer_ids=[1, 7]).save_pretrained(workspace / "deep")
        with pytest.raises(ValueError, match="num_hidden_layers"):
            calibrate(arguments(workspace, drafter=str(workspace / "deep"), target=str(workspace / "target")))

    def test_a_deepspec_checkpoint_keeps_no_temperatures(self, workspace):
        folder = Path(__file__).parents[1] / "fixtures" / "a_vanilla_confM" / "draft"
        with pytest.raises(ValueError, match="save_pretrained"):
            calibrate(arguments(workspace, drafter=str(folder)))

    def test_unusable_prompts(self, workspace):
        with pytest.raises(ValueError, match="at most 2 tokens"):
            calibrate(arguments(workspace, max_prompt_tokens=2))
        (workspace / "prompts.jsonl").write_text("")
        with pytest.raises(ValueError, match="has 0 prompts"):
            calibrate(arguments(workspace))
        with pytest.raises(ValueError, match="no file"):
            calibrate(arguments(workspace, prompts=str(workspace / "missing.jsonl")))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"batch_size": 0},
            {"temperature": -1.0},
            {"temperature": math.inf},
            {"holdout": 1.0},
            {"num_prompts": 1},
            {"dtype": "int8"},
        ],
    )
    def test_wrong_arguments(self, workspace, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            arguments(workspace, **wrong)


class TestSplitAndConfig:
    def split(self, holdout):
        return HoldoutArguments(drafter="d", prompts="p", holdout=holdout)

    def test_prompts_are_split_not_rounds(self):
        records = [{"prompt": index, "accepted": [0] * (index % 4)} for index in range(40)]
        fit, held_out = split_records(records, self.split(0.3))
        assert (len(fit), len(held_out)) == (21, 9)
        assert sorted(each["prompt"] for each in fit + held_out) == [i for i in range(40) if i % 4]
        assert split_records(records, self.split(0.3)) == (fit, held_out)
        assert [len(part) for part in split_records(records[:3], self.split(0.01))] == [1, 1]
        with pytest.raises(ValueError, match="1 of 2 answers"):
            split_records(records[:2], self.split(0.5))

    def test_the_config_is_replaced_at_once(self, tmp_path, monkeypatch):
        """A crash while writing leaves the old config, and nothing else in the folder."""
        path = tmp_path / "config.json"
        content = '{"z": 1e-06, "a": [1, 2.50], "name": "d\\u00e9j\\u00e0", "nested": {"b": null}}'
        path.write_text(content)

        def fails(self, target):
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(type(path), "replace", fails)
            with pytest.raises(OSError, match="disk full"):
                write_temperatures(tmp_path, [1.0, 2.0])
        assert path.read_text() == content
        assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
        path.chmod(0o640)
        write_temperatures(tmp_path, [1.0, 2.0])
        written = json.loads(path.read_text())
        assert written == json.loads(content) | {"confidence_temperatures": [1.0, 2.0]}
        assert path.stat().st_mode & 0o777 == 0o640


def test_the_report_has_a_line_for_each_position():
    report = calibration_report(synthetic_rounds(100, [1.0, 2.0]), [1.0, 2.0])
    lines = table(replace(report, temperatures=(1.25, 0.5))).splitlines()
    assert [line.split()[0] for line in lines] == ["position", "0", "1", "mean"]
    assert "1.250" in lines[1]
