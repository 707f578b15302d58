"""The command `dspark`, from a clone and from an installed package, which has no top-level names but its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import dspark
from hub_upload.__main__ import app
from hub_upload.hub.verify import PROMPTS


ROOT = Path(__file__).parents[2]
FOLDERS = ("dspark", "modeling_dspark", "training", "hub_upload")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the package is installed, as into site-packages."""
    base = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("repos", "logs", "__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, base / "source" / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, base / "source" / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(base / "site"), str(base / "source")], check=True, timeout=120)
    return base / "site"


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`dspark ...` in a folder that has nothing of the clone."""
    environment = os.environ | {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(site / "bin" / "dspark"), *arguments]
    return subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_has_every_package():
    packages = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    folders = [path.parent.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("__init__.py")]
    names = {".".join(folder.parts) for folder in folders}
    expected = {f"dspark.{name}" if name.startswith(("training", "hub_upload")) else name for name in names}
    assert set(re.findall(r'"([\w.]+)"', packages[1])) == expected


def test_verbs_are_the_commands_that_exist():
    modules = {f"training.{path.stem}" for path in (ROOT / "training").glob("*.py") if "__main__" in path.read_text()}
    assert {module for module, _ in dspark.VERBS.values() if module.startswith("training.")} == modules
    hub = {verb for verb, (module, _) in dspark.VERBS.items() if module.startswith("hub_upload")}
    assert hub == set(typer.main.get_command(app).commands)


def test_installing_adds_no_other_top_level_name(site):
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == {"bin", "dspark", "modeling_dspark"}


def test_recipes_and_templates_are_installed(site):
    for folder in ("training/configs", "hub_upload/templates", "training/evaluation/metrics"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts]
        assert files
        assert [str(file) for file in files if not (site / "dspark" / file).is_file()] == []
    listed = run(site, "recipes").stdout.split()
    assert [Path(path).name for path in listed] == sorted(
        path.name for path in (ROOT / "training/configs").glob("*.yaml")
    )
    assert all(Path(path).is_file() for path in listed)


def test_the_default_prompts_of_verify_are_installed(site):
    assert PROMPTS.is_file()
    assert (site / "dspark" / PROMPTS.relative_to(ROOT)).is_file()


def test_help_lists_the_verbs(site):
    for done in (run(site), run(site, "--help")):
        assert done.returncode == 0
        assert re.findall(r"^  ([a-z-]+) {2,}", done.stdout, re.MULTILINE)[: len(dspark.VERBS)] == list(dspark.VERBS)


def test_help_waits_for_nothing():
    code = "import sys, dspark; sys.argv[1:] = ['--help']; dspark.main(); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "modeling_dspark", "typer", "training"} & set(
        re.findall(r"'(\w+)'", done.stderr)
    )


def test_an_installed_verb_runs(site):
    recipe = next(path for path in run(site, "recipes").stdout.split() if path.endswith("qwen3-4b.yaml"))
    done = run(site, "train", "--config", recipe, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
    done = run(site, "card", "--help")
    assert done.returncode == 0
    assert "dspark card" in done.stdout


@pytest.mark.parametrize("verb", [["demo"], ["bench", "latency"]], ids=" ".join)
def test_what_needs_a_clone_says_so(site, verb):
    done = run(site, *verb)
    assert done.returncode == 2
    assert "from a clone" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "`trian` is not a verb of `dspark`"),
        (["bench"], "`dspark bench` needs the name of a benchmark"),
        (["bench", "no-such"], "got `no-such`"),
    ],
)
def test_a_mistake_names_what_there_is(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dspark", *arguments])
    assert dspark.main() == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 2, 130])
def test_arguments_and_exit_status_are_those_of_the_module(status, tmp_path, monkeypatch):
    (tmp_path / "a_verb.py").write_text(
        f"import sys\nif __name__ == '__main__':\n    print(sys.argv[1:], file=open('argv', 'w'))\n    sys.exit({status})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(dspark.VERBS, "a-verb", ("a_verb", "writes its arguments"))
    monkeypatch.setattr(sys, "argv", ["dspark", "a-verb", "--one", "a b", "--", "-h"])
    with pytest.raises(SystemExit) as exit:
        dspark.main()
    assert exit.value.code == status
    assert (tmp_path / "argv").read_text() == "['--one', 'a b', '--', '-h']\n"


def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(dspark.VERBS, "train", ("needs_more", ""))
    monkeypatch.setattr(sys, "argv", ["dspark", "train"])
    assert dspark.main() == 2
    assert "a_package_that_is_missing" in (message := capsys.readouterr().err)
    assert "pip install '.[train]'" in message


def test_both_spellings_of_a_command_are_documented_once():
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = dict(re.findall(r"^\| `dspark ([a-z-]+)` \| `python -m ([\w. -]+)` \|", page, re.MULTILINE))
    expected = {
        verb: module if module.startswith("training") else f"hub_upload {verb}"
        for verb, (module, _) in dspark.VERBS.items()
    }
    assert rows == expected
