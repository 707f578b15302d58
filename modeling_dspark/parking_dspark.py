"""Stepping aside: which requests draft in the next round, from measured costs and past rounds only.

Each request keeps a running estimate of what a drafting round brought it. The requests for which drafting raises the
expected tokens per second of the whole round draft; the others decode plainly and try again later, at growing
distances. All of it is known before the next block is drafted, so the choice may be the best one over all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass


_PRIOR_GAIN = 0.6  # accepted drafts a round that a drafter nothing is known about is given credit for,
_PRIOR_BUDGET = 1.0  # the drafts it verifies for that,
_PRIOR_WEIGHT = 1.0  # and for how many rounds: few, so that useless drafts are found out after two or three
_FORGETTING = 0.9  # weight of a round against the one after it
_POOL_FORGETTING = 0.995
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # rounds


@dataclass
class _Mean:
    """Discounted means of accepted and verified drafts a round."""

    forgetting: float
    weight: float = 0.0
    gain: float = 0.0
    budget: float = 0.0

    def add(self, gain: int, budget: int) -> None:
        self.weight = self.forgetting * self.weight + 1
        self.gain += (gain - self.gain) / self.weight
        self.budget += (budget - self.budget) / self.weight

    def with_prior(self, gain: float, budget: float) -> tuple[float, float]:
        total = self.weight + _PRIOR_WEIGHT
        return (
            (self.gain * self.weight + gain * _PRIOR_WEIGHT) / total,
            (self.budget * self.weight + budget * _PRIOR_WEIGHT) / total,
        )


class RequestEstimate:
    """What drafting has brought one request, and when it may try again."""

    def __init__(self) -> None:
        self.mean = _Mean(_FORGETTING)
        self.wait = _FIRST_WAIT
        self.retry_at: int | None = None


class Parking:
    """Chooses the requests that draft; one object serves one engine.

    A request that is new is judged by what the requests before it got.
    """

    def __init__(self) -> None:
        self._pool = _Mean(_POOL_FORGETTING)
        self._round = 0

    def admit(
        self, estimates: list[RequestEstimate], *, num_rows: int, seconds: Callable[[int, int], float]
    ) -> list[int]:
        """Indices into `estimates` of the requests that draft in this round.

        Args:
            estimates (`list[RequestEstimate]`): Of the rows that could draft.
            num_rows (`int`): Rows of the target forward.
            seconds (callable): Cost of a round, from its verified tokens and its number of drafting rows.
        """
        self._round += 1
        prior = self._pool.with_prior(_PRIOR_GAIN, _PRIOR_BUDGET)
        means = [estimate.mean.with_prior(*prior) for estimate in estimates]
        order = sorted(range(len(means)), key=lambda index: -means[index][0])
        best, admitted = num_rows / seconds(num_rows, 0), 0
        expected = tokens = float(num_rows)
        for count, index in enumerate(order, 1):
            expected, tokens = expected + means[index][0], tokens + means[index][1]
            rate = expected / seconds(round(tokens), count)
            if rate > best:
                best, admitted = rate, count
        paying = set(order[:admitted])
        return [index for index, estimate in enumerate(estimates) if self._may_draft(estimate, paying=index in paying)]

    def record(self, estimate: RequestEstimate, *, accepted: int, verified: int) -> None:
        """Count what a drafting round brought."""
        estimate.mean.add(accepted, verified)
        self._pool.add(accepted, verified)

    def _may_draft(self, estimate: RequestEstimate, *, paying: bool) -> bool:
        if paying:
            estimate.retry_at, estimate.wait = None, _FIRST_WAIT
            return True
        if estimate.retry_at is None:
            estimate.retry_at = self._next_try(estimate.wait)
            return False
        if self._round < estimate.retry_at:
            return False
        estimate.wait = min(2 * estimate.wait, _LONGEST_WAIT)
        estimate.retry_at = self._next_try(estimate.wait)
        return True

    def _next_try(self, wait: int) -> int:
        # Multiples of `wait`, so that requests try together and share the fixed cost of drafting.
        return -(-(self._round + wait) // wait) * wait


__all__ = ["Parking", "RequestEstimate"]
