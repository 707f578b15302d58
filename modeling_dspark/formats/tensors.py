"""Which tensors a checkpoint has, and their bytes, without loading it: safetensors files read with the standard library.

A file is eight bytes with the length of its header, the header in JSON, and the tensors. Plain reads, since pages of a
mapped file count as memory of the process, and a checkpoint may be larger than that.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from transformers.utils import cached_file


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100 * 2**20
_CHUNK = 4 * 2**20


class StoredTensor(NamedTuple):
    """A tensor in a file: `dtype` as safetensors writes it, `shape`, and where its bytes are."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return (self.stop - self.start) // max(1, self.shape[0] if self.shape else 1)

    def chunks(self, *, first: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The tensor's bytes, a part at a time, from byte `first` to byte `stop` of it."""
        left = (self.stop - self.start if stop is None else stop) - first
        with self.path.open("rb") as file:
            file.seek(self.start + first)
            while left > 0:
                part = file.read(min(left, _CHUNK))
                if not part:
                    raise ValueError(f"`{self.path}` is corrupt or truncated: it ends within a tensor.")
                left -= len(part)
                yield part

    def read(self, *, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its rows from one up to another, in its own dtype."""
        if self.dtype not in DTYPES:
            raise ValueError(f"`{self.path}` has a tensor of dtype {self.dtype}, which is not read here.")
        first, stop = (0, self.stop - self.start) if rows is None else (row * self.row_bytes for row in rows)
        shape = self.shape if rows is None else (rows[1] - rows[0], *self.shape[1:])
        data = bytearray().join(self.chunks(first=first, stop=stop))
        if not data:
            return torch.empty(shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(shape)


def stored_tensors(name_or_path: Any, **file_arguments: Any) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, in one file or in shards; nothing for one that is not in safetensors files.

    Args:
        name_or_path (`str` or `Path`): Folder or Hub id.
        file_arguments: As for [`~transformers.utils.cached_file`] (`revision`, `token`, ...).

    Raises:
        ValueError: if a file is corrupt, truncated or missing.
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
        found = read_header(Path(path))
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"`{name_or_path}` has tensors in more than one of its files: {', '.join(twice)}.")
        tensors |= found
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of their names.

    Raises:
        ValueError: if the file is corrupt or truncated.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError("it has no header")
            header = json.loads(file.read(length))
        base, tensors = 8 + length, {}
        for name in sorted(header.keys() - {"__metadata__"}):
            item = header[name]
            start, stop = (base + offset for offset in item["data_offsets"])
            tensors[name] = StoredTensor(path, item["dtype"], tuple(item["shape"]), start, stop)
            width = DTYPES[item["dtype"]].itemsize if item["dtype"] in DTYPES else None
            if width is not None and stop - start != width * math.prod(item["shape"]):
                raise ValueError(f"`{name}` has other bytes than its shape says")
        _check_tiled(tensors, base, path.stat().st_size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"A weight file of the checkpoint, `{path}`, is corrupt or truncated ({error}). Download or copy it again."
        ) from error
    return tensors


def _check_tiled(tensors: dict[str, StoredTensor], base: int, size: int) -> None:
    """Raises ValueError unless the tensors lie one after another, as safetensors insists, from `base` to the end."""
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if tensor.start != end or not end <= tensor.stop <= size:
            raise ValueError(f"the bytes of `{name}` are not there")
        end = tensor.stop
    if end != size:
        raise ValueError("it has bytes of no tensor")


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


__all__ = ["DTYPES", "StoredTensor", "read_header", "stored_tensors"]
