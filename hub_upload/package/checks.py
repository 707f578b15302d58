"""Checks that a drafter can be published, made before a package is written."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from hub_upload.card.facts import FACTS_FILE
from hub_upload.card.header import CARD
from hub_upload.card.inputs import WEIGHTS
from hub_upload.convert.sources import CALIBRATION, open_checkpoint
from hub_upload.package.scan import scan
from modeling_dspark import DSparkConfig
from modeling_dspark.formats.load import read_config


_LOCAL = re.compile(r"^(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]|file:)")


def checked_config(source: Path, target_name: str | None, *, with_card: bool = True) -> dict[str, Any]:
    """The drafter's config, once it and the weights are found fit to be published.

    Args:
        source (`Path`): The drafter's folder.
        target_name (`str`, *optional*): Hub id of the target, in the place of the config's `target_name_or_path`.
        with_card (`bool`, *optional*, defaults to `True`): Whether there has to be a card, or facts to make it from.

    Raises:
        ValueError: if a file is missing or broken, or a field names something on this machine.
    """
    for name in ("config.json", WEIGHTS):
        if not (source / name).is_file():
            raise ValueError(f"`{source}` has no `{name}`. A drafter folder needs config.json and {WEIGHTS}.")
    if with_card and not any((source / name).is_file() for name in (FACTS_FILE, CARD)):
        raise ValueError(
            f"`{source}` has no card: write `{FACTS_FILE}`, from which `python -m hub_upload card` makes one, or a `{CARD}`; "
            "`--no-card` makes a package to measure with."
        )
    config = read_config(source)
    if config.get("model_type") != DSparkConfig.model_type:
        raise ValueError(f"`{source}` has `model_type` {config.get('model_type')!r}, expected 'dspark'.")
    if target_name is not None:
        config["target_name_or_path"] = target_name
    _check_private(source, config, is_named=target_name is not None)
    try:
        DSparkConfig.from_dict(config)
    except StrictDataclassError as error:
        raise ValueError(f"`{source / 'config.json'}`: {error}.") from error
    _check_loadable(source, config)
    if problems := scan(source / WEIGHTS, str(source / WEIGHTS)):
        raise ValueError(f"{'; '.join(problems)}: this would be published; remove it.")
    return config


def _check_loadable(source: Path, config: dict[str, Any]) -> None:
    """Refuse weights that do not fit the config, another drafter's calibration, and NaN of a diverged training."""
    checkpoint = open_checkpoint(str(source))
    if checkpoint.config.confidence_temperatures != config.get("confidence_temperatures"):
        raise ValueError(
            f"`{source / 'config.json'}` has no `confidence_temperatures`, but {CALIBRATION} has; take both from one run "
            "of `python -m training.calibrate`."
        )
    for name, tensor in checkpoint.tensors.items():
        if not bool(tensor.read().isfinite().all()):
            raise ValueError(f"`{source / WEIGHTS}` has values in `{name}` that are not numbers (NaN or infinity).")


def _check_private(source: Path, config: dict[str, Any], *, is_named: bool) -> None:
    found = dict(_local_paths(config))
    target = config.get("target_name_or_path")
    if isinstance(target, str) and not is_named and Path(target).is_dir():  # `runs/target` looks like a Hub id
        found["target_name_or_path"] = target
    if config.get("_name_or_path"):
        found["_name_or_path"] = config["_name_or_path"]
    if "target_name_or_path" in found:
        raise ValueError(
            f"`{source / 'config.json'}` names its target by a path on this machine "
            f"(`target_name_or_path`: {found['target_name_or_path']!r}); pass `--target ORG/NAME`, its Hub id."
        )
    if found:
        raise ValueError(f"`{source / 'config.json'}` has fields with paths of this machine: {found}; remove them.")


def _local_paths(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a config, at any depth, whose value is a path on this machine; with the value."""
    for name, value in config.items():
        for path, text in _texts(name, value):
            if _LOCAL.match(text) or (path.endswith("_name_or_path") and text.count("/") > 1):
                yield path, text


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(f"{path}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(f"{path}.{index}", inner)


__all__ = ["checked_config"]
