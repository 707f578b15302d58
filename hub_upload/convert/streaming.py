"""Write a safetensors file tensor by tensor, never holding more than a part of one in memory.

The bytes are those that `safetensors` itself would write for the same tensors.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from modeling_dspark.formats.tensors import DTYPES, StoredTensor


_METADATA = {"format": "pt"}  # what Transformers asks for
# safetensors puts tensors of later dtypes of this list first, and those of one dtype by name.
_ORDER = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
_ROWS_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: its name, its dtype as safetensors names it, its shape, and its bytes in parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def stored_piece(name: str, tensor: StoredTensor) -> Piece:
    """A tensor of a file, as it is."""
    return Piece(name, tensor.dtype, tensor.shape, tensor.chunks)


def small_piece(name: str, tensor: torch.Tensor) -> Piece:
    """A tensor in memory."""
    dtype = next(text for text, dtype in DTYPES.items() if dtype == tensor.dtype)
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return Piece(name, dtype, tuple(tensor.shape), lambda: iter((data,)))


def rows_piece(name: str, tensor: StoredTensor, rows: Sequence[int]) -> Piece:
    """Some rows of a matrix of a file, in the order given."""

    def chunks() -> Iterator[bytes]:
        at_once = max(1, _ROWS_BYTES // max(1, tensor.row_bytes))
        with tensor.path.open("rb") as file:
            for first in range(0, len(rows), at_once):
                yield b"".join(_row(file, tensor, row) for row in rows[first : first + at_once])

    return Piece(name, tensor.dtype, (len(rows), *tensor.shape[1:]), chunks)


def cast_piece(piece: Piece, dtype: str) -> Piece:
    """A piece in another floating-point dtype, rounded to the nearest; one that holds no floating-point numbers as it is.

    Raises:
        ValueError: when it is read, if a finite number is too large for `dtype`.
    """
    before, after = DTYPES[piece.dtype], DTYPES[dtype]
    if not before.is_floating_point or before == after:
        return piece

    def chunks() -> Iterator[bytes]:
        for part in piece.chunks():  # of whole numbers: parts of files are multiples of 8 bytes, up to the last
            numbers = torch.frombuffer(bytearray(part), dtype=before)
            rounded = numbers.to(after)
            if (rounded.isinf() & numbers.isfinite()).any():
                raise ValueError(f"The tensor `{piece.name}` has numbers that are too large for {after}.")
            yield rounded.view(torch.uint8).numpy().tobytes()

    return Piece(piece.name, dtype, piece.shape, chunks)


def _row(file: BinaryIO, tensor: StoredTensor, row: int) -> bytes:
    file.seek(tensor.start + row * tensor.row_bytes)
    return file.read(tensor.row_bytes)


def write_safetensors(path: Path, pieces: Iterable[Piece], advance: Callable[[int], object] = lambda _: None) -> None:
    """Write a file.

    Args:
        path (`Path`): The file.
        pieces (iterable of [`Piece`]): Its tensors, in any order.
        advance (callable, *optional*): Called with the number of bytes of each part written.

    Raises:
        ValueError: if a tensor has a dtype that is not known here, or other bytes than its shape says.
    """
    ordered = sorted(pieces, key=lambda piece: (-_rank(piece), piece.name))
    header: dict[str, object] = {"__metadata__": _METADATA}
    start = 0
    for piece in ordered:
        stop = start + piece.num_bytes
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in ordered:
            written = 0
            for part in piece.chunks():
                file.write(part)
                written += len(part)
                advance(len(part))
            if written != piece.num_bytes:
                raise ValueError(f"The tensor `{piece.name}` has {written} bytes, and its shape {piece.num_bytes}.")


def _rank(piece: Piece) -> int:
    if piece.dtype not in _ORDER:
        raise ValueError(f"The tensor `{piece.name}` has the dtype {piece.dtype}, which is not written here.")
    return _ORDER.index(piece.dtype)


__all__ = ["Piece", "cast_piece", "rows_piece", "small_piece", "stored_piece", "write_safetensors"]
