"""A folder of safetensors shards with an index: written once, checked when read. The meaning of the tensors is elsewhere.

`index.json` holds the SHA-256, the size and the number of conversations of each shard. A shard is complete from the moment
it has its name; the index follows. So a shard that the index lacks, because a run was killed in between or because an
earlier version wrote it, is complete too: its length is checked, and it is entered.
"""

import errno
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from training.common.files import checksum, is_running, write_atomically


logger = logging.get_logger("training.data.features")


class ShardFolder:
    """Shards in a folder.

    Args:
        folder (`str` or `Path`): The folder; it is made when the first shard is written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def index(self) -> dict[str, dict[str, Any]]:
        """Entries by shard name."""
        path = self.folder / "index.json"
        return json.loads(path.read_text())["shards"] if path.is_file() else {}

    def missing(self, sizes: dict[str, int]) -> list[str]:
        """The shards that have to be written; complete shards that the index lacks are entered.

        Args:
            sizes (`dict[str, int]`): Conversations of each shard, by name.
        """
        entries = self.index()
        unlisted = {name: self._entry(name, count) for name, count in sizes.items() if name not in entries}
        adopted = {name: entry for name, entry in unlisted.items() if entry is not None}
        if adopted:
            self._enter(adopted)
        entries |= adopted
        missing = [name for name in sizes if name not in entries or not self.path(name).is_file()]
        for name in set(sizes) - set(missing):
            size = self.path(name).stat().st_size
            if size != entries[name]["bytes"]:
                logger.warning(
                    f"{self.path(name)} has {size} bytes, not {entries[name]['bytes']}: it is written again."
                )
                missing.append(name)
        return missing

    def _entry(self, name: str, num_conversations: int) -> dict[str, Any] | None:
        path = self.path(name)
        if not path.is_file():
            return None
        try:
            safe_open(path, framework="pt")  # compares the length with the header
        except SafetensorError as error:
            logger.warning(f"{path} is not complete ({error}): it is written again.")
            return None
        return {"sha256": checksum(path), "conversations": num_conversations, "bytes": path.stat().st_size}

    def _enter(self, entries: dict[str, dict[str, Any]]) -> None:
        content = {"format": 1, "shards": self.index() | entries}
        write_atomically(self.folder / "index.json", json.dumps(content, indent=1) + "\n")

    def check_space(self, needed: int) -> int:
        """The free bytes of the disk.

        Raises:
            ValueError: if `needed` bytes do not fit; names the folder and both sizes.
        """
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise self._full(needed, free)
        return free

    def _full(self, needed: int, free: int) -> ValueError:
        return ValueError(
            f"The disk of `{self.folder}` is too full for the features: {size_text(needed)} are needed, {size_text(free)} "
            "are free. Free some space and start again, which continues from here; or choose another `feature_cache`, use "
            "fewer conversations (`max_conversations`), or leave out `feature_cache` to compute features in the step."
        )

    def write(self, name: str, tensors: dict[str, torch.Tensor], *, num_conversations: int, needed: int) -> None:
        """Write a shard completely or not at all, and enter it into the index.

        Args:
            name (`str`): Name of the shard.
            tensors (`dict[str, torch.Tensor]`): Its content.
            num_conversations (`int`): For the index.
            needed (`int`): Bytes still to write, this shard included; for the message if the disk is full.

        Raises:
            ValueError: if the disk is full; nothing of the shard is left behind.
        """
        # A folder, since safetensors writes to a file with a name of its own choice first.
        scratch = self.folder / f"{_partial_prefix()}{os.getpid()}"
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            file = scratch / self.path(name).name
            save_file(tensors, file)
            _flush(file)
            entry = {"sha256": checksum(file), "conversations": num_conversations, "bytes": file.stat().st_size}
            file.replace(self.path(name))
            if os.name == "posix":
                _flush(self.folder)
            self._enter({name: entry})
        except (OSError, SafetensorError) as error:
            if not _means_full(error):
                raise
            shutil.rmtree(scratch, ignore_errors=True)  # before free space is measured
            raise self._full(needed, shutil.disk_usage(self.folder).free) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def remove_partial(self) -> None:
        """Remove the half-written shards of processes of this machine that have ended."""
        prefix = _partial_prefix()
        for path in self.folder.glob(f"{prefix}*"):
            process = path.name.removeprefix(prefix)
            if process.isdecimal() and not is_running(int(process)):
                shutil.rmtree(path, ignore_errors=True)

    def num_bytes(self, *, without: Iterable[str] = ()) -> int:
        """Size of all shards in the folder, without those named."""
        excluded = {self.path(name) for name in without}
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors") if path not in excluded)

    def open(self, name: str) -> Any:
        """A shard for reading; its checksum is verified once in each process.

        Raises:
            ValueError: if the shard is missing or damaged.
        """
        if name not in self._open:
            path = self.path(name)
            entry = self.index().get(name)
            try:
                damage = entry is not None and checksum(path) != entry["sha256"]
                shard = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                damage, shard = str(error), None
            if damage:
                reason = "its checksum is not that of the index" if damage is True else damage
                raise ValueError(f"The feature shard `{path}` is damaged ({reason}); delete it and start again.")
            self._open[name] = shard
        return self._open[name]


def _partial_prefix() -> str:
    return f".partial-{socket.gethostname()}-"


def size_text(num_bytes: int) -> str:
    """A size in words: `1.25 GB`."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= unit), (1e3, "kB"))
    return f"{num_bytes / unit:.3g} {name}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _means_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return os.strerror(errno.ENOSPC) in str(error)  # safetensors wraps what the system says in text


__all__ = ["ShardFolder", "size_text"]
