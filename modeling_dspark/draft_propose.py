"""Draft one block for any number of rows: embed and backbone, base logits, then the heads.

`propose` runs these three steps, independently of schedules and verification, and returns exactly the distributions that
the draft tokens are drawn from.

Shapes: `R` rows, `C` new context positions, `n` draft positions, `Q` positions of the block, `L` tapped layers, `D` hidden
size, `r` Markov rank, `V` vocabulary, `Vd` draft vocabulary.
"""

from dataclasses import dataclass

import torch

from .draft_binding import DraftBinding
from .draft_tokens import DraftBlock, DraftSampling, choose_tokens
from .model_cache import DSparkCache
from .model_heads import MarkovHead, calibrated_confidence
from .model_protocol import Drafter


@dataclass(frozen=True)
class Proposal:
    """Drafts of one round.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, n)`): Draft tokens in the target's vocabulary.
        logits (`torch.Tensor` of shape `(R, n, Vd)`, *optional*):
            Logits of the distributions the tokens were drawn from, over the draft vocabulary (fp32, processed); `None`
            when greedy.
        columns (`torch.LongTensor` of shape `(R, n)`): The tokens' places in the draft vocabulary.
        token_ids (`torch.LongTensor` of shape `(Vd,)`, *optional*): Tokens of a reduced draft vocabulary.
        confidence_logits (`torch.Tensor` of shape `(R, n)`, *optional*): As the head returns them.
        confidence (`torch.Tensor` of shape `(R, n)`, *optional*): Calibrated, `c_k`.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    columns: torch.Tensor
    token_ids: torch.Tensor | None
    confidence_logits: torch.Tensor | None
    confidence: torch.Tensor | None

    def full_logits(self, vocab_size: int) -> torch.Tensor | None:
        """`logits` over the target's vocabulary `[R, n, V]`, `-inf` where a token cannot be drafted."""
        if self.logits is None:
            return None
        columns = torch.arange(self.logits.shape[-1]) if self.token_ids is None else self.token_ids
        full = self.logits.new_full((*self.logits.shape[:-1], vocab_size), -torch.inf)
        full[..., columns.to(full.device)] = self.logits
        return full


@torch.no_grad()
def propose(
    binding: DraftBinding,
    features: torch.Tensor,
    *,
    anchor_tokens: torch.Tensor,
    cache: DSparkCache,
    context_lengths: list[int] | None = None,
    num_tokens: int | None = None,
    sampling: DraftSampling = DraftSampling(),  # noqa: B008 - frozen
) -> Proposal:
    """Draft up to `num_tokens` tokens for each row (docs/data-path.md, "One round").

    Args:
        binding ([`DraftBinding`]): Drafter and target.
        features (`torch.Tensor` of shape `(R, C, L * D)`): Features new to the cache, padded on the right where ragged.
        anchor_tokens (`torch.LongTensor` of shape `(R,)`): Last token of each row, which has no features yet.
        cache ([`DSparkCache`]): The drafter's context; its first `R` rows are read and advanced.
        context_lengths (`list[int]`, *optional*): Features of each row that are not padding; by default `C`.
        num_tokens (`int`, *optional*): Positions to draft, up to `block_size` (the default).
        sampling ([`DraftSampling`], *optional*): How tokens are chosen; by default the argmax.

    Returns:
        [`Proposal`]: the drafts and the distributions they come from.
    """
    hidden = encode_block(binding, features, anchor_tokens=anchor_tokens, cache=cache, context_lengths=context_lengths)
    return draft_tokens(binding, score_block(binding, hidden, anchor_tokens, num_tokens), sampling)


def encode_block(
    binding: DraftBinding,
    features: torch.Tensor,
    *,
    anchor_tokens: torch.Tensor,
    cache: DSparkCache,
    context_lengths: list[int] | None = None,
) -> torch.Tensor:
    """Run the backbone over one block per row and keep the new context: hidden states `[R, Q, D]` of all its positions.

    The arguments are those of `propose`.
    """
    drafter = binding.drafter
    num_rows, num_context = features.shape[:2]
    lengths = [num_context] * num_rows if context_lengths is None else context_lengths
    config, device = drafter.config, drafter.device
    noise = torch.full((num_rows, config.num_block_positions), config.mask_token_id, device=device)
    noise[:, 0] = anchor_tokens.to(device)
    start = torch.tensor(cache.lengths[:num_rows], device=device)[:, None]
    new = torch.tensor(lengths, device=device)[:, None]
    positions = torch.cat(
        [
            start + torch.arange(num_context, device=device),
            start + new + torch.arange(config.num_block_positions, device=device),
        ],
        dim=1,
    )
    output = drafter(
        noise_embeds=binding.embed(noise, like=drafter.norm.weight),  # type: ignore[arg-type]  # of a norm
        context_hidden_states=features.to(device=device, dtype=drafter.dtype),
        position_ids=positions,
        cache=cache,
        context_lengths=lengths,
    )
    cache.advance(lengths)
    return output.last_hidden_state


def score_block(
    binding: DraftBinding, hidden: torch.Tensor, anchor_tokens: torch.Tensor, num_tokens: int | None = None
) -> DraftBlock:
    """Base logits of the first `num_tokens` draft positions, from the backbone's output `[R, Q, D]` for the whole block."""
    config = binding.drafter.config
    first = config.num_block_positions - config.block_size
    drafting = hidden[:, first : first + (config.block_size if num_tokens is None else num_tokens)]
    # One matrix, since a linear layer over a slice of three dimensions copies its weight for each row.
    base_logits = binding.draft_logits(drafting.flatten(0, 1)).unflatten(0, drafting.shape[:2])
    anchors = anchor_tokens.to(hidden.device)
    return DraftBlock(anchors, drafting, base_logits, state_before_draft(binding.drafter, hidden[:, 0], anchors))


def draft_tokens(binding: DraftBinding, block: DraftBlock, sampling: DraftSampling) -> Proposal:
    """Draft tokens, their distributions and their confidences."""
    chosen, drafter = choose_tokens(binding, block, sampling), binding.drafter
    confidence = None
    if chosen.confidence_logits is not None:
        confidence = calibrated_confidence(chosen.confidence_logits, drafter.config.confidence_temperatures)
    return Proposal(
        tokens=chosen.tokens,
        logits=chosen.logits,
        columns=chosen.columns,
        token_ids=drafter.draft_token_ids,
        confidence_logits=chosen.confidence_logits,
        confidence=confidence,
    )


def state_before_draft(drafter: Drafter, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor | None:
    """State of the `rnn` head before the first position `[..., r]`, or `None` where a block starts without one.

    In the older layout the anchor has its own position, which drafts nothing but advances the state.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        hidden (`torch.Tensor` of shape `(..., D)`): Backbone output of the anchor's position.
        anchors (`torch.LongTensor` of shape `(...)`): The anchors.
    """
    if drafter.config.sample_from_anchor or drafter.config.markov_head_type != "rnn":
        return None
    head: MarkovHead = drafter.markov_head  # type: ignore[assignment]  # of this type
    return head.step(head.embed(anchors).to(hidden.dtype), hidden, None)[1]


__all__ = ["Proposal", "draft_tokens", "encode_block", "propose", "score_block", "state_before_draft"]
