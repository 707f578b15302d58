"""The heads of a block, from left to right: draft tokens, and the logits they are chosen from.

Shapes: `R` rows, `n` draft positions, `D` hidden size, `r` Markov rank, `V` vocabulary, `Vd` draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from .draft_accept import draw
from .draft_binding import DraftBinding
from .fused_head import BlockTokens, fused_block
from .model_protocol import Drafter


_UNDRAFTABLE = -1e30  # finite at any sensible temperature, and without weight in a softmax
LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (drafts so far, logits) -> logits


@dataclass(frozen=True)
class DraftSampling:
    """How draft tokens are chosen from logits.

    Attributes:
        do_sample (`bool`): Draw from `q` instead of taking its argmax.
        processor (callable, *optional*):
            Called at each draft position with the draft tokens `[R, k]` before it and its logits `[R, V]`; returns logits.
        is_vocabulary_invariant (`bool`):
            Whether the processor ignores which token a logit belongs to; it then gets the logits of a reduced draft
            vocabulary directly, `[R, Vd]`.
        temperature (`float`, *optional*):
            What the processor divides the logits by, if it does nothing else: the heads can then be one operation.
        generator (`torch.Generator`, *optional*): Source of randomness of the draws.
    """

    do_sample: bool = False
    processor: LogitsProcessor | None = None
    is_vocabulary_invariant: bool = False
    temperature: float | None = None
    generator: torch.Generator | None = None

    @property
    def level(self) -> float | None:
        """Temperature of the draws; `None` if the processor does more than apply one."""
        return 1.0 if self.processor is None else self.temperature


class DraftBlock(NamedTuple):
    """Inputs of the heads.

    Attributes:
        anchors (`torch.LongTensor` of shape `(R,)`): The token before the first draft position.
        hidden_states (`torch.Tensor` of shape `(R, n, D)`): Backbone outputs.
        base_logits (`torch.Tensor` of shape `(R, n, Vd)`): `U`, in the draft vocabulary.
        state (`torch.Tensor` of shape `(R, r)`, *optional*): State of the `rnn` head before the first draft position.
    """

    anchors: torch.Tensor
    hidden_states: torch.Tensor
    base_logits: torch.Tensor
    state: torch.Tensor | None


def choose_tokens(binding: DraftBinding, block: DraftBlock, sampling: DraftSampling) -> BlockTokens:
    """Draft tokens of a block: in one operation if the heads are fused and only a temperature is applied."""
    fused = sampling.level is not None and block.state is None and binding.heads is not None
    return _at_once(binding, block, sampling) if fused else _position_by_position(binding.drafter, block, sampling)


def _at_once(binding: DraftBinding, block: DraftBlock, sampling: DraftSampling) -> BlockTokens:
    """The heads as one operation. The logits, kept for draws, are divided by the temperature and in fp32."""
    inputs = (binding.heads, block.base_logits, block.hidden_states, block.anchors)
    if not sampling.do_sample:
        return fused_block(*inputs, backend=binding.backend)  # type: ignore[arg-type]  # they are fused
    temperature: float = sampling.level  # type: ignore[assignment]  # checked by the caller
    chosen = fused_block(
        *inputs,  # type: ignore[arg-type]
        temperature=temperature,
        seed=_seed(sampling.generator),
        keep_logits=True,
        backend=binding.backend,
    )
    logits = chosen.logits.float().div_(temperature)  # type: ignore[union-attr]  # asked for
    unusable = ~logits.amax(dim=-1).isfinite()
    if logits.device.type == "cpu" and not unusable.any():  # the check would wait for a GPU
        return chosen._replace(logits=logits)
    logits.masked_fill_(unusable[..., None], -torch.inf)
    logits[..., 0].masked_fill_(unusable, 0.0)
    columns = chosen.columns.masked_fill(unusable, 0)
    return chosen._replace(columns=columns, tokens=binding.drafter.to_target_ids(columns), logits=logits)


def _position_by_position(drafter: Drafter, block: DraftBlock, sampling: DraftSampling) -> BlockTokens:
    """The heads from left to right, with the processor between the logits and the choice."""
    hidden, base_logits, state, previous = block.hidden_states, block.base_logits, block.state, block.anchors
    processor: Callable = lambda logits, _: logits  # noqa: E731
    if sampling.processor is not None or sampling.do_sample:
        processor = partial(_processed, drafter, sampling)
    tokens: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    confidences: list[torch.Tensor] = []
    for position in range(hidden.shape[1]):
        step = drafter.head_step(hidden[:, position], base_logits[:, position], previous, state)
        state = step.state
        scores = processor(step.logits, tokens)
        chosen = draw(scores.softmax(dim=-1), sampling.generator) if sampling.do_sample else argmax(scores)
        previous = drafter.to_target_ids(chosen)
        columns.append(chosen)
        tokens.append(previous)
        logits.append(scores)
        confidences.append(step.confidence_logits)
    empty = hidden.new_empty(hidden.shape[0], 0)
    return BlockTokens(
        columns=torch.stack(columns, dim=1) if columns else empty.long(),
        tokens=torch.stack(tokens, dim=1) if tokens else empty.long(),
        logits=torch.stack(logits, dim=1) if logits and sampling.do_sample else None,
        confidence_logits=None
        if drafter.confidence_head is None
        else torch.stack(confidences, dim=1)
        if confidences
        else empty.float(),
    )


def _seed(generator: torch.Generator | None) -> int:
    """A seed for counter-based draws, from the caller's generator; waits for a generator on a GPU."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=device))


def _processed(
    drafter: Drafter, sampling: DraftSampling, logits: torch.Tensor, tokens: list[torch.Tensor]
) -> torch.Tensor:
    """The user's processors applied to one draft position `[R, Vd]`: the logits of the draws, in fp32.

    Tokens that cannot be drafted get a finite value, because some processors fail on a row without finite values. A row
    without any possible token (or with NaN or infinity) proposes the first token with certainty.
    """
    processed = logits.float()
    if sampling.processor is not None:
        before = torch.stack(tokens, dim=1) if tokens else logits.new_empty((logits.shape[0], 0), dtype=torch.long)
        draft_token_ids = drafter.draft_token_ids
        if draft_token_ids is None or sampling.is_vocabulary_invariant:
            processed = sampling.processor(before, processed)
        else:
            full = drafter.to_target_logits(logits, fill=_UNDRAFTABLE)
            processed = sampling.processor(before, full)[..., draft_token_ids]
    processed = processed.float()  # verification uses exactly these logits
    unusable = torch.isnan(processed) | torch.isposinf(processed)
    empty = unusable.any(dim=-1, keepdim=True) | torch.isneginf(processed).all(dim=-1, keepdim=True)
    return torch.where(empty, _certain(processed), processed)


def _certain(logits: torch.Tensor) -> torch.Tensor:
    """Logits of the same shape `[P, Vd]` of which only the first can be drawn."""
    certain = torch.full_like(logits, -torch.inf)
    certain[:, 0] = 0.0
    return certain


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the first of the highest logits; on a CPU `max` is several times faster than `argmax`."""
    return logits.max(dim=-1).indices


__all__ = ["DraftBlock", "DraftSampling", "LogitsProcessor", "argmax", "choose_tokens"]
