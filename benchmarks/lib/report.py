"""Measurements as JSON files and as text. Nothing is measured here."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def latency_tables(sections: Sequence[dict[str, Any]]) -> str:
    """The sections of a latency report as Markdown: speed and acceptance by set, then the breakdowns if there are any."""
    parts = [speed_tables(sections)]
    for section in sections:
        for name, part in section.get("breakdown", {}).items():
            parts.append(_breakdown_table(f"{threads(section)}, {name}", part))
    return "\n\n".join(parts)


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
    table = markdown_table(["part", "ms a round", "median ms a call", "calls", "share"], rows)
    return f"Where a round's time goes ({title}, {breakdown['rounds']} rounds, after the prefill):\n\n{table}"


def write_json(path: str | Path, content: dict[str, Any]) -> Path:
    """Write `content` in one step: a reader, or a Ctrl-C, never leaves or meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _one_line_lists(json.dumps(content, indent=2)) + "\n")
    return path


def _one_line_lists(text: str) -> str:
    """Lists of numbers on one line each, so that a report can be read."""
    return re.sub(r"\[\s+([-\d.,\seE]+?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)


__all__ = ["by_position", "latency_tables", "markdown_table", "speed_tables", "verdict", "write_json"]
