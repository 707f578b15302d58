"""The sequential head and the confidence head, one position at a time.

A step is the same function in training (teacher-forced, any leading shape) and in decoding (`[R, ...]`); the caller
owns the state, so a block always starts from `None` (`s_{-1} = 0`).

Shapes: `...` any leading shape, `r` Markov rank, `D` hidden size, `V` vocabulary, `Vd` draft vocabulary.
"""

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """Low-rank bias on the base logits that depends on the previous token (`vanilla`, `gated`, `rnn`).

    `logits[k] = U[k] + B_k` with `B_k = W2 @ latent_k`; `step` computes the latent, `bias` the product.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def embed(self, previous_tokens: torch.Tensor) -> torch.Tensor:
        """`W1[prev]` `[..., r]` of the tokens before the position (in the target's vocabulary)."""
        return self.markov_w1(previous_tokens)

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Latent of one position.

        Args:
            previous (`torch.Tensor` of shape `(..., r)`): `embed` of the previous token.
            hidden (`torch.Tensor` of shape `(..., D)`): Backbone output of the position.
            state (`torch.Tensor` of shape `(..., r)`, *optional*): State of the position before; `None` starts a block.

        Returns:
            `tuple`: the latent `[..., r]` and the state for the next position (`None` for stateless heads).
        """
        mixer = self.gate_proj if self.kind == "gated" else self.joint_proj if self.kind == "rnn" else None
        weight, bias = (None, None) if mixer is None else (mixer.weight, mixer.bias)
        return markov_latent(self.kind, previous, hidden, state, weight, bias)

    def bias(self, latent: torch.Tensor) -> torch.Tensor:
        """`B_k = W2 @ latent` `[..., Vd]`."""
        return self.markov_w2(latent)


def markov_latent(
    kind: str,
    previous: torch.Tensor,
    hidden: torch.Tensor,
    state: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`MarkovHead.step` from the weight and bias of its gate (`gated`, `[r, D + r]`) or cell (`rnn`, `[3 r, 2 r + D]`)."""
    if kind == "vanilla":
        return previous, None
    if kind == "gated":
        gate = nn.functional.linear(torch.cat([hidden, previous], dim=-1), weight, bias)  # type: ignore[arg-type]
        return torch.sigmoid(gate) * previous, None
    state = torch.zeros_like(previous) if state is None else state
    mixed = nn.functional.linear(torch.cat([state, previous, hidden], dim=-1), weight, bias)  # type: ignore[arg-type]
    gate, candidate, output = mixed.chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Logit of the chance that a position survives verification, given that the positions before it did."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits `[...]` in fp32, from `hidden` `[..., D]` and `previous` `[..., r]`."""
        if self.with_markov:
            hidden = torch.cat([hidden, previous], dim=-1)  # type: ignore[list-item]  # the config demands a Markov head
        return self.proj(hidden).squeeze(-1).float()


def calibrated_confidence(logits: torch.Tensor, temperatures: list[float] | None) -> torch.Tensor:
    """`c_k = sigmoid(z_k / T_k)` `[..., n]` for the first `n` positions of a block (design: sequential temperature scaling)."""
    if temperatures is not None:
        logits = logits / logits.new_tensor(temperatures[: logits.shape[-1]])
    return torch.sigmoid(logits)


__all__ = ["ConfidenceHead", "MarkovHead", "calibrated_confidence", "markov_latent"]
