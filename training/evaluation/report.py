"""The report of an evaluation: its figures, computed from records, and its JSON.

A record is one prompt's rounds, as `training.confidence.rounds.rounds_of` gives them with `all_rounds`. Nothing is decoded here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from training.confidence.rounds import join
from training.evaluation.figures import (
    Speed,
    ThresholdPoint,
    acceptance_figures,
    calibration_figures,
    speed_figures,
    threshold_sweep,
)


FORMAT = 1
POOLED = "pooled"
_RENAMED = {  # keys in reports of release 0.1
    "accepted_length": "acceptance_length",
    "acceptance_by_position": "acceptance_rate_by_position",
    "num_slots": "num_draft_positions",
}


@dataclass(frozen=True)
class SetReport:
    """Figures of one set of prompts, or of all of them.

    Attributes:
        prompts, skipped (`int`): Prompts answered; prompts left out as too long.
        acceptance (`dict`): What `training.evaluation.figures.acceptance_figures` returns.
        calibration (`dict`, *optional*): What `calibration_figures` returns; `None` without a confidence head.
        thresholds (`tuple[ThresholdPoint, ...]`, *optional*): The sweep; `None` without a confidence head.
        speed (`Speed`, *optional*): `None` where nothing was timed.
    """

    prompts: int
    skipped: int
    acceptance: dict[str, Any]
    calibration: dict[str, Any] | None
    thresholds: tuple[ThresholdPoint, ...] | None
    speed: Speed | None


@dataclass(frozen=True)
class EvalReport:
    """What `python -m training.evaluate` measured. Without `timing` and every `speed`, equal runs give equal reports.

    Attributes:
        drafter, target (`dict`): Names, fingerprints of the weights, and what describes them.
        settings (`dict`): How the prompts were answered.
        environment (`dict`): Hardware, versions and commit.
        sets (`dict[str, SetReport]`): Figures by set.
        pooled (`SetReport`): Figures over all rounds of all sets.
        notes (`tuple[str, ...]`): Omissions, with their reasons.
        timing (`dict`, *optional*): When and how speed was measured; `None` where it was not.
    """

    drafter: dict[str, Any]
    target: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    sets: dict[str, SetReport]
    pooled: SetReport
    notes: tuple[str, ...]
    timing: dict[str, Any] | None

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "EvalReport":
        """Read what `to_json` wrote, also in release 0.1.

        Raises:
            ValueError: if the text is not JSON, or not a report of this format.
        """
        data = json.loads(text, object_pairs_hook=_with_new_names)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"This is not a report of `training.evaluate` in format {FORMAT}.")
        _check_names(cls, data)
        sets = {name: _set_from(figures) for name, figures in data["sets"].items()}
        return cls(**data | {"sets": sets, "pooled": _set_from(data["pooled"]), "notes": tuple(data["notes"])})


def _with_new_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in pairs}


def set_report(
    records: Sequence[dict[str, Any]],
    *,
    num_draft_positions: int,
    temperatures: Sequence[float] | None,
    thresholds: Sequence[float] | None,
    speeds: Sequence[dict[str, Any]],
    skipped: int,
) -> SetReport:
    """The figures of some records.

    Args:
        records (`Sequence[dict]`): Rounds of the prompts of a set.
        num_draft_positions (`int`): `block_size` of the drafter.
        temperatures (`Sequence[float]`, *optional*): The drafter's `confidence_temperatures`.
        thresholds (`Sequence[float]`, *optional*): Of the sweep; `None` for a drafter without a confidence head.
        speeds (`Sequence[dict]`): Timings of the prompts of the set, if there are any.
        skipped (`int`): Prompts of the set that were left out.

    Raises:
        ValueError: if no answer had a round after the prefill.
    """
    columns = {
        name: [value for record in records for value in record[name]]
        for name in ("verified", "accepted", "new_tokens", "logits")
    }
    if not columns["new_tokens"]:
        raise ValueError(
            f"None of {len(records)} answers had a token after the first one; pass more prompts, or a larger "
            "`max_new_tokens`."
        )
    logits = columns.pop("logits")
    acceptance = acceptance_figures(**columns, num_draft_positions=num_draft_positions)
    calibration = sweep = None
    if thresholds is not None and any(columns["verified"]):
        calibration = calibration_figures(
            logits=logits, accepted=columns["accepted"], verified=columns["verified"], temperatures=temperatures
        )
        rounds = join(records, num_draft_positions)
        sweep = threshold_sweep(rounds, columns["new_tokens"], temperatures=temperatures, thresholds=thresholds)
    speed = speed_figures(speeds) if speeds else None
    return SetReport(len(records), skipped, acceptance, calibration, None if sweep is None else tuple(sweep), speed)


def _set_from(data: dict[str, Any]) -> SetReport:
    _check_names(SetReport, data)
    thresholds, speed = data["thresholds"], data["speed"]
    for kind, entries in ((ThresholdPoint, thresholds or []), (Speed, [speed] if speed else [])):
        for entry in entries:
            _check_names(kind, entry)
    if thresholds is not None:
        thresholds = tuple(ThresholdPoint(**point) for point in thresholds)
    if speed is not None:
        speed = Speed(**(speed | {"interval": speed["interval"] and tuple(speed["interval"])}))
    return SetReport(**(data | {"thresholds": thresholds, "speed": speed}))


def _check_names(kind: Any, data: Any) -> None:
    expected = {field.name for field in fields(kind)}
    if not isinstance(data, dict) or set(data) != expected:
        received = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"A {kind.__name__} has the fields {sorted(expected)}, got {received}.")


__all__ = ["FORMAT", "POOLED", "EvalReport", "SetReport", "set_report"]
