"""The three losses of DSpark, and a fourth that leads them: pure functions over supervised slots.

`L = ce * CE + soft * SoftCE + l1 * L1 + confidence * BCE`, each `sum(w * term) / sum(w)` with slot weights
`w_k = exp(-(k - 1) / decay)`, `k = 1..K`. `L1 = sum_v |q - p|` over the whole vocabulary, the BCE target is
`1 - L1 / 2`, detached. `SoftCE = -sum_v p log q` gives gradient where total variation has almost none, early in training.

Loss and gradient are computed in one pass over chunks of slots, so that one chunk of `[chunk, Vd]` is alive at a time.

Shapes: `n` supervised slots, `Vd` draft vocabulary (all of `V` without a reduced one).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms, and the decay over slots (`None`: all slots weigh the same)."""

    ce: float = 0.1
    soft: float = 0.0
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0

    def __post_init__(self) -> None:
        if min(self.ce, self.soft, self.l1, self.confidence) < 0:
            raise ValueError(f"Loss weights must be >= 0, got {self}.")
        if self.decay is not None and self.decay <= 0:
            raise ValueError(f"`decay` must be positive or `None`, got {self.decay}.")


@dataclass(frozen=True)
class SlotTerms:
    """Terms of each supervised slot, detached: `ce`, `soft`, `l1`, `agreement`, `[n]` each.

    `agreement` tells whether q and p have the same argmax within the draft vocabulary.
    """

    ce: torch.Tensor
    soft: torch.Tensor
    l1: torch.Tensor
    agreement: torch.Tensor


def slot_weights(block_size: int, decay: float | None, device: torch.device | None = None) -> torch.Tensor:
    """`w_k = exp(-(k - 1) / decay)` `[K]`."""
    slots = torch.arange(block_size, device=device, dtype=torch.float32)
    return torch.ones_like(slots) if decay is None else torch.exp(-slots / decay)


def _chunk_terms(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_logsumexp: torch.Tensor,
    *,
    labels: torch.Tensor,
) -> tuple[SlotTerms, torch.Tensor, torch.Tensor]:
    """Terms of one chunk, and `q`, `p` `[n, Vd]`. `labels` is -1 for tokens outside the draft vocabulary."""
    log_q = draft_logits.float().log_softmax(dim=-1)
    p = (target_logits.float() - target_logsumexp[:, None]).exp_()
    soft = -torch.einsum("nv,nv->n", p, log_q)
    known = labels >= 0
    ce = torch.where(known, -log_q.gather(1, labels.clamp(min=0)[:, None]).squeeze(1), 0.0)
    agreement = (log_q.argmax(dim=-1) == p.argmax(dim=-1)).float()
    q = log_q.exp_()
    # Outside the draft vocabulary q is zero, so |q - p| sums to the target's mass there.
    l1 = (q - p).abs_().sum(dim=-1) + (1 - p.sum(dim=-1)).clamp(min=0)
    return SlotTerms(ce, soft, l1, agreement), q, p


class _WeightedChunk(torch.autograd.Function):
    """`sum_n w_n (ce * CE_n + soft * SoftCE_n + l1 * L1_n)` of one chunk, with its gradient made in the same pass.

    d CE / dz = q - onehot;  d SoftCE / dz = q * sum(p) - p;  d L1 / dz = q * (s - <q, s>), s = sign(q - p).
    """

    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: torch.Tensor,
        target_logits: torch.Tensor,
        target_logsumexp: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        loss_weights: LossWeights,
    ) -> tuple[torch.Tensor, ...]:
        terms, q, p = _chunk_terms(draft_logits, target_logits, target_logsumexp, labels=labels)
        known = (labels >= 0).float()
        scale = loss_weights.ce * known
        gradient = q * scale[:, None]
        gradient.scatter_add_(1, labels.clamp(min=0)[:, None], -scale[:, None])
        if loss_weights.soft:
            gradient.add_((q * p.sum(dim=-1, keepdim=True)).sub_(p), alpha=loss_weights.soft)
        if loss_weights.l1:
            sign = torch.sign(q - p)
            inner = torch.einsum("nv,nv->n", q, sign)
            gradient.add_(sign.sub_(inner[:, None]).mul_(q), alpha=loss_weights.l1)
        gradient.mul_(weights[:, None])
        ctx.save_for_backward(gradient.to(draft_logits.dtype))
        total = loss_weights.ce * terms.ce + loss_weights.soft * terms.soft + loss_weights.l1 * terms.l1
        ctx.mark_non_differentiable(terms.ce, terms.soft, terms.l1, terms.agreement)
        return (weights * total).sum(), terms.ce, terms.soft, terms.l1, terms.agreement

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None, None, None, None, None


def weighted_slot_loss(
    draft_logits_of: Callable[[slice], torch.Tensor],
    target_of: Callable[[slice], tuple[torch.Tensor, torch.Tensor]],
    *,
    labels: torch.Tensor,
    weights: torch.Tensor,
    loss_weights: LossWeights,
    chunk_size: int = 256,
) -> tuple[torch.Tensor, SlotTerms]:
    """`sum(w * (ce * CE + soft * SoftCE + l1 * L1))` over all slots, not yet divided by `sum(w)`.

    Args:
        draft_logits_of (callable): Differentiable draft logits `[m, Vd]` of a slice of the slots.
        target_of (callable): Target logits `[m, Vd]` and their logsumexp over the whole vocabulary `[m]`, of a slice.
        labels (`torch.LongTensor` of shape `(n,)`): Label in the draft vocabulary, -1 if it is not in it.
        weights (`torch.Tensor` of shape `(n,)`): Slot weights.
        loss_weights ([`LossWeights`]): Weights of the terms.
        chunk_size (`int`, *optional*, defaults to `256`): Slots computed at once.

    Returns:
        `tuple`: the sum, and the detached [`SlotTerms`] of all slots.
    """
    totals, parts = [], []
    for start in range(0, labels.shape[0], chunk_size):
        part = slice(start, min(start + chunk_size, labels.shape[0]))
        target_logits, logsumexp = target_of(part)
        total, *terms = _WeightedChunk.apply(
            draft_logits_of(part), target_logits, logsumexp, labels[part], weights[part], loss_weights
        )
        totals.append(total)
        parts.append(terms)
    if not totals:
        empty = weights.new_zeros(0)
        return weights.sum() * 0.0, SlotTerms(empty, empty, empty, empty)
    return torch.stack(totals).sum(), SlotTerms(*(torch.cat(column) for column in zip(*parts, strict=True)))


def confidence_loss(logits: torch.Tensor, l1: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum(w * BCE)` of confidence logits `[n]` against the detached acceptance chance `1 - L1 / 2`."""
    target = (1 - l1.detach() / 2).clamp(0, 1)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    return (weights * bce).sum()


def linear_between(start: float, end: float, fraction: float) -> float:
    """`start` at `fraction = 0`, `end` from `fraction = 1` on."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


__all__ = ["LossWeights", "SlotTerms", "confidence_loss", "linear_between", "slot_weights", "weighted_slot_loss"]
