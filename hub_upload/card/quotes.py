"""Where the numbers of a card come from: files of measurements and settings, quoted by a path into them.

A number in the text itself, outside of a quotation, is refused (`check_numbers`, `check_prose`). So the rule "a number that is
in no report is in no card" does not rest on care.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"[^\W\d]\w*")  # a word that begins with a letter: `gsm8k`, `Q4_1`
_FORM = re.compile(r",?(\.\d)?[dfg%]?")  # digits to show, and none to add
_TAG = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_TEXT = r"(\"[^\"{}]*\"|'[^'{}]*')"
_QUOTATION = re.compile(rf"\{{\{{\s*\w+\.quote\({_TEXT}(,\s*({_TEXT}|tables\.\w+))?\)\s*\}}\}}")


@dataclass(frozen=True)
class Source:
    """A file, or part of one, that a card may quote.

    Attributes:
        name (`str`): What messages call it.
        data (`Any`): Its content.
    """

    name: str
    data: Any

    def quote(self, path: str = "", form: str | Callable[[Any], str] = "") -> str:
        """A value of the source, written out: the only way for a number into a card.

        Args:
            path (`str`, *optional*): Keys and list indices with dots between them, e.g. `settings.temperature`; by default
                the whole content.
            form (`str` or `Callable[[Any], str]`, *optional*): How it is written: a format such as `.2f`, or a function of
                the value alone.

        Raises:
            ValueError: if there is nothing at `path`, or `form` is not a plain number format.
        """
        value = self.at(path)
        if value is None:
            raise ValueError(f"`{self.name}` has no `{path}`, which the card quotes.")
        if not callable(form) and not _FORM.fullmatch(form):
            raise ValueError(f"`{self.name}`: `{path}` is quoted as {form!r}; a form is like `,`, `.2f` or `.1%`.")
        if not callable(form) and isinstance(value, dict | list):
            raise ValueError(f"`{self.name}`: `{path}` is not a single value; quote a value within it.")
        return form(value) if callable(form) else format(value, form)

    def has(self, path: str) -> bool:
        """Whether there is something at `path`."""
        return self.at(path) is not None

    def at(self, path: str) -> Any:
        """The content at `path`; `None` where there is nothing."""
        value = self.data
        for key in path.split(".") if path else ():
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value


def read_source(path: Path) -> Source:
    """Read a JSON or YAML file.

    Raises:
        ValueError: if the file is missing or is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return Source(
            path.name,
            json.loads(text, parse_constant=_refuse_constant) if path.suffix == ".json" else yaml.safe_load(text),
        )
    except FileNotFoundError:
        raise ValueError(f"There is no file `{path}`.") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"`{path}` cannot be read as {path.suffix.lstrip('.').upper()}: {error}.") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that can be quoted")


def check_numbers(name: str, text: str) -> None:
    """Refuse a text with a number outside of its Jinja tags.

    Fenced blocks hold examples and are not read; digits within a name that begins with a letter are not a number.

    Raises:
        ValueError: names the lines, and says what to do.
    """
    prose = _TAG.sub("_", _FENCE.sub("", text))
    lines = [line.strip() for line in prose.splitlines() if any(map(_is_numeral, _NAME.sub(_without_name, line)))]
    if lines:
        raise ValueError(
            f"Every number of a card comes out of a report, and `{name}` has lines with a number that does not: "
            + "; ".join(f"`{line}`" for line in lines[:5])
            + '. Quote it, e.g. `{{ calibration.quote("num_samples", ",") }}`, or state it in `stated` of the facts file '
            'and write `{{ stated.quote("NAME") }}` in `training`.'
        )


def check_prose(name: str, text: str) -> None:
    """Refuse a text of an author that has numbers, or anything of Jinja but quotations: a loop need not end.

    Raises:
        ValueError: names the text, and what it may not have.
    """
    rest = _QUOTATION.sub("_", text)
    if tag := re.search(r"\{[{%#].*", rest):
        raise ValueError(
            f'`{name}` of the card cannot be filled in: it may have `{{{{ SOURCE.quote("PATH", "FORM") }}}}` in it and '
            f"nothing else of Jinja, got `{tag[0]}`."
        )
    check_numbers(name, rest)


def _is_numeral(char: str) -> bool:
    return unicodedata.category(char).startswith("N")  # digits, and also fractions, superscripts, Roman numerals


def _without_name(word: re.Match[str]) -> str:
    return word[0] if _is_numeral(word[0][0]) else ""


def slug(name: str) -> str:
    """A name for files and tasks: lower-case letters of any script, digits and underscores."""
    return re.sub(r"[\W_]+", "_", name.lower()).strip("_") or "_"


__all__ = ["Source", "check_numbers", "check_prose", "read_source", "slug"]
