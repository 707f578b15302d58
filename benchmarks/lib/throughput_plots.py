"""A throughput report as two diagrams: tokens per second by concurrency, and against those that one request gets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.closed_loop import PLAIN, SCHEDULED
from benchmarks.lib.references import TRANSFORMERS, TRANSFORMERS_LOOP


BEST_FIXED = "best_fixed"
DEFAULT_LINES = (TRANSFORMERS, PLAIN, BEST_FIXED, *SCHEDULED)
_LABELS = {
    TRANSFORMERS: "Transformers, static batches",
    TRANSFORMERS_LOOP: "Transformers' assisted loop",
    PLAIN: "packed, no drafts",
    BEST_FIXED: "best fixed length",
    "confidence": "confidence threshold",
    "throughput": "throughput",
    "throughput_lagged": "throughput, lagged",
}
_STYLES = {
    TRANSFORMERS: ("0.6", "s", "--"),
    TRANSFORMERS_LOOP: ("tab:brown", "X", "--"),
    PLAIN: ("black", "o", "-"),
    BEST_FIXED: ("tab:orange", "^", ":"),
    "confidence": ("tab:green", "v", "-"),
    "throughput": ("tab:blue", "D", "-"),
    "throughput_lagged": ("tab:purple", "P", "-."),
}
_LABEL_DISTANCE = 0.055  # of the height of the axes: a line of text

Points = list[tuple[int, float, float]]  # concurrency, tokens/s, tokens/s per request


def plot_throughput(report: dict[str, Any], folder: str | Path, *, lines: Sequence[str] | None = None) -> list[Path]:
    """Write `throughput.png` and `throughput_per_request.png`; returns their paths.

    Args:
        report (`dict`): A report of `benchmarks.throughput`.
        folder (`str` or `Path`): The folder to write to; created if it is missing.
        lines (`Sequence[str]`, *optional*): Policies to show, `"best_fixed"` among them if wanted.

    Raises:
        ValueError: if the report has no level with any of `lines`.
    """
    names = list(lines or DEFAULT_LINES)
    series = {name: points for name in names if (points := _points(report["levels"], name))}
    if not series:
        raise ValueError(f"`--plot` needs a report that has been measured with one of {', '.join(names)}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "throughput.png", folder / "throughput_per_request.png"]
    for path, draw in zip(paths, (_draw_concurrency, _draw_frontier), strict=True):
        figure = Figure(figsize=(8.6, 5.0), layout="constrained")
        axes = figure.subplots()
        draw(axes, series)
        axes.set_title(_title(report), fontsize=10, loc="left")
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
    return paths


def _points(levels: Sequence[dict[str, Any]], name: str) -> Points:
    points = []
    for level in levels:
        entry = level["policies"].get(level["best_fixed"] if name == BEST_FIXED else name)
        if entry is not None:
            rates = entry["tokens_per_second"], entry["tokens_per_second_per_request"]
            points.append((level["concurrency"], *rates))
    return sorted(points)


def _draw_concurrency(axes: Axes, series: dict[str, Points]) -> None:
    ticks = sorted({concurrency for points in series.values() for concurrency, _, _ in points})
    for name, points in series.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], **_style(name))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="requests in flight", ylabel="tokens per second, all requests")
    _label_ends(axes, {name: (points[-1][0], points[-1][1]) for name, points in series.items()})


def _draw_frontier(axes: Axes, series: dict[str, Points]) -> None:
    for name, points in series.items():
        axes.plot([point[2] for point in points], [point[1] for point in points], **_style(name))
        if name in (PLAIN, "throughput"):
            for concurrency, total, single in points:
                axes.annotate(str(concurrency), (single, total), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="tokens per second per request",
        ylabel="tokens per second, all requests",
    )
    axes.legend(fontsize=9, frameon=False, title="numbers: requests in flight", title_fontsize=8)


def _style(name: str) -> dict[str, Any]:
    color, marker, line = _STYLES.get(name, (None, ".", "-"))
    return {
        "label": _LABELS.get(name, name),
        "color": color,
        "marker": marker,
        "linestyle": line,
        "markersize": 5,
        "linewidth": 1.6,
    }


def _label_ends(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Name each line at its end on the right, moved up where two would overlap."""
    top = axes.get_ylim()[1]
    height = 0.0
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        height = max(y / top, height + _LABEL_DISTANCE)
        label = _style(name)
        axes.annotate(
            label["label"],
            (x, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=label["color"],
            fontsize=9,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.7},
            annotation_clip=False,
        )


def _title(report: dict[str, Any]) -> str:
    facts = report["environment"]
    threads = f"{facts['threads']} thread{'s' if facts['threads'] != 1 else ''}"
    return f"{report['target']}\n{facts['cpu']}, {threads}, {facts['dtype']}, greedy"


__all__ = ["BEST_FIXED", "DEFAULT_LINES", "plot_throughput"]
