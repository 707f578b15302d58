"""The operation `dspark::sequential_head` in PyTorch: the reference of the fused forms, and the fallback without one.

Shapes: `R` rows, `K` positions, `D` hidden size, `V` vocabulary, `Vd` draft vocabulary, `r` Markov rank.
"""

from typing import NamedTuple

import torch
from torch import nn

from .model_heads import markov_latent


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_SIXTEEN, _WORD = 0xFFFF, 0xFFFFFFFF


class HeadInputs(NamedTuple):
    """The operation's arguments, in its order.

    Attributes:
        base_logits (`torch.Tensor` of shape `(R, K, Vd)`): `U`.
        hidden (`torch.Tensor` of shape `(R, K, D)`): Backbone outputs.
        anchors (`torch.LongTensor` of shape `(R,)`): Token before the first position, in target ids.
        w1 (`torch.Tensor` of shape `(V, r)`): Embedding of the token before a position.
        w2 (`torch.Tensor` of shape `(Vd, r)`): From the latent to the bias on the logits.
        mixer_weight (`torch.Tensor`, *optional*): Of the gate `(r, D + r)` or the cell `(3 r, 2 r + D)`.
        mixer_bias (`torch.Tensor`, *optional*): Of shape `(r,)` or `(3 r,)`.
        confidence_weight (`torch.Tensor` of shape `(D,)` or `(D + r,)`, *optional*): Of the confidence head.
        confidence_bias (`torch.Tensor` of shape `(1,)`, *optional*): Of the confidence head.
        draft_to_target (`torch.LongTensor` of shape `(Vd,)`, *optional*): What to add to a column for its token.
        kind (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        temperature (`float`): Of the draws; 0 takes the highest logit.
        seed (`int`): Of the draws.
        keep_logits (`bool`): Whether to return the logits.
    """

    base_logits: torch.Tensor
    hidden: torch.Tensor
    anchors: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    mixer_weight: torch.Tensor | None
    mixer_bias: torch.Tensor | None
    confidence_weight: torch.Tensor | None
    confidence_bias: torch.Tensor | None
    draft_to_target: torch.Tensor | None
    kind: str
    temperature: float
    seed: int
    keep_logits: bool


def head_in_torch(inputs: HeadInputs) -> Outputs:
    """Columns, tokens, logits and confidence logits of a block."""
    base_logits, offsets, weight = inputs.base_logits, inputs.draft_to_target, inputs.confidence_weight
    previous, state, uniform = inputs.anchors, None, None
    if inputs.temperature > 0:
        uniform = philox_uniform(inputs.seed, *base_logits.shape[:2]).to(base_logits.device)
    outputs = empty_outputs(base_logits, weight, with_logits=inputs.keep_logits)
    columns, tokens, logits, confidence = outputs
    for position in range(base_logits.shape[1]):
        hidden, embedded = inputs.hidden[:, position], nn.functional.embedding(previous, inputs.w1)
        latent, state = markov_latent(inputs.kind, embedded, hidden, state, inputs.mixer_weight, inputs.mixer_bias)
        scores = base_logits[:, position] + nn.functional.linear(latent, inputs.w2)
        if weight is not None:
            read = torch.cat([hidden, embedded], dim=-1)[:, : len(weight)]
            confidence[:, position] = read.float() @ weight.float() + inputs.confidence_bias.float()  # type: ignore[union-attr]
        if inputs.keep_logits:
            logits[:, position] = scores
        chosen = (
            scores.max(-1).indices if uniform is None else _drawn(scores, inputs.temperature, uniform[:, position])
        )
        previous = chosen if offsets is None else chosen + offsets[chosen]
        columns[:, position], tokens[:, position] = chosen, previous
    return outputs


def empty_outputs(base_logits: torch.Tensor, confidence_weight: torch.Tensor | None, *, with_logits: bool) -> Outputs:
    """Tensors for a block's results; absent results have no elements."""
    columns = base_logits.new_empty(base_logits.shape[:2], dtype=torch.long)
    logits = base_logits.new_empty(base_logits.shape if with_logits else (0,))
    confidence_shape = (0,) if confidence_weight is None else base_logits.shape[:2]
    return columns, torch.empty_like(columns), logits, base_logits.new_empty(confidence_shape, dtype=torch.float32)


def _drawn(scores: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """A column of each row of scores `[R, Vd]` by inversion."""
    cumulative = (scores.float() / temperature).softmax(dim=-1).double().cumsum(dim=-1)
    level = uniform[:, None] * cumulative[:, -1:]
    level = torch.minimum(level, torch.nextafter(cumulative[:, -1:], torch.zeros_like(level)))
    place = torch.searchsorted(cumulative, level, right=True).squeeze(1)
    return place.clamp(max=scores.shape[1] - 1)  # if levels are NaN


def philox_uniform(seed: int, num_rows: int, num_draft_positions: int) -> torch.Tensor:
    """Numbers in [0, 1) in fp64 `[R, K]`, by Philox 4x32-10 with the counter `(row, position, 0, 0)` and the key `seed`."""
    row, position = torch.meshgrid(torch.arange(num_rows), torch.arange(num_draft_positions), indexing="ij")
    counter = [row, position, torch.zeros_like(row), torch.zeros_like(row)]
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


__all__ = ["HeadInputs", "Outputs", "empty_outputs", "head_in_torch", "philox_uniform"]
