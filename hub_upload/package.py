"""Assemble a Hub folder that loads with one line: weights, configuration, card, and exactly the remote code needed.

The code exists once in the repository (`modeling_dspark/`); a package is a build product, the same bytes for the same
inputs. This module talks to no network.
"""

import json
import shutil
import tempfile
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dspark
from modeling_dspark import DSparkConfig


AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkModel"}
_DRAFTER_FILES = ("config.json", "model.safetensors", "README.md")
_OPTIONAL_FILES = ("calibration.json",)  # temperatures and what they are worth, in SGLang's form


def remote_code_files() -> list[Path]:
    """The files of `modeling_dspark/` that remote code needs: `modeling_dspark.py` and what it imports, sorted."""
    entry = Path(modeling_dspark.__file__).parent / "modeling_dspark.py"
    needed = {entry, *(Path(path) for path in get_relative_import_files(entry))}
    return sorted(needed)


def custom_generate_file() -> Path:
    """The shim that makes `custom_generate="org/repo"` work."""
    return Path(modeling_dspark.__file__).parent / "custom_generate" / "generate.py"


def package(drafter: str | Path, output: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write a loadable Hub folder.

    Args:
        drafter (`str` or `Path`): Folder with `config.json`, `model.safetensors` and `README.md` (the card).
        output (`str` or `Path`): Folder to make; written aside and moved into place, so it is never half there.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `output`, if it is an earlier package.

    Returns:
        `list[Path]`: the files written, sorted.

    Raises:
        ValueError: if a file is missing or broken, or `output` exists and may not be replaced.
    """
    source, target = Path(drafter), Path(output)
    config = _checked_config(source)
    _check_output(source, target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=".package-", dir=target.parent))
    new, old = workspace / "new", workspace / "old"
    try:
        new.mkdir()
        (new / "config.json").write_text(json.dumps(config | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n")
        optional = [source / name for name in _OPTIONAL_FILES if (source / name).is_file()]
        for path in (source / "model.safetensors", source / "README.md", *optional, *remote_code_files()):
            shutil.copyfile(path, new / path.name)
        (new / "custom_generate").mkdir()
        shutil.copyfile(custom_generate_file(), new / "custom_generate" / "generate.py")
        if target.exists():
            target.rename(old)
        new.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(workspace, ignore_errors=True)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _checked_config(source: Path) -> dict:
    for name in _DRAFTER_FILES:
        if not (source / name).is_file():
            hint = "; write its model card there first" if name == "README.md" else ""
            raise ValueError(f"`{source}` has no `{name}`{hint}. A drafter folder needs {', '.join(_DRAFTER_FILES)}.")
    try:
        config = json.loads((source / "config.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`{source / 'config.json'}` is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"`{source / 'config.json'}` is not a JSON object.")
    if config.get("model_type") != DSparkConfig.model_type:
        raise ValueError(f"`{source}` has `model_type` {config.get('model_type')!r}, expected 'dspark'.")
    try:
        DSparkConfig.from_dict(config)
    except StrictDataclassError as error:
        raise ValueError(f"`{source / 'config.json'}`: {error}.") from error
    try:
        with safe_open(source / "model.safetensors", framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"`{source / 'model.safetensors'}` is corrupt or truncated: {error}.") from error
    return config


def _check_output(source: Path, target: Path, overwrite: bool) -> None:
    inside, outside = source.resolve(), target.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise ValueError(
            f"`output` (`{target}`) is the drafter folder itself, or one lies inside the other (`{source}`); choose another "
            "folder."
        )
    if target.is_symlink():
        raise ValueError(f"`{target}` is a symbolic link; give the folder itself.")
    if not target.exists():
        return
    if not overwrite:
        raise ValueError(f"`{target}` exists; pass `--overwrite` to replace an earlier package, or another folder.")
    if not target.is_dir() or not (target / "config.json").is_file():
        raise ValueError(f"`{target}` exists and is not an earlier package, so it is not replaced.")
    written = {*_DRAFTER_FILES, *_OPTIONAL_FILES, "custom_generate", *(path.name for path in remote_code_files())}
    foreign = sorted(path.name for path in target.iterdir() if path.name not in written)
    if foreign:
        raise ValueError(f"`{target}` holds files that no package has ({foreign[:5]}), so it is not replaced.")


__all__ = ["AUTO_MAP", "package", "remote_code_files"]
