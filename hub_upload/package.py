"""Assemble a Hub folder that loads with one line: weights, configuration, card, and exactly the remote code needed.

The code exists once in the repository (`modeling_dspark/`); a package is a build product, the same bytes for the same
inputs. This module talks to no network.
"""

import json
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dspark
from modeling_dspark import DSparkConfig


AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkModel"}
_DRAFTER_FILES = ("config.json", "model.safetensors", "README.md")


def remote_code_files() -> list[Path]:
    """The files of `modeling_dspark/` that remote code needs: `modeling_dspark.py` and what it imports, sorted."""
    entry = Path(modeling_dspark.__file__).parent / "modeling_dspark.py"
    needed = {entry, *(Path(path) for path in get_relative_import_files(entry))}
    return sorted(needed)


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
    scratch = Path(tempfile.mkdtemp(prefix=".package-", dir=target.parent))
    try:
        (scratch / "config.json").write_text(
            json.dumps(config | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n"
        )
        for path in (source / "model.safetensors", source / "README.md", *remote_code_files()):
            shutil.copyfile(path, scratch / path.name)
        scratch.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _checked_config(source: Path) -> dict:
    for name in _DRAFTER_FILES:
        if not (source / name).is_file():
            raise ValueError(f"`{source}` is not a drafter folder: it has no `{name}` (needed: {_DRAFTER_FILES}).")
    try:
        config = json.loads((source / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"`{source / 'config.json'}` is not JSON: {error}.") from error
    if config.get("model_type") != DSparkConfig.model_type:
        raise ValueError(f"`{source}` has `model_type` {config.get('model_type')!r}, expected 'dspark'.")
    DSparkConfig.from_dict(config)
    try:
        with safe_open(source / "model.safetensors", framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"`{source / 'model.safetensors'}` is corrupt or truncated: {error}.") from error
    return config


def _check_output(source: Path, target: Path, overwrite: bool) -> None:
    if source.resolve() == target.resolve():
        raise ValueError(f"`output` is the drafter folder itself (`{source}`); choose another folder.")
    if not target.exists():
        return
    if not overwrite:
        raise ValueError(f"`{target}` exists; pass `--overwrite` to replace an earlier package, or another folder.")
    if not (target / "modeling_dspark.py").is_file():
        raise ValueError(f"`{target}` exists and is not an earlier package, so it is not replaced.")


__all__ = ["AUTO_MAP", "package", "remote_code_files"]
