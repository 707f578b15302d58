"""From slices of closed loops to the numbers of a throughput report: rates, ratios with intervals, acceptance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.lib.closed_loop import PLAIN, SCHEDULED, Slice
from benchmarks.lib.intervals import drawn, edges
from benchmarks.lib.machine import conditions
from benchmarks.lib.report import markdown_table


DEFINITIONS = {
    "tokens_per_second": "new tokens of all requests / seconds, over all slices; prefills of joining requests included",
    "decoding": "the same rate and ratio over steps in which no request joined, since the number of prefills in a short "
    "run is chance",
    "ratio": "of tokens per second, over slices that bring both about the same tokens of the same requests; `low` and "
    "`high` are a 95 % bootstrap interval over slices, drawn in pairs where both have as many",
    "mean_verified_tokens": "draft tokens verified per row and round",
    "tau": "acceptance length: tokens per row and round, pooled over rounds, bonus tokens counted",
    "plain_share": "rounds of rows in which the schedule drafted nothing / rounds of rows",
    "steps": "target forwards after prefills, each for all rows",
    "same_text": "requests finished by both plain and this policy, and how many of them have the same text",
    "best_fixed": "the fixed length with the most tokens per second here, chosen after the fact",
}


def tokens_per_second(slices: Sequence[Slice]) -> float:
    """Sum of tokens over sum of seconds."""
    return sum(item.tokens for item in slices) / sum(item.seconds for item in slices)


def ratio_interval(fast: Sequence[Slice], slow: Sequence[Slice], *, seed: int = 0) -> dict[str, float | None]:
    """The ratio of the speeds of two policies, with a bootstrap interval over slices.

    Slice `i` of both was measured within the same minute over the same requests, so slices are drawn in pairs. Where one
    policy has fewer (whole batches instead of slices), each is drawn independently. A single slice gives no interval.

    Returns:
        `dict`: `value`, `low` and `high`.
    """
    value = round(tokens_per_second(fast) / tokens_per_second(slow), 4)
    if min(len(fast), len(slow)) < 2:
        return {"value": value, "low": None, "high": None}
    chosen = drawn(len(fast), (len(fast),), seed=seed)
    chosen_slow = chosen if len(slow) == len(fast) else drawn(len(slow), (len(slow),), seed=seed + 1)
    low, high = edges(_drawn_rates(fast, chosen) / _drawn_rates(slow, chosen_slow))
    return {"value": value, "low": low, "high": high}


def _drawn_rates(slices: Sequence[Slice], chosen: torch.Tensor) -> torch.Tensor:
    tokens = torch.tensor([item.tokens for item in slices], dtype=torch.float64)
    seconds = torch.tensor([item.seconds for item in slices], dtype=torch.float64)
    return tokens[chosen].sum(dim=1) / seconds[chosen].sum(dim=1)


def summarize_level(
    slices: Mapping[str, Sequence[Slice]], texts: Mapping[str, Mapping[int, list[int]]], *, concurrency: int
) -> dict[str, Any]:
    """The numbers of one concurrency.

    Args:
        slices (`Mapping[str, Sequence[Slice]]`): The slices of each policy, in order; those without time left out.
        texts (`Mapping[str, Mapping[int, list[int]]]`): The texts of each policy's finished requests, by number.
        concurrency (`int`): Requests in flight.
    """
    policies = {
        name: _policy(items, slices[PLAIN], concurrency) | {"same_text": _same_text(texts[name], texts[PLAIN])}
        for name, items in slices.items()
    }
    fixed = [name for name in slices if name.startswith("fixed")]
    best = max(fixed, key=lambda name: tokens_per_second(slices[name]), default=None)
    to_best = {
        name: ratio_interval(slices[name], slices[best]) for name in SCHEDULED if best is not None and name in slices
    }
    return {"concurrency": concurrency, "best_fixed": best, "ratio_to_best_fixed": to_best, "policies": policies}


def _policy(slices: Sequence[Slice], plain: Sequence[Slice], concurrency: int) -> dict[str, Any]:
    counts = sum((item.counts for item in slices), Counter[str]())
    rate, rounds = tokens_per_second(slices), counts["rounds"]
    return {
        "tokens_per_second": round(rate, 3),
        "tokens_per_second_per_request": round(rate / concurrency, 3),
        "ratio_to_plain": ratio_interval(slices, plain),
        "decoding": _decoding(slices, plain),
        "mean_verified_tokens": round(counts["verified"] / rounds, 4) if rounds else None,
        "tau": round(counts["new_tokens"] / rounds, 4) if rounds else None,
        "plain_share": round(counts["plain"] / rounds, 4) if rounds else None,
        "steps": sum(item.steps for item in slices) or None,
        "row_rounds": rounds or None,
        "tokens": sum(item.tokens for item in slices),
        "seconds": round(sum(item.seconds for item in slices), 3),
        "slices": {
            "tokens": [item.tokens for item in slices],
            "seconds": [round(item.seconds, 4) for item in slices],
        },
    }


def _decoding(slices: Sequence[Slice], plain: Sequence[Slice]) -> dict[str, Any] | None:
    """Rate and ratio without the steps in which requests joined, over the slices in which both had other steps."""
    if len(slices) != len(plain):
        return None
    pairs = [
        [Slice(item.decoding_tokens, item.decoding_seconds) for item in pair]
        for pair in zip(slices, plain, strict=True)
        if all(item.decoding_seconds for item in pair)
    ]
    if not pairs:
        return None
    ours, theirs = zip(*pairs, strict=True)
    return {"tokens_per_second": round(tokens_per_second(ours), 3), "ratio_to_plain": ratio_interval(ours, theirs)}


def _same_text(texts: Mapping[int, list[int]], plain: Mapping[int, list[int]]) -> dict[str, int]:
    both = texts.keys() & plain.keys()
    return {"compared": len(both), "equal": sum(texts[number] == plain[number] for number in both)}


def level_table(level: Mapping[str, Any]) -> str:
    """One concurrency as Markdown."""
    rows = [_row(name, entry) for name, entry in level["policies"].items()]
    header = ["policy", "tokens/s", "per request", "ratio to plain", "decoding", "ratio", "verified", "tau", "plain"]
    header.append("same text")
    lines = [f"### {level['concurrency']} in flight", "", markdown_table(header, rows)]
    for name, ratio in level["ratio_to_best_fixed"].items():
        lines += ["", f"{name} against the best fixed length ({level['best_fixed']}): {_ratio(ratio)}"]
    return "\n".join(lines)


def report_conditions(report: Mapping[str, Any]) -> str:
    """What the numbers of a report depend on, for the line under its table."""
    slices = [len(entry["slices"]["seconds"]) for level in report["levels"] for entry in level["policies"].values()]
    repeats = f"at least {min(slices)} slices of each policy in turns"
    return conditions(dict(report), batch="batch: the requests in flight, greedy", repeats=repeats)


def throughput_table(report: Mapping[str, Any]) -> str:
    """The report in one table, one line per concurrency, as the documentation quotes it."""
    rows = []
    for level in report["levels"]:
        policies, best = level["policies"], level["best_fixed"]
        chosen = policies["throughput"]
        reference = policies.get("transformers")
        rows.append(
            [
                level["concurrency"],
                "-" if reference is None else f"{reference['tokens_per_second']:.1f}",
                f"{policies[PLAIN]['tokens_per_second']:.1f}",
                "-" if best is None else f"{policies[best]['tokens_per_second']:.1f} ({best.removeprefix('fixed')})",
                f"{chosen['tokens_per_second']:.1f}",
                f"{chosen['ratio_to_plain']['value']:.2f}x",
                "-" if best is None else f"{level['ratio_to_best_fixed']['throughput']['value']:.2f}x",
                _number(chosen["tau"], ".2f"),
                _number(chosen["mean_verified_tokens"], ".2f"),
                _number(chosen["plain_share"], ".0%"),
            ]
        )
    header = ["in flight", "transformers tok/s", "plain tok/s", "best fixed (length)", "throughput tok/s"]
    return markdown_table([*header, "/ plain", "/ best fixed", "tau", "verified", "plain"], rows)


def _row(name: str, entry: Mapping[str, Any]) -> list[str]:
    same, decoding = entry["same_text"], entry["decoding"]
    return [
        name,
        f"{entry['tokens_per_second']:.1f}",
        f"{entry['tokens_per_second_per_request']:.2f}",
        _ratio(entry["ratio_to_plain"]),
        "-" if decoding is None else f"{decoding['tokens_per_second']:.1f}",
        "-" if decoding is None else _ratio(decoding["ratio_to_plain"]),
        _number(entry["mean_verified_tokens"], ".2f"),
        _number(entry["tau"], ".2f"),
        _number(entry["plain_share"], ".0%"),
        f"{same['equal']}/{same['compared']}",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(ratio: Mapping[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['value']:.3f}"
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


__all__ = [
    "DEFINITIONS",
    "level_table",
    "ratio_interval",
    "report_conditions",
    "summarize_level",
    "throughput_table",
    "tokens_per_second",
]
