"""The whole sequential head of a block as one operation, `dspark::sequential_head`.

Unfused, every slot takes a handful of small operations and a pass over the logits; what has to be done is one read of
`W2` a slot. On a CPU the operation is C++ that is built on first use (`fused_build_dspark`); elsewhere, and where it
cannot be built, it is the same steps in PyTorch. `DSPARK_FUSED_HEAD` chooses: `auto` (the default), `torch` or `cpu`.

Tokens are chosen from the logits as they are returned: rounded to the dtype of the weights, ties to the lowest index.
Numbers for drawing come from a counter (Philox), so they depend on seed, row and slot alone.

Shapes: `R` rows, `K` slots, `D` hidden size, `V` vocabulary, `Vd` draft vocabulary, `r` Markov rank.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from .fused_build_dspark import BuildError, load_library
from .fused_sources_dspark import HEAD_CPU
from .heads_dspark import markov_latent


logger = logging.get_logger(__name__)

_CHOICES = ("auto", "cpu", "torch")
_KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIXTEEN, _WORD = 0xFFFF, 0xFFFFFFFF


class BlockTokens(NamedTuple):
    """What the head makes of a block.

    Attributes:
        columns (`torch.LongTensor` of shape `(R, K)`): Places of the tokens in the draft vocabulary.
        tokens (`torch.LongTensor` of shape `(R, K)`): Tokens of the target's vocabulary.
        logits (`torch.Tensor` of shape `(R, K, Vd)`, *optional*): What they were chosen from, where it was asked for.
        confidence_logits (`torch.Tensor` of shape `(R, K)`, *optional*): In fp32; `None` without a confidence head.
    """

    columns: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor | None
    confidence_logits: torch.Tensor | None


class _Arguments(ctypes.Structure):
    """`DsparkHeadArguments` of head_cpu.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "slots", "vocabulary")),
        *((name, ctypes.c_int64) for name in ("target_vocabulary", "rank", "hidden_size")),
        ("hidden_row_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("base", "hidden", "anchors", "w1", "w2", "mixer_weight", "mixer_bias")),
        *((name, ctypes.c_void_p) for name in ("confidence_weight", "confidence_bias", "draft_to_target")),
        *((name, ctypes.c_void_p) for name in ("logits", "columns", "tokens", "confidence")),
        ("temperature", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("kind", "confidence_reads_tokens", "dtype", "isa", "threads")),
    ]


def fusable_heads(drafter: Any, base_logits: torch.Tensor) -> dict[str, Any] | None:
    """The weights of a drafter's heads by the names of the operation's arguments, or `None` where they go slot by slot.

    That is where there is no Markov head or no library, dtypes differ, or `head_step` is a method of the user's own.
    """
    head, confidence = drafter.markov_head, drafter.confidence_head
    if head is None or not getattr(drafter.head_step, "fusable", False):
        return None
    if _library_for(base_logits, head.markov_w2.weight) is None:
        return None
    mixer = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}[head.kind]
    mixer = None if mixer is None else getattr(head, mixer)
    return {
        "w1": head.markov_w1.weight,
        "w2": head.markov_w2.weight,
        "mixer_weight": None if mixer is None else mixer.weight,
        "mixer_bias": None if mixer is None else mixer.bias,
        "confidence_weight": None if confidence is None else confidence.proj.weight[0],
        "confidence_bias": None if confidence is None else confidence.proj.bias,
        "draft_to_target": drafter.d2t if drafter.config.draft_vocab_size is not None else None,
        "kind": head.kind,
    }


def fused_block(
    heads: dict[str, Any],
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    keep_logits: bool = False,
) -> BlockTokens:
    """Choose or draw the tokens of a block, slot after slot (design section 2, steps 3 and 4).

    Args:
        heads (`dict`): Weights and kind, as `fusable_heads` gives them.
        base_logits (`torch.Tensor` of shape `(R, K, Vd)`): `U`.
        hidden (`torch.Tensor` of shape `(R, K, D)`): Backbone outputs.
        anchors (`torch.LongTensor` of shape `(R,)`): Token before the first slot, in target ids.
        temperature (`float`, *optional*, defaults to `0.0`): Of the draws; 0 takes the highest logit.
        seed (`int`, *optional*, defaults to `0`): Of the draws.
        keep_logits (`bool`, *optional*, defaults to `False`): Whether to return the logits.
    """
    columns, tokens, logits, confidence = torch.ops.dspark.sequential_head(
        base_logits, hidden, anchors, **heads, temperature=temperature, seed=seed, keep_logits=keep_logits
    )
    has_confidence = heads["confidence_weight"] is not None
    return BlockTokens(columns, tokens, logits if keep_logits else None, confidence if has_confidence else None)


@torch.library.custom_op("dspark::sequential_head", mutates_args=())
def _operation(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    mixer_weight: torch.Tensor | None,
    mixer_bias: torch.Tensor | None,
    confidence_weight: torch.Tensor | None,
    confidence_bias: torch.Tensor | None,
    draft_to_target: torch.Tensor | None,
    kind: str,
    temperature: float,
    seed: int,
    keep_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = locals()
    library = _library_for(base_logits, w2)
    return _in_torch(**arguments) if library is None else _on_cpu(library, **arguments)


@_operation.register_fake
def _(base_logits, hidden, anchors, w1, w2, mixer_weight, mixer_bias, confidence_weight, confidence_bias,
      draft_to_target, kind, temperature, seed, keep_logits):  # fmt: skip
    rows, slots = base_logits.shape[:2]
    tokens = anchors.new_empty((rows, slots))
    logits = base_logits.new_empty(base_logits.shape if keep_logits else (0,))
    confidence = base_logits.new_empty((rows, slots) if confidence_weight is not None else (0,), dtype=torch.float32)
    return tokens, torch.empty_like(tokens), logits, confidence


def _library_for(logits: torch.Tensor, weight: torch.Tensor) -> Any:
    """The CPU library where it serves these tensors and is wanted, else `None`."""
    choice = os.environ.get("DSPARK_FUSED_HEAD", "auto")
    if choice not in _CHOICES:
        raise ValueError(f"The environment variable DSPARK_FUSED_HEAD must be one of {_CHOICES}, got {choice!r}.")
    serves = logits.device.type == "cpu" and logits.dtype == weight.dtype and logits.dtype in _DTYPES
    if choice == "torch" or not serves:
        return None
    try:
        return load_library("dspark_head", HEAD_CPU)
    except BuildError as error:
        logger.warning_once(
            f"The fused sequential head is not used, and drafting is a little slower: {error}. "
            "DSPARK_FUSED_HEAD=torch says that this is fine."
        )
        return None


def _on_cpu(
    library: Any,
    *,
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    draft_to_target: torch.Tensor | None,
    kind: str,
    temperature: float,
    seed: int,
    keep_logits: bool,
    isa: int = -1,
    **weights: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, slots, vocabulary = base_logits.shape
    base_logits, anchors = base_logits.contiguous(), anchors.contiguous()
    if hidden.stride()[1:] != (hidden.shape[2], 1):
        hidden = hidden.contiguous()
    weights = {name: None if weight is None else weight.contiguous() for name, weight in weights.items()}
    confidence_weight, rank = weights["confidence_weight"], weights["w2"].shape[1]
    columns = torch.empty(rows, slots, dtype=torch.long)
    confidence = torch.empty((rows, slots) if confidence_weight is not None else (0,), dtype=torch.float32)
    # A draw goes over the logits twice, so they are written for it in any case.
    logits = torch.empty_like(base_logits) if keep_logits or temperature > 0 else base_logits.new_empty(0)
    tensors = {
        **weights,
        "base": base_logits,
        "hidden": hidden,
        "anchors": anchors,
        "draft_to_target": draft_to_target,
        "logits": logits if len(logits) else None,
        "columns": columns,
        "tokens": (tokens := torch.empty_like(columns)),
        "confidence": confidence,
    }
    arguments = _Arguments(
        rows=rows,
        slots=slots,
        vocabulary=vocabulary,
        target_vocabulary=len(weights["w1"]),
        rank=rank,
        hidden_size=hidden.shape[2],
        hidden_row_stride=hidden.stride(0),
        temperature=temperature,
        seed=seed % 2**64,
        kind=_KINDS[kind],
        confidence_reads_tokens=confidence_weight is not None and len(confidence_weight) > hidden.shape[2],
        dtype=_DTYPES[base_logits.dtype],
        isa=isa,
        threads=torch.get_num_threads(),
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
    )
    if refusal := library.dspark_head_cpu(ctypes.byref(arguments)):
        what = f"instruction set {isa} on this machine" if refusal == 1 else f"the anchors {anchors.tolist()}"
        raise ValueError(f"The fused head does not serve {what}.")
    return columns, tokens, logits if keep_logits else base_logits.new_empty(0), confidence


def _in_torch(
    *,
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    mixer_weight: torch.Tensor | None,
    mixer_bias: torch.Tensor | None,
    confidence_weight: torch.Tensor | None,
    confidence_bias: torch.Tensor | None,
    draft_to_target: torch.Tensor | None,
    kind: str,
    temperature: float,
    seed: int,
    keep_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with PyTorch's operations."""
    previous, state = anchors, None
    columns, tokens, logits, confidences = [], [], [], []
    uniform = philox_uniform(seed, *base_logits.shape[:2]).to(base_logits.device)
    for slot in range(base_logits.shape[1]):
        embedded = nn.functional.embedding(previous, w1)
        latent, state = markov_latent(kind, embedded, hidden[:, slot], state, mixer_weight, mixer_bias)
        scores = base_logits[:, slot] + nn.functional.linear(latent, w2)
        if confidence_weight is not None:
            read = torch.cat([hidden[:, slot], embedded], dim=-1)[:, : len(confidence_weight)]
            confidences.append((read.float() @ confidence_weight.float()) + confidence_bias.float())
        columns.append(_drawn(scores, temperature, uniform[:, slot]) if temperature > 0 else scores.max(-1).indices)
        previous = columns[-1] if draft_to_target is None else columns[-1] + draft_to_target[columns[-1]]
        tokens.append(previous)
        logits.append(scores)
    return (
        torch.stack(columns, dim=1),
        torch.stack(tokens, dim=1),
        torch.stack(logits, dim=1) if keep_logits else base_logits.new_empty(0),
        torch.stack(confidences, dim=1) if confidences else base_logits.new_empty(0, dtype=torch.float32),
    )


def _drawn(scores: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """A column of each row of scores `[R, Vd]` by inversion."""
    cumulative = (scores.float() / temperature).softmax(dim=-1).double().cumsum(dim=-1)
    level = uniform[:, None] * cumulative[:, -1:]
    level = torch.minimum(level, torch.nextafter(cumulative[:, -1:], torch.zeros_like(level)))
    return torch.searchsorted(cumulative, level, right=True).squeeze(1)


def philox_uniform(seed: int, num_rows: int, num_slots: int) -> torch.Tensor:
    """Numbers in [0, 1) in fp64 `[R, K]`, by Philox 4x32-10 with the counter `(row, slot, 0, 0)` and the key `seed`."""
    row, slot = torch.meshgrid(torch.arange(num_rows), torch.arange(num_slots), indexing="ij")
    counter = [row, slot, torch.zeros_like(row), torch.zeros_like(row)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        (high, low), (second_high, second_low) = _product(counter[0], 0xD2511F53), _product(counter[2], 0xCD9E8D57)
        counter = [second_high ^ counter[1] ^ key[0], second_low, high ^ counter[3] ^ key[1], low]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return ((counter[0] << 21) ^ (counter[1] >> 11)).double() * 2.0**-53


def _product(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of products of 32-bit words, which do not fit into a signed 64-bit number."""
    low = (words & _SIXTEEN) * factor
    high = (words >> 16) * factor + (low >> 16)
    return high >> 16, ((high & _SIXTEEN) << 16) | (low & _SIXTEEN)


def fusable(method: Callable) -> Callable:
    """Mark a method that does what the fused operation does."""
    method.fusable = True  # type: ignore[attr-defined]
    return method


__all__ = ["BlockTokens", "fusable", "fusable_heads", "fused_block", "philox_uniform"]
