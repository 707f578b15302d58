"""Draft one block for any number of rows: embed, backbone, base logits, then the heads from left to right.

`propose` knows neither schedules nor verification; it returns what they need. The distribution a draft token is drawn
from is the one that is returned.

Shapes: `R` rows, `C` new context positions, `K` positions, `L` tapped layers, `D` hidden size, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .draft_accept import draw
from .fused_head import BlockTokens, fusable_heads, fused_block
from .model_cache import DSparkCache
from .model_heads import calibrated_confidence
from .target_binding import TargetBinding


_UNDRAFTABLE = -1e30  # finite after any sensible temperature, and of no weight in a softmax
LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (drafts so far, logits) -> logits


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
        hidden_states (`torch.Tensor` of shape `(R, n, D)`): Backbone outputs.
        base_logits (`torch.Tensor` of shape `(R, n, Vd)`): `U`, in the draft vocabulary.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    columns: torch.Tensor
    token_ids: torch.Tensor | None
    confidence_logits: torch.Tensor | None
    confidence: torch.Tensor | None
    hidden_states: torch.Tensor
    base_logits: torch.Tensor

    def full_logits(self, vocab_size: int) -> torch.Tensor | None:
        """`logits` over the target's vocabulary `[R, n, V]`, `-inf` where a token cannot be drafted."""
        if self.logits is None:
            return None
        columns = torch.arange(self.logits.shape[-1]) if self.token_ids is None else self.token_ids
        full = self.logits.new_full((*self.logits.shape[:-1], vocab_size), -torch.inf)
        full[..., columns.to(full.device)] = self.logits
        return full


def draft_block(
    drafter: Any,
    binding: TargetBinding,
    features: torch.Tensor,
    *,
    anchor_tokens: torch.Tensor,
    cache: DSparkCache,
    context_lengths: list[int] | None = None,
) -> torch.Tensor:
    """Run the backbone over one block a row and keep the new context: hidden states `[R, Q, D]` of all its positions.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        binding ([`TargetBinding`]): The target's embedding and LM head.
        features (`torch.Tensor` of shape `(R, C, L * D)`): Features of tokens that are new to `cache`, left-aligned.
        anchor_tokens (`torch.LongTensor` of shape `(R,)`): The last token of each row, not yet through the target.
        cache ([`DSparkCache`]): Context so far; advanced by this call.
        context_lengths (`list[int]`, *optional*): Real features in each row; `None` means all `C` in every row.
    """
    rows, num_context = features.shape[:2]
    lengths = [num_context] * rows if context_lengths is None else context_lengths
    config, device = drafter.config, drafter.device
    noise = torch.full((rows, config.num_block_positions), config.mask_token_id, device=device)
    noise[:, 0] = anchor_tokens.to(device)
    start = torch.tensor(cache.lengths[:rows], device=device)[:, None]
    new = torch.tensor(lengths, device=device)[:, None]
    positions = torch.cat(
        [
            start + torch.arange(num_context, device=device),
            start + new + torch.arange(config.num_block_positions, device=device),
        ],
        dim=1,
    )
    output = drafter(
        noise_embeds=binding.embed(noise, like=drafter.norm.weight),
        context_hidden_states=features.to(device=device, dtype=drafter.dtype),
        position_ids=positions,
        cache=cache,
        context_lengths=lengths,
    )
    cache.advance(lengths)
    return output.last_hidden_state


@torch.no_grad()
def propose(  # noqa: D417 - six arguments are those of `draft_block`
    drafter: Any,
    binding: TargetBinding,
    features: torch.Tensor,
    *,
    anchor_tokens: torch.Tensor,
    cache: DSparkCache,
    context_lengths: list[int] | None = None,
    num_tokens: int | None = None,
    do_sample: bool = False,
    logits_processor: LogitsProcessor | None = None,
    is_vocabulary_invariant: bool = False,
    temperature: float | None = None,
    generator: torch.Generator | None = None,
) -> Proposal:
    """Draft up to `num_tokens` tokens a row (design section 2, steps 2 to 4).

    Args:
        drafter, binding, features, anchor_tokens, cache, context_lengths: As for `draft_block`.
        num_tokens (`int`, *optional*): Positions to draft, at most `block_size` (the default).
        do_sample (`bool`, *optional*, defaults to `False`): Draw from `q` instead of taking its argmax.
        logits_processor (callable, *optional*):
            Called at each position with the draft tokens `[R, k]` before it and its logits `[R, V]`; returns logits.
        is_vocabulary_invariant (`bool`, *optional*, defaults to `False`):
            Whether the processor does not look at which token a logit belongs to; it then gets those of a reduced draft
            vocabulary as they are, `[R, Vd]`.
        temperature (`float`, *optional*):
            What the processor divides the logits by, if it does nothing else: the heads can then be one operation.
        generator (`torch.Generator`, *optional*): Source of randomness of the draws.

    Returns:
        [`Proposal`]: the drafts and the distributions they come from.
    """
    block = draft_block(
        drafter,
        binding,
        features,
        anchor_tokens=anchor_tokens,
        cache=cache,
        context_lengths=context_lengths,
    )
    config, first = drafter.config, drafter.config.num_block_positions - drafter.config.block_size
    hidden = block[:, first : first + (config.block_size if num_tokens is None else num_tokens)]
    # One matrix, since a linear layer over a slice of three dimensions copies its weight for each row.
    base_logits = binding.draft_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    anchors = anchor_tokens.to(hidden.device)
    level = 1.0 if logits_processor is None else temperature
    state = state_before_positions(drafter, block[:, 0], anchors)
    heads = None if level is None or state is not None else fusable_heads(drafter, base_logits)
    if heads is not None and level is not None:
        level = level if do_sample else 0.0
        made = _at_once(drafter, heads, hidden, base_logits, anchors, temperature=level, generator=generator)
        return _proposal(drafter, hidden, base_logits, made)
    processor = None
    if logits_processor is not None or do_sample:
        processor = partial(
            _processed, drafter, logits_processor=logits_processor, in_full=not is_vocabulary_invariant
        )
    made = _position_by_position(
        drafter, hidden, base_logits, anchors, processor, state=state, do_sample=do_sample, generator=generator
    )
    return _proposal(drafter, hidden, base_logits, made)


def state_before_positions(drafter: Any, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor | None:
    """State of the `rnn` head before the first position `[..., r]`, or `None` where a block starts without one.

    In the older layout the anchor has a position of its own, which drafts nothing; the state passes over it.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        hidden (`torch.Tensor` of shape `(..., D)`): Backbone output of the anchor's position.
        anchors (`torch.LongTensor` of shape `(...)`): The anchors.
    """
    if drafter.config.sample_from_anchor or drafter.config.markov_head_type != "rnn":
        return None
    head = drafter.markov_head
    return head.step(head.embed(anchors).to(hidden.dtype), hidden, None)[1]


def _at_once(
    drafter: Any,
    heads: dict[str, Any],
    hidden: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    *,
    temperature: float,
    generator: torch.Generator | None,
) -> BlockTokens:
    """The heads as one operation. The logits, kept for draws, are divided by the temperature and in fp32."""
    if temperature == 0.0:
        return fused_block(heads, base_logits, hidden, anchors)
    seed = _seed(generator)
    made = fused_block(heads, base_logits, hidden, anchors, temperature=temperature, seed=seed, keep_logits=True)
    logits = made.logits.float().div_(temperature)  # type: ignore[union-attr]  # it was asked for
    unusable = ~logits.amax(dim=-1).isfinite()
    if logits.device.type == "cpu" and not unusable.any():  # asking a GPU would be waiting for it
        return made._replace(logits=logits)
    logits.masked_fill_(unusable[..., None], -torch.inf)
    logits[..., 0].masked_fill_(unusable, 0.0)
    columns = made.columns.masked_fill(unusable, 0)
    return made._replace(columns=columns, tokens=drafter.to_target_ids(columns), logits=logits)


def _position_by_position(
    drafter: Any,
    hidden: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    processor: Callable | None,
    *,
    state: torch.Tensor | None,
    do_sample: bool,
    generator: torch.Generator | None,
) -> BlockTokens:
    """The heads from left to right, with processors between the logits and the choice."""
    previous = anchors
    tokens: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    confidences: list[torch.Tensor] = []
    for position in range(hidden.shape[1]):
        step = drafter.head_step(hidden[:, position], base_logits[:, position], previous, state)
        state = step.state
        scores = step.logits if processor is None else processor(step.logits, tokens)
        columns.append(draw(scores.softmax(dim=-1), generator) if do_sample else argmax(scores))
        previous = drafter.to_target_ids(columns[-1])
        tokens.append(previous)
        logits.append(scores)
        confidences.append(step.confidence_logits)
    empty = hidden.new_empty(hidden.shape[0], 0)
    return BlockTokens(
        columns=torch.stack(columns, dim=1) if columns else empty.long(),
        tokens=torch.stack(tokens, dim=1) if tokens else empty.long(),
        logits=torch.stack(logits, dim=1) if logits and do_sample else None,
        confidence_logits=None
        if drafter.confidence_head is None
        else torch.stack(confidences, dim=1)
        if confidences
        else empty.float(),
    )


def _seed(generator: torch.Generator | None) -> int:
    """A seed for draws by a counter, from the caller's source of randomness; one on a GPU is waited for."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=device))


def _processed(
    drafter: Any,
    logits: torch.Tensor,
    tokens: list[torch.Tensor],
    logits_processor: LogitsProcessor | None,
    *,
    in_full: bool,
) -> torch.Tensor:
    """The user's processors on one position `[R, Vd]`: the logits of what is drawn from, in fp32.

    Processors see a finite value at tokens that cannot be drafted, since some of them fail on a row without any finite
    value. A row that is left without a token (or is not a number) proposes the first one for certain.
    """
    processed = logits.float()
    if logits_processor is not None:
        before = torch.stack(tokens, dim=1) if tokens else logits.new_empty((logits.shape[0], 0), dtype=torch.long)
        draft_token_ids = drafter.draft_token_ids
        if draft_token_ids is None or not in_full:
            processed = logits_processor(before, processed)
        else:
            full = drafter.to_target_logits(logits, fill=_UNDRAFTABLE)
            processed = logits_processor(before, full)[..., draft_token_ids]
    processed = processed.float()  # what is drawn from is what is verified with
    unusable = torch.isnan(processed) | torch.isposinf(processed)
    empty = unusable.any(dim=-1, keepdim=True) | torch.isneginf(processed).all(dim=-1, keepdim=True)
    return torch.where(empty, _certain(processed), processed)


def _certain(logits: torch.Tensor) -> torch.Tensor:
    """Logits of the same shape `[P, Vd]` of which nothing but the first is drawn."""
    certain = torch.full_like(logits, -torch.inf)
    certain[:, 0] = 0.0
    return certain


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the first of the highest logits; on a CPU `max` is several times faster than `argmax`."""
    return logits.max(dim=-1).indices


def _proposal(drafter: Any, hidden: torch.Tensor, base_logits: torch.Tensor, made: BlockTokens) -> Proposal:
    confidence = None
    if made.confidence_logits is not None:
        confidence = calibrated_confidence(made.confidence_logits, drafter.config.confidence_temperatures)
    return Proposal(
        tokens=made.tokens,
        logits=made.logits,
        columns=made.columns,
        token_ids=drafter.draft_token_ids,
        confidence_logits=made.confidence_logits,
        confidence=confidence,
        hidden_states=hidden,
        base_logits=base_logits,
    )


__all__ = ["LogitsProcessor", "Proposal", "argmax", "draft_block", "propose", "state_before_positions"]
