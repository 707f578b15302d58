"""The benchmarks of the fused head: what they compare, write and refuse."""

import functools
import json
import os

import pytest
import torch

from benchmarks import head, head_rounds
from benchmarks.lib.pair import code_of
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
def test_heads_take_turns_and_everything_is_left_as_it_was(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(head_rounds, "load_pair", lambda *_: pair)
    monkeypatch.setenv("DSPARK_FUSED_HEAD", "cpu")  # the user's own choice is what is measured
    drafting = code_of(pair.drafter, "draft_propose")
    ran = []
    for name in ("fused_block", "_position_by_position"):
        monkeypatch.setattr(drafting, name, recorded(getattr(drafting, name), ran))
    before = dict(vars(drafting))
    output = tmp_path / "rounds.json"
    options = ["--prompts", str(prompts_file), "--rows", "2", "--pairs", "6", "--max-new-tokens", "14"]
    assert head_rounds.main([*options, "--output", str(output)]) == 0
    assert os.environ["DSPARK_FUSED_HEAD"] == "cpu"
    assert vars(drafting) == before
    assert set(ran) == {("fused_block", "cpu"), ("_position_by_position", "torch")}
    report = json.loads(output.read_text())
    assert [case["temperature"] for case in report["results"]] == [0.0, 1.0]
    for case in report["results"]:
        assert case["pairs"] >= 6
        assert case["interval"][0] <= case["ratio"] <= case["interval"][1]
        assert all(0 < case["heads_ms"][way] < case["ms_a_round"][way] for way in ("position by position", "fused"))
    assert head_rounds.rounds_table(report["results"]) in capsys.readouterr().out


def recorded(function, ran):
    """The function, which notes its name and the choice of the moment."""

    @functools.wraps(function)
    def recording(*arguments, **named):
        ran.append((function.__name__, os.environ["DSPARK_FUSED_HEAD"]))
        return function(*arguments, **named)

    return recording


def test_rounds_without_a_fused_head_are_no_measurement(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(head_rounds, "load_pair", lambda *_: pair)
    monkeypatch.setattr(code_of(pair.drafter, "draft_propose"), "fusable_heads", lambda *_: None)
    options = ["--prompts", str(prompts_file), "--rows", "1", "--output", str(tmp_path / "rounds.json")]
    assert head_rounds.main(options) == 2
    assert "The heads ran position by position, not fused" in capsys.readouterr().err
    assert not (tmp_path / "rounds.json").exists()


def test_pairs_are_neighbours_with_all_rows():
    a, b = head_rounds.STEPWISE, head_rounds.FUSED
    taken = [
        (a, 2, 8.0, 0.5),
        (b, 2, 4.0, 0.25),
        (b, 2, 5.0, 0.1),
        (a, 1, 9.0, 0.1),
        (a, 2, 6.0, 0.2),
        (b, 2, 3.0, 0.1),
    ]
    expected = [{a: (8.0, 0.5), b: (4.0, 0.25)}, {a: (6.0, 0.2), b: (3.0, 0.1)}]
    assert head_rounds.pairs_of(taken, 2) == expected
