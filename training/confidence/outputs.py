"""The outputs of calibration: the drafter's temperatures, SGLang's JSON, a full report, a table and a figure.

Takes measured numbers; computes only the bins of the figure.

Shapes: `n` rounds, `K` positions, `B` bins.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from training.common.files import write_atomically
from training.confidence.scaling import CalibrationReport, ReliabilityBins, Rounds, reliability_bins, survival


def write_outputs(
    folder: Path,
    report: CalibrationReport,
    *,
    fit: CalibrationReport,
    held_out_rounds: Rounds,
    details: dict[str, Any],
    dataset: str,
) -> None:
    """Write `calibration.json`, `report.json` and `reliability.png` into `folder`.

    Args:
        folder (`Path`): An existing folder.
        report (`CalibrationReport`): Figures of the held-out rounds.
        fit (`CalibrationReport`): Figures of the rounds fitted on, for comparison.
        held_out_rounds (`Rounds`): The rounds of the diagram.
        details (`dict`): Settings and counts, copied into `report.json`; `num_rounds["fit"]` is read.
        dataset (`str`): A name for the prompts.
    """
    bins = {
        "before": position_bins(held_out_rounds, [1.0] * held_out_rounds.num_draft_positions),
        "after": position_bins(held_out_rounds, report.temperatures),
    }
    full = details | {
        "dataset": dataset,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "held_out": _with_means(report),
        "fit": _with_means(fit),
        "reliability": {
            name: [{key: value.tolist() for key, value in vars(position).items()} for position in positions]
            for name, positions in bins.items()
        },
    }
    sglang = sglang_calibration(report, dataset=dataset, num_samples=details["num_rounds"]["fit"])
    write_atomically(folder / "calibration.json", json.dumps(sglang, indent=2) + "\n")
    write_atomically(folder / "report.json", json.dumps(without_nan(full), indent=2, allow_nan=False) + "\n")
    plot_reliability(folder / "reliability.png", report, before=bins["before"], after=bins["after"])


def write_temperatures(folder: Path, temperatures: Sequence[float]) -> None:
    """Set `confidence_temperatures` in a drafter's config.json and leave its other fields as they are."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["confidence_temperatures"] = list(temperatures)
    write_atomically(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def sglang_calibration(report: CalibrationReport, *, dataset: str, num_samples: int) -> dict[str, Any]:
    """SGLang's calibration file; the samples are the fitted rounds, both errors those of the held-out rounds."""
    return {
        "temperatures": list(report.temperatures),
        "dataset": dataset,
        "num_samples": num_samples,
        "ece_before": list(report.before.ece),
        "ece_after": list(report.after.ece),
    }


def table(report: CalibrationReport) -> str:
    """The report as text, one line per position."""
    lines = [f"{'position':>4}{'rounds':>8}{'survived':>10}{'T':>8}{'ECE':>19}{'(floor)':>9}{'AUC':>18}{'Brier':>20}"]
    for position, (count, share) in enumerate(zip(report.counts, report.survived, strict=True)):
        start = f"{position:4d}{count:8d}{share:10.1%}{report.temperatures[position]:8.3f}"
        figures = [{name: values[position] for name, values in vars(m).items()} for m in (report.before, report.after)]
        lines.append(start + _before_after(figures, f"({report.ece_floor[position]:.2%})"))
    lines.append(f"{'mean':30}" + _before_after([report.before.means(), report.after.means()], ""))
    return "\n".join(lines)


def _before_after(figures: list[dict[str, float]], floor: str) -> str:
    before, after = figures
    ece = f"{before['ece']:.2%} -> {after['ece']:.2%}"
    auc = f"{before['auc']:.3f} -> {after['auc']:.3f}"
    brier = f"{before['brier']:.4f} -> {after['brier']:.4f}"
    return f"{ece:>19}{floor:>9}{auc:>18}{brier:>20}"


def position_bins(rounds: Rounds, temperatures: Sequence[float]) -> list[ReliabilityBins]:
    """Reliability bins of survival at each position."""
    confidence = survival(rounds.logits, temperatures)
    outcomes = [rounds.outcome(position) for position in range(rounds.num_draft_positions)]
    return [reliability_bins(confidence[rows, position], kept) for position, (rows, kept) in enumerate(outcomes)]


def plot_reliability(
    path: Path,
    report: CalibrationReport,
    *,
    before: Sequence[ReliabilityBins],
    after: Sequence[ReliabilityBins] | None,
) -> None:
    """Draw observed against predicted survival, a panel for each position, with one standard error.

    Bins of fewer than 20 rounds are left out: they show chance. `after` is `None` without temperatures.
    """
    from matplotlib.figure import Figure  # its absence is reported before recording

    columns = min(3, len(before))
    rows = -(-len(before) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.4 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for position, panel in enumerate(panels[: len(before)]):
        _draw_position(panel, before[position], None if after is None else after[position])
        scaled = "" if after is None else f" to {report.after.ece[position]:.1%}"
        panel.set_title(f"position {position}: ECE {report.before.ece[position]:.1%}{scaled}", fontsize=10)
        panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        panel.tick_params(labelbottom=position + columns >= len(before))
    for panel in panels[len(before) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    figure.supxlabel("predicted survival of the prefix up to the position", fontsize=10)
    figure.supylabel("observed", fontsize=10)
    figure.savefig(path, dpi=150)


def _draw_position(panel: Any, before: ReliabilityBins, after: ReliabilityBins | None) -> None:
    counts, name = (before.counts, "before") if after is None else (after.counts, "after")
    shares = counts / counts.sum()
    centers = (torch.arange(len(shares)) + 0.5) / len(shares)
    width = 0.9 / len(shares)
    panel.bar(centers.tolist(), shares.tolist(), width=width, color="0.85", label=f"share of rounds ({name})")
    panel.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--", label="exact")
    curves = [(before, "tab:orange", "before")] + ([] if after is None else [(after, "tab:blue", "after")])
    for bins, color, name in curves:
        filled = bins.counts >= 20
        observed, counts = bins.observed[filled], bins.counts[filled]
        error = (observed * (1 - observed) / counts).sqrt()
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1, "elinewidth": 0.7}
        panel.errorbar(bins.confidence[filled].tolist(), observed.tolist(), yerr=error.tolist(), label=name, **style)


def _with_means(report: CalibrationReport) -> dict[str, Any]:
    return asdict(report) | {"means": {"before": report.before.means(), "after": report.after.means()}}


def without_nan(value: Any) -> Any:
    """Replace NaN, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


__all__ = [
    *("plot_reliability", "position_bins", "sglang_calibration", "table", "without_nan", "write_outputs"),
    "write_temperatures",
]
