"""The draft settings of a `generate` call, and the schedule that they name."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from .configuration_dspark import SCHEDULES, DSparkConfig
from .schedule_policies import (
    ConfidenceSchedule,
    FixedSchedule,
    LaggedThroughputSchedule,
    Schedule,
    ThroughputSchedule,
)


logger = logging.get_logger(__name__)

# Transformers fills unset fields with these before any decoding method runs; exactly these values count as "not set".
_GLOBAL_DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}


@dataclass(frozen=True)
class DraftSettings:
    """Settings of one `generate` call.

    Attributes:
        num_assistant_tokens (`int`): Maximum draft tokens per round, up to `block_size`.
        schedule (`str` or `Schedule`): One of `SCHEDULES`, or an object with a method `lengths`.
        confidence_threshold (`float`): Threshold on calibrated confidence; used by `"confidence"` only.
    """

    num_assistant_tokens: int
    schedule: Any
    confidence_threshold: float


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
    """The settings for a loop in which costs are not known: a static schedule instead of one that needs them."""
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
    schedules = {
        "fixed": FixedSchedule,
        "confidence": lambda: ConfidenceSchedule(settings.confidence_threshold),
        "throughput": ThroughputSchedule,
        "throughput_lagged": LaggedThroughputSchedule,
    }
    schedule = settings.schedule
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return schedules[schedule]()
    if callable(getattr(schedule, "lengths", None)) and not isinstance(schedule, type):
        return schedule if isinstance(schedule, Schedule) else _Adapted(schedule)
    raise ValueError(
        f"`num_assistant_tokens_schedule={schedule!r}` is not a schedule of a DSpark drafter; choose one of {SCHEDULES}, "
        "or pass an object with a method `lengths(view) -> list[int]`."
    )


class _Adapted(Schedule):
    """A user's object, with defaults for missing attributes."""

    def __init__(self, schedule: Any):
        self.needs_confidence = getattr(schedule, "needs_confidence", True)
        self.needs_costs = getattr(schedule, "needs_costs", False)
        self.lengths = schedule.lengths  # type: ignore[method-assign]
        self._name = type(schedule).__name__

    @property
    def name(self) -> str:
        return self._name


def _user_value(generation_config: GenerationConfig, name: str) -> Any:
    value = getattr(generation_config, name)
    return None if isinstance(value, type(_GLOBAL_DEFAULTS[name])) and value == _GLOBAL_DEFAULTS[name] else value


__all__ = ["DraftSettings", "fallback_settings", "make_schedule", "resolve_settings"]
