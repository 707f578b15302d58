"""Tokens from the target's logits, for all positions at once: the user's processors, the argmax or a draw, the texts.

Shapes: `R` rows, `N` packed positions, `K` draft positions, `V` vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .draft_accept import Acceptance, accept_greedy, accept_sampled, draw
from .draft_tokens import argmax
from .engine_processors import RowProcessors
from .engine_request import Request
from .engine_round import ScheduledDrafts
from .engine_stopping import StopConditions
from .target_packing import PackedPlan


class Scores(NamedTuple):
    """Logits `[N, V]` before and after the processors: `raw` (valid only if kept) and `processed`."""

    raw: torch.Tensor
    processed: torch.Tensor


class TokenSelector:
    """Chooses the tokens of a call.

    Args:
        processors ([`RowProcessors`]): Applied to the target's logits.
        do_sample (`bool`): Draw instead of taking the argmax.
        generator (`torch.Generator`, *optional*): Source of randomness.
        keep_scores, keep_logits (`bool`): Whether processed or raw logits are kept.
    """

    def __init__(
        self,
        processors: RowProcessors,
        *,
        do_sample: bool,
        generator: torch.Generator | None,
        keep_scores: bool,
        keep_logits: bool,
    ):
        self.processors, self.do_sample, self.generator = processors, do_sample, generator
        self.keep_scores, self.keep_logits = keep_scores, keep_logits

    def process(self, logits: torch.Tensor, prefixes: Callable[[], list[torch.Tensor]], rows: list[int]) -> Scores:
        """Logits `[N, V]` before and after the processors; see `RowProcessors` for `prefixes` and `rows`."""
        if not (self.processors or self.do_sample or self.keep_scores or self.keep_logits):
            return Scores(logits, logits)  # only their order matters, so they stay as they are
        logits = logits.to(torch.float32, copy=True)
        raw = logits.clone() if self.keep_logits and self.processors else logits
        return Scores(raw, self.processors(logits, prefixes, rows).float())

    def choose(self, processed: torch.Tensor) -> torch.Tensor:
        """A token `[P]` from each row of processed logits `[P, V]`, where nothing was drafted."""
        return draw(processed.softmax(dim=-1), self.generator) if self.do_sample else argmax(processed)

    def accept(self, drafts: ScheduledDrafts, plan: PackedPlan, processed: torch.Tensor) -> Acceptance:
        """Compare drafts and target, for all rows at once."""
        device = processed.device
        lengths = torch.tensor(drafts.counts, device=device) - 1
        draft_tokens = drafts.tokens[:, 1:].to(device)
        if not self.do_sample:
            return accept_greedy(draft_tokens, plan.unpack(argmax(processed)), lengths)
        num_rows, longest = draft_tokens.shape
        if not longest:
            return Acceptance(lengths, self.choose(processed))
        positions = plan.unpack(torch.arange(len(processed), device=device))
        proposal: Any = drafts.proposal  # something was drafted
        return accept_sampled(
            draft_tokens,
            _to_rows(proposal.logits[:, :longest].to(device), drafts.rows, num_rows),
            processed,
            lengths,
            draft_columns=_to_rows(proposal.columns[:, :longest].to(device), drafts.rows, num_rows),
            draft_token_ids=proposal.token_ids,
            positions=positions,
            generator=self.generator,
        )


class TextWriter:
    """Appends tokens to texts, up to where each text ends.

    Args:
        conditions ([`StopConditions`]): Where texts end.
        keep_scores, keep_logits (`bool`): Whether requests keep processed or raw logits of their new tokens.
    """

    def __init__(self, conditions: StopConditions, *, keep_scores: bool, keep_logits: bool):
        self.conditions, self.keep_scores, self.keep_logits = conditions, keep_scores, keep_logits

    def append(
        self, requests: list[Request], kept: list[list[int]], offsets: Sequence[int], *, scores: Scores
    ) -> list[Request]:
        """Append the tokens `kept` of each request; returns the requests that have finished.

        Args:
            requests (`list[Request]`): Requests to append to.
            kept (`list[list[int]]`): New tokens of each, at least one.
            offsets (`Sequence[int]`): Where the scores of each request begin in `scores`.
            scores ([`Scores`]): Scores that the tokens were chosen from.

        Raises:
            ValueError: if no token could be drawn.
        """
        if any(tokens[-1] >= scores.processed.shape[-1] for tokens in kept):
            raise ValueError(
                "No token can be drawn: the logits are not numbers, or the logits processors leave no token with a finite "
                "logit. Check the processors, or the target's dtype."
            )
        for request, tokens, offset in zip(requests, kept, offsets, strict=False):
            request.append(tokens)
            if self.keep_scores:
                request.scores += scores.processed[offset : offset + len(tokens)].clone().unbind()
            if self.keep_logits:
                request.logits += scores.raw[offset : offset + len(tokens)].clone().unbind()
        ends = self.conditions.cut(
            [(request.text, tokens) for request, tokens in zip(requests, kept, strict=True)],
            rows=[request.index for request in requests],
            scores=[request.scores if self.keep_scores else None for request in requests],
        )
        out_of_time = self.conditions.out_of_time()
        for request, end in zip(requests, ends, strict=True):
            if end is not None:
                request.truncate(end)
                num_new = len(request.tokens)
                del request.scores[num_new:], request.logits[num_new:]
            request.finished = end is not None or request.room <= 0 or out_of_time
        return [request for request in requests if request.finished]


def _to_rows(drafting: torch.Tensor, rows: list[int], num_rows: int) -> torch.Tensor:
    """Values of the rows that draft `[n, ...]` at their place in all rows `[R, ...]`; the other rows are never read."""
    if rows == list(range(num_rows)):
        return drafting
    placed = drafting.new_zeros(num_rows, *drafting.shape[1:])
    placed[torch.tensor(rows, device=drafting.device)] = drafting
    return placed


__all__ = ["Scores", "TextWriter", "TokenSelector"]
