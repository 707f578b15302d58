"""The distributions that the loss compares, computed for a few positions at a time from hidden states, which are small.

Nothing here is of size `[n, V]`; `training.objective.losses` asks for chunks and drops them.

Shapes: `n` supervised positions, `m` positions of a chunk, `P` positions of the batch, `D` hidden size, `V` vocabulary, `Vd` draft
vocabulary, `r` Markov rank.
"""

from dataclasses import dataclass

import torch

from modeling_dspark import DSparkModel
from modeling_dspark.target_binding import TargetBinding


@dataclass(frozen=True)
class TargetDistribution:
    """The target's distribution at each position.

    Attributes:
        binding ([`TargetBinding`]): The target's LM head.
        last_hidden (`torch.Tensor` of shape `(P, D)`): After the final norm.
        positions (`torch.LongTensor` of shape `(n,)`): The position whose logits predict each supervised position.
        logsumexp (`torch.Tensor` of shape `(P,)`, *optional*):
            Of the logits over the whole vocabulary. With it, a reduced draft vocabulary takes only its own rows of the LM
            head; `None` computes it.
    """

    binding: TargetBinding
    last_hidden: torch.Tensor
    positions: torch.Tensor
    logsumexp: torch.Tensor | None = None

    @torch.no_grad()
    def probabilities(self, chunk: slice) -> torch.Tensor:
        """`p` `[m, Vd]` in fp32; rows sum to less than 1 where the draft vocabulary is reduced."""
        # A position serves several neighboring blocks: its logits are computed once per chunk.
        positions, rows = self.positions[chunk].unique(return_inverse=True)
        hidden, ids = self.last_hidden[positions], self.binding.draft_token_ids
        if self.logsumexp is not None:
            logits = self.binding.draft_logits(hidden).float()
            return (logits - self.logsumexp[positions, None]).exp_()[rows]
        logits = self.binding.target_logits(hidden).float()
        if ids is None:
            return logits.softmax(dim=-1)[rows]
        return (logits[:, ids] - logits.logsumexp(dim=-1, keepdim=True)).exp_()[rows]


def draft_logits(
    drafter: DSparkModel, binding: TargetBinding, hidden: torch.Tensor, latent: torch.Tensor | None
) -> torch.Tensor:
    """`U + W2 @ latent` `[m, Vd]`: the borrowed LM head, soft-capped as the target's logits are, then the bias."""
    logits = binding.draft_logits(hidden)
    if latent is not None:
        logits = logits + drafter.markov_head.bias(latent)  # type: ignore[union-attr]  # it made the latents
    return logits


def bias_parameters(drafter: DSparkModel) -> list[torch.nn.Parameter]:
    """The trained parameters that `draft_logits` reads, adapters on `W2` included."""
    if drafter.markov_head is None:
        return []
    return [parameter for parameter in drafter.markov_head.markov_w2.parameters() if parameter.requires_grad]


__all__ = ["TargetDistribution", "bias_parameters", "draft_logits"]
