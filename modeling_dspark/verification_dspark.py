"""Which draft tokens the target keeps, and what follows them: pure functions, any number of rows.

Shapes: `R` rows, `K` draft slots (ragged rows are padded; `lengths` tells how many count), `V` vocabulary.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round.

    Attributes:
        num_accepted (`torch.LongTensor` of shape `(R,)`): Draft tokens kept, `m`.
        next_tokens (`torch.LongTensor` of shape `(R,)`): The target's token after them (replacement or bonus).
    """

    num_accepted: torch.Tensor
    next_tokens: torch.Tensor


def accept_greedy(draft_tokens: torch.Tensor, choices: torch.Tensor, lengths: torch.Tensor) -> Verdict:
    """Keep draft tokens while they are the target's choices.

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, K)`): Drafts.
        choices (`torch.LongTensor` of shape `(R, K + 1)`): Argmax of the processed target logits at the anchor and each draft.
        lengths (`torch.LongTensor` of shape `(R,)`): Drafts that were verified in each row.
    """
    num_accepted = _leading(draft_tokens == choices[:, :-1], lengths)
    return Verdict(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))


def accept_sampled(
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    lengths: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Rejection sampling (Leviathan et al. 2023, Algorithm 1): the output is distributed as the target's.

    Accept `d_k` iff `u < p_k(d_k) / q_k(d_k)`, strictly, so that a token of zero target probability is never kept; on
    the first rejection draw from `normalize(max(p_k - q_k, 0))` (from `p_k` where rounding leaves no mass); if all
    verified drafts are kept draw from `p` at the next position.

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, K)`): Drafts, each drawn from `softmax(draft_logits)`.
        draft_logits (`torch.Tensor` of shape `(R, K, V)`): Logits of exactly the distribution that was drawn from.
        target_logits (`torch.Tensor` of shape `(R, K + 1, V)`): Processed target logits.
        lengths (`torch.LongTensor` of shape `(R,)`): Drafts that were verified in each row.
        generator (`torch.Generator`, *optional*): Source of randomness.
    """
    rows, num_slots = draft_tokens.shape
    q = draft_logits.float().softmax(dim=-1)
    p = target_logits.float().softmax(dim=-1)
    p_draft = p[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
    q_draft = q.gather(2, draft_tokens[..., None]).squeeze(2)
    uniform = torch.rand(rows, num_slots, device=p.device, generator=generator)
    num_accepted = _leading(uniform * q_draft < p_draft, lengths)
    index = num_accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, index).squeeze(1)
    residual = p_next
    if num_slots:
        q_next = q.gather(1, index.clamp(max=num_slots - 1)).squeeze(1)
        bonus = (num_accepted == lengths)[:, None]
        residual = torch.where(bonus, p_next, (p_next - q_next).clamp(min=0))
    weights = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_next)
    next_tokens = torch.multinomial(weights, 1, generator=generator).squeeze(1)
    return Verdict(num_accepted, next_tokens)


def _leading(accepted: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Number of leading accepted slots among the first `lengths[r]` of each row."""
    verified = torch.arange(accepted.shape[1], device=accepted.device) < lengths[:, None]
    return (accepted & verified).int().cumprod(dim=1).sum(dim=1)


__all__ = ["Verdict", "accept_greedy", "accept_sampled"]
