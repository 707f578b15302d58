"""The three losses of DSpark, and distillation, which precedes them: pure functions over supervised positions.

`L = ce * CE + kd * KD + l1 * L1 + confidence * BCE`, each `sum(w * term) / sum(w)` with position weights
`w_k = exp(-(k - 1) / decay)`, `k = 1..K`. `L1 = sum_v |q - p|` over the whole vocabulary, the BCE target is
`1 - L1 / 2`, detached. `KD = -sum_v p log q` gives gradient where total variation has almost none, early in training.

Loss and gradient are computed in one pass over chunks of positions. The gradient goes through the LM head at once, chunk by
chunk, so that nothing of size `[n, Vd]` ever exists, of the drafter or of the target.

Shapes: `n` supervised positions, `m` positions of a chunk, `D` hidden size, `r` Markov rank, `Vd` draft vocabulary (all of `V`
without a reduced one).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms, and the decay over positions (`None`: all positions weigh the same)."""

    ce: float = 0.1
    kd: float = 0.0
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0

    def __post_init__(self) -> None:
        if not all(0 <= weight < math.inf for weight in (self.ce, self.kd, self.l1, self.confidence)):
            raise ValueError(f"Loss weights must be >= 0 and finite, got {self}.")
        if self.decay is not None and self.decay <= 0:
            raise ValueError(f"`decay` must be positive or `None`, got {self.decay}.")


@dataclass(frozen=True)
class PositionTerms:
    """Terms of each supervised position, detached: `ce`, `kd`, `l1`, `agreement`, `[n]` each.

    `kd` is 0 where its weight is; `agreement` is 1 where q and p have the same argmax within the draft vocabulary.
    """

    ce: torch.Tensor
    kd: torch.Tensor
    l1: torch.Tensor
    agreement: torch.Tensor


DraftLogits = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class _Work:
    """The inputs of the loop over chunks that are not differentiated."""

    draft_logits_of: DraftLogits
    target_of: Callable[[slice], torch.Tensor]
    labels: torch.Tensor
    weights: torch.Tensor
    loss_weights: LossWeights
    chunk_size: int
    with_gradient: bool

    def chunks(self) -> Iterator[slice]:
        count = self.labels.shape[0]
        for start in range(0, count, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, count))


def position_weights(block_size: int, decay: float | None, device: torch.device | None = None) -> torch.Tensor:
    """`w_k = exp(-(k - 1) / decay)` `[K]`."""
    positions = torch.arange(block_size, device=device, dtype=torch.float32)
    return torch.ones_like(positions) if decay is None else torch.exp(-positions / decay)


def _chunk_terms(
    logits: torch.Tensor, p: torch.Tensor, work: _Work, chunk: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Terms `[4, m]` of one chunk in the order of `PositionTerms`, and the gradient `[m, Vd]` of its weighted sum.

    d CE / dz = q - onehot;  d KD / dz = q * sum(p) - p;  d L1 / dz = q * (s - <q, s>), s = sign(q - p).
    `labels` is -1 for tokens outside the draft vocabulary.
    """
    labels, scale = work.labels[chunk], work.loss_weights
    known, index = (labels >= 0).float(), labels.clamp(min=0)[:, None]
    log_q = logits.float().log_softmax(dim=-1)
    agreement = (log_q.argmax(dim=-1) == p.argmax(dim=-1)).float()
    ce = torch.where(labels >= 0, -log_q.gather(1, index).squeeze(1), 0.0)
    kd = -_dot(p, log_q) if scale.kd else torch.zeros_like(ce)
    mass = p.sum(dim=-1)
    q = log_q.exp_()
    difference = q - p
    # Outside the draft vocabulary q is zero, so |q - p| sums to the target's mass there.
    l1 = torch.linalg.vector_norm(difference, ord=1, dim=-1) + (1 - mass).clamp(min=0)
    terms = torch.stack([ce, kd, l1, agreement])
    if not work.with_gradient:
        return terms, None
    weights = work.weights[chunk].float()
    gradient = difference.sign_()
    of_q = scale.ce * known + scale.kd * mass - scale.l1 * _dot(q, gradient)
    gradient.mul_(scale.l1).add_(of_q[:, None]).mul_(q)
    if scale.kd:
        gradient.sub_(p, alpha=scale.kd)
    gradient.scatter_add_(1, index, -(scale.ce * known)[:, None])
    return terms, gradient.mul_(weights[:, None])


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Row by row `[m]`, without a product of the size of the operands."""
    return torch.einsum("nv,nv->n", a, b)


def _run_chunks(work: _Work, inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Terms `[4, n]` of all positions, and the gradient of their weighted sum for each of `inputs`.

    `inputs` are hidden states and latents, which go by rows, and then parameters, whose gradients add up in fp32.
    """
    wanted = [
        i for i, tensor in enumerate(inputs) if work.with_gradient and tensor is not None and tensor.requires_grad
    ]
    terms = work.weights.new_empty((4, work.labels.shape[0]), dtype=torch.float32)
    gradients: list[Any] = [None] * len(inputs)
    for i in wanted:
        gradients[i] = torch.zeros_like(inputs[i], dtype=None if i < 2 else torch.float32)  # type: ignore[arg-type]
    for chunk in work.chunks():
        with torch.set_grad_enabled(bool(wanted)):
            leaves: list[Any] = [*(_leaf(tensor, chunk) for tensor in inputs[:2]), *inputs[2:]]
            logits = work.draft_logits_of(leaves[0], leaves[1])
        p = work.target_of(chunk)
        with torch.autocast(logits.device.type, enabled=False):  # it would take the sums over the vocabulary in bf16
            terms[:, chunk], gradient = _chunk_terms(logits.detach(), p, work, chunk)
        del p
        if gradient is not None and wanted:
            gradient = gradient.to(logits.dtype)
            of_leaves = torch.autograd.grad(logits, [leaves[i] for i in wanted], gradient, allow_unused=True)
            for i, of_leaf in zip(wanted, of_leaves, strict=True):
                if of_leaf is not None:
                    (gradients[i][chunk] if i < 2 else gradients[i]).add_(of_leaf)
            del of_leaves, of_leaf
        del logits, gradient  # before the next chunk makes its own
    return terms, gradients


def _leaf(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Rows of `tensor` as leaves of a graph of their own."""
    return None if tensor is None else tensor[rows].detach().requires_grad_(tensor.requires_grad)


class _ChunkedLoss(torch.autograd.Function):
    """`sum_n w_n (ce * CE_n + kd * KD_n + l1 * L1_n)`, its gradients made chunk by chunk in the forward.

    `backward` only scales them; gradients of parameters pass through autograd like any others, so that hooks fire.
    """

    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        terms, gradients = _run_chunks(work, inputs)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.mark_non_differentiable(terms)
        scale = work.loss_weights
        total = scale.ce * terms[0] + scale.kd * terms[1] + scale.l1 * terms[2]
        return (work.weights * total).sum(), terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * grad_total.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, *scaled


def weighted_position_loss(
    hidden: torch.Tensor,
    latent: torch.Tensor | None,
    *,
    draft_logits_of: DraftLogits,
    target_of: Callable[[slice], torch.Tensor],
    labels: torch.Tensor,
    weights: torch.Tensor,
    loss_weights: LossWeights,
    parameters: Sequence[torch.Tensor] = (),
    chunk_size: int = 256,
) -> tuple[torch.Tensor, PositionTerms]:
    """`sum(w * (ce * CE + kd * KD + l1 * L1))` over all positions, not yet divided by `sum(w)`.

    Args:
        hidden (`torch.Tensor` of shape `(n, D)`): Backbone outputs.
        latent (`torch.Tensor` of shape `(n, r)`, *optional*): Latents of the sequential head.
        draft_logits_of (callable): Draft logits `[m, Vd]` of `m` rows of `hidden` and `latent`: any operations that
            autograd knows, row by row.
        target_of (callable): The target's probabilities `p` `[m, Vd]` at a slice of the positions, in fp32.
        labels (`torch.LongTensor` of shape `(n,)`): Label in the draft vocabulary, -1 if it is not in it.
        weights (`torch.Tensor` of shape `(n,)`): Position weights.
        loss_weights ([`LossWeights`]): Weights of the terms.
        parameters (`Sequence[torch.Tensor]`, *optional*): Trained parameters that `draft_logits_of` reads (`W2`); the
            others get no gradient from here.
        chunk_size (`int`, *optional*, defaults to `256`): Positions computed at once.

    Returns:
        `tuple`: the sum, and the detached [`PositionTerms`] of all positions.
    """
    with_gradient = torch.is_grad_enabled()  # inside an autograd function it never is
    work = _Work(draft_logits_of, target_of, labels, weights, loss_weights, chunk_size, with_gradient)
    total, terms = _ChunkedLoss.apply(work, hidden, latent, *parameters)
    return total, PositionTerms(*terms)


def confidence_loss(logits: torch.Tensor, l1: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum(w * BCE)` of confidence logits `[n]` against the detached acceptance chance `1 - L1 / 2`."""
    target = (1 - l1.detach() / 2).clamp(0, 1)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    return (weights * bce).sum()


def linear_between(start: float, end: float, fraction: float) -> float:
    """`start` at `fraction = 0`, `end` from `fraction = 1` on."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


__all__ = [
    *("LossWeights", "PositionTerms", "confidence_loss", "linear_between", "position_weights"),
    "weighted_position_loss",
]
