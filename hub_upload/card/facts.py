"""The author's facts file, checked when read: what no report can say, such as names, license, training and limits."""

import re
import reprlib  # YAML aliases of aliases are long when written out
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hub_upload.card.quotes import Source, read_source


FACTS_FILE = "facts.yaml"
_GUIDE = "`docs/guides/card.md` has an example"
_REQUIRED = ("name", "repo_id", "base_model", "license", "training", "thinking")
_LISTS = ("language", "datasets", "limits", "commands", "reports")


@dataclass(frozen=True)
class Facts:
    """The content of a facts file. `summary`, `training`, `thinking` and `limits` are templates that may quote sources.

    Attributes:
        name (`str`): Title of the card.
        repo_id (`str`): The Hub repository of the drafter.
        base_model (`str`): Hub id of the target.
        license (`str`): The Hub's identifier of the license, e.g. `apache-2.0`.
        training (`str`): What the drafter was trained on, and how.
        thinking (`str`): The thinking mode of the target during training, or that it has none.
        summary (`str`, *optional*): More about the drafter.
        limits (`tuple[str, ...]`, *optional*): Limits beyond those of every drafter.
        language, datasets (`tuple[str, ...]`, *optional*): As in the metadata of the Hub.
        license_link (`str`, *optional*): For a custom license (`license: other`).
        citation (`str`, *optional*): BibTeX of this drafter; every card has the paper's.
        commands (`tuple[str, ...]`, *optional*): The commands that made the drafter, in order.
        benchmark (`str`, *optional*): Hub id of the benchmark dataset whose tasks are the sets of prompts; without it
            there are no `.eval_results`.
        stated (`dict`, *optional*): Numbers that the author states about the training.
        reports (`tuple[str, ...]`, *optional*): Reports of this drafter; relative to the facts file.
    """

    name: str
    repo_id: str
    base_model: str
    license: str
    training: str
    thinking: str
    summary: str = ""
    limits: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    license_link: str = ""
    citation: str = ""
    commands: tuple[str, ...] = ()
    benchmark: str = ""
    stated: dict[str, Any] = field(default_factory=dict)
    reports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            self._check(name, value)
        for name in ("repo_id", "base_model", "benchmark"):
            if value := getattr(self, name):
                _check_repo_id(name, value)

    def _check(self, name: str, value: Any) -> None:
        if name == "stated":
            if not isinstance(value, dict):
                raise ValueError(f"`stated` must be a mapping of names to numbers, got {reprlib.repr(value)}.")
            return
        parts = value if name in _LISTS else (value,)
        if not isinstance(parts, tuple) or not all(isinstance(part, str) for part in parts):
            kind = "a list of texts" if name in _LISTS else "a text"
            raise ValueError(f"`{name}` must be {kind}, got {reprlib.repr(value)}.")
        if name in _REQUIRED and not value.strip():
            raise ValueError(f"`{name}` must not be empty.")
        if any("```" in part for part in parts):
            raise ValueError(f"`{name}` must be prose, without fenced blocks.")


def read_facts(path: Path) -> Facts:
    """Read a facts file.

    Raises:
        ValueError: names the file, the field, and what is wrong with it.
    """
    if not path.is_file():
        raise ValueError(f"There is no facts file `{path}`; {_GUIDE}.")
    source = read_source(path)
    known = {item.name for item in fields(Facts)}
    data = source.data
    if not isinstance(data, dict):
        raise ValueError(f"`{path}` must be a mapping of fields; {_GUIDE}.")
    missing, unknown = [name for name in _REQUIRED if name not in data], sorted(set(data) - known, key=str)
    if missing or unknown:
        raise ValueError(f"`{path}` lacks {missing} and has unknown fields {unknown}; {_GUIDE}.")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
    try:
        return Facts(**values)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from error


def stated(facts: Facts) -> Source:
    """The author's own numbers, as a source."""
    return Source("stated", facts.stated)


def _check_repo_id(name: str, value: str) -> None:
    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise ValueError(f"`{name}` must be a Hub id, e.g. `org/name`: {error}") from error
    if not re.fullmatch(r"[^/]+/[^/]+", value):
        raise ValueError(f"`{name}` must be a Hub id with its owner, e.g. `org/name`, got {value!r}.")


__all__ = ["FACTS_FILE", "Facts", "read_facts", "stated"]
