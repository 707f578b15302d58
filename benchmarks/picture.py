"""Draw a latency report: tokens per second on each evaluation set, plain beside assisted, for the README.

    python -m benchmarks.picture
    python -m benchmarks.picture --report /tmp/latency.json --threads 1 --output /tmp/speed.png

Nothing is measured: every number is one of the report that `python -m benchmarks.latency` wrote. The background is
transparent and the colors have enough contrast on white and on black. The output's ending chooses SVG or PNG.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.measure import ASSISTED, PLAIN
from benchmarks.lib.options import RESULTS, CommandParser, command, positive_int
from benchmarks.lib.report import require_matplotlib


if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT, GRID = "#737c87", "#73808c55"
COLORS = {PLAIN: "#8b949e", ASSISTED: "#2f81f7"}
LABELS = {PLAIN: "plain generate", ASSISTED: "with the DSpark drafter"}
_BAR = 0.38  # of the distance between two sets


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("picture", __doc__)
    parser.add_argument("--report", default=str(RESULTS / "latency.json"), help="the report to draw")
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="thread count to draw (default: the last in the report)"
    )
    parser.add_argument("--output", default="docs/images/speed.svg", help="the SVG or PNG file to write")
    return parser.parse_args(argv)


def section_of(report: dict[str, Any], threads: int | None) -> dict[str, Any]:
    """The section of a thread count.

    Raises:
        ValueError: if the report has none.
    """
    sections: dict[int, dict[str, Any]] = {section["threads"]: section for section in report.get("sections", [])}
    if not sections or threads not in (None, *sections):
        raise ValueError(f"`--threads {threads}`: the report has measurements for {sorted(sections)} threads.")
    return sections[threads or list(sections)[-1]]


def caption(report: dict[str, Any], section: dict[str, Any]) -> str:
    """What the numbers depend on, in two lines."""
    facts, settings = report["environment"], report["settings"]
    threads = f"{section['threads']} thread{'s' if section['threads'] > 1 else ''}"
    lines = [
        f"{report['target']}: {facts['cpu']}, {threads} of {facts['cores']} cores, {facts['dtype']}, {settings['decoding']}",
        f"{settings['per_set']} prompts per set, at most {settings['max_new_tokens']} new tokens, "
        f"repeats: {settings['repeats']}, commit {(facts['git_commit'] or 'unknown')[:9]}",
    ]
    if report.get("load", {}).get("busy"):
        lines[1] += ", measured on a busy machine"
    return "\n".join(lines)


def draw(report: dict[str, Any], section: dict[str, Any]) -> "Figure":
    """Horizontal bars: a pair for each set, with the speed-up beside it."""
    from matplotlib.figure import Figure  # `run` has checked that it is installed

    sets = section["sets"]
    figure = Figure(figsize=(8.0, 0.62 * len(sets) + 1.7), layout="constrained")
    axes = figure.subplots()
    for place, method in enumerate((PLAIN, ASSISTED)):
        speeds = [entry["tokens_per_second"][method] for entry in sets.values()]
        rows = [row + (place - 0.5) * _BAR for row in range(len(sets))]
        bars = axes.barh(rows, speeds, height=_BAR, color=COLORS[method], label=LABELS[method])
        ratios = [f"   {entry['ratio'][ASSISTED]:.2f}x" if method == ASSISTED else "" for entry in sets.values()]
        labels = [f"{speed:.1f}{ratio}" for speed, ratio in zip(speeds, ratios, strict=True)]
        axes.bar_label(bars, labels, padding=4, color=TEXT, fontsize=9)
    axes.set_yticks(range(len(sets)), list(sets))
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel("tokens per second", color=TEXT)
    axes.set_ylabel("evaluation set", color=TEXT)
    axes.tick_params(colors=TEXT, length=0)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=TEXT)
    figure.supxlabel(caption(report, section), x=0.01, ha="left", fontsize=8, color=TEXT)
    return figure


def run(options: argparse.Namespace) -> None:
    """Draw and write."""
    require_matplotlib("benchmarks.picture")
    from matplotlib import rc_context

    report = json.loads(Path(options.report).read_text(encoding="utf-8"))
    path = Path(options.output)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"`--output {path}` must end in .svg or .png.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "dspark"}):  # the same report gives the same file
        figure = draw(report, section_of(report, options.threads))
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=160, transparent=True, metadata=metadata)
    print(f"written to {path}")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
