"""The drafts of one round, before the target has seen them.

Shapes: `R` rows of the target, `Q` maximum tokens of a row.
"""

from dataclasses import dataclass

import torch

from .draft_propose import Proposal
from .engine_request import Request


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


__all__ = ["ScheduledDrafts"]
