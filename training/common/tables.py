"""Measurements as Markdown tables, for reports, benchmarks, the documentation and model cards. Nothing is measured here."""

from collections.abc import Sequence
from typing import Any


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


def compact_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table that need not line up as plain text; cells may hold anything, names of the user's too."""
    marks = ["---", *("---:" for _ in header[1:])]
    lines = ([" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in (header, marks, *rows))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_position(acceptance: Sequence[float | None], tried: Sequence[int]) -> str:
    """Conditional acceptance at each position as one line; `-` where a position was never tried."""
    return " ".join(f"{value:.2f}" if count else "-" for value, count in zip(acceptance, tried, strict=True))


def speed_tables(sections: Sequence[dict[str, Any]]) -> str:
    """Speed and acceptance by set, one table for each thread count of a report of `benchmarks.latency`."""
    tables = [f"### {threads(s)}\n\n{_speed_table(s)}\n\n{_overall_line(s['overall'])}" for s in sections]
    return "\n\n".join(tables)


def threads(section: dict[str, Any]) -> str:
    """The title of a section."""
    return f"{section['threads']} thread{'s' if section['threads'] != 1 else ''}"


def _speed_table(section: dict[str, Any]) -> str:
    names = list(section["overall"]["geometric_mean_ratio"])
    header = ["set", "plain tok/s", *(column for name in names for column in (f"{name} tok/s", "ratio"))]
    rows = []
    for source, entry in section["sets"].items():
        speeds, ratios, different = entry["tokens_per_second"], entry["ratio"], entry["differences"]["count"]
        row = [source, f"{speeds['plain']:.1f}"]
        row += [cell for name in names for cell in (f"{speeds[name]:.1f}", f"{ratios[name]:.2f}x")]
        acceptance = by_position(entry["acceptance_rate_by_position"], entry["tried_by_position"])
        rows.append([*row, f"{entry['tau']:.2f}", acceptance, f"{entry['prompts'] - different}/{entry['prompts']}"])
    return markdown_table([*header, "tau", "acceptance rate by position", "same text"], rows)


def _overall_line(overall: dict[str, Any]) -> str:
    intervals = overall.get("geometric_mean_interval", {})
    ratios = [
        f"{name}: {value:.2f}x{_in_brackets(intervals.get(name))} in geometric mean over the sets, "
        f"{overall['min_ratio'][name]:.2f}x on the worst"
        for name, value in overall["geometric_mean_ratio"].items()
    ]
    gap = overall["differences"]["largest_logit_gap"]
    differences = f"{overall['differences']['count']} of {overall['prompts']} texts differ"
    if gap is not None:
        differences += f" (two logits at most {gap:.4g} apart at the first difference)"
    acceptance = by_position(overall["acceptance_rate_by_position"], overall["tried_by_position"])
    return (
        "; ".join([*ratios, f"tau {overall['tau']:.2f}", f"acceptance rate by position {acceptance}", differences])
        + "."
    )


def _in_brackets(interval: list[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"


__all__ = ["by_position", "compact_table", "markdown_table", "speed_tables", "threads"]
