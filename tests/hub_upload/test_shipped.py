"""The shipped drafter's folder is what `card` and `package` make of its weights, facts and reports, byte for byte."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from hub_upload.card.render import card_files
from hub_upload.package import package, remote_code_files
from tests.builders import cache_with_kernels
from training.common.targets import EMBEDDED_TARGET, resolve_target


ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "hub_upload" / "repos" / "dspark-smollm2-135m-instruct"
HOW = "`make card` makes it anew"
INPUTS = {"facts.yaml"}


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def software(path):
    """What wrote a PNG file; another version of matplotlib draws other pixels."""
    with Image.open(path) as image:
        return image.info["Software"]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packaged") / SHIPPED.name
    package(SHIPPED, folder)
    return folder


def test_the_folder_is_what_is_made_of_it(packaged):
    shipped, made = files_of(SHIPPED), files_of(packaged)
    code = {path.name for path in remote_code_files()} | {"custom_generate/generate.py"}
    assert set(made) == set(shipped) - INPUTS | code | {"files.json"}
    for name in set(shipped) - INPUTS:
        if name.endswith(".png") and software(SHIPPED / name) != software(packaged / name):
            continue
        assert made[name] == shipped[name], f"{name}: {HOW}"


def test_the_card_and_nothing_else_is_made_by_card():
    made = card_files(SHIPPED)
    others = {"config.json", "model.safetensors", "calibration.json"} | INPUTS
    assert set(made) == set(files_of(SHIPPED)) - others
    assert made["README.md"] == (SHIPPED / "README.md").read_bytes(), HOW


def test_another_process_makes_the_same_bytes(packaged, tmp_path):
    command = [sys.executable, "-m", "hub_upload", "package", str(SHIPPED), str(tmp_path / "other")]
    environment = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert files_of(tmp_path / "other") == files_of(packaged)


@pytest.mark.slow
def test_the_snippets_of_the_card_run_as_they_stand(packaged, tmp_path):
    """With the real target, in a folder where the two Hub ids are local folders."""
    for name, folder in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", resolve_target(EMBEDDED_TARGET)),
        (f"org/{SHIPPED.name}", packaged),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(folder)
    text = (SHIPPED / "README.md").read_text()
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    (tmp_path / "run.py").write_text(script + "print(drafter.last_run.acceptance_length > 1)\n")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    environment |= {"DSPARK_CACHE": str(cache_with_kernels(tmp_path / "cache"))}
    result = subprocess.run(
        [sys.executable, "-I", "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "True"
    assert "scatter" in result.stdout  # why the sky is blue
