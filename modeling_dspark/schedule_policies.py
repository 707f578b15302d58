"""How many draft tokens to verify: the schedules.

For a position, a schedule may use only what is known before its token is drawn (the confidences of earlier positions and
of this one, which depend on earlier tokens); this keeps the output lossless. A search over all confidences of the current
block for the best total is not allowed: it lets the token of a position decide whether that position is verified.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .compat_renamed import renamed


@dataclass(frozen=True)
class RoundView:
    """What a schedule may know about a round; drafting rows only, unless noted otherwise.

    Attributes:
        confidence (`list[list[float]]`):
            Calibrated confidence `c[r][k]` of the positions that may be verified, left to right; empty lists inside where
            a row may verify none. For a schedule with `needs_confidence = False`, ones.
        num_rows (`int`): Rows of the target forward, rows that do not draft included.
        seconds (callable, *optional*):
            Cost of a round in which the target verifies `B` tokens, anchors of all rows included; given to schedules
            with `needs_costs = True`.
        token_bucket (callable, *optional*):
            The next token count that the target runs efficiently, at least `B`, never falling. By default `B` itself.
    """

    confidence: list[list[float]]
    num_rows: int
    seconds: Callable[[int], float] | None = None
    token_bucket: Callable[[int], int] = int

    round_up = renamed("round_up", "token_bucket")

    def survival(self) -> list[list[float]]:
        """`a[r][j]`, the chance that position `j` and all before it are accepted."""
        return [list(accumulate(row, lambda before, now: before * now)) for row in self.confidence]


class Schedule:
    """Base of the schedules; a custom schedule needs only the method `lengths`.

    Attributes:
        needs_confidence (`bool`): Whether `lengths` reads confidences.
        needs_costs (`bool`): Whether it reads `RoundView.seconds`; requests then decode plainly while drafts do not pay.
    """

    needs_confidence = True
    needs_costs = False

    @property
    def name(self) -> str:
        """Its name in errors."""
        return type(self).__name__

    def lengths(self, view: RoundView) -> list[int]:
        """Draft tokens to verify in each row: a prefix, so at most `len(view.confidence[r])`."""
        raise NotImplementedError


class FixedSchedule(Schedule):
    """Verify all drafts."""

    needs_confidence = False

    def lengths(self, view: RoundView) -> list[int]:
        """All drafts of each row."""
        return [len(row) for row in view.confidence]


class ConfidenceSchedule(Schedule):
    """Stop before the first position whose calibrated confidence is below a threshold.

    Args:
        threshold (`float`): In [0, 1].
    """

    def __init__(self, threshold: float):
        self.threshold = threshold

    def lengths(self, view: RoundView) -> list[int]:
        """The positions before the first one below the threshold."""
        return [
            next((position for position, value in enumerate(row) if value < self.threshold), len(row))
            for row in view.confidence
        ]


class ThroughputSchedule(Schedule):
    """Algorithm 1 of the paper: admit positions by survival while expected tokens per second rise, then stop.

    It stops at the first position that does not pay and never looks further (line 12): whether position `k` is verified then
    depends only on what is known before its token is drawn (Appendix A has the counterexample).
    """

    needs_costs = True

    def lengths(self, view: RoundView) -> list[int]:
        """The admitted prefix of each row."""
        seconds: Callable[[int], float] = view.seconds  # type: ignore[assignment]  # `needs_costs`
        ordered = _by_survival(view.survival())
        admitted, expected = 0, float(view.num_rows)
        best = expected / seconds(view.num_rows)
        for survival, _, _ in ordered:
            expected += survival
            rate = expected / seconds(view.num_rows + admitted + 1)
            if rate <= best:
                break
            best, admitted = rate, admitted + 1
        return _prefixes(view, ordered, admitted)


class LaggedThroughputSchedule(Schedule):
    """For jagged costs: an unconstrained search two rounds ago sets the number of positions, the current round their choice.

    The number is independent of the current block, so the search may use all confidences of its own round. In the first two
    rounds, Algorithm 1 decides. One object serves one run.
    """

    needs_costs = True

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=2)  # admitted positions per row, of the two rounds before this one
        self._first = ThroughputSchedule()

    def lengths(self, view: RoundView) -> list[int]:
        """The positions with the highest survival, as many as the lagged capacity allows."""
        survival = view.survival()
        share = self._shares[0] if len(self._shares) == 2 else None
        self._shares.append(_best_capacity(view, survival) / max(view.num_rows, 1))
        if share is None:
            return self._first.lengths(view)
        return _prefixes(view, _by_survival(survival), round(share * view.num_rows))


def checked_lengths(schedule: Any, view: RoundView) -> list[int]:
    """`schedule.lengths(view)`, checked.

    Raises:
        ValueError: if the lengths of a user's schedule are not one integer per row within the number of drafts.
    """
    limits = [len(row) for row in view.confidence]
    returned = schedule.lengths(view)
    try:
        lengths = [int(length) for length in returned]
        exact = len(lengths) == len(limits) and all(
            length == given and 0 <= length <= limit
            for length, given, limit in zip(lengths, returned, limits, strict=True)
        )
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not a list of numbers, or not finite ones
        exact = False
    if not exact:
        raise ValueError(
            f"The schedule {schedule.name} returned the lengths {returned}; it must return one integer per row, "
            f"between 0 and {limits}."
        )
    return lengths


def _by_survival(survival: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All positions `(a, r, j)` by descending survival; ties: smaller `j` first, so that lengths stay prefixes."""
    positions = [
        (value, row, position) for row, values in enumerate(survival) for position, value in enumerate(values)
    ]
    return sorted(positions, key=lambda item: (-item[0], item[2]))


def _prefixes(view: RoundView, ordered: Sequence[tuple[float, int, int]], admitted: int) -> list[int]:
    """Lengths of the rows with `admitted` positions, and the next ones in order up to a token count that runs efficiently.

    This is as lossless as stopping early: whether the position at place `i` is added depends only on whether the schedule
    stopped at some place up to `i`, and so on nothing after it.
    """
    if admitted:
        admitted = view.token_bucket(view.num_rows + admitted) - view.num_rows
    lengths = [0] * len(view.confidence)
    for _, row, position in ordered[:admitted]:
        lengths[row] = position + 1
    return lengths


def _best_capacity(view: RoundView, survival: list[list[float]]) -> int:
    """The number of positions with the most expected tokens per second, over all numbers."""
    seconds: Callable[[int], float] = view.seconds  # type: ignore[assignment]  # `needs_costs`
    values = [value for value, _, _ in _by_survival(survival)]
    totals = accumulate(values, initial=float(view.num_rows))
    rates = [total / seconds(view.num_rows + count) for count, total in enumerate(totals)]
    return rates.index(max(rates))


__all__ = [
    "ConfidenceSchedule",
    "FixedSchedule",
    "LaggedThroughputSchedule",
    "RoundView",
    "Schedule",
    "ThroughputSchedule",
    "checked_lengths",
]
