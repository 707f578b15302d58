"""The files of `modeling_dspark/` can be shipped as remote code: Transformers finds all of them, and nothing else is needed.

`transformers.dynamic_module_utils` finds the files to copy by regular expressions over the text of each file, and checks
imports it takes for packages. What it would misread fails here, and not on a user's machine.
"""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

import modeling_dspark
from hub_upload.package import remote_code_files


FOLDER = Path(modeling_dspark.__file__).parent
SHIPPED = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
ALLOWED = {
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "tqdm",
}  # what Transformers itself requires

shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def relative_imports_of(path: Path) -> list[ast.ImportFrom]:
    return [node for node in imports_of(path) if isinstance(node, ast.ImportFrom) and node.level > 0]


def absolute_modules_of(path: Path) -> set[str]:
    """Top-level names of absolute imports, also of those in functions and `try:`."""
    modules = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0:
            modules.add(node.module.split(".")[0])
    return modules


def test_modeling_dspark_reaches_every_file():
    entry = FOLDER / "modeling_dspark.py"
    reached = {entry, *(Path(path) for path in get_relative_import_files(entry))}
    assert sorted(reached) == SHIPPED
    assert remote_code_files() == SHIPPED


def test_folder_holds_nothing_that_would_be_left_behind():
    others = {path.name for path in FOLDER.iterdir() if path.name != "__pycache__"} - {path.name for path in SHIPPED}
    assert others == {
        "__init__.py",
        "py.typed",
        "custom_generate",
        "formats",
        "kernels",
    }  # kernels are shipped as text


@shipped
def test_imports_are_what_transformers_requires(path):
    allowed = ALLOWED | sys.stdlib_module_names
    assert absolute_modules_of(path) - allowed == set()
    assert set(get_imports(path)) - allowed == set()


@shipped
def test_no_absolute_import_of_the_package_itself(path):
    own = {FOLDER.name, *(file.stem for file in SHIPPED)}
    assert absolute_modules_of(path) & own == set()


@shipped
def test_relative_imports_have_the_one_form_that_is_followed(path):
    for node in relative_imports_of(path):
        where = f"{path.name}:{node.lineno}"
        assert node.level == 1, f"{where}: an import from a parent folder is not found in a Hub folder"
        assert node.module is not None, f"{where}: `from . import x` is not followed; write `from .x import name`"
        assert "." not in node.module, f"{where}: a Hub folder is flat"


@shipped
def test_no_other_line_looks_like_a_relative_import(path):
    # Transformers' regular expressions also match lines of docstrings, and would look for a file of that name.
    assert sorted(get_relative_imports(path)) == sorted({node.module for node in relative_imports_of(path)})


@shipped
def test_all_names_what_the_file_defines(path):
    module = importlib.import_module(f"modeling_dspark.{path.stem}")
    names = getattr(module, "__all__", [])
    assert names, f"{path.name} has no `__all__`"
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


# A room may import those before it; those of one line leave each other alone.
ROOMS = [
    {"configuration", "compat"},
    {"model"},
    {"target", "fused", "schedule"},
    {"draft"},
    {"engine"},
    {"generate"},
    {"modeling"},
]


def place_of(module: str) -> tuple[int, str]:
    room = module.split("_")[0]
    return next(place for place, rooms in enumerate(ROOMS) if room in rooms), room


@shipped
def test_rooms_import_downward(path):
    place, room = place_of(path.stem)
    for node in relative_imports_of(path):
        below, imported = place_of(node.module)
        assert imported == room or below < place, f"{path.name}:{node.lineno} imports {node.module}, which comes later"


@shipped
def test_the_engine_is_left_alone(path):
    """Whoever wants to watch an engine observes it: nobody assigns to what is its own."""
    assert path.name == "engine_loop.py" or assignments_to_engines(path) == []


@pytest.mark.parametrize("package", ["training", "hub_upload", "benchmarks"])
def test_other_packages_leave_the_engine_alone(package):
    files = sorted((FOLDER.parent / package).rglob("*.py"))
    assert files
    assert [found for path in files for found in assignments_to_engines(path)] == []


def test_an_assignment_to_an_engine_is_found(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(
        "engine.accept = watch\nself.engine.packed.cache.rows.lengths = [1]\nengine.rows.lengths[0] += 1\nengine = 1\n"
    )
    assert len(assignments_to_engines(file)) == 3


def assignments_to_engines(path: Path) -> list[str]:
    """Places that write an attribute of an engine or of its parts, by the names these go by, or `setattr` it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "any")]
        for target in targets:
            inner = target
            while isinstance(inner, (ast.Attribute, ast.Subscript)):
                inner = inner.value
                name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
                if name.strip("_") in ("engine", "drafting"):
                    found.append(f"{path.name}:{node.lineno}")
                    break
    return found
