"""Acceptance length, verify rate and acceptance rate by position as a metric of the library `evaluate`.

`evaluate.load` copies this file elsewhere, so it imports by absolute names only.
"""

from typing import Any

import datasets
import evaluate

from training.evaluation.figures import acceptance_figures


_DESCRIPTION = "How many drafts of speculative decoding are kept: pooled over rounds, every round weighs the same."

_INPUTS = """
Args:
    predictions (`list[int]`): Drafts that the target verified in each round; 0 in a round without drafts.
    references (`list[int]`): Leading drafts that it kept.
    new_tokens (`list[int]`): Tokens of each round, bonus or replacement token included.
    num_draft_positions (`int`, *optional*): Positions of a block; by default the maximum that a round verified.

Returns:
    `dict`: `rounds`, `new_tokens`, `acceptance_length` (tokens per round), `drafts_per_round`, `verify_rate` (kept over
    verified), `tried_by_position` and `acceptance_rate_by_position` (of the rounds in which the position was verified and all
    before it were kept, the share in which it was kept; `None` where there are none).

Example:

    >>> import evaluate
    >>> acceptance = evaluate.load("training/evaluation/metrics/speculative_acceptance")
    >>> figures = acceptance.compute(predictions=[3, 3], references=[3, 1], new_tokens=[4, 2])
    >>> figures["acceptance_length"], figures["acceptance_rate_by_position"]
    (3.0, [1.0, 0.5, 1.0])
"""


class SpeculativeAcceptance(evaluate.Metric):
    """Wraps `training.evaluation.figures.acceptance_figures`, for rounds that come one by one or in batches."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": integer, "references": integer, "new_tokens": integer}),
        )

    def _compute(
        self,
        predictions: list[int],
        references: list[int],
        new_tokens: list[int],
        num_draft_positions: int | None = None,
    ) -> dict[str, Any]:
        return acceptance_figures(
            verified=predictions, accepted=references, new_tokens=new_tokens, num_draft_positions=num_draft_positions
        )
