"""Tensors of a checkpoint's safetensors files: names, dtypes and shapes at once, values on demand.

Each read maps its file anew and lets go of it: mapped pages count as memory of the process, and a checkpoint may be larger
than that.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file


_PART_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` as safetensors names it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, or the given rows of its first dimension, in its own dtype."""
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
            if not self.shape:
                return tensor.clone()
            rows = range(self.shape[0]) if rows is None else rows
            if isinstance(rows, range):
                return tensor[rows.start : rows.stop].clone()
            return tensor[rows]

    def parts(self, rows: Sequence[int] | None = None) -> Iterator[torch.Tensor]:
        """The tensor, or the given rows in their order, a few megabytes at a time."""
        if not self.shape:
            yield self.read()
            return
        rows = range(self.shape[0]) if rows is None else rows
        at_once = max(1, _PART_BYTES // max(1, self.read(range(1)).nbytes))
        for first in range(0, len(rows), at_once):
            yield self.read(rows[first : first + at_once])


def stored_tensors(name_or_path: Any, **file_arguments: Any) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, in one file or in shards; none for a checkpoint without safetensors files.

    Args:
        name_or_path (`str` or `Path`): Folder or Hub id.
        file_arguments: As for [`~transformers.utils.cached_file`] (`revision`, `token`, ...).

    Raises:
        ValueError: if a file is corrupt, truncated or missing, or if two files hold the same tensor.
    """
    where: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, **file_arguments}
    # Offline, nobody can say whether there is an index that is not in the cache.
    index = cached_file(
        name_or_path, "model.safetensors.index.json", _raise_exceptions_for_connection_errors=False, **where
    )
    names = ["model.safetensors"] if index is None else _shards_of(Path(index))
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        path = cached_file(name_or_path, name, **where)
        if path is None and index is not None:
            raise ValueError(f"`{name_or_path}` lacks the file `{name}` that its index names.")
        if path is None:
            continue
        shard = read_header(Path(path))
        if twice := sorted(tensors.keys() & shard.keys()):
            raise ValueError(f"`{name_or_path}` has tensors in more than one of its files: {', '.join(twice)}.")
        tensors |= shard
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of their names.

    Raises:
        ValueError: if the file is corrupt or truncated.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in sorted(file.keys())}
            return {
                name: StoredTensor(path, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"The weight file `{path}` is corrupt or truncated ({error}). Download or copy it again."
        ) from error


def _shards_of(index: Path) -> list[str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
        content["metadata"]  # Transformers cannot do without
        if outside := [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]:
            raise ValueError(f"it names files outside of the checkpoint, {outside}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"`{index}` is not an index of shards: {error}.") from error
    return names


__all__ = ["StoredTensor", "read_header", "stored_tensors"]
