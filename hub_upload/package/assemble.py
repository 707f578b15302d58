"""Assemble a Hub folder that loads with one line: weights, configuration, card, and exactly the remote code it needs.

A package is a build product of `modeling_dspark/`: equal inputs give equal bytes. Nothing here uses the network.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dspark
from hub_upload.card.facts import FACTS_FILE, read_facts
from hub_upload.card.header import CARD
from hub_upload.card.inputs import WEIGHTS
from hub_upload.card.render import card_files, check_card
from hub_upload.convert.folders import check_output, write_folder
from hub_upload.convert.sources import CALIBRATION
from hub_upload.package.checks import checked_config
from hub_upload.package.contents import is_package_file
from hub_upload.package.manifest import write_manifest
from hub_upload.package.scan import check_text
from modeling_dspark import CostProfile


AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkModel"}
COSTS = "cost_profile.json"
_SHIM = "custom_generate/generate.py"


@dataclass(frozen=True)
class _Contents:
    """The contents of a package by path: texts and plots that are made, and files that are copied."""

    made: dict[str, bytes]
    copied: dict[str, Path]

    def sizes(self) -> dict[str, int]:
        sizes = {name: len(content) for name, content in self.made.items()}
        return sizes | {name: path.stat().st_size for name, path in self.copied.items()}


def remote_code_files() -> list[Path]:
    """The files of `modeling_dspark/` that remote code needs: `modeling_dspark.py` and what it imports, sorted."""
    entry = Path(modeling_dspark.__file__).parent / "modeling_dspark.py"
    needed = {entry, *(Path(path) for path in get_relative_import_files(entry))}
    return sorted(needed)


def custom_generate_file() -> Path:
    """The shim that makes `custom_generate="org/repo"` work."""
    return Path(modeling_dspark.__file__).parent / "custom_generate" / "generate.py"


def package(
    drafter: str | Path,
    output: str | Path,
    *,
    reports: Sequence[str | Path] | None = None,
    cost_profile: str | Path | None = None,
    target_name: str | None = None,
    with_card: bool = True,
    overwrite: bool = False,
) -> list[Path]:
    """Write a loadable Hub folder.

    Args:
        drafter (`str` or `Path`): Folder with `config.json`, `model.safetensors`, `calibration.json` if there is one, and
            either `facts.yaml`, from which the card is made, or a `README.md`.
        output (`str` or `Path`): Folder to make; written aside, then moved into place.
        reports (`Sequence`, *optional*): Reports for the card; by default those that the facts file lists.
        cost_profile (`str` or `Path`, *optional*): A measured profile, this project's or SGLang's, to be included in
            SGLang's form.
        target_name (`str`, *optional*): Hub id of the target, which replaces the config's `target_name_or_path`; by default
            `base_model` of the facts, if there are any.
        with_card (`bool`, *optional*, defaults to `True`): Without a card, the package serves to measure for the first one.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `output`, if it is an earlier package.

    Returns:
        `list[Path]`: the files written, sorted.

    Raises:
        ValueError: if a file is missing, broken or private, or if `output` exists and may not be replaced.
    """
    source, target = Path(drafter), Path(output)
    check_output(target, is_package_file, overwrite=overwrite, inputs=[source])
    contents = _contents(
        source, reports=reports, cost_profile=cost_profile, target_name=target_name, with_card=with_card
    )
    return write_folder(target, lambda folder: _write(folder, contents))


def planned(
    drafter: str | Path,
    *,
    reports: Sequence[str | Path] | None = None,
    cost_profile: str | Path | None = None,
    target_name: str | None = None,
    with_card: bool = True,
) -> dict[str, int]:
    """Sizes in bytes of the files that `package` would write, by path, without the manifest; writes nothing.

    Args:
        drafter (`str` or `Path`): As for `package`.
        reports (`Sequence`, *optional*): As for `package`.
        cost_profile (`str` or `Path`, *optional*): As for `package`.
        target_name (`str`, *optional*): As for `package`.
        with_card (`bool`, *optional*, defaults to `True`): As for `package`.
    """
    contents = _contents(
        Path(drafter), reports=reports, cost_profile=cost_profile, target_name=target_name, with_card=with_card
    )
    return dict(sorted(contents.sizes().items()))


def _contents(
    source: Path,
    *,
    reports: Sequence[str | Path] | None,
    cost_profile: str | Path | None,
    target_name: str | None,
    with_card: bool,
) -> _Contents:
    config = checked_config(source, _target_name(source, target_name), with_card=with_card)
    made = {"config.json": _json(config | {"auto_map": AUTO_MAP}, sort=True)}
    if with_card:
        made |= _card(source, reports)
    if (source / CALIBRATION).is_file():
        made[CALIBRATION] = (source / CALIBRATION).read_bytes()
    if cost_profile is not None:
        made[COSTS] = _json(CostProfile.load(cost_profile).to_sglang(config["block_size"]))
    for name, content in made.items():
        if not name.endswith(".png"):
            check_text(str(source / name), _text(source / name, content))
    code = {path.name: path for path in remote_code_files()}
    code[_SHIM] = custom_generate_file()
    return _Contents(made, {WEIGHTS: source / WEIGHTS} | code)


def _target_name(source: Path, given: str | None) -> str | None:
    """The Hub id of the target for the config: the card's, so that the two agree.

    Raises:
        ValueError: if the given id differs from that of the facts.
    """
    if not (source / FACTS_FILE).is_file():
        return given
    named = read_facts(source / FACTS_FILE).base_model
    if given not in (None, named):
        raise ValueError(
            f"`target` is `{given}`, and `base_model` in `{source / FACTS_FILE}` `{named}`: the card would name another target."
        )
    return named


def _write(folder: Path, contents: _Contents) -> None:
    """Write all files, the manifest last, with modes that do not depend on the user's umask."""
    for name, content in contents.made.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name, path in contents.copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    write_manifest(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _card(source: Path, reports: Sequence[str | Path] | None) -> dict[str, bytes]:
    if (source / FACTS_FILE).is_file():
        files = card_files(source, reports=[Path(path) for path in reports] if reports else None)
        check_card(source, files)
        return files
    if reports:
        raise ValueError(
            f"`reports` need a card made from `{source / FACTS_FILE}`, and there is none; write it, or leave the reports out."
        )
    return {CARD: (source / CARD).read_bytes()}


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` is not a text in UTF-8: {error}.") from error


def _json(content: dict[str, Any], *, sort: bool = False) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=sort) + "\n").encode()


__all__ = ["AUTO_MAP", "COSTS", "package", "planned", "remote_code_files"]
