"""A package holds exactly what it needs, the same bytes every time, and is never half there."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.package import AUTO_MAP, package, remote_code_files
from tests.builders import tiny_drafter, tiny_target


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    tiny_drafter(tiny_target("llama")).save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    (folder / "README.md").write_text("A card.\n")
    (folder / "optimizer.pt").write_bytes(b"state")
    return folder


def test_contents(source, tmp_path):
    files = package(source, tmp_path / "out")
    expected = {"config.json", "model.safetensors", "README.md"} | {path.name for path in remote_code_files()}
    assert {str(path.relative_to(tmp_path / "out")) for path in files} == expected | {"custom_generate/generate.py"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


def test_reproducible(source, tmp_path):
    for name in ("one", "two"):
        package(source, tmp_path / name)
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_calibration_goes_along(source, tmp_path):
    (source / "calibration.json").write_text("{}")
    assert tmp_path / "out" / "calibration.json" in package(source, tmp_path / "out")
    package(source, tmp_path / "out", overwrite=True)


def test_overwrite(source, tmp_path):
    package(source, tmp_path / "out")
    with pytest.raises(ValueError, match="--overwrite"):
        package(source, tmp_path / "out")
    (source / "README.md").write_text("Another card.\n")
    package(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "README.md").read_text() == "Another card.\n"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not an earlier package"):
        package(source, precious, overwrite=True)
    assert (precious / "thesis.txt").exists()
    with pytest.raises(ValueError, match="drafter folder itself"):
        package(source, source, overwrite=True)


def test_what_is_the_users_is_kept(source, tmp_path):
    """A note in an earlier package, a source inside the output, and an output inside the source."""
    package(source, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt"):
        package(source, tmp_path / "out", overwrite=True)
    inner = tmp_path / "out" / "source"
    shutil.copytree(source, inner)
    for one, other in ((inner, tmp_path / "out"), (source, source / "out")):
        with pytest.raises(ValueError, match="inside the other"):
            package(one, other, overwrite=True)
    assert (inner / "model.safetensors").exists()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ValueError, match="symbolic link"):
        package(source, tmp_path / "link", overwrite=True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_missing_files(source, tmp_path, name):
    (source / name).unlink()
    with pytest.raises(ValueError, match=name):
        package(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_files(source, tmp_path):
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:500])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        package(source, tmp_path / "out")
    (source / "model.safetensors").write_bytes(weights)
    (source / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type.*llama"):
        package(source, tmp_path / "out")
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        package(source, tmp_path / "out")


def test_command_line(source, tmp_path):
    runner = CliRunner()
    result = runner.invoke(app, ["package", str(source), str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "modeling_dspark.py" in result.output
    result = runner.invoke(app, ["package", str(source), str(tmp_path / "out")])
    assert result.exit_code == 2
    result = runner.invoke(app, ["package", "--help"])
    assert "Folder to make" in result.output
