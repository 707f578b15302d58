"""The CUDA source of the fused head run on a CPU with tensors, and what it has to give, in fp64.

Shapes: `R` rows, `K` positions, `D` hidden size, `V` draft vocabulary, `r` Markov rank.
"""

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from modeling_dspark.fused_launch import HeadArguments
from tests.modeling.test_fused_head import DTYPES, STEP, first_of_the_highest


KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}
_GUARD = 4096  # elements on both sides of an array


class EmulationError(RuntimeError):
    """A launch that did not come to its end: a deadlock, threads of a warp that part, or memory out of bounds."""


class Block(NamedTuple):
    """Outputs: columns and tokens [R, K], logits [R, K, V] and confidences [R, K], or `None` where not asked for."""

    columns: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor | None
    confidence: torch.Tensor | None


class Launch(NamedTuple):
    """A way to run a block, on which nothing may depend."""

    blocks: int = 1
    warps: int = 2
    schedule: int = 0
    in_one: bool = True  # all phases in a cooperative launch
    tiles: int | None = None  # of eight rows; by default as few as hold all rows
    aligned: bool | None = None


LAUNCHES = [Launch(), Launch(2, 1, schedule=1), Launch(3, 2, schedule=2, in_one=False), Launch(5, 3, schedule=3)]


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.emulate_head.argtypes = [ctypes.POINTER(HeadArguments), *[ctypes.c_int] * 7, ctypes.c_uint]
    library.emulate_gumbel.argtypes, library.emulate_gumbel.restype = [ctypes.c_uint32], ctypes.c_float
    return library


class _Arrays:
    """Memory between two guards. Where nothing was put there is NaN in an input, and something else in an output."""

    def __init__(self) -> None:
        self._whole: list[tuple[torch.Tensor, int]] = []

    def copy(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else self._fill(tensor.shape, tensor.dtype, 0xFF).copy_(tensor)

    def output(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._fill(shape, dtype, 0xFE)

    def _fill(self, shape: Any, dtype: torch.dtype, byte: int) -> torch.Tensor:
        whole = torch.empty(math.prod(shape) + 2 * _GUARD, dtype=dtype)
        whole.view(torch.uint8).fill_(byte)
        self._whole.append((whole, byte))
        return whole[_GUARD:-_GUARD].view(shape)

    def check(self) -> None:
        for whole, byte in self._whole:
            for guard in (whole[:_GUARD], whole[-_GUARD:]):
                assert (guard.view(torch.uint8) == byte).all(), "written out of bounds"


def mixed_hidden(heads: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor | None:
    """What the latent's linear layer makes of `hidden`, with the bias, in the dtype of the weights."""
    weight, size = heads["mixer_weight"], hidden.shape[-1]
    if weight is None:
        return None
    part = weight[:, :size] if heads["kind"] == "gated" else weight[:, -size:]
    return linear(hidden.double(), part.double(), heads["mixer_bias"].double()).to(weight.dtype)


def run(
    library: ctypes.CDLL,
    heads: dict[str, Any],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    launch: Launch | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    keep_logits: bool = True,
) -> Block:
    """A block, whose outputs hold nothing of use before."""
    launch = launch or Launch()
    memory = _Arrays()
    base, hidden, anchors = (memory.copy(tensor) for tensor in inputs)
    weights = {name: memory.copy(value) for name, value in heads.items() if name not in ("kind", "mixer_bias")}
    mixer, w1, confidence_weight = weights["mixer_weight"], weights["w1"], weights["confidence_weight"]
    (rows, positions, vocabulary), rank, size = base.shape, w1.shape[1], hidden.shape[2]
    mixer_hidden = memory.copy(mixed_hidden(heads, hidden))
    logits = memory.output(base.shape, base.dtype)
    columns, tokens = (memory.output((rows, positions), torch.int64) for _ in range(2))
    confidence = memory.output((rows, positions), torch.float32)
    scratch = memory.output((1 + rows * positions + -(-3 * rows * rank // 2),), torch.int64).zero_()

    def address(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    arguments = HeadArguments(
        rows=rows,
        positions=positions,
        vocabulary=vocabulary,
        target_vocabulary=len(w1),
        rank=rank,
        hidden_size=size,
        hidden_row_stride=positions * size,
        mixer_row_stride=0 if mixer is None else mixer.shape[1],
        base=address(base),
        hidden=address(hidden),
        anchors=address(anchors),
        w1=address(w1),
        w2=address(weights["w2"]),
        mixer_weight=address(mixer if heads["kind"] != "gated" else mixer[:, size:]),
        mixer_hidden=address(mixer_hidden),
        confidence_weight=address(confidence_weight),
        confidence_bias=address(weights["confidence_bias"]),
        draft_to_target=address(weights["draft_to_target"]),
        logits=address(logits if keep_logits else None),
        columns=address(columns),
        tokens=address(tokens),
        confidence=address(confidence),
        scratch=address(scratch),
        temperature=temperature,
        seed=seed,
        kind=KINDS[heads["kind"]],
        confidence_reads_tokens=confidence_weight is not None and len(confidence_weight) > size,
        dtype=list(DTYPES.values()).index(base.dtype),
        aligned=rank * base.itemsize % 16 == 0 if launch.aligned is None else launch.aligned,
    )
    phases = positions * (1 if heads["kind"] == "vanilla" else 2) + 1
    for first, last in [(0, phases)] if launch.in_one else [(i, i + 1) for i in range(phases)]:
        _launch(library, arguments, launch, first, last)
    memory.check()
    return Block(
        columns, tokens, logits if keep_logits else None, confidence if confidence_weight is not None else None
    )


def _launch(library: ctypes.CDLL, arguments: HeadArguments, launch: Launch, first: int, last: int) -> None:
    item = 4 if arguments.dtype == 0 else 2
    fitting = 1 if arguments.rows <= 8 else 2 if arguments.rows <= 16 else 8
    tiles = 1 if item == 4 else launch.tiles or fitting
    rows = 4 if item == 4 else 8 * tiles
    pitch = -(-arguments.rank * item // 128) * 128 + 64
    shared = 8 * rows * (launch.warps + 1) + rows * pitch
    error = library.emulate_head(
        arguments, arguments.dtype, tiles, first, last, launch.blocks, 32 * launch.warps, shared, launch.schedule
    )
    if error:
        raise EmulationError(f"error {error} of emulation.h, in phases {first} to {last}")


def reference(
    heads: dict[str, Any], inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [R, K, V] and confidences [R, K] in fp64, of positions that follow the given tokens."""
    base, hidden, anchors = inputs
    dtype, rank, size, kind = base.dtype, heads["w1"].shape[1], hidden.shape[2], heads["kind"]
    w1, w2 = heads["w1"].double(), heads["w2"].double()
    before = torch.cat([anchors.clamp(0, len(w1) - 1)[:, None], tokens[:, :-1]], dim=1)
    embedded = w1[before]  # [R, K, r]
    latent = embedded
    if kind == "gated":
        mixed = mixed_hidden(heads, hidden).double() + embedded @ heads["mixer_weight"][:, size:].double().T
        latent = mixed.sigmoid() * embedded
    elif kind == "rnn":
        rest = mixed_hidden(heads, hidden).double() + embedded @ heads["mixer_weight"][:, rank : 2 * rank].double().T
        state, outputs = torch.zeros(len(base), rank, dtype=torch.double), []
        for position in range(base.shape[1]):
            mixed = rest[:, position] + state @ heads["mixer_weight"][:, :rank].double().T
            gate, candidate, output = mixed.chunk(3, dim=1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            outputs.append(output.tanh())
        latent = torch.stack(outputs, dim=1)
    logits = base.double() + latent.to(dtype).double() @ w2.T
    if heads["confidence_weight"] is None:
        return logits, None
    read = torch.cat([hidden.double(), embedded], dim=2)[..., : len(heads["confidence_weight"])]
    return logits, read @ heads["confidence_weight"].double() + heads["confidence_bias"].double()


def check_block(
    library: ctypes.CDLL,
    heads: dict[str, Any],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    launches: Sequence[Launch] = LAUNCHES,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Block:
    """Run a block in several ways: all give the same, logits and confidences are right, and tokens are of the logits."""
    block, *others = (
        run(library, heads, inputs, launch=launch, temperature=temperature, seed=seed) for launch in launches
    )
    for other in others:
        assert torch.equal(other.columns, block.columns)
        assert torch.equal(other.logits.view(torch.uint8), block.logits.view(torch.uint8))
        assert other.confidence is None or torch.equal(other.confidence, block.confidence)
    bare = run(library, heads, inputs, launch=launches[-1], temperature=temperature, seed=seed, keep_logits=False)
    assert torch.equal(bare.tokens, block.tokens)

    dtype, offset = inputs[0].dtype, heads["draft_to_target"]
    assert ((block.columns >= 0) & (block.columns < inputs[0].shape[2])).all()
    assert torch.equal(block.tokens, block.columns if offset is None else block.columns + offset[block.columns])
    logits, confidence = reference(heads, inputs, block.tokens)
    tolerance = 4 * STEP[dtype] * (1 + logits.abs()) + 1e-5  # a latent may be rounded to the other side
    assert (
        (block.logits.double() - logits).abs() <= tolerance + (4 * STEP[dtype] if dtype != torch.float32 else 0)
    ).all()
    if temperature == 0:
        assert torch.equal(block.columns, first_of_the_highest(block.logits))
    if confidence is not None:
        torch.testing.assert_close(block.confidence.double(), confidence, atol=2e-5, rtol=2e-5)
    return block


__all__ = [
    "DTYPES",
    "KINDS",
    "LAUNCHES",
    "EmulationError",
    "Launch",
    "check_block",
    "load",
    "mixed_hidden",
    "reference",
    "run",
]
