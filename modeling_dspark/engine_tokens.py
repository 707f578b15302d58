"""Tokens from the target's logits: the user's processors, then the argmax or a draw, for all positions at once.

Shapes: `R` rows, `N` packed positions, `K` draft positions, `V` vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .draft_accept import Acceptance, accept_greedy, accept_sampled, draw
from .draft_propose import argmax
from .engine_drafts import Round
from .engine_processors import RowProcessors
from .target_packing import PackedPlan


class Scores(NamedTuple):
    """Logits `[N, V]` before and after the processors: `raw` (meant only where it is kept) and `processed`."""

    raw: torch.Tensor
    processed: torch.Tensor


class TokenSelector:
    """Chooses the tokens of a call.

    Args:
        processors ([`RowProcessors`]): Applied to the target's logits.
        do_sample (`bool`): Draw instead of taking the argmax.
        generator (`torch.Generator`, *optional*): Source of randomness.
        keep_scores, keep_logits (`bool`): Whether someone will keep processed or raw logits.
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

    def verdict(self, drafts: Round, plan: PackedPlan, processed: torch.Tensor) -> Acceptance:
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
        rows = torch.tensor([request.row for request in drafts.drafting], device=device)
        return accept_sampled(
            draft_tokens,
            _to_rows(proposal.logits[:, :longest].to(device), rows, num_rows),
            processed,
            lengths,
            draft_columns=_to_rows(proposal.columns[:, :longest].to(device), rows, num_rows),
            draft_token_ids=proposal.token_ids,
            positions=positions,
            generator=self.generator,
        )


def _to_rows(drafting: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Values of the rows that draft `[n, ...]` at their place in all rows `[R, ...]`; nothing is read of the others."""
    if len(rows) == num_rows and bool((rows == torch.arange(num_rows, device=rows.device)).all()):
        return drafting
    placed = drafting.new_zeros(num_rows, *drafting.shape[1:])
    placed[rows] = drafting
    return placed


__all__ = ["Scores", "TokenSelector"]
