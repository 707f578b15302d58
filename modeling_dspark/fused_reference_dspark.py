"""The operation `dspark::sequential_head` in PyTorch: what the fused forms do, and what runs where there is none.

Shapes: `R` rows, `K` slots, `D` hidden size, `Vd` draft vocabulary, `r` Markov rank.
"""

import torch
from torch import nn

from .heads_dspark import markov_latent


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_SIXTEEN, _WORD = 0xFFFF, 0xFFFFFFFF


def head_in_torch(
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
) -> Outputs:
    """Columns, tokens, logits and confidence logits of a block; arguments as for `fused_block`."""
    previous, state = anchors, None
    columns, tokens, logits, confidences = [], [], [], []
    uniform = philox_uniform(seed, *base_logits.shape[:2]).to(base_logits.device) if temperature > 0 else None
    for slot in range(base_logits.shape[1]):
        embedded = nn.functional.embedding(previous, w1)
        latent, state = markov_latent(kind, embedded, hidden[:, slot], state, mixer_weight, mixer_bias)
        scores = base_logits[:, slot] + nn.functional.linear(latent, w2)
        if confidence_weight is not None:
            read = torch.cat([hidden[:, slot], embedded], dim=-1)[:, : len(confidence_weight)]
            confidences.append((read.float() @ confidence_weight.float()) + confidence_bias.float())  # type: ignore[union-attr]
        columns.append(scores.max(-1).indices if uniform is None else _drawn(scores, temperature, uniform[:, slot]))
        previous = columns[-1] if draft_to_target is None else columns[-1] + draft_to_target[columns[-1]]
        tokens.append(previous)
        logits.append(scores)
    empty = anchors.new_empty(base_logits.shape[:2])
    return (
        torch.stack(columns, dim=1) if columns else empty,
        torch.stack(tokens, dim=1) if tokens else empty.clone(),
        torch.stack(logits, dim=1) if logits and keep_logits else _no_logits(base_logits, keep_logits),
        torch.stack(confidences, dim=1) if confidences else _no_confidence(base_logits, confidence_weight),
    )


def empty_outputs(base_logits: torch.Tensor, confidence_weight: torch.Tensor | None, *, with_logits: bool) -> Outputs:
    """What a block's results are written to. Those that there are none of have no elements."""
    columns = base_logits.new_empty(base_logits.shape[:2], dtype=torch.long)
    confidence = _no_confidence(base_logits, confidence_weight)
    return columns, torch.empty_like(columns), _no_logits(base_logits, with_logits), confidence


def _no_logits(base_logits: torch.Tensor, keep_logits: bool) -> torch.Tensor:
    return base_logits.new_empty(base_logits.shape if keep_logits else (0,))


def _no_confidence(base_logits: torch.Tensor, confidence_weight: torch.Tensor | None) -> torch.Tensor:
    return base_logits.new_empty((0,) if confidence_weight is None else base_logits.shape[:2], dtype=torch.float32)


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


__all__ = ["Outputs", "empty_outputs", "head_in_torch", "philox_uniform"]
