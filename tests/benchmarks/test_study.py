"""The study of baselines: same data and recipe for all, resumes, and measures by the replay."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import domain, study
from benchmarks.lib import study_data, study_report
from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target
from training.run.architectures import ARCHITECTURES
from training.run.options import parse_arguments


ROOT = Path(__file__).parents[2]
EVERY = {name: fields for group in study.GROUPS.values() for name, fields in group.items()}


def options(tmp_path, *more):
    prompts = tmp_path / "eval.jsonl"
    if not prompts.is_file():
        lines = [{"turns": [text], "source": source} for source in ("one", "two") for text in ("abc", "xyz", "de")]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--prompts", "p.jsonl", "--answers", "a.jsonl", "--eval-prompts", str(prompts), "--limit", "2"]
    arguments += ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "study.json"), "--max-new-tokens", "6"]
    return study.parse_options([*arguments, *more])


@pytest.mark.parametrize("name", EVERY)
def test_flags_are_those_of_the_recipe_but_for_what_the_name_says(name, tmp_path):
    settings = options(tmp_path)
    drafter, data, training = parse_arguments(study.training_flags(settings, EVERY[name], tmp_path / name))
    reference, same_data, same_training = parse_arguments(study.training_flags(settings, {}, tmp_path / name))
    differing = {key for key, value in vars(drafter).items() if value != vars(reference)[key]}
    assert differing <= set(EVERY[name]) | {"init_from_target_layers"}
    assert (data, training.to_dict()) == (same_data, same_training.to_dict())
    assert drafter.architecture in ARCHITECTURES
    assert len(drafter.init_from_target_layers) == drafter.num_draft_layers
    assert training.max_steps == 1500


def test_a_training_that_was_stopped_goes_on(tmp_path):
    folder = tmp_path / "dspark"
    (folder / "checkpoint-100").mkdir(parents=True)
    # Cut short by a kill: there is nothing to go on from.
    assert "--resume-from-checkpoint" not in study.training_flags(options(tmp_path), {}, folder)
    for name in ("trainer_state.json", "config.json"):
        (folder / "checkpoint-100" / name).write_text("{}")
    flags = study.training_flags(options(tmp_path), {}, folder)
    assert flags[flags.index("--resume-from-checkpoint") + 1] == "true"


@pytest.fixture
def tiny_study(tmp_path, tiny_tokenizer, monkeypatch):
    """Tiny models in the place of the real ones; what is trained is a random drafter."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    trained = []

    def train(_, fields, folder):
        trained.append(folder.name)
        drafter = tiny_drafter(target, block_size=fields.get("block_size", 4))
        drafter.save_pretrained(folder / "drafter")
        return 1.0

    monkeypatch.setattr(study, "train", train)
    kinds = {"dspark": {}, "dflash": {"block_size": 3}}
    groups = {"main": kinds, "block": {"dspark-block-2": {"block_size": 2}, "dflash-block-2": {"block_size": 2}}}
    monkeypatch.setattr(study, "GROUPS", groups)
    (tmp_path / "a.jsonl").write_text('{"prompt": 0, "answer_ids": [4]}\n')
    lines = [{"turns": [text]} for text in ("abc", "def", "gh", "ij", "klm", "no")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return trained


def test_a_study_is_written_resumed_and_drawn(tiny_study, tmp_path, capsys):
    more = ["--target", str(tmp_path / "target"), "--groups", "main", "block", "--plots", str(tmp_path / "plots")]
    study.run(options(tmp_path, *more))
    first = (tmp_path / "study.json").read_text()
    report = json.loads(first)
    trained = ["dspark", "dflash", "dspark-block-2", "dflash-block-2"]
    assert [case["drafter"] for case in report["results"]] == ["plain target", "prompt lookup", *trained]
    plain = report["results"][0]["rounds"]
    for case in report["results"]:
        assert set(case["tau"]) == {"one", "two", "all"}
        assert case["tau"]["all"] >= 1
        for source, rounds in case["rounds"].items():
            assert len(rounds) == 2
            assert case["tau"][source] == round(sum(plain[source]) / sum(rounds), 4)
    assert (report["conversations"], report["answers"]) == (1, {"one": 2, "two": 2})
    assert study_report.study_tables(report) in capsys.readouterr().out
    plots = ["block", "positions", "reliability", "thresholds"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [f"study_{name}.png" for name in plots]
    assert report["confidence"]["calibration_prompts"] == 5
    unseen = (tmp_path / "work" / "calibration_prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["turns"] for line in unseen] == [["def"], ["gh"], ["ij"], ["klm"], ["no"]]
    assert len(tiny_study) == 4
    study.run(options(tmp_path, *more))
    assert len(tiny_study) == 4  # nothing is trained again
    assert json.loads((tmp_path / "study.json").read_text())["results"] == report["results"]
    (tmp_path / "work" / "dflash" / "result.json").unlink()
    study.run(options(tmp_path, *more))
    assert tiny_study[4:] == ["dflash"]


def test_drafters_can_be_chosen(tiny_study, tmp_path):
    more = ["--target", str(tmp_path / "target"), "--groups", "main", "--plots", str(tmp_path / "plots")]
    study.run(options(tmp_path, *more, "--drafters", "dflash"))
    report = json.loads((tmp_path / "study.json").read_text())
    assert [case["drafter"] for case in report["results"]] == ["plain target", "prompt lookup", "dflash"]
    assert tiny_study == ["dflash"]
    assert "confidence" not in report  # it is of `dspark`
    with pytest.raises(ValueError, match="None of --drafters mtp-1 is in --groups main"):
        study.run(options(tmp_path, *more, "--drafters", "mtp-1"))


def test_other_evaluation_prompts_are_refused(tiny_study, tmp_path):
    study.run(options(tmp_path, "--target", str(tmp_path / "target"), "--groups", "main"))
    with pytest.raises(ValueError, match="choose another `--work`"):
        study.run(options(tmp_path, "--target", str(tmp_path / "target"), "--groups", "main", "--limit", "1"))


def test_other_settings_are_refused(tiny_study, tmp_path):
    more = ["--target", str(tmp_path / "target"), "--groups", "main"]
    study.run(options(tmp_path, *more))
    with pytest.raises(ValueError, match=r"'steps': \(1500, 7\).*choose another `--work`"):
        study.run(options(tmp_path, *more, "--steps", "7"))
    (tmp_path / "a.jsonl").write_text('{"prompt": 0, "answer_ids": [5]}\n')
    with pytest.raises(ValueError, match="'answers'.*choose another `--work`"):
        study.run(options(tmp_path, *more))
    assert len(tiny_study) == 2


@pytest.mark.parametrize("line", ['{"messages": []}', "[1]", '{"prompt": "x"}'])
def test_files_that_hold_no_answers_are_named(tmp_path, line):
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="a.jsonl` holds something other"):
        study_data.num_answers(str(tmp_path / "p.jsonl"), [str(tmp_path / "a.jsonl")])


def test_evaluation_prompts_without_a_source_are_named(tiny_study, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="`source`"):
        study_data.evaluation_sets(options(tmp_path))


def test_a_failed_training_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "check_work", lambda *_: None)
    monkeypatch.setattr(study, "evaluation_sets", lambda _: {"one": []})
    (tmp_path / "p").write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n')
    (tmp_path / "a").write_text('{"prompt": 0, "answer_ids": [4]}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    arguments = ["--prompts", "p", "--answers", "a", "--groups", "main", "--work", str(tmp_path)]
    assert study.main(arguments) == 2
    assert "The training of `dspark` failed" in capsys.readouterr().err


def test_answers_to_other_prompts_are_refused_before_anything_is_made(tiny_study, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": 6, "answer_ids": [4]}\n')
    arguments = ["--prompts", "p.jsonl", "--answers", "a.jsonl", "--work", str(tmp_path / "work")]
    assert study.main(arguments) == 2
    assert "`p.jsonl` has 6" in capsys.readouterr().err
    assert study.main([*arguments[:3], "missing.jsonl"]) == 2
    assert "missing.jsonl" in capsys.readouterr().err
    assert not tiny_study


class TestMargins:
    def test_the_margin_is_that_of_the_acceptance_lengths(self):
        ours, other = {"one": [10, 20], "two": [30]}, {"one": [15, 20], "two": [40]}
        mean, low, high = study_report.margin(ours, other)
        assert mean == pytest.approx(75 / 60 - 1)
        # `two` is always there; `one` is drawn as (10, 10), (10, 20) or (20, 20).
        assert (low, high) == (pytest.approx(80 / 70 - 1), pytest.approx(70 / 50 - 1))

    def test_answers_are_drawn_in_pairs(self):
        """A drafter that needs twice the rounds everywhere does so in every draw."""
        ours = {"one": [3, 50, 7, 400]}
        assert study_report.margin(ours, {"one": [6, 100, 14, 800]}) == (1.0, 1.0, 1.0)

    def test_the_table_has_all_but_ours(self):
        cases = [
            {"group": group, "drafter": name, "rounds": {"one": [rounds], "two": [rounds]}}
            for group, name, rounds in (
                ("references", "plain target", 30),
                ("main", "dspark", 10),
                ("main", "dflash", 12),
                ("block", "dspark-block-4", 1),
            )
        ]
        lines = study_report.margin_table(cases).splitlines()
        assert [line.split("|")[1].strip() for line in lines[2:]] == ["plain target", "dflash"]
        assert "+20.0% [+20.0%, +20.0%]" in lines[3]

    def test_by_depth_like_is_held_against_like(self):
        cases = [
            {"drafter": name, "rounds": {"one": [rounds]}, "settings": {"fields": {"num_draft_layers": layers}}}
            for name, layers, rounds in (
                ("dspark", 2, 10),
                ("dflash", 2, 12),
                ("eagle", 1, 9),
                ("dspark-depth-1", 1, 12),
                ("dflash-depth-1", 1, 15),
                ("dspark-depth-5", 5, 8),
                ("dspark-block-4", 2, 1),
            )
        ]
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in study_report.depth_table(cases).splitlines()[2:]
        ]
        one, two, five = "+25.0% [+25.0%, +25.0%]", "+20.0% [+20.0%, +20.0%]", "-"
        assert [row[:2] for row in rows] == [["1", one], ["2", two], ["5", five]]
        assert [row[2].split()[0] for row in rows] == ["-25.0%", "-10.0%", "+12.5%"]


class TestDomain:
    def options(self, tmp_path, *more):
        tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path / "base")
        lines = [{"turns": ["abc"], "category": "code"}, {"turns": ["de"], "category": "chat"}]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        answers = [{"prompt": index % 2, "answer_ids": [5, 6, 7, 8]} for index in range(6)]
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        evaluation = options(tmp_path).eval_prompts
        return domain.parse_options(
            [
                *("--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "base"), "--limit", "2"),
                *("--prompts", str(tmp_path / "train.jsonl"), "--answers", str(tmp_path / "b.jsonl"), *more),
                *("--eval-prompts", evaluation, "--work", str(tmp_path / "w"), "--output", str(tmp_path / "d.json")),
                *("--max-new-tokens", "8", "--steps", "2", "--lora-rank", "2"),
            ]
        )

    def test_before_and_after_are_written(self, tiny_study, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        domain.run(self.options(tmp_path))
        report = json.loads((tmp_path / "d.json").read_text())
        assert report["conversations"] == 3
        assert set(report["before"]["tau"]) == set(report["after"]["tau"]) == {"one", "two", "all"}
        assert domain.tau_rows(report["before"], report["after"]) in capsys.readouterr().out
        assert (tmp_path / "w" / "tuned" / "adapter" / "adapter_config.json").is_file()
        before, after = (
            DSparkModel.from_pretrained(folder).state_dict()["layers.0.mlp.up_proj.weight"]
            for folder in (tmp_path / "base", tmp_path / "w" / "tuned" / "drafter")
        )
        assert not torch.equal(before, after)

    def test_another_domain_does_not_go_on_with_the_first_ones_training(self, tiny_study, tmp_path):
        (tmp_path / "w").mkdir()
        domain.domain_answers(self.options(tmp_path))
        before = (tmp_path / "w" / "answers.jsonl").read_text()
        with pytest.raises(ValueError, match=r"'domain': \('code', 'chat'\)"):
            domain.domain_answers(self.options(tmp_path, "--domain", "chat"))
        assert (tmp_path / "w" / "answers.jsonl").read_text() == before

    def test_a_domain_that_is_not_there_is_named(self, tiny_study, tmp_path):
        with pytest.raises(ValueError, match=r"'chat', 'code'"):
            domain.run(self.options(tmp_path, "--domain", "law"))
