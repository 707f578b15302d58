"""From timed calls to the numbers of a latency report: what is summed, what is averaged, what is only counted."""

import statistics
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.lib.intervals import drawn, edges, speed_draws
from benchmarks.lib.measure import ASSISTED, PLAIN, Measurement, first_difference, pooled_run, pooled_speed


DEFINITIONS = {
    "tokens_per_second": "sum of new tokens / sum of median seconds of whole generate calls, prefill included",
    "seconds": "of every call, by prompt, in the order of the repeats",
    "ratio": "tokens per second / those of plain decoding, which took turns with it in the same process",
    "interval": "95 % bootstrap of the ratio over prompts and, within each prompt, over repeats, both methods drawn together",
    "tau": "acceptance length: tokens per target forward after the prefill, pooled over rounds, bonus tokens counted",
    "acceptance_rate_by_position": "share of drafts accepted at a position, of rounds that verified it and accepted all before it",
}


def summarize_set(target: PreTrainedModel, measurements: list[Measurement]) -> dict[str, Any]:
    """Speeds, acceptance and differences of a set."""
    names = list(measurements[0].calls)
    speeds = {name: pooled_speed(measurements, name) for name in names}
    run = pooled_run(measurement.run() for measurement in measurements)
    differences = []
    for number, item in enumerate(measurements):
        difference = first_difference(target, item.prompt_ids, item.tokens(PLAIN), item.tokens(ASSISTED))
        if difference is not None:
            differences.append({"prompt": number, **asdict(difference)})
    draws = ratio_draws(measurements)
    return {
        "prompts": len(measurements),
        "repeats": len(measurements[0].calls[PLAIN]),
        "new_tokens": {name: sum(len(item.tokens(name)) for item in measurements) for name in names},
        "seconds": {
            name: [[round(call.seconds, 4) for call in item.calls[name]] for item in measurements] for name in names
        },
        "tokens_per_second": {name: round(speed, 3) for name, speed in speeds.items()},
        "ratio": {name: round(speed / speeds[PLAIN], 4) for name, speed in speeds.items() if name != PLAIN},
        "interval": {name: list(edges(values)) for name, values in draws.items()},
        **_acceptance(run),
        "differences": _differences(differences),
    }


def ratio_draws(measurements: list[Measurement], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Resampled speed-ups `[DRAWS]` over plain decoding, by method; sets that are combined need different seeds."""
    num_prompts, num_repeats = len(measurements), len(measurements[0].calls[PLAIN])
    chosen = {
        "prompts": drawn(num_prompts, (num_prompts,), seed=2 * seed),
        "repeats": drawn(num_repeats, (num_prompts, num_repeats), seed=2 * seed + 1),
    }
    speeds = {}
    for name in measurements[0].calls:
        tokens = [len(item.tokens(name)) for item in measurements]
        seconds = [[call.seconds for call in item.calls[name]] for item in measurements]
        speeds[name] = speed_draws(tokens, seconds, **chosen)
    return {name: values / speeds[PLAIN] for name, values in speeds.items() if name != PLAIN}


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


def summarize_section(sets: dict[str, dict[str, Any]], measurements: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Over all sets of one thread count: each set weighs the same in speed, each round in acceptance.

    Args:
        sets (`dict`): The summaries of the sets.
        measurements (`dict[str, list[Measurement]]`): What they summarize.
    """
    names = list(next(iter(sets.values()))["ratio"])
    ratios = {name: [entry["ratio"][name] for entry in sets.values()] for name in names}
    items = [{"set": source, **item} for source, entry in sets.items() for item in entry["differences"]["items"]]
    draws = [ratio_draws(of_set, seed=number) for number, of_set in enumerate(measurements.values())]
    means = {name: torch.stack([of_set[name] for of_set in draws]).log().mean(dim=0).exp() for name in names}
    runs = [measurement.run() for of_set in measurements.values() for measurement in of_set]
    return {
        "geometric_mean_ratio": {name: round(statistics.geometric_mean(ratios[name]), 4) for name in names},
        "geometric_mean_interval": {name: list(edges(means[name])) for name in names},
        "min_ratio": {name: min(ratios[name]) for name in names},
        "prompts": sum(entry["prompts"] for entry in sets.values()),
        **_acceptance(pooled_run(runs)),
        "differences": {key: value for key, value in _differences(items).items() if key != "items"},
    }


__all__ = ["DEFINITIONS", "ratio_draws", "summarize_section", "summarize_set"]
