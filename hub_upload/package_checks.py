"""What `package` checks before it writes: that the drafter can be published, and that the output is free."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from hub_upload.card import CARD
from hub_upload.card_inputs import WEIGHTS
from hub_upload.facts import FACTS_FILE
from hub_upload.private import check_text, local_paths
from modeling_dspark import DSparkConfig


def checked_config(source: Path, target_name: str | None, *, with_card: bool = True) -> dict[str, Any]:
    """The drafter's config, after a check that it and the weights can be published.

    Args:
        source (`Path`): The drafter's folder.
        target_name (`str`, *optional*): Hub id of the target, in the place of the config's `target_name_or_path`.
        with_card (`bool`, *optional*, defaults to `True`): Whether there has to be a card, or facts to make one of.

    Raises:
        ValueError: if a file is missing or broken, or a field says something of this machine.
    """
    for name in ("config.json", WEIGHTS):
        if not (source / name).is_file():
            raise ValueError(f"`{source}` has no `{name}`. A drafter folder needs config.json and {WEIGHTS}.")
    if with_card and not any((source / name).is_file() for name in (FACTS_FILE, CARD)):
        raise ValueError(
            f"`{source}` has no card: write `{FACTS_FILE}`, of which `python -m hub_upload card` makes one, or a `{CARD}`; "
            "`--no-card` makes a package to be measured."
        )
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`{source / 'config.json'}` is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"`{source / 'config.json'}` is not a JSON object.")
    if config.get("model_type") != DSparkConfig.model_type:
        raise ValueError(f"`{source}` has `model_type` {config.get('model_type')!r}, expected 'dspark'.")
    if target_name is not None:
        config["target_name_or_path"] = target_name
    _check_private(source, config, is_named=target_name is not None)
    try:
        DSparkConfig.from_dict(config)
    except StrictDataclassError as error:
        raise ValueError(f"`{source / 'config.json'}`: {error}.") from error
    try:
        with safe_open(source / WEIGHTS, framework="pt") as file:
            check_text(str(source / WEIGHTS), json.dumps(file.metadata() or {}))
    except SafetensorError as error:
        raise ValueError(f"`{source / WEIGHTS}` is corrupt or truncated: {error}.") from error
    return config


def _check_private(source: Path, config: dict[str, Any], *, is_named: bool) -> None:
    found = dict(local_paths(config))
    target = config.get("target_name_or_path")
    if isinstance(target, str) and not is_named and Path(target).is_dir():  # `runs/target` reads like a Hub id
        found["target_name_or_path"] = target
    if config.get("_name_or_path"):
        found["_name_or_path"] = config["_name_or_path"]
    if "target_name_or_path" in found:
        raise ValueError(
            f"`{source / 'config.json'}` names its target by a path on this machine "
            f"(`target_name_or_path`: {found['target_name_or_path']!r}); pass `--target ORG/NAME`, its Hub id."
        )
    if found:
        raise ValueError(
            f"`{source / 'config.json'}` has fields that say where it came from on this machine: {found}; remove them."
        )


def check_output(source: Path, target: Path, *, overwrite: bool, patterns: Sequence[str]) -> None:
    """Refuse an output that is not free, unless it is an earlier package and may be replaced.

    Args:
        source (`Path`): The drafter's folder.
        target (`Path`): The output.
        overwrite (`bool`): Whether an earlier package may be replaced.
        patterns (`Sequence[str]`): Of the paths that a package may hold.

    Raises:
        ValueError: says why, and what to do.
    """
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
    paths = [path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()]
    foreign = sorted(path for path in paths if not any(fnmatchcase(path, pattern) for pattern in patterns))
    if foreign:
        raise ValueError(f"`{target}` holds files that no package has ({foreign[:5]}), so it is not replaced.")


__all__ = ["check_output", "checked_config"]
