"""How the training commands end: an error in one line and status 2, 130 after Ctrl-C, never a traceback."""

import runpy
import sys

import pytest

from tests.builders import tiny_target
from training.answers import regeneration
from training.common import targets
from training.common.commands import exit_status


def run(module, *words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *map(str, words)])
    monkeypatch.delitem(sys.modules, f"training.{module}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"training.{module}", run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("regenerate", ("--prompts", "p.jsonl", "--output", "a.jsonl", "--target", "missing")),
        ("train", ("--target", "missing", "--answers", "a.jsonl", "--mask_token_id", "3")),
        ("evaluate", ("--drafter", "missing", "--prompts", "p.jsonl")),
        ("calibrate", ("--drafter", "missing", "--prompts", "p.jsonl", "--output", "c")),
        ("refit_confidence", ("--drafter", "missing", "--prompts", "p.jsonl", "--output", "r")),
    ],
)
def test_a_mistake_is_one_line_and_status_2(module, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    assert run(module, *words, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "missing" in error


def test_ctrl_c_ends_with_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(regeneration, "load_tokenizer", interrupted)
    assert run("regenerate", "--prompts", "p", "--output", "a.jsonl", monkeypatch=monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_status(interrupted, when_interrupted="the same command goes on.") == 130
    assert capsys.readouterr().err == "\ninterrupted: the same command goes on.\n"


def test_a_defect_keeps_its_traceback():
    def broken():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        exit_status(broken)


def test_what_the_system_refuses_is_a_mistake_too(tmp_path, capsys):
    assert exit_status(lambda: (tmp_path / "file" / "x").write_text("")) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=f"`device={device}` cannot be used"):
        targets.check_device(device)


@pytest.mark.parametrize("load", [targets.load_target, targets.load_tokenizer])
def test_a_target_that_is_not_there_is_named(load, tmp_path):
    with pytest.raises(ValueError, match=f"`target`: `{tmp_path}` cannot be loaded"):
        load(str(tmp_path))


def test_a_target_whose_weights_are_cut_is_named(tmp_path):
    tiny_target("llama").save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="`target`.*cannot be loaded"):
        targets.load_target(str(tmp_path))
