"""Measurements as JSON files and as text. Nothing is measured here."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Difference
from training.regenerate import write_atomically


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table whose columns also line up as plain text: the first to the left, numbers to the right."""
    table = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            _aligned(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in table
    ]
    rule = "|" + "|".join(
        "-" * (width + 2) if column == 0 else "-" * (width + 1) + ":" for column, width in enumerate(widths)
    )
    return "\n".join([lines[0], rule + "|", *lines[1:]])


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def by_position(acceptance: Sequence[float], tried: Sequence[int]) -> str:
    """Conditional acceptance at each slot as one line; `-` where a slot was never tried."""
    return " ".join(f"{value:.2f}" if count else "-" for value, count in zip(acceptance, tried, strict=True))


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
            parts.append(_breakdown_table(f"{_title(section)}, {name}", part))
    return "\n\n".join(parts)


def speed_tables(sections: Sequence[dict[str, Any]]) -> str:
    """Speed and acceptance by set, one table for each thread count; what README and the model card quote."""
    parts = [f"### {_title(s)}\n\n{_speed_table(s)}\n\n{_overall_line(s['overall'])}" for s in sections]
    return "\n\n".join(parts)


def _title(section: dict[str, Any]) -> str:
    return f"{section['threads']} thread{'s' if section['threads'] != 1 else ''}"


def _speed_table(section: dict[str, Any]) -> str:
    names = list(section["overall"]["geometric_mean_ratio"])
    header = ["set", "plain tok/s", *(column for name in names for column in (f"{name} tok/s", "ratio"))]
    rows = []
    for source, entry in section["sets"].items():
        speeds, ratios, different = entry["tokens_per_second"], entry["ratio"], entry["differences"]["count"]
        row = [source, f"{speeds['plain']:.1f}"]
        row += [cell for name in names for cell in (f"{speeds[name]:.1f}", f"{ratios[name]:.2f}x")]
        acceptance = by_position(entry["acceptance_by_position"], entry["tried_by_position"])
        rows.append([*row, f"{entry['tau']:.2f}", acceptance, f"{entry['prompts'] - different}/{entry['prompts']}"])
    return markdown_table([*header, "tau", "acceptance by position", "same text"], rows)


def _overall_line(overall: dict[str, Any]) -> str:
    ratios = [
        f"{name}: {value:.2f}x in geometric mean over the sets, {overall['min_ratio'][name]:.2f}x on the worst"
        for name, value in overall["geometric_mean_ratio"].items()
    ]
    gap = overall["differences"]["largest_logit_gap"]
    differences = f"{overall['differences']['count']} of {overall['prompts']} texts differ"
    if gap is not None:
        differences += f" (two logits at most {gap:.4g} apart at the first difference)"
    acceptance = by_position(overall["acceptance_by_position"], overall["tried_by_position"])
    return "; ".join([*ratios, f"tau {overall['tau']:.2f}", f"acceptance by position {acceptance}", differences]) + "."


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
