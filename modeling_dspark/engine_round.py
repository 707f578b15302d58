"""The drafts of one round before the target has seen them, and how many of them it will see.

Shapes: `R` rows of the target, `Q` maximum tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .draft_propose import Proposal
from .engine_request import Request
from .schedule_policies import RoundView, checked_lengths


@dataclass(frozen=True)
class ScheduledDrafts:
    """Drafts, and how many of them the target verifies.

    Attributes:
        drafting (`list[Request]`): Requests that drafted, in the order of the proposal's rows.
        rows (`list[int]`): The target's row of each of them.
        plain (`set[int]`): Indices of the requests that could have drafted and decode plainly instead.
        num_drafted (`int`): Draft positions of each drafting request.
        proposal ([`Proposal`], *optional*): Their drafts; `None` in a plain step.
        counts (`list[int]`): Tokens to verify in each row of the target, anchors included.
        tokens (`torch.LongTensor` of shape `(R, Q)`): Anchor and drafts of each row of the target.
    """

    drafting: list[Request]
    rows: list[int]
    plain: set[int]
    num_drafted: int
    proposal: Proposal | None
    counts: list[int]
    tokens: torch.Tensor

    def prefixes(self, requests: list[Request]) -> list[torch.Tensor]:
        """The prefix of every packed position: the text, then the drafts before the position."""
        return [
            torch.cat([request.text, self.tokens[row, 1 : 1 + num_drafts]])
            for row, request in enumerate(requests)
            for num_drafts in range(self.counts[row])
        ]


def schedule_lengths(
    schedule: Any,
    proposal: Proposal,
    limits: list[int],
    *,
    num_rows: int,
    seconds: Callable[[int], float] | None = None,
    token_bucket: Callable[[int], int] = int,
) -> list[int]:
    """Draft tokens to verify in each row of a proposal; syncs if the schedule reads confidences.

    Args:
        schedule ([`Schedule`]): The schedule.
        proposal ([`Proposal`]): The drafts.
        limits (`list[int]`): Maximum for each row.
        num_rows (`int`): Rows of the target forward.
        seconds (callable, *optional*): Cost of the round, from its verified tokens.
        token_bucket (callable, *optional*): The next token count that the target runs efficiently.

    Raises:
        ValueError: if the lengths of a user's schedule are invalid.
    """
    confidence = [[1.0] * limit for limit in limits]
    if schedule.needs_confidence:
        values = proposal.confidence.tolist()  # type: ignore[union-attr]  # the settings refuse it without a head
        confidence = [row[:limit] for row, limit in zip(values, limits, strict=True)]
    return checked_lengths(schedule, RoundView(confidence, num_rows, seconds, token_bucket))


__all__ = ["ScheduledDrafts", "schedule_lengths"]
