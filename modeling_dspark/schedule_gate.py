"""Stepping aside: which requests draft in the next round, and how many positions, from measured costs and past rounds only.

Each request keeps a running estimate of what a drafting round brought it. As many requests draft, the most promising
first, as the expected tokens per second of the whole round allow; one more that costs next to nothing drafts along, since
a batch is done when its slowest request is. The others decode plainly and try again later, at growing distances. All of
it is known before the next block is drafted, so the choice may be the best one over all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass


_PRIOR_GAIN = 0.6  # accepted drafts a round that a drafter nothing is known about is given credit for,
_PRIOR_BUDGET = 1.0  # the drafts it verifies for that,
_PRIOR_WEIGHT = 1.0  # and for how many rounds: few, so that useless drafts are found out after two or three
_POOL_WEIGHT = 12.0  # rounds that what all others got counts for, when a request is judged: a few misses are chance
_FORGETTING = 0.97  # weight of a round against the one after it: long enough that chance seldom parks a fair request
_POOL_FORGETTING = 0.98
_MOST_MISSES = 20  # rounds in a row without a draft kept, after which nothing is expected: seldom met by chance
_WORTHWHILE = 0.97  # a request drafts along with others unless leaving it out gains more than this leaves
_FIRST_SLOTS = 0.7  # share of positions kept, of those whose predecessors were, before anything is known
_SLOT_RATE = 0.02  # of a row's round
_EXPLORE_SLOTS = 16  # rounds
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

    def with_prior(self, gain: float, budget: float, weight: float) -> tuple[float, float]:
        total = self.weight + weight
        return (
            (self.gain * self.weight + gain * weight) / total,
            (self.budget * self.weight + budget * weight) / total,
        )


class RequestEstimate:
    """What drafting has brought one request, and when it may try again."""

    def __init__(self) -> None:
        self.mean = _Mean(_FORGETTING)
        self.misses = 0  # rounds in a row in which drafts were verified and none was kept
        self.wait: int | None = None  # rounds between two tries, once it steps aside
        self.retry_at: int | None = None


class DraftGate:
    """Chooses the requests that draft; one object serves one engine.

    A request that is new is judged by what the requests before it got.
    """

    def __init__(self) -> None:
        self._pool = _Mean(_POOL_FORGETTING)
        self._round = 0
        self._first_wait = _FIRST_WAIT  # of a request that steps aside: longer where others have tried in vain

    def admit(
        self, estimates: list[RequestEstimate], *, num_rows: int, seconds: Callable[[float, int], float]
    ) -> list[int]:
        """Indices into `estimates` of the requests that draft in this round.

        Args:
            estimates (`list[RequestEstimate]`): Of the rows that could draft.
            num_rows (`int`): Rows of the target forward.
            seconds (callable): Cost of a round, from its verified tokens and its number of drafting rows.
        """
        self._round += 1
        prior = self._pool.with_prior(_PRIOR_GAIN, _PRIOR_BUDGET, _PRIOR_WEIGHT)
        means = [_expected(estimate, prior) for estimate in estimates]
        order = sorted(range(len(means)), key=lambda index: -means[index][0])
        rates = [num_rows / seconds(num_rows, 0)]  # by the number of requests that draft, the most promising first
        expected = tokens = float(num_rows)
        for count, index in enumerate(order, 1):
            expected, tokens = expected + means[index][0], tokens + means[index][1]
            rates.append(expected / seconds(tokens, count))
        enough = max(rates[0], _WORTHWHILE * max(rates))
        paying = set(order[: max(count for count, rate in enumerate(rates) if rate >= enough)])
        return [index for index, estimate in enumerate(estimates) if self._may_draft(estimate, paying=index in paying)]

    def record(self, estimate: RequestEstimate, *, accepted: int, verified: int) -> None:
        """Count what a drafting round brought."""
        estimate.mean.add(accepted, verified)
        if verified:
            estimate.misses = 0 if accepted else estimate.misses + 1
        self._pool.add(accepted, verified)

    def _may_draft(self, estimate: RequestEstimate, *, paying: bool) -> bool:
        if paying:
            estimate.retry_at = estimate.wait = None
            self._first_wait = _FIRST_WAIT
            return True
        if estimate.wait is None or estimate.retry_at is None:
            estimate.wait = self._first_wait
            estimate.retry_at = self._next_try(estimate.wait)
            return False
        if self._round < estimate.retry_at:
            return False
        estimate.wait = min(2 * estimate.wait, _LONGEST_WAIT)
        self._first_wait = max(self._first_wait, estimate.wait)
        estimate.retry_at = self._next_try(estimate.wait)
        return True

    def _next_try(self, wait: int) -> int:
        # Multiples of `wait`, so that requests try together and share the fixed cost of drafting.
        return -(-(self._round + wait) // wait) * wait


def _expected(estimate: RequestEstimate, prior: tuple[float, float]) -> tuple[float, float]:
    """Drafts that a round is expected to keep and to verify for a request."""
    gain, budget = estimate.mean.with_prior(*prior, _POOL_WEIGHT)
    return (gain if estimate.misses < _MOST_MISSES else 0.0), budget


class BlockLength:
    """How many positions to draft in a round, by what each position has brought in the rounds before.

    Args:
        most (`int`): Most positions there are.
    """

    def __init__(self, most: int):
        self._verified = [
            _FIRST_SLOTS**position for position in range(1, most + 1)
        ]  # a row's drafts verified at each position,
        self._accepted = [_FIRST_SLOTS**position for position in range(1, most + 1)]  # and kept: discounted means
        self._round = 0

    def choose(self, *, num_rows: int, num_drafting: int, seconds: Callable[[float, int], float]) -> int:
        """The number of positions with the most expected tokens per second; now and then all, to see what they bring.

        Args:
            num_rows (`int`): Rows of the target forward.
            num_drafting (`int`): Rows that draft.
            seconds (callable): Cost of the round, from its verified tokens and its positions.
        """
        self._round += 1
        if self._round % _EXPLORE_SLOTS == 1:
            return len(self._accepted)
        tokens = expected = float(num_rows)
        best, chosen = 0.0, 1
        for position, (verified, accepted) in enumerate(zip(self._verified, self._accepted, strict=True), 1):
            tokens, expected = tokens + num_drafting * verified, expected + num_drafting * accepted
            rate = expected / seconds(tokens, position)
            if rate > best:
                best, chosen = rate, position
        return chosen

    def record(self, *, num_draft_positions: int, accepted: int, verified: int) -> None:
        """Count what a block of `num_draft_positions` brought one row."""
        for position in range(num_draft_positions):
            self._verified[position] += _SLOT_RATE * ((verified > position) - self._verified[position])
            self._accepted[position] += _SLOT_RATE * ((accepted > position) - self._accepted[position])


__all__ = ["BlockLength", "DraftGate", "RequestEstimate"]
