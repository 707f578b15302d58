"""Files that survive a kill: JSONL that is appended line by line, and files that are replaced as a whole.

Knows nothing of what the lines mean.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any


if sys.platform != "win32":
    import fcntl


def read_jsonl(path: str | Path) -> list[dict]:
    """Read a JSONL file; a last line cut by a crash is dropped, any other broken line is an error."""
    if not Path(path).is_file():
        raise ValueError(f"There is no file `{path}`.")
    # Not `splitlines`, which also splits at separators that JSON strings may contain. A cut may fall inside a character.
    lines = [line for line in Path(path).read_bytes().split(b"\n") if line]
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"`{path}` line {number + 1} is not JSON: {error}.") from error
    return records


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file such that it has the old content or the new one, at any moment. Text is written as UTF-8."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


class JsonlAppender:
    """Appends records to a JSONL file, each of them with one call of the operating system, for use in a `with` block.

    Half a line that a crash left at the end is cut off first, so that the next record starts on a line of its own.

    Raises:
        ValueError: if another process appends to the file (not seen on Windows).
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lifts it when the process ends
            except BlockingIOError as error:
                self._file.close()
                raise ValueError(f"Another process is writing to `{path}`; let it end, or end it first.") from error
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def __enter__(self) -> "JsonlAppender":
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it is in the file when this returns, also if the process is killed after."""
        self._file.write((json.dumps(record) + "\n").encode())


__all__ = ["JsonlAppender", "read_jsonl", "write_atomically"]
