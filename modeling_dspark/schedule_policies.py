"""How many draft tokens to verify: per-call settings and the schedules.

A schedule may use only what is known before the token of a position is drawn (confidences of earlier positions and of this one,
which depend on earlier tokens); that is what keeps the output lossless. A search over all confidences of the current
block for the best total is not allowed: it lets the token of a position decide whether that position is verified.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from .configuration_dspark import SCHEDULES, DSparkConfig


logger = logging.get_logger(__name__)

# Transformers fills unset fields with these before any decoding method runs; exactly they count as "not set".
_GLOBAL_DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}


@dataclass(frozen=True)
class DraftSettings:
    """Settings of one `generate` call.

    Attributes:
        num_assistant_tokens (`int`): Most draft tokens a round, at most `block_size`.
        schedule (`str` or `Schedule`): One of `SCHEDULES`, or an object with a method `lengths`.
        confidence_threshold (`float`): Threshold on calibrated confidence; used by `"confidence"` only.
    """

    num_assistant_tokens: int
    schedule: Any
    confidence_threshold: float


@dataclass(frozen=True)
class RoundView:
    """What a schedule may know about a round; drafting rows only, unless said otherwise.

    Attributes:
        confidence (`list[list[float]]`):
            Calibrated confidence `c[r][k]` of the positions that may be verified, left to right; empty lists inside where
            a row may verify none. For a schedule with `needs_confidence = False`, ones.
        num_rows (`int`): Rows of the target forward, rows that do not draft included.
        seconds (callable, *optional*):
            Cost of a round in which the target verifies `B` tokens, anchors of all rows included; given to schedules
            with `needs_costs = True`.
        token_bucket (callable, *optional*):
            A number of tokens that the target is ready for, at least `B`, never falling. By default `B` itself.
    """

    confidence: list[list[float]]
    num_rows: int
    seconds: Callable[[int], float] | None = None
    token_bucket: Callable[[int], int] = int

    def survival(self) -> list[list[float]]:
        """`a[r][j]`, the chance that position `j` and all before it are accepted."""
        return [list(accumulate(row, lambda before, now: before * now)) for row in self.confidence]


class Schedule:
    """Base of the schedules; a user's own needs only the method `lengths`.

    Attributes:
        needs_confidence (`bool`): Whether `lengths` reads confidences.
        needs_costs (`bool`): Whether it reads `RoundView.seconds`; drafting then steps aside where it does not pay.
    """

    needs_confidence = True
    needs_costs = False

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    def lengths(self, view: RoundView) -> list[int]:
        """Draft tokens to verify in each row: a prefix, so at most `len(view.confidence[r])`."""
        raise NotImplementedError


class FixedSchedule(Schedule):
    """Verify all that was drafted."""

    needs_confidence = False

    def lengths(self, view: RoundView) -> list[int]:
        """As many as there are."""
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
    """For jagged costs: how many positions in all comes from an unconstrained search two rounds ago, which ones from now.

    The number knows nothing of the current block, so the search may look at all of that round. In the first two rounds,
    in which there is nothing to look back to, Algorithm 1 decides. One object serves one run.
    """

    needs_costs = True

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=2)  # admitted positions a row, of the two rounds before this one
        self._first = ThroughputSchedule()

    def lengths(self, view: RoundView) -> list[int]:
        """The positions with the highest survival, as many as the lagged capacity allows."""
        survival = view.survival()
        share = self._shares[0] if len(self._shares) == 2 else None
        self._shares.append(_best_capacity(view, survival) / max(view.num_rows, 1))
        if share is None:
            return self._first.lengths(view)
        return _prefixes(view, _by_survival(survival), round(share * view.num_rows))


def resolve_settings(generation_config: GenerationConfig, config: DSparkConfig) -> DraftSettings:
    """What the user passed to `generate`, else the drafter's defaults; neither config object is changed.

    Raises:
        ValueError: for a value outside its range or a schedule that is not offered; names the argument and the value.
    """
    cap = _user_value(generation_config, "num_assistant_tokens")
    schedule = _user_value(generation_config, "num_assistant_tokens_schedule")
    threshold = _user_value(generation_config, "assistant_confidence_threshold")
    if cap is None:
        cap = config.default_num_assistant_tokens or config.block_size
    if isinstance(cap, bool) or not isinstance(cap, int) or cap < 0:
        raise ValueError(f"`num_assistant_tokens` must be an integer >= 0 (0 = no drafts), got {cap!r}.")
    if schedule is None:
        schedule = "confidence" if threshold is not None else config.default_num_assistant_tokens_schedule
    if threshold is None:
        threshold = config.default_assistant_confidence_threshold
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise ValueError(f"`assistant_confidence_threshold` must lie in [0, 1], got {threshold!r}.")
    settings = DraftSettings(min(cap, config.block_size), schedule, float(threshold))
    if make_schedule(settings).needs_confidence and not config.enable_confidence_head:
        raise ValueError(
            f"`num_assistant_tokens_schedule={schedule!r}` (or a threshold) needs a drafter with a confidence head; this "
            "one has `enable_confidence_head=False`. Use `num_assistant_tokens_schedule='fixed'`."
        )
    return settings


def fallback_settings(settings: DraftSettings, config: DSparkConfig) -> DraftSettings:
    """The settings for a loop in which costs are not known: a static schedule in the place of one that needs them."""
    if not make_schedule(settings).needs_costs:
        return settings
    has_head = config.enable_confidence_head
    instead = f"the static confidence threshold {settings.confidence_threshold}" if has_head else "all drafts"
    logger.warning_once(
        f"`num_assistant_tokens_schedule={settings.schedule!r}` needs measured costs, which Transformers' own assisted loop "
        f"does not have; this call uses {instead}."
    )
    return replace(settings, schedule="confidence" if has_head else "fixed")


def make_schedule(settings: DraftSettings) -> Any:
    """The schedule of one run.

    Raises:
        ValueError: if `settings.schedule` is neither a name in `SCHEDULES` nor an object with a method `lengths`.
    """
    made = {
        "fixed": FixedSchedule,
        "confidence": lambda: ConfidenceSchedule(settings.confidence_threshold),
        "throughput": ThroughputSchedule,
        "throughput_lagged": LaggedThroughputSchedule,
    }
    schedule = settings.schedule
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return made[schedule]()
    if callable(getattr(schedule, "lengths", None)) and not isinstance(schedule, type):
        return schedule if isinstance(schedule, Schedule) else _Adapted(schedule)
    raise ValueError(
        f"`num_assistant_tokens_schedule={schedule!r}` is not a schedule of a DSpark drafter; choose one of {SCHEDULES}, "
        "or pass an object with a method `lengths(view) -> list[int]`."
    )


def checked_lengths(schedule: Any, view: RoundView) -> list[int]:
    """`schedule.lengths(view)`, checked.

    Raises:
        ValueError: if the lengths of a user's schedule are not one integer a row within what was drafted.
    """
    most = [len(row) for row in view.confidence]
    returned = schedule.lengths(view)
    try:
        lengths = [int(length) for length in returned]
        exact = len(lengths) == len(most) and all(
            length == given and 0 <= length <= limit
            for length, given, limit in zip(lengths, returned, most, strict=True)
        )
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not a list of numbers, or not finite ones
        exact = False
    if not exact:
        raise ValueError(
            f"The schedule {schedule.name} returned the lengths {returned}; it must return one integer a row, "
            f"between 0 and {most}."
        )
    return lengths


class _Adapted(Schedule):
    """A user's object, with the defaults of what it does not say."""

    def __init__(self, schedule: Any):
        self.needs_confidence = getattr(schedule, "needs_confidence", True)
        self.needs_costs = getattr(schedule, "needs_costs", False)
        self.lengths = schedule.lengths  # type: ignore[method-assign]
        self._name = type(schedule).__name__

    @property
    def name(self) -> str:
        return self._name


def _by_survival(survival: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All positions `(a, r, j)` by descending survival; ties: smaller `j` first, so that lengths stay prefixes."""
    positions = [
        (value, row, position) for row, values in enumerate(survival) for position, value in enumerate(values)
    ]
    return sorted(positions, key=lambda item: (-item[0], item[2]))


def _prefixes(view: RoundView, ordered: Sequence[tuple[float, int, int]], admitted: int) -> list[int]:
    """Lengths of the rows once `admitted` positions are in, and those next in order up to a number the target is ready for.

    Lossless as stopping early is: whether the position at place `i` is let in by rounding up depends on whether the schedule
    stopped before some place up to `i`, and so on nothing that comes after it.
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


def _user_value(generation_config: GenerationConfig, name: str) -> Any:
    value = getattr(generation_config, name)
    return None if isinstance(value, type(_GLOBAL_DEFAULTS[name])) and value == _GLOBAL_DEFAULTS[name] else value


__all__ = [
    "ConfidenceSchedule",
    "DraftSettings",
    "FixedSchedule",
    "LaggedThroughputSchedule",
    "RoundView",
    "Schedule",
    "ThroughputSchedule",
    "checked_lengths",
    "fallback_settings",
    "make_schedule",
    "resolve_settings",
]
