"""Names of release 0.1 that still work, with a warning that names the new one; and the one dialect of flags."""

import importlib
import re
import subprocess
import sys

import pytest

from training import calibrate, evaluate, refit_confidence, regenerate, train
from training.common.settings import check_same_settings
from training.run.architectures import ARCHITECTURES
from training.run.options import parse_arguments


COMMANDS = [calibrate, evaluate, refit_confidence, regenerate, train]
MOVED = {
    "targets": ("training.common.targets", "load_target"),
    "initialization": ("training.run.initialization", "config_for_target"),
    "losses": ("training.objective.losses", "LossWeights"),
    "calibration": ("training.confidence.scaling", "fit_temperatures"),
    "evaluation_report": ("training.evaluation.report", "EvalReport"),
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_is_the_new_one(old):
    new, name = MOVED[old]
    sys.modules.pop(f"training.{old}", None)
    spec = importlib.import_module(new).__spec__
    with pytest.warns(DeprecationWarning, match=f"`training.{old}` is now `{new}`") as caught:
        module = importlib.import_module(f"training.{old}")
    assert len(caught) == 1
    assert module is importlib.import_module(new)
    assert getattr(module, name).__module__ == module.__spec__.name == new
    assert module.__spec__ is spec


def test_a_warning_points_at_the_import():
    code = "from training.losses import LossWeights\nfrom training.evaluation import Speed\nimport training.nowhere"
    command = [sys.executable, "-W", "always::DeprecationWarning:__main__", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "<string>:1: DeprecationWarning: `training.losses` is now" in ended.stderr
    assert "<string>:2: DeprecationWarning: `training.evaluation.Speed` is now" in ended.stderr
    assert "No module named 'training.nowhere'" in ended.stderr


def test_figures_by_their_old_module():
    evaluation = importlib.import_module("training.evaluation")
    with pytest.warns(DeprecationWarning, match="`training.evaluation.figures.speed_figures`"):
        assert evaluation.speed_figures.__module__ == "training.evaluation.figures"
    with pytest.raises(AttributeError, match="nothing"):
        evaluation.nothing  # noqa: B018 - the attribute is what is tested


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
def test_help_has_flags_with_hyphens_only(command, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert command.__doc__.splitlines()[0] in text
    flags = {word.strip("[],") for word in text.split() if word.strip("[],").startswith("--")}
    assert len(flags) > 10
    assert [flag for flag in flags if "_" in flag] == []


def test_both_spellings_of_a_flag(tmp_path):
    config = tmp_path / "recipe.yaml"
    config.write_text("mask_token_id: 3\nnum_anchors: 7\n")
    for flags in (("--block-size", "5", "--no-confidence-head"), ("--block_size", "5", "--no_confidence_head")):
        drafter, _, training = parse_arguments(["--config", str(config), "--use-cpu", *flags])
        assert (drafter.block_size, drafter.confidence_head, drafter.mask_token_id) == (5, False, 3)
        assert training.num_anchors == 7


def test_soft_weight_is_kd_weight(tmp_path):
    config = tmp_path / "recipe.yaml"
    config.write_text("soft_weight: 0.25\n")
    with pytest.warns(FutureWarning, match="`soft_weight` is deprecated.*write `kd_weight`"):
        assert parse_arguments(["--config", str(config), "--use-cpu"])[2].kd_weight == 0.25
    for flags in (["--soft_weight", "0.5"], ["--soft-weight", "0.5"], ["--soft_weight=0.5"]):
        with pytest.warns(FutureWarning, match="`soft_weight` is deprecated.*write `kd_weight`"):
            assert parse_arguments([*flags, "--use-cpu"])[2].kd_weight == 0.5


def test_an_architecture_of_a_clone_is_named_where_it_is_missing(monkeypatch):
    assert ARCHITECTURES["eagle"].__name__ == "EagleDrafter"
    assert list(ARCHITECTURES) == ["dspark", "eagle"]
    monkeypatch.setitem(sys.modules, "benchmarks.baselines.autoregressive", None)  # as in an installed package
    assert "eagle" in ARCHITECTURES
    with pytest.raises(ValueError, match=r"`architecture: eagle` needs .*benchmarks.*from a clone"):
        ARCHITECTURES["eagle"]


def test_settings_that_differ_are_named_with_both_values():
    then = {"dtype": "float32", "seed": 1, "forgotten": True}
    check_same_settings(then, {"dtype": "float32", "seed": 1}, subject="`f` was made", way_out="Stop.")
    changed = "{'dtype': ('float32', 'bfloat16'), 'new': (None, 2)}"
    with pytest.raises(ValueError, match=re.escape(f"`f` was made with other settings (then, now): {changed}. Stop.")):
        check_same_settings(then, {"dtype": "bfloat16", "seed": 1, "new": 2}, subject="`f` was made", way_out="Stop.")
