"""Over real HTTP: a package is pushed, and somebody else loads it by its name alone and generates."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hub_upload.hub.push import checked_files, push
from hub_upload.package import package
from tests.hub_upload.hub_double import READER, Fault


REPO = "org/dspark-smollm2-135m-instruct"
SHIPPED = Path(__file__).parents[2] / "hub_upload" / "repos" / "dspark-smollm2-135m-instruct"


def stranger(hub, folder, *arguments, token):
    """Run `stranger.py` from an empty folder with empty caches; its answer, and what it printed besides."""
    folder.mkdir()
    script = shutil.copy(Path(__file__).with_name("stranger.py"), folder / "stranger.py")
    environment = os.environ | hub.environment(folder / "home", token=token)
    command = [sys.executable, "-E", str(script), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return (json.loads(done.stdout) if done.returncode == 0 else None), done.stderr


def test_pushed_loaded_generated(hub, tiny_pair, packaged, tmp_path):
    """Through a broken download, a renamed repository and a tag; with other revisions and private things refused clearly."""
    pushed = push(checked_files(packaged), REPO, tag="v1")
    hub.store.put(REPO, {"config.json": b"{}"})  # main moves on; the tag does not
    hub.store.create("eve/private", private=True)
    hub.store.create("org/empty", private=True)
    hub.faults.append(Fault("GET /storage/", cut=5000))
    hub.store.moved["org/former-name"] = REPO
    hub.store.create("org/moved-file", private=True)
    moved = {"config.json": "config.json", "modeling_dspark.py": "code/modeling_dspark.py"}
    hub.store.put("org/moved-file", {there: (packaged / name).read_bytes() for name, there in moved.items()})
    others = [f"{REPO}@v2", f"{REPO}@{'0' * 40}", "eve/private@main", "org/empty@main", "org/former-name@v1"]
    others.append("org/moved-file@main")
    answer, errors = stranger(hub, tmp_path / "a", REPO, tiny_pair / "target", "v1", *others, token=READER)
    assert answer is not None, errors
    assert answer["assisted"] == answer["plain"]
    assert answer["module"].startswith("transformers_modules.")
    assert pushed.commit in answer["module"]
    assert not answer["imported"]
    assert hub.faults[0].times == 0  # the download was cut, and went on
    assert not hub.leaked
    said = answer["errors"]
    for other in others[:2]:
        assert "is not a valid git identifier" in said[other]
    assert "is not a local folder and is not a valid model identifier" in said["eve/private@main"]
    assert "org/former-name@v1" not in said  # redirected
    assert "org/moved-file does not appear to have a file named" in said["org/moved-file@main"]
    assert "config.json" in said["org/empty@main"]  # what a push leaves that got no further than an empty repository


@pytest.mark.slow
def test_the_shipped_drafter_over_http(hub, tmp_path, monkeypatch):
    """The real pair: pushed, verified at its commit with the card's own prompts."""
    from typer.testing import CliRunner

    from hub_upload.__main__ import app

    package(SHIPPED, tmp_path / "package")
    pushed = push(checked_files(tmp_path / "package"), REPO, tag="v1")
    for name, value in hub.environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)  # for the process that decodes
    words = [
        "verify",
        REPO,
        "--revision",
        pushed.commit,
        "--target",
        "smollm2-135m-instruct",
        "--max-new-tokens",
        "32",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "12 prompts" in result.stdout
