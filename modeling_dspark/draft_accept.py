"""Which draft tokens the target keeps, and the token after them: pure functions for any number of rows.

Shapes: `R` rows, `K` draft positions (ragged rows are padded; `lengths` gives their real lengths), `V` vocabulary, `Vd` draft
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .compat_renamed import renamed_in


_BLOCK = 256  # columns


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one round.

    Attributes:
        num_accepted (`torch.LongTensor` of shape `(R,)`): Draft tokens kept, `m`.
        next_tokens (`torch.LongTensor` of shape `(R,)`): The target's token after them (replacement or bonus).
    """

    num_accepted: torch.Tensor
    next_tokens: torch.Tensor


def accept_greedy(draft_tokens: torch.Tensor, choices: torch.Tensor, lengths: torch.Tensor) -> Acceptance:
    """Keep draft tokens while they are the target's choices.

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, K)`): Drafts.
        choices (`torch.LongTensor` of shape `(R, K + 1)`): Argmax of the processed target logits at the anchor and each draft.
        lengths (`torch.LongTensor` of shape `(R,)`): Drafts that were verified in each row.
    """
    num_accepted = _leading(draft_tokens == choices[:, :-1], lengths)
    return Acceptance(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))


def accept_sampled(
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    lengths: torch.Tensor,
    *,
    draft_columns: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Rejection sampling (Leviathan et al. 2023, Algorithm 1): the output is distributed as the target's.

    Accept `d_k` iff `u < p_k(d_k) / q_k(d_k)`, strictly, so that a token of zero target probability is never kept; on
    the first rejection draw from `normalize(max(p_k - q_k, 0))` (from `p_k` where rounding leaves no mass); if all
    verified drafts are kept draw from `p` at the next position.

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, K)`): Drafts, each drawn from `softmax(draft_logits)`.
        draft_logits (`torch.Tensor` of shape `(R, K, Vd)`): Logits of exactly the distribution of the draws.
        target_logits (`torch.Tensor` of shape `(R, K + 1, V)` or `(N, V)`): Processed target logits.
        lengths (`torch.LongTensor` of shape `(R,)`): Drafts that were verified in each row.
        draft_columns (`torch.LongTensor` of shape `(R, K)`, *optional*):
            Columns of `draft_logits` that were drawn, in a reduced draft vocabulary; by default the tokens.
        draft_token_ids (`torch.LongTensor` of shape `(Vd,)`, *optional*): Token of each column; by default its index.
        positions (`torch.LongTensor` of shape `(R, K + 1)`, *optional*): Rows of packed `target_logits`.
        generator (`torch.Generator`, *optional*): Source of randomness.
    """
    num_rows, num_draft_positions = draft_tokens.shape
    device = target_logits.device
    if positions is None:
        target_logits = target_logits.flatten(0, 1)
        positions = torch.arange(num_rows * (num_draft_positions + 1), device=device).view(
            num_rows, num_draft_positions + 1
        )
    p = target_logits.float().softmax(dim=-1)
    num_accepted = torch.zeros(num_rows, dtype=torch.long, device=device)
    columns = draft_tokens if draft_columns is None else draft_columns
    if num_draft_positions:
        q = draft_logits.float().softmax(dim=-1)
        p_draft, q_draft = p[positions[:, :-1], draft_tokens], q.gather(2, columns[..., None]).squeeze(2)
        uniform = torch.rand(num_rows, num_draft_positions, device=device, generator=generator)
        num_accepted = _leading(uniform * q_draft < p_draft, lengths)
    weights = p_next = p[positions.gather(1, num_accepted[:, None]).squeeze(1)]
    if num_draft_positions:
        rejected = num_accepted < lengths
        q_next = q[torch.arange(num_rows, device=device), num_accepted.clamp(max=num_draft_positions - 1)]
        weights = torch.where(rejected[:, None], _residual(p_next, q_next, draft_token_ids), p_next)
    return Acceptance(num_accepted, draw(weights, generator))


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw an index `[R]` from each row of non-negative weights `[R, V]`, by inversion; never one of weight zero.

    The index is `V` for a row without weight or with NaN; the caller checks. A block of columns is drawn first, then a column
    within it, because running sums over a whole vocabulary are slow.
    """
    blocks = nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1)
    block = _invert(sums, generator).clamp(max=sums.shape[1] - 1)
    column = _invert(blocks.gather(1, block[:, None, None].expand(-1, -1, _BLOCK)).squeeze(1), generator)
    drawable = sums.sum(dim=-1) > 0  # false for NaN, too
    return torch.where(drawable, block * _BLOCK + column, weights.shape[1])


def _invert(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    exact = torch.float32 if weights.device.type == "mps" else torch.float64
    cumulative = weights.cumsum(dim=-1, dtype=exact)
    total = cumulative[:, -1:].contiguous()
    level = torch.rand(total.shape, dtype=exact, device=weights.device, generator=generator) * total
    # A product that rounds up to the total would point past the last weight.
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True).squeeze(1)


def _residual(p: torch.Tensor, q: torch.Tensor, draft_token_ids: torch.Tensor | None) -> torch.Tensor:
    """`max(p - q, 0)`, or `p` where rounding leaves no mass; `q` may be over fewer tokens than `p`."""
    residual = p.clone()
    if draft_token_ids is None:
        residual[:, : q.shape[-1]] -= q
    else:
        residual.index_add_(1, draft_token_ids, q, alpha=-1)
    residual.clamp_(min=0)
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)


def _leading(accepted: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Number of leading accepted positions among the first `lengths[r]` of each row."""
    verified = torch.arange(accepted.shape[1], device=accepted.device) < lengths[:, None]
    return (accepted & verified).int().cumprod(dim=1).sum(dim=1)


__getattr__ = renamed_in(__name__, {"Verdict": "Acceptance"})

__all__ = ["Acceptance", "accept_greedy", "accept_sampled", "draw"]
