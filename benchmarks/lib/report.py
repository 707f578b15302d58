"""Measurements as JSON files and as text. Nothing is measured here."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import conditions
from benchmarks.lib.measure import Difference
from training.common.files import write_atomically
from training.common.tables import by_position, markdown_table, speed_tables, threads


def verdict(difference: Difference | None, num_tokens: int, dtype: str) -> str:
    """One line on whether the assisted output is the plain one."""
    if difference is None:
        return f"identical to plain generate, all {num_tokens} tokens"
    where = f"first difference at new token {difference.position + 1}"
    if difference.logit_gap is None:
        return f"DIFFERENT: {where}, where one of the outputs has ended"
    gap = f"{where}, where the target's two logits are {difference.logit_gap:.4g} apart"
    if dtype == "float32":
        return f"DIFFERENT, although in float32: {gap}"
    return f"{gap} (one {dtype} step there is {difference.dtype_step:.4g})"


def latency_tables(report: dict[str, Any]) -> str:
    """A latency report as Markdown: speed and acceptance by set, intervals, conditions, then breakdowns if there are any."""
    sections, settings = report["sections"], report["settings"]
    parts = [speed_tables(sections)]
    parts += [
        f"{threads(section)}: {interval_line(section)}" for section in sections if "interval" in _first_set(section)
    ]
    repeats = f"{settings['per_set']} prompts per set, {settings['repeats']} repeats of each"
    parts.append(conditions(report, batch="batch size 1, greedy", repeats=repeats))
    for section in sections:
        for name, breakdown in section.get("breakdown", {}).items():
            parts.append(_breakdown_table(f"{threads(section)}, {name}", breakdown))
    return "\n\n".join(parts)


def _first_set(section: dict[str, Any]) -> dict[str, Any]:
    return next(iter(section["sets"].values()))


def interval_line(section: dict[str, Any]) -> str:
    """The ratios of a section with their intervals, in a sentence for each method."""
    overall, sentences = section["overall"], []
    for name, mean in overall["geometric_mean_ratio"].items():
        ratios = {source: (entry["ratio"][name], entry["interval"][name]) for source, entry in section["sets"].items()}
        ratios["geometric mean"] = (mean, overall["geometric_mean_interval"][name])
        sentences.append(
            f"{name} over plain with 95 % intervals (bootstrap over prompts and repeats): "
            + ", ".join(
                f"{source} {ratio:.2f}x [{low:.2f}, {high:.2f}]" for source, (ratio, (low, high)) in ratios.items()
            )
            + "."
        )
    return " ".join(sentences)


def _breakdown_table(title: str, breakdown: dict[str, Any]) -> str:
    rows = [
        [
            part,
            f"{entry['ms_per_round']:.2f}",
            f"{entry['ms_per_call_median']:.2f}",
            entry["calls"],
            f"{entry['share']:.0%}",
        ]
        for part, entry in breakdown["parts"].items()
    ]
    table = markdown_table(["part", "ms per round", "median ms per call", "calls", "share"], rows)
    return f"Time per round by part ({title}, {breakdown['rounds']} rounds, after the prefill):\n\n{table}"


def write_json(path: str | Path, content: dict[str, Any]) -> Path:
    """Write `content` in one step: neither a reader nor Ctrl-C meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _one_line_lists(json.dumps(content, indent=2)) + "\n")
    return path


def partial_path(path: str | Path) -> Path:
    """Where a run keeps what is complete until it ends, next to its output."""
    return Path(path).with_suffix(".partial.json")


def _one_line_lists(text: str) -> str:
    """Lists of numbers on one line each, so that a report can be read."""
    return re.sub(r"\[\s+([-\d.,\seE]+?)\s+\]", lambda numbers: "[" + " ".join(numbers[1].split()) + "]", text)


def require_matplotlib(option: str) -> None:
    """Refuse to draw without matplotlib, before anything takes time.

    Raises:
        ValueError: names the command that installs it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"`{option}` needs matplotlib: `pip install matplotlib`.")


__all__ = [
    "by_position",
    "interval_line",
    "latency_tables",
    "markdown_table",
    "partial_path",
    "require_matplotlib",
    "speed_tables",
    "verdict",
    "write_json",
]
