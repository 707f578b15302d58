"""From measurements to the numbers of a report: what is summed, what is averaged, and what is only counted."""

import statistics
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from benchmarks.lib.measure import ASSISTED, PLAIN, Measurement, first_difference, pooled_run, pooled_speed


DEFINITIONS = {
    "tokens_per_second": "sum of new tokens / sum of median seconds of whole generate calls, prefill included",
    "tau": "tokens a target forward after the prefill yields, pooled over rounds, bonus tokens counted",
    "acceptance_rate_by_position": "of the rounds in which the position was verified and all before it kept, the share that kept it",
}


def summarize_set(target: PreTrainedModel, measurements: list[Measurement]) -> dict[str, Any]:
    """Speeds, acceptance and differences of a set."""
    names = list(measurements[0].calls)
    speeds = {name: pooled_speed(measurements, name) for name in names}
    run = pooled_run(measurement.run() for measurement in measurements)
    differences = []
    for number, item in enumerate(measurements):
        found = first_difference(target, item.prompt_ids, item.tokens(PLAIN), item.tokens(ASSISTED))
        if found is not None:
            differences.append({"prompt": number, **asdict(found)})
    return {
        "prompts": len(measurements),
        "new_tokens": {name: sum(len(item.tokens(name)) for item in measurements) for name in names},
        "median_seconds": {name: [round(item.seconds(name), 4) for item in measurements] for name in names},
        "tokens_per_second": {name: round(speed, 3) for name, speed in speeds.items()},
        "ratio": {name: round(speed / speeds[PLAIN], 4) for name, speed in speeds.items() if name != PLAIN},
        **_acceptance(run),
        "differences": _differences(differences),
    }


def _acceptance(run: Any) -> dict[str, Any]:
    return {
        "rounds": run.rounds,
        "tau": round(run.acceptance_length, 4),
        "verified_tokens": sum(run.verified),
        "acceptance_rate_by_position": [round(value, 4) for value in run.acceptance_rate_by_position],
        "tried_by_position": run.tried_by_position,
    }


def _differences(items: list[dict[str, Any]]) -> dict[str, Any]:
    gaps = [item["logit_gap"] for item in items if item["logit_gap"] is not None]
    return {"count": len(items), "largest_logit_gap": max(gaps, default=None), "items": items}


def summarize_section(sets: dict[str, dict[str, Any]], runs: list[Any]) -> dict[str, Any]:
    """Over all sets of one thread count: each set weighs the same in speed, each round in acceptance."""
    names = list(next(iter(sets.values()))["ratio"])
    ratios = {name: [entry["ratio"][name] for entry in sets.values()] for name in names}
    items = [{"set": source, **item} for source, entry in sets.items() for item in entry["differences"]["items"]]
    return {
        "geometric_mean_ratio": {name: round(statistics.geometric_mean(ratios[name]), 4) for name in names},
        "min_ratio": {name: min(ratios[name]) for name in names},
        "prompts": sum(entry["prompts"] for entry in sets.values()),
        **_acceptance(pooled_run(runs)),
        "differences": {key: value for key, value in _differences(items).items() if key != "items"},
    }


__all__ = ["DEFINITIONS", "summarize_section", "summarize_set"]
