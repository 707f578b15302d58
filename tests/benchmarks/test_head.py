"""The benchmarks of the fused head: what they compare, write and refuse."""

import json

import pytest
import torch

from benchmarks import head, head_rounds
from modeling_dspark.fused_backends import backend_for
from tests.builders import tiny_drafter, tiny_target


needs_fused = pytest.mark.skipif(backend_for(torch.device("cpu")) is None, reason="needs the fused head")


@needs_fused
def test_all_ways_of_a_case_make_the_same_block(tmp_path):
    like = tiny_drafter(tiny_target("llama"))
    sizes = {"vocabulary": 97, "rank": 16, "positions": 3, "kind": "rnn"}
    drafter = head.random_drafter(like, **sizes, dtype=torch.float32)
    with torch.no_grad():
        ways = head.ways(drafter, rows=2, positions=3, temperature=0.0, compiled=False)
        assert set(ways) == {"torch", "fused", "kernel", "floor"}
        tokens, ran = ways["torch"]().tokens, ways["kernel"]()
        assert torch.equal(ways["fused"]().tokens, tokens)
    assert torch.equal(ran[1][1], tokens)
    assert len(ways["floor"]()) == 3


@needs_fused
def test_the_command_writes_every_case(tmp_path, monkeypatch, capsys):
    like = tiny_drafter(tiny_target("llama"))
    monkeypatch.setattr(head, "check_drafter", lambda name: None)
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", lambda *_, **__: like)
    output = tmp_path / "head.json"
    options = [
        "--vocabulary",
        "64",
        "80",
        "--rank",
        "8",
        "--positions",
        "2",
        "--rows",
        "1",
        "3",
        "--dtype",
        "bfloat16",
        "--repeats",
        "1",
    ]
    assert head.main([*options, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    cases = {(result["vocabulary"], result["rows"], result["temperature"]) for result in report["results"]}
    assert cases == {(v, rows, t) for v in (64, 80) for rows in (1, 3) for t in (0.0, 1.0)}
    for result in report["results"]:
        assert result["ratio"] == pytest.approx(result["torch_ms"] / result["fused_ms"], rel=0.02)
        assert result["of_floor"] == pytest.approx(result["floor_ms"] / result["kernel_ms"], rel=0.1, abs=2e-3)
    assert head.head_table(report["results"]) in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    assert head.main(["--device", "cuda"]) == 2
    assert "--device cuda needs a CUDA device" in capsys.readouterr().err


@needs_fused
def test_rounds_of_both_ways_take_turns_and_are_paired(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(head_rounds, "load_pair", lambda *_: pair)
    monkeypatch.setenv("DSPARK_FUSED_HEAD", "cpu")  # the user's own choice is what is measured
    ran, make_engine = [], head_rounds.make_engine

    def recorded(*arguments, **named):
        engine = make_engine(*arguments, **named)
        step, way = engine.step, engine.drafting.binding.backend
        engine.step = lambda: ran.append(way) or step()
        return engine

    monkeypatch.setattr(head_rounds, "make_engine", recorded)
    output = tmp_path / "rounds.json"
    options = ["--prompts", str(prompts_file), "--rows", "2", "--pairs", "6", "--max-new-tokens", "14"]
    assert head_rounds.main([*options, "--output", str(output)]) == 0
    assert ran[:8] == ["torch", "cpu", "torch", "cpu", "cpu", "torch", "torch", "cpu"]  # two prefills, then A B B A
    report = json.loads(output.read_text())
    assert [case["temperature"] for case in report["results"]] == [0.0, 1.0]
    for case in report["results"]:
        assert case["pairs"] >= 6
        assert case["interval"][0] <= case["ratio"] <= case["interval"][1]
        assert all(0 < case["heads_ms"][way] < case["ms_per_round"][way] for way in ("position by position", "fused"))
    assert head_rounds.rounds_table(report["results"]) in capsys.readouterr().out


def test_rounds_without_a_fused_head_are_no_measurement(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(head_rounds, "load_pair", lambda *_: pair)
    monkeypatch.setenv("DSPARK_FUSED_HEAD", "torch")
    options = ["--prompts", str(prompts_file), "--rows", "1", "--output", str(tmp_path / "rounds.json")]
    assert head_rounds.main(options) == 2
    assert "are not fused, so there is nothing to compare: `fused_head='torch'`" in capsys.readouterr().err
    assert not (tmp_path / "rounds.json").exists()
