"""A JSONL file of records that a command can be stopped in and go on with: a line of settings, then a line a record.

A record is a dictionary with the number of its prompt under `prompt`. What is recorded is for the command to say.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from training.regenerate import read_jsonl, write_atomically


class RecordFile:
    """Open, or go on with, a file of records; a context manager.

    A line is written as soon as `add` is called, so a crash loses at most the record that was being written. At the end
    the lines are sorted and written anew, so that a run that was stopped and started again leaves the file of one that
    was not. A record of a prompt that has one already takes its place.

    Args:
        path (`Path`): The file; its folder exists.
        settings (`dict`): What records depend on. Records of other settings are never mixed with these.
        fields (`Iterable[str]`): The names that every record has.

    Attributes:
        records (`dict[int, dict]`): The records by prompt.

    Raises:
        ValueError: if the file was made with other settings (names them), or has other lines than records.
    """

    def __init__(self, path: Path, settings: dict[str, Any], fields: Iterable[str]):
        self._path, self._settings, self._fields = path, settings, {"prompt", *fields}
        self.records = self._resume()

    def __enter__(self) -> "RecordFile":
        self._rewrite()  # without half a line that a crash may have left
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            self._rewrite()

    def add(self, record: dict[str, Any]) -> None:
        """Write one record."""
        self.records[record["prompt"]] = record
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _rewrite(self) -> None:
        lines = [{"settings": self._settings}, *(self.records[index] for index in sorted(self.records))]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def _resume(self) -> dict[int, dict[str, Any]]:
        """Records of an earlier run by prompt, after a check that it had the same settings."""
        lines: list[Any] = list(read_jsonl(self._path)) if self._path.is_file() else []
        if not lines:
            return {}
        if not isinstance(lines[0], dict) or not isinstance(lines[0].get("settings"), dict):
            raise ValueError(f"`{self._path}` does not begin with a line of settings; choose another `output`.")
        earlier = lines[0]["settings"]
        names = sorted(set(earlier) | set(self._settings))
        different = {name: (earlier.get(name), self._settings.get(name)) for name in names}
        different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
        if different:
            raise ValueError(
                f"`{self._path}` was recorded with other settings (then, now): {different}. Go on with the same ones, or "
                "choose another `output`."
            )
        for number, line in enumerate(lines[1:], start=2):
            if not isinstance(line, dict) or set(line) != self._fields:
                raise ValueError(
                    f"`{self._path}` line {number} is not a record of this command; choose another `output`."
                )
        return {line["prompt"]: line for line in lines[1:]}


__all__ = ["RecordFile"]
