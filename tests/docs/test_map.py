"""The map in `docs/data-path.md` is that of the tree, and in the order of the import contract. No other page has a copy."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "data-path.md").read_text(encoding="utf-8")
PACKAGES = ("modeling_dspark", "training", "hub_upload", "benchmarks")


def section(package: str) -> str:
    """The part of the map that is about one package."""
    return re.split(r"^## ", MAP.split(f"\n## `{package}/`\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def named(text: str, suffix: str) -> list[str]:
    """Names in backticks that end in `suffix`."""
    return re.findall(rf"`([\w/]+{re.escape(suffix)})`", text)


def contract() -> dict[str, int]:
    """The place of each file of `modeling_dspark/` in the contract that import-linter enforces, lowest first."""
    layers = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split('containers = ["modeling_dspark"]')[1]
    lines = re.findall(r'^    "([^"]+)",', layers.split("\n]")[0], re.MULTILINE)
    return {name.strip(" ()"): -place for place, line in enumerate(lines) for name in re.split(r"[|:]", line)}


def test_every_file_of_the_data_path_has_one_line_in_its_order():
    files = re.findall(r"^\| `([\w/]+)\.py` \|", section("modeling_dspark"), re.MULTILINE)
    folder = ROOT / "modeling_dspark"
    paths = [*folder.glob("*.py"), *folder.glob("formats/*.py")]
    tree = [path.relative_to(folder).with_suffix("").as_posix() for path in paths if path.stem != "__init__"]
    assert sorted(files) == sorted(tree)
    places = contract()
    order = [places[name.replace("/", ".")] for name in files if name.replace("/", ".") in places]
    assert order == sorted(order), files
    assert len(order) >= len(list(folder.glob("*.py"))) - 1, "the contract has every file"


def test_every_room_of_the_data_path_is_described():
    rooms = {path.stem.split("_")[0] for path in (ROOT / "modeling_dspark").glob("[a-z]*.py")}
    described = re.findall(r"^\| (`[^|]+) \|", section("modeling_dspark"), re.MULTILINE)
    cells = " ".join(cell for cell in described if ".py" not in cell)
    assert {name.split("_")[0] for name in re.findall(r"`(\w+)`", cells)} >= rooms


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_every_room_and_command_is_named(package):
    folder = ROOT / package
    rooms = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    assert [room for room in rooms if f"\n| `{room}/` |" not in section(package)] == []
    commands = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert sorted(set(commands) - set(named(section(package), ".py"))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_the_map_names_exists(package):
    text, folder = section(package), ROOT / package
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    names = files | {path.rsplit("/", 1)[-1] for path in files}
    assert [name for name in named(text, ".py") if name not in names] == []
    assert [name for name in named(text, "/") if not (folder / name).is_dir() and not (ROOT / name).is_dir()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_other_pages_name_rooms_and_not_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    rooms = {path.stem.split("_")[0] for path in (ROOT / "modeling_dspark").glob("[a-z]*_*.py")}
    assert [room for room in rooms - {"configuration", "modeling"} if f"`{room}_*`" not in text] == []
    files = {path.name for path in (ROOT / "modeling_dspark").glob("[a-z]*.py")}
    assert len(files & set(named(text, ".py"))) <= 2, "the map is docs/data-path.md"
    assert "docs/data-path.md" in text
