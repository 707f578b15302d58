"""Which requests draft in the next round, and how many positions, from measured costs and past rounds only.

Each request keeps a running estimate of its gain per drafting round. Requests draft, the most promising first, as long as
the expected tokens per second of the whole round rise; a request whose drafting costs almost nothing drafts along, because
a batch is done when its slowest request is. The others decode plainly and try again after growing intervals. The choice
uses past rounds only, so an unconstrained search over the requests is lossless.
"""

from collections.abc import Callable
from dataclasses import dataclass


_PRIOR_GAIN = 0.6  # accepted drafts per round credited to an unknown drafter,
_PRIOR_VERIFIED = 1.0  # drafts verified per round for that,
_PRIOR_WEIGHT = 1.0  # and the number of such rounds: few, so that useless drafts show after two or three
_POOL_WEIGHT = 12.0  # weight, in rounds, of the gains of all other requests: a few misses are chance
_FORGETTING = 0.97  # weight of a round relative to the next one: slow enough that chance seldom stops a fair request
_POOL_FORGETTING = 0.98
_MAX_MISSES = 20  # consecutive rounds without an accepted draft after which the expected gain is 0: rare by chance
# A request drafts along if the rate of the round with it is at least this share of the best rate.
_WORTHWHILE = 0.97
_FIRST_RATE = 0.7  # acceptance rate by position before any round
_UPDATE_RATE = 0.02  # of one row in one round
_EXPLORE_EVERY = 16  # rounds
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # rounds


@dataclass
class _Mean:
    """Discounted means of accepted and verified drafts per round."""

    forgetting: float
    weight: float = 0.0
    gain: float = 0.0
    verified: float = 0.0

    def add(self, gain: int, verified: int) -> None:
        self.weight = self.forgetting * self.weight + 1
        self.gain += (gain - self.gain) / self.weight
        self.verified += (verified - self.verified) / self.weight

    def with_prior(self, gain: float, verified: float, weight: float) -> tuple[float, float]:
        total = self.weight + weight
        return (
            (self.gain * self.weight + gain * weight) / total,
            (self.verified * self.weight + verified * weight) / total,
        )


class RequestEstimate:
    """The gain of drafting for one request, and the round of its next try."""

    def __init__(self) -> None:
        self.mean = _Mean(_FORGETTING)
        self.misses = 0  # consecutive rounds in which drafts were verified and none was accepted
        self.wait: int | None = None  # rounds between two tries, once it decodes plainly
        self.retry_at: int | None = None


class DraftGate:
    """Chooses the requests that draft; one object serves one engine.

    The estimate of a new request starts from the gains of earlier ones.
    """

    def __init__(self) -> None:
        self._pool = _Mean(_POOL_FORGETTING)
        self._round = 0
        self._first_wait = _FIRST_WAIT  # of a request that stops drafting: longer after failed tries of others

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
        prior = self._pool.with_prior(_PRIOR_GAIN, _PRIOR_VERIFIED, _PRIOR_WEIGHT)
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
        """Count a drafting round."""
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
    """Expected accepted and verified drafts of a request in one round."""
    gain, verified = estimate.mean.with_prior(*prior, _POOL_WEIGHT)
    return (gain if estimate.misses < _MAX_MISSES else 0.0), verified


class BlockLength:
    """The number of positions to draft, from the acceptance of each position in past rounds.

    Args:
        max_positions (`int`): Maximum number of draft positions.
    """

    def __init__(self, max_positions: int):
        # Discounted means of the drafts of a row that are verified, and accepted, at each position.
        self._verified = [_FIRST_RATE**position for position in range(1, max_positions + 1)]
        self._accepted = list(self._verified)
        self._round = 0

    def choose(self, *, num_rows: int, num_drafting: int, seconds: Callable[[float, int], float]) -> int:
        """The number of positions with the most expected tokens per second; from time to time all, to update the estimates.

        Args:
            num_rows (`int`): Rows of the target forward.
            num_drafting (`int`): Rows that draft.
            seconds (callable): Cost of the round, from its verified tokens and its positions.
        """
        self._round += 1
        if self._round % _EXPLORE_EVERY == 1:
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
        """Count one row's block of `num_draft_positions`."""
        for position in range(num_draft_positions):
            self._verified[position] += _UPDATE_RATE * ((verified > position) - self._verified[position])
            self._accepted[position] += _UPDATE_RATE * ((accepted > position) - self._accepted[position])


__all__ = ["BlockLength", "DraftGate", "RequestEstimate"]
