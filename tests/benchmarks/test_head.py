"""The benchmarks of the fused head: what they compare, write and refuse."""

import json
import os

import pytest
import torch

from benchmarks import head, head_rounds
from modeling_dspark.fused_backends_dspark import backend_for
from tests.builders import tiny_drafter, tiny_target


needs_fused = pytest.mark.skipif(backend_for(torch.device("cpu")) is None, reason="needs the fused head")


@needs_fused
def test_all_ways_of_a_case_make_the_same_block(tmp_path):
    like = tiny_drafter(tiny_target("llama"))
    sizes = {"vocabulary": 97, "rank": 16, "slots": 3, "kind": "rnn"}
    drafter = head.random_drafter(like, **sizes, dtype=torch.float32)
    with torch.no_grad():
        ways = head.ways(drafter, rows=2, slots=3, temperature=0.0, compiled=False)
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
    options = ["--vocabulary", "64", "80", "--rank", "8", "--slots", "2", "--rows", "1", "3", "--dtype", "bfloat16"]
    assert head.main([*options, "--repeats", "1", "--output", str(output)]) == 0
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


def test_rounds_are_compared_and_the_environment_is_left_as_it_was(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(head_rounds, "load_pair", lambda *_: pair)
    monkeypatch.setenv("DSPARK_FUSED_HEAD", "auto")
    seen, original = [], pair.target.generate
    monkeypatch.setattr(
        pair.target, "generate", lambda **k: seen.append(os.environ["DSPARK_FUSED_HEAD"]) or original(**k)
    )
    output = tmp_path / "rounds.json"
    options = ["--prompts", str(prompts_file), "--rows", "2", "--pairs", "3", "--max-new-tokens", "9"]
    assert head_rounds.main([*options, "--output", str(output)]) == 0
    assert sorted(seen) == ["auto"] * 8 + ["torch"] * 8  # two temperatures, three pairs and one to warm up
    assert os.environ["DSPARK_FUSED_HEAD"] == "auto"
    report = json.loads(output.read_text())
    assert [case["temperature"] for case in report["results"]] == [0.0, 1.0]
    for case in report["results"]:
        assert case["interval"][0] <= case["ratio"] <= case["interval"][1]
    assert "slot by slot" in capsys.readouterr().out
