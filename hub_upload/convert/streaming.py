"""Write a safetensors file tensor by tensor, a few megabytes at a time.

`safetensors` itself writes tensors that are in memory as a whole, mapped or not, and a checkpoint may not fit there. The
bytes here are those that it would write.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling_dspark.formats.tensors import StoredTensor


# In the order of a file: safetensors sorts tensors by alignment and dtype first, then by name.
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: its name, its dtype as safetensors names it, its shape, and its values in parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def stored_piece(name: str, tensor: StoredTensor, rows: Sequence[int] | None = None) -> Piece:
    """A tensor of a file as it is, or some of its rows in the order given."""
    shape = tensor.shape if rows is None else (len(rows), *tensor.shape[1:])
    return Piece(name, tensor.dtype, shape, lambda: tensor.parts(rows))


def small_piece(name: str, tensor: torch.Tensor) -> Piece:
    """A tensor in memory."""
    dtype = next(text for text, dtype in DTYPES.items() if dtype == tensor.dtype)
    return Piece(name, dtype, tuple(tensor.shape), lambda: iter((tensor,)))


def cast_piece(piece: Piece, dtype: str) -> Piece:
    """A piece rounded to another floating-point dtype; one that holds no floating-point numbers stays as it is.

    Raises:
        ValueError: when it is read, if a finite number is too large for `dtype`.
    """
    before, after = DTYPES[piece.dtype], DTYPES[dtype]
    if not before.is_floating_point or before == after:
        return piece

    def parts() -> Iterator[torch.Tensor]:
        for part in piece.parts():
            rounded = part.to(after)
            if (rounded.isinf() & part.isfinite()).any():
                raise ValueError(f"The tensor `{piece.name}` has numbers that are too large for {after}.")
            yield rounded

    return Piece(piece.name, dtype, piece.shape, parts)


def write_safetensors(path: Path, pieces: Iterable[Piece], advance: Callable[[int], object] = lambda _: None) -> None:
    """Write a file.

    Args:
        path (`Path`): The file.
        pieces (iterable of [`Piece`]): Its tensors, in any order.
        advance (callable, *optional*): Called with the number of bytes of each part written.

    Raises:
        ValueError: if a tensor has a dtype that cannot be written.
    """
    ordered = sorted(pieces, key=lambda piece: (_rank(piece), piece.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # Transformers insists on it
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
            for part in piece.parts():
                file.write(part.contiguous().flatten().view(torch.uint8).numpy().data)
                advance(part.nbytes)


def _rank(piece: Piece) -> int:
    if piece.dtype not in DTYPES:
        raise ValueError(
            f"The tensor `{piece.name}` has dtype {piece.dtype}; only {', '.join(DTYPES)} can be written."
        )
    return list(DTYPES).index(piece.dtype)


__all__ = ["Piece", "cast_piece", "small_piece", "stored_piece", "write_safetensors"]
