"""What must not leave the machine: local paths and access tokens in the texts of a package."""

import re
from collections.abc import Iterator
from typing import Any


_LOCAL = re.compile(r"^(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]|file:)")
_IN_TEXT = (
    (
        "a local path",
        re.compile(r"(?<![\w/.:-])(?:/(?:home|root|Users|tmp|mnt|scratch)/|[A-Za-z]:\\Users\\)[\w.\-/\\]+"),
    ),
    ("an access token", re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")),
)


def local_paths(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a config whose value is a path on this machine, at any depth, with the value."""
    for name, value in config.items():
        for path, text in _texts(name, value):
            if _LOCAL.match(text) or (path.endswith("_name_or_path") and text.count("/") > 1):
                yield path, text


def check_text(name: str, text: str) -> None:
    """Refuse a text with a local path or an access token.

    Raises:
        ValueError: names the file and what was found; a token is not repeated.
    """
    for kind, pattern in _IN_TEXT:
        if found := pattern.search(text):
            shown = f" ({found[0]})" if kind == "a local path" else ""
            raise ValueError(f"`{name}` holds {kind}{shown}, which would be published; remove it.")


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(f"{path}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(f"{path}.{index}", inner)


__all__ = ["check_text", "local_paths"]
