"""A package holds exactly what it needs, the same bytes every time, and is never half there."""

import hashlib
import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.package import package, remote_code_files
from hub_upload.package.assemble import AUTO_MAP, planned
from hub_upload.package.contents import foreign_files
from hub_upload.package.manifest import read_manifest
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
    expected |= {"custom_generate/generate.py", "files.json"}
    assert {str(path.relative_to(tmp_path / "out")) for path in files} == expected
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


def contents(folder):
    """Bytes and modes by path."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def test_names_of_this_release_and_the_last():
    last = [
        "engine_dspark.py",
        "modeling_dspark.py",
        "packed_target_dspark.py",
        ".eval_results/accepted_length_a.yaml",
    ]
    ours = [path.name for path in remote_code_files()] + [".eval_results/acceptance_length_a.yaml"]
    foreign = ["engine.py", "setup.py", "formats/load.py", "../engine_loop.py", "custom_generate/other.py"]
    assert foreign_files([*last, *ours, *foreign]) == sorted(foreign)


def test_reproducible(source, tmp_path):
    """In other folders, from a copy with other modes, with another mask; `test_shipped` does so in another process."""
    package(source, tmp_path / "one")
    shutil.copytree(source, tmp_path / "elsewhere" / "copy")
    for path in (tmp_path / "elsewhere" / "copy").iterdir():
        path.chmod(0o600)
    mask = os.umask(0o077)
    try:
        package(tmp_path / "elsewhere" / "copy", tmp_path / "two")
    finally:
        os.umask(mask)
    one = contents(tmp_path / "one")
    assert len(one) > 20
    assert one == contents(tmp_path / "two")
    assert {mode for mode, _ in one.values()} == {0o100644, 0o40755}


def test_the_manifest_has_every_other_file(source, tmp_path):
    files = package(source, tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "files.json").read_text())["files"]
    names = {path.relative_to(tmp_path / "out").as_posix(): path for path in files if path.name != "files.json"}
    assert set(listed) == set(names)
    for name, path in names.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert listed[name] == {"sha256": digest, "size": path.stat().st_size}
    assert read_manifest(tmp_path / "out") == {name: entry["sha256"] for name, entry in listed.items()}
    for text in ("[]", '{"files": {}, "format": 2}', "{"):
        (tmp_path / "out" / "files.json").write_text(text)
        with pytest.raises(ValueError, match=r"not a manifest"):
            read_manifest(tmp_path / "out")


def set_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    "path", ["/data/models/target", "~/target", "./runs/target", "runs/my/target", "C:\\models\\t"]
)
def test_a_local_target_is_refused_with_the_way_out(source, tmp_path, path):
    set_config(source, target_name_or_path=path)
    with pytest.raises(ValueError, match="--target ORG/NAME"):
        package(source, tmp_path / "out")
    package(source, tmp_path / "out", target_name="org/target")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["target_name_or_path"] == "org/target"


def test_a_target_that_is_a_folder_here_is_no_hub_id(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "target").mkdir(parents=True)
    set_config(source, target_name_or_path="runs/target")
    with pytest.raises(ValueError, match="--target ORG/NAME"):
        package(source, tmp_path / "out")
    package(source, tmp_path / "out", target_name="runs/target")  # of that name on the Hub


@pytest.mark.parametrize("fields", [{"_name_or_path": "runs/x"}, {"note": {"from": ["/home/someone/x"]}}])
def test_traces_of_this_machine_are_refused(source, tmp_path, fields):
    set_config(source, **fields)
    with pytest.raises(ValueError, match="remove them"):
        package(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("README.md", "See /home/someone/notes.txt", "a path of this machine"),
        ("README.md", "token hf_" + "a1" * 17, "a Hugging Face token"),
        ("README.md", "<!-- /tmp/prompts.jsonl -->", "a path of this machine"),
    ],
)
def test_texts_with_paths_or_tokens_are_refused(source, tmp_path, name, text, match):
    (source / name).write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        package(source, tmp_path / "out")
    assert "hf_" not in str(caught.value)


def test_costs_go_along_in_the_form_of_sglang(source, tmp_path, fake_costs):
    fake_costs.save(tmp_path / "costs.json")
    package(source, tmp_path / "out", cost_profile=tmp_path / "costs.json")
    costs = json.loads((tmp_path / "out" / "cost_profile.json").read_text())
    assert set(costs) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert costs["sample_batch_tokens"] == [1, 101]
    # One row drafts four positions and the target verifies one token; 20 rows of five, 101.
    seconds = [0.1 + 4 * 0.005 + 1.0 + 0.02, 0.1 + 0.1 * 19 / 32 + 4 * 0.005 + 3.0 + 0.02]
    assert costs["sample_steps_per_sec"] == pytest.approx([1 / value for value in seconds], rel=1e-12)
    assert costs["max_batch_tokens"] == 101
    package(source, tmp_path / "again", cost_profile=tmp_path / "out" / "cost_profile.json")
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ValueError, match="not a cost profile"):
        package(source, tmp_path / "third", cost_profile=tmp_path / "costs.json")


def test_a_plan_is_what_is_written(source, tmp_path):
    plan = planned(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    files = package(source, tmp_path / "out")
    sizes = {path.relative_to(tmp_path / "out").as_posix(): path.stat().st_size for path in files}
    assert plan == {name: size for name, size in sizes.items() if name != "files.json"}


def test_calibration_goes_along(source, tmp_path):
    temperatures = [1.5, 0.8, 1.1, 1.3]
    (source / "calibration.json").write_text(json.dumps({"temperatures": temperatures}))
    with pytest.raises(ValueError, match="has no `confidence_temperatures`"):
        package(source, tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"confidence_temperatures": temperatures}))
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
    with pytest.raises(ValueError, match="not written by this command"):
        package(source, precious, overwrite=True)
    assert (precious / "thesis.txt").exists()
    with pytest.raises(ValueError, match="a folder that is read"):
        package(source, source, overwrite=True)


def test_what_is_the_users_is_kept(source, tmp_path):
    """A note in an earlier package, a source inside the output, and an output inside the source."""
    package(source, tmp_path / "out")
    for notes in (tmp_path / "out" / "notes.txt", tmp_path / "out" / "custom_generate" / "notes.txt"):
        notes.write_text("mine")
        with pytest.raises(ValueError, match="notes.txt"):
            package(source, tmp_path / "out", overwrite=True)
        notes.unlink()
    inner = tmp_path / "out" / "source"
    shutil.copytree(source, inner)
    for one, other in ((inner, tmp_path / "out"), (source, source / "out")):
        with pytest.raises(ValueError, match="inside of it"):
            package(one, other, overwrite=True)
    assert (inner / "model.safetensors").exists()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ValueError, match="symbolic link"):
        package(source, tmp_path / "link", overwrite=True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_missing_files(source, tmp_path, name):
    (source / name).unlink()
    with pytest.raises(ValueError, match=f"{source}.*has no.*{name}"):
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
