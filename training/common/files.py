"""Files that survive a kill: JSONL that is appended line by line, and files that are replaced as a whole.

The meaning of the lines belongs to the callers.
"""

import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging


if sys.platform != "win32":
    import fcntl


logger = logging.get_logger(__name__)


def read_jsonl(path: str | Path) -> list[dict]:
    """Read a JSONL file; a last record that a crash cut is left out with a warning, other broken lines are errors."""
    if not Path(path).is_file():
        raise ValueError(f"There is no file `{path}`.")
    # Not `splitlines`, which also splits at separators that JSON strings may contain. A cut may fall inside a character.
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines) and line.startswith(b"{"):  # no line break follows, as after a crash
                logger.warning(f"`{path}` ends with half a record, line {number}, which is left out.")
                break
            raise ValueError(f"`{path}` line {number} is not JSON: {error}.") from error
    return records


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that has its old content or its new content at any moment. Text is written as UTF-8."""
    _remove_orphans(path)
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


def _remove_orphans(path: Path) -> None:
    """Remove the files of processes that were killed in `write_atomically`."""
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process = scratch.suffixes[-2][1:]
        if process.isdecimal() and not is_running(int(process)):
            scratch.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether a process of this machine exists; where asking is not harmless, it counts as running."""
    if sys.platform == "win32":  # signal 0 can end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Lock a folder or a file for this process; the system releases it when the process ends.

    Raises:
        ValueError: if another process holds it (not detected on Windows).
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"Another process is writing to `{path}`; wait for it, or end it.") from error


class JsonlAppender:
    """Appends records to a JSONL file, one system call per record, for use in a `with` block.

    Before the first record, or at the end of the block, half a record that a crash left is cut off, and a whole one
    without a line break gets it. If the block raises before it writes, the file stays as it is.

    Raises:
        ValueError: if another process appends to the file (not detected on Windows).
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file.fileno(), path)
        except ValueError:
            self._file.close()
            raise
        self._path, self._at_line_start = path, False

    def __enter__(self) -> "JsonlAppender":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._at_line_start:
            self._end_last_line()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; once this returns, a kill cannot lose it."""
        if not self._at_line_start:
            self._end_last_line()
        data = (json.dumps(record) + "\n").encode()
        while data:  # a disk that is almost full takes only some of it
            data = data[self._file.write(data) :]

    def _end_last_line(self) -> None:
        content = self._path.read_bytes()
        begin = content.rfind(b"\n") + 1
        try:
            json.loads(content[begin:])
        except ValueError:
            self._file.truncate(begin)
        else:
            self._file.write(b"\n")
        self._at_line_start = True


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


__all__ = ["JsonlAppender", "checksum", "is_running", "only_writer", "read_jsonl", "write_atomically"]
