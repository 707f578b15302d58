"""Launches the head's GPU kernel, however it was compiled: arguments, tiles of rows, shared memory, grid and phases.

Kernels are known by a code for their dtype (0 fp32, 1 bf16, 2 fp16) and the number of tiles, each of eight rows (four in
fp32), that a pass over W2 serves.
"""

import ctypes
from abc import ABC, abstractmethod
from typing import NamedTuple

from .fused_build import BuildError


THREADS = 256  # of a block
_LANES = 32  # threads of a warp
_COLUMNS = 16  # of W2, that a warp takes at a time
KINDS = ("vanilla", "gated", "rnn")  # by the code in `HeadArguments.kind`
_DTYPES = ("fp32", "bf16", "fp16")
_WEIGHT_BYTES = (4, 2, 2)


class LaunchError(RuntimeError):
    """CUDA's reason for not loading or launching a kernel.

    Attributes:
        code (`int`): CUDA's number for it; 0 if the error is not CUDA's.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(f"{message} (CUDA error {code})" if code else message)
        self.code = code


class HeadArguments(ctypes.Structure):
    """`DsparkHeadArguments` of head_cuda.cu and head_cpu.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "positions", "vocabulary")),
        *((name, ctypes.c_int64) for name in ("target_vocabulary", "rank", "hidden_size")),
        *((name, ctypes.c_int64) for name in ("hidden_row_stride", "mixer_row_stride")),
        *((name, ctypes.c_void_p) for name in ("base", "hidden", "anchors", "w1", "w2")),
        *((name, ctypes.c_void_p) for name in ("mixer_weight", "mixer_hidden")),
        *((name, ctypes.c_void_p) for name in ("confidence_weight", "confidence_bias", "draft_to_target")),
        *((name, ctypes.c_void_p) for name in ("logits", "columns", "tokens", "confidence", "scratch")),
        ("temperature", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("kind", "confidence_reads_tokens", "dtype", "isa", "threads", "aligned")
        ),
    ]


class Grid(NamedTuple):
    """Launch configuration of a kernel.

    Attributes:
        blocks (`int`): Of the grid.
        threads (`int`): Of a block.
        shared_bytes (`int`): Shared memory of a block.
        stream (`int`): Address of the CUDA stream.
        cooperative (`bool`): Whether blocks can wait for each other.
    """

    blocks: int
    threads: int
    shared_bytes: int
    stream: int
    cooperative: bool


class Kernels(ABC):
    """Compiled kernels on the current device, whose context earlier work of this thread has bound."""

    def __init__(self) -> None:
        self._occupancies: dict[tuple[int, int, int, int], int] = {}  # each is asked for once

    def occupancy(self, dtype: int, tiles: int, threads: int, shared_bytes: int) -> int:
        """Blocks that a multiprocessor holds at a time. Later launches may use this much shared memory."""
        key = (dtype, tiles, threads, shared_bytes)
        if key not in self._occupancies:
            sizes = [size for *kernel, _, size in self._occupancies if kernel == [dtype, tiles]]
            self._occupancies[key] = self._allow(*key)
            if max(sizes, default=0) > shared_bytes:  # the last limit stays in force; never lower it
                self._allow(dtype, tiles, threads, max(sizes))
        return self._occupancies[key]

    @abstractmethod
    def launch(self, dtype: int, tiles: int, arguments: HeadArguments, first: int, last: int, grid: Grid) -> None:
        """Queue the phases `[first, last)`; several phases need a cooperative launch."""

    @abstractmethod
    def _allow(self, dtype: int, tiles: int, threads: int, shared_bytes: int) -> int:
        """Let a kernel use this much shared memory; returns how many of its blocks a multiprocessor holds."""


def kernel_name(dtype: int, tiles: int) -> str:
    return f"dspark_head_{_DTYPES[dtype]}_{tiles}"


def kernel_macros(dtype: int, tiles: int) -> dict[str, str]:
    """Macros that reduce the source to one kernel."""
    return {"DSPARK_ONLY_DTYPE": _DTYPES[dtype], "DSPARK_ONLY_TILES": str(tiles)}


def architecture(capability: tuple[int, int]) -> int:
    """The number behind `sm_` for a device's compute capability.

    Raises:
        BuildError: if its tensor cores lack bf16.
    """
    if capability < (8, 0):
        raise BuildError(
            "the kernel needs a GPU of compute capability 8.0 or higher, "
            f"and this one has {capability[0]}.{capability[1]}"
        )
    return 10 * capability[0] + capability[1]


def scratch_bytes(rows: int, positions: int, rank: int, kind: str) -> int:
    """Size of `HeadArguments.scratch`, to be zeroed before each block: counter, keys `[rows, positions]`, latents, states."""
    return 8 * (1 + rows * positions) + (0 if kind == "vanilla" else 4 * 3 * rows * rank)


def shared_bytes(dtype: int, tiles: int, rank: int, threads: int = THREADS) -> int:
    """Shared memory of a block: for each row a key of each warp, the token before it, and a latent with padding."""
    rows = 8 * tiles if dtype else 4
    latent = -(-rank * _WEIGHT_BYTES[dtype] // 128) * 128 + 64
    return rows * (8 * (threads // _LANES) + 8 + latent)


def tiles_for(dtype: int, rows: int, rank: int, max_shared_bytes: int) -> int | None:
    """Tiles of the kernel to use: the fewest for all rows in one pass over W2, as far as shared memory allows.

    Args:
        dtype (`int`): Its code.
        rows (`int`): Of the block.
        rank (`int`): Of the Markov head.
        max_shared_bytes (`int`): Limit of a block, `shared_memory_per_block_optin` of the device's properties.

    Returns:
        `None` if no kernel fits.
    """
    wanted = 1 if dtype == 0 or rows <= 8 else 2 if rows <= 16 else 8
    fitting = (
        tiles for tiles in (8, 2, 1) if tiles <= wanted and shared_bytes(dtype, tiles, rank) <= max_shared_bytes
    )
    return next(fitting, None)


def launch(
    kernels: Kernels,
    arguments: HeadArguments,
    *,
    num_multiprocessors: int,
    max_shared_bytes: int,
    stream: int,
    stepwise: bool,
) -> None:
    """Queue a block.

    Args:
        kernels (`Kernels`): Of the current device.
        arguments (`HeadArguments`): With addresses on that device, and a scratch of zeros.
        num_multiprocessors (`int`): Of the device.
        max_shared_bytes (`int`): Of a block, as for `tiles_for`.
        stream (`int`): Address of the CUDA stream.
        stepwise (`bool`): One launch per phase, for a stream that is captured or a device without cooperative launches.

    Raises:
        BuildError: if the kernel cannot be compiled.
        LaunchError: if a latent does not fit into shared memory, or CUDA refuses.
    """
    dtype, rank = arguments.dtype, arguments.rank
    tiles = tiles_for(dtype, arguments.rows, rank, max_shared_bytes)
    if tiles is None:
        raise LaunchError(
            f"A Markov rank of {rank} needs {shared_bytes(dtype, 1, rank)} bytes of shared memory, "
            f"but a block on this GPU has a maximum of {max_shared_bytes}."
        )
    size = shared_bytes(dtype, tiles, rank)
    resident = num_multiprocessors * kernels.occupancy(dtype, tiles, THREADS, size)
    useful = -(-arguments.vocabulary // (_COLUMNS * (THREADS // _LANES)))
    phases = arguments.positions * (1 if KINDS[arguments.kind] == "vanilla" else 2) + 1
    step = 1 if stepwise else phases
    grid = Grid(max(1, min(resident, useful)), THREADS, size, stream, cooperative=not stepwise)
    for first in range(0, phases, step):
        kernels.launch(dtype, tiles, arguments, first, first + step, grid)


__all__ = [
    "KINDS",
    "THREADS",
    "Grid",
    "HeadArguments",
    "Kernels",
    "LaunchError",
    "architecture",
    "kernel_macros",
    "kernel_name",
    "launch",
    "scratch_bytes",
    "shared_bytes",
    "tiles_for",
]
