"""Time of a study's drafters: what is drafted, what is computed from the times, and the command."""

import json

import pytest
import torch
from torch.testing import assert_close

from benchmarks import study_time
from benchmarks.baselines.autoregressive import EagleDrafter
from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target


@pytest.fixture
def work(tmp_path):
    """A study of three tiny drafters, one of them autoregressive."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    plain = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    like = tiny_drafter(target, **plain).config.to_dict() | {"num_hidden_layers": 1}
    like = {name: like[name] for name in like if name not in ("model_type", "auto_map", "architectures")}
    drafters = {
        "dspark": (tiny_drafter(target), {}, [0.5, 0.5, 0.5, None]),
        "eagle": (EagleDrafter(EagleDrafter.config_class(**like)), {"architecture": "eagle"}, [0.5] * 4),
    }
    for name, (drafter, fields, acceptance) in drafters.items():
        drafter.save_pretrained(tmp_path / "work" / name / "drafter")
        result = {"settings": {"fields": fields, "steps": 8}, "acceptance": acceptance}
        (tmp_path / "work" / name / "result.json").write_text(json.dumps(result))
    (tmp_path / "longer" / "eagle").mkdir(parents=True)
    result = {"settings": {"fields": {}, "steps": 24}, "acceptance": [1.0, 1.0, 1.0, 1.0]}
    (tmp_path / "longer" / "eagle" / "result.json").write_text(json.dumps(result))
    return tmp_path


def test_speed_by_hand():
    verify, draft = {1: 10.0, 2: 12.0, 3: 13.0}, {1: 1.0, 2: 7.0}
    found = study_time.speeds_of([0.5, 0.4], draft, verify)
    assert found["tau"] == [1.5, 1.7]
    assert found["speedup"] == [round(15 / 13, 4), round(17 / 20, 4)]
    assert found["best_num_tokens"] == 1
    assert found["draft_ms"] == [1000, 7000]


def test_the_command_measures_every_number_of_drafts(work, capsys):
    arguments = [
        "--work",
        str(work / "work"),
        str(work / "longer"),
        "--target",
        str(work / "target"),
        "--output",
        str(work / "time.json"),
    ]
    flags = ["--drafters", "dspark", "eagle", "--context", "12", "--repeats", "2", "--threads", "1"]
    assert study_time.main([*arguments, *flags]) == 0
    report = json.loads((work / "time.json").read_text())
    assert len(report["verify_ms"]) == 5
    assert [(case["drafter"], case["steps"]) for case in report["results"]] == [
        ("dspark", 8),
        ("eagle", 8),
        ("eagle", 24),
    ]
    assert [case["tau"] for case in report["results"]] == [
        [1.5, 1.75, 1.875, 1.875],
        [1.5, 1.75, 1.875, 1.9375],
        [2, 3, 4, 5],
    ]
    assert report["results"][1]["draft_ms"] == report["results"][2]["draft_ms"]
    for case in report["results"]:
        assert min(case["draft_ms"]) > 0
        first = case["tau"][0] * report["verify_ms"][0] / (case["draft_ms"][0] + report["verify_ms"][1])
        assert case["speedup"][0] == pytest.approx(first, rel=0.02)
    assert study_time.tables(report) in capsys.readouterr().out


@torch.no_grad()
def test_a_turn_leaves_the_context_as_it_was(work, monkeypatch):
    """Verifying twice, or drafting twice, does the same."""
    target, seen = tiny_target("llama"), []
    verify = study_time.verification(target, 10)
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: seen.append(forward(*a, **k).logits) or forward)
    verify(3)
    verify(5)
    assert_close(seen[0], seen[1][:, :3])
    drafter = study_time.load(work / "work", "dspark")
    assert isinstance(drafter, DSparkModel)
    drafts = []
    propose = study_time.propose
    monkeypatch.setattr(study_time, "propose", lambda *a, **k: drafts.append(propose(*a, **k).tokens))
    draft = study_time.drafting(drafter, target.to(torch.bfloat16), 10)
    for _ in range(2):
        draft(4)
    assert torch.equal(drafts[1], drafts[2])


def test_a_drafter_that_was_not_measured_is_named(work, capsys):
    assert study_time.main(["--work", str(work / "work"), "--drafters", "mtp-1"]) == 2
    assert "holds no measured drafter `mtp-1`" in capsys.readouterr().err


def test_a_further_folder_without_drafters_is_named(work, capsys):
    folders = [str(work / "work"), str(work / "long")]
    assert study_time.main(["--work", *folders, "--drafters", "eagle", "--target", str(work / "target")]) == 2
    assert f"`{work / 'long'}` has none of the drafters eagle" in capsys.readouterr().err
