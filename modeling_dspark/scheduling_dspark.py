"""How many draft tokens to verify: per-call settings and the static schedules.

A schedule may use only what is known before the token of a slot is drawn (confidences of earlier slots and this one,
which depend on earlier tokens); that is what keeps the output lossless.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from .configuration_dspark import SCHEDULES, DSparkConfig


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
        schedule (`str`): `"fixed"` (always the cap) or `"confidence"` (stop before the first slot below the threshold).
        confidence_threshold (`float`): Threshold on calibrated confidence; used by `"confidence"` only.
    """

    num_assistant_tokens: int
    schedule: str
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
    if schedule not in SCHEDULES:
        raise ValueError(
            f"`num_assistant_tokens_schedule={schedule!r}` is not a schedule of a DSpark drafter; choose one of "
            f"{SCHEDULES}."
        )
    if threshold is None:
        threshold = config.default_assistant_confidence_threshold
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise ValueError(f"`assistant_confidence_threshold` must lie in [0, 1], got {threshold!r}.")
    if schedule == "confidence" and not config.enable_confidence_head:
        raise ValueError(
            "`num_assistant_tokens_schedule='confidence'` (or a threshold) needs a drafter with a confidence head; this "
            "one has `enable_confidence_head=False`. Use `num_assistant_tokens_schedule='fixed'`."
        )
    return DraftSettings(min(cap, config.block_size), schedule, float(threshold))


def static_lengths(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """Slots before the first one whose calibrated confidence is below `threshold`: `[R, n]` -> `[R]`."""
    return (confidence >= threshold).int().cumprod(dim=-1).sum(dim=-1)


def _user_value(generation_config: GenerationConfig, name: str) -> Any:
    value = getattr(generation_config, name)
    return None if value == _GLOBAL_DEFAULTS[name] else value


__all__ = ["DraftSettings", "resolve_settings", "static_lengths"]
