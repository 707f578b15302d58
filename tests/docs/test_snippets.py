"""What the documentation shows works: its Python blocks run, its commands parse, its names exist.

The Python blocks of a page run in order, in one process that has not imported this package, in a folder with a packaged
drafter in `build/`. Costs are measured as a user's would be, and kept apart from the user's. A block that cannot run is
preceded by a line `<!-- not run: reason -->`.
"""

import contextlib
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import typer
from transformers import HfArgumentParser
from typer.testing import CliRunner

import dspark
import modeling_dspark
from hub_upload.__main__ import app
from modeling_dspark import DSparkConfig, DSparkModel, Engine
from modeling_dspark.configuration_dspark import SCHEDULES
from tests.builders import cache_with_kernels
from training.common.targets import EMBEDDED_TARGET, resolve_target
from training.run.arguments import DSparkTrainingArguments
from training.run.options import DataArguments, DrafterArguments


ROOT = Path(__file__).parents[2]
DRAFTER = ROOT / "hub_upload" / "repos" / "dspark-smollm2-135m-instruct"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_COMMANDS = [*PAGES, ROOT / "CONTRIBUTING.md"]

# Commands whose arguments are a dataclass.
DATACLASSES = {
    "training.regenerate": "RegenerateArguments",
    "training.calibrate": "CalibrateArguments",
    "training.refit_confidence": "RefitArguments",
    "training.evaluate": "EvaluateArguments",
}

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line its text starts at (from 0), and whether it is to be run."""

    language: str
    text: str
    line: int
    runs: bool


def blocks_of(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    return [
        Block(
            match["language"],
            match["text"],
            line=content.count("\n", 0, match.start("text")),
            runs=_NOT_RUN.search(content, 0, match.start()) is None,
        )
        for match in _FENCE.finditer(content)
    ]


def script_of(page: Path) -> str:
    """All Python blocks of a page at the lines they have there, so that a traceback points into the page."""
    lines: list[str] = []
    for block in blocks_of(page):
        if block.language == "python" and block.runs:
            lines += [""] * (block.line - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines)


def commands_of(page: Path) -> Iterator[str]:
    """Command lines in bash blocks, continuations joined, and `make ...` in running text."""
    content = page.read_text(encoding="utf-8")
    for block in blocks_of(page):
        if block.language == "bash":
            yield from block.text.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`(make [^`\n]+)`", _FENCE.sub("", content))


def check_command(command: str) -> None:
    """Parse a command as its program would, without running it; an unknown flag, target or module is an error."""
    words = shlex.split(command, comments=True)
    if words[:1] == ["make"]:
        targets = [word for word in words[1:] if "=" not in word]
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(targets) <= set(known), f"`{command}`: the Makefile has {known}"
    elif words[:1] == ["dspark"]:
        verb, *arguments = words[1:]
        if verb in dspark.VERBS:
            module = dspark.VERBS[verb][0].removesuffix(".__main__")
            check_module(module, [verb, *arguments] if module == "hub_upload" else arguments)
        else:
            assert (verb, arguments) == ("recipes", []), f"`{command}`: `dspark` has no verb `{verb}`"
    elif words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    elif words[:2] == ["accelerate", "launch"]:
        check_command(shlex.join([*words[words.index("-m") + 1 :], "--use-cpu", "true"]))  # recipes are for GPUs


def check_module(name: str, arguments: list[str]) -> None:
    if name == "hub_upload":
        group = typer.main.get_command(app)
        group.commands[arguments[0]].make_context(arguments[0], arguments[1:])
        return
    module = importlib.import_module(name)
    if name == "training.train":
        module.parse_arguments(arguments)
    elif name in DATACLASSES:
        HfArgumentParser(getattr(module, DATACLASSES[name])).parse_args_into_dataclasses(arguments)
    else:
        assert name.startswith("benchmarks."), f"`python -m {name}` is not a command of this repository"
        module.parse_options(arguments)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder as `make demo` leaves it: a packaged drafter in `build/`."""
    folder = tmp_path_factory.mktemp("docs")
    result = CliRunner().invoke(app, ["package", str(DRAFTER), str(folder / "build" / DRAFTER.name), "--no-card"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The user's cache folder, the same for all workers: what a round costs is measured once or twice, not by each."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs-cache"
    with contextlib.suppress(FileExistsError):
        cache_with_kernels(folder)
    with contextlib.suppress(FileExistsError):
        (folder / "targets").symlink_to(Path(resolve_target(EMBEDDED_TARGET)).parent)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, workspace, cache):
    script = workspace / f"page_{page.stem}.py"  # the bare name would shadow the package `training`
    script.write_text(script_of(page), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(workspace / f"modules-{page.stem}"),
        "DSPARK_CACHE": str(cache),  # what is measured on a machine that runs tests is not for its user
    }
    result = subprocess.run(
        [sys.executable, str(script)], cwd=workspace, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{page.name} (line numbers are those of the page):\n{result.stderr[-4000:]}"


def test_every_page_with_python_is_run():
    expected = {"README.md", "index.md", "data-path.md", "lossless.md", "batching.md", "scheduling.md", "profiling.md"}
    expected |= {"training.md", "calibration.md", "evaluation.md", "convert.md"}
    assert {page.name for page in PAGES if script_of(page)} >= expected
    indented = [page.name for page in PAGES if re.search(r"^ +```(python|bash)", page.read_text(), re.MULTILINE)]
    assert not indented, "indented blocks are not found by these tests"


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands_of(page):
        check_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "dspark train --config training/configs/smollm2-135m.yaml --no-such-flag 1",
        "dspark regenerate --prompts a --output b --no-such-flag 1",
        "dspark calibrate --drafter a --prompts b --output c --no-such-flag 1",
        "dspark refit-confidence --drafter a --prompts b",
        "dspark evaluate --drafter a --prompts b --thresholds high",
        "python -m benchmarks.throughput --no-such-flag",
        "python -m benchmarks.profile --plot",
        "python -m benchmarks.memory --batch-sizes none",
        "dspark package only-one-argument",
        "dspark convert without --a-format",
        "dspark card a --no-such-flag",
        "dspark push build/my-drafter my-org/my-drafter --token abc",
        "dspark verify without-a-target",
        "dspark no-such-verb",
        "accelerate launch --config_file a.yaml -m dspark train --no-such-flag 1",
        "python -m training.no_such_module",
    ],
)
def test_a_wrong_command_is_found(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((Exception, SystemExit)):
        check_command(command)


@pytest.mark.parametrize("documented", [DSparkConfig, DSparkModel, Engine], ids=lambda documented: documented.__name__)
def test_docstring_examples_run(documented):
    runner = doctest.DocTestRunner()
    report: list[str] = []
    for example in doctest.DocTestFinder(recurse=False).find(documented, globs={}):
        runner.run(example, out=report.append)
    assert runner.tries > 0
    assert runner.failures == 0, "".join(report)


def test_api_page_names_what_is_public():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    public = set(modeling_dspark.__all__) - {"DSparkPreTrainedModel"}  # of no use to a program
    assert {name for name in public if f"::: modeling_dspark.{name}\n" not in page} == set()


def test_schedules_are_documented():
    page = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE)) == sorted(SCHEDULES)


def test_training_page_names_real_keys():
    groups = (DrafterArguments, DataArguments, DSparkTrainingArguments)
    known = {item.name for group in groups for item in fields(group)}
    table = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("## Keys")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 20
    assert named <= known
    own = {item.name for group in groups[:2] for item in fields(group)}
    assert own <= named, "every key of ours is in the table"
