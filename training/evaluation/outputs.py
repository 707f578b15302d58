"""What evaluation writes: the report as JSON and Markdown, and its figures. Takes measured numbers; measures nothing."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.common.files import write_atomically
from training.common.tables import compact_table
from training.confidence.outputs import plot_reliability, position_bins
from training.confidence.scaling import Rounds, calibration_report
from training.evaluation.report import POOLED, EvalReport, SetReport


def write_report(folder: Path, report: EvalReport, rounds: Rounds | None) -> None:
    """Write `report.json`, `report.md`, `acceptance.png`, and with confidence `thresholds.png` and `reliability.png`.

    Args:
        folder (`Path`): An existing folder.
        report (`EvalReport`): The figures.
        rounds (`Rounds`, *optional*): All rounds, for the reliability diagram; `None` without a confidence head.
    """
    write_atomically(folder / "report.json", report.to_json())
    write_atomically(folder / "report.md", markdown(report))
    plot_acceptance(folder / "acceptance.png", report)
    if rounds is not None and report.pooled.calibration is not None:
        plot_thresholds(folder / "thresholds.png", report)
        plot_reliability_of(folder / "reliability.png", rounds, report.pooled.calibration["temperatures"])


def markdown(report: EvalReport) -> str:
    """The report as Markdown: the conditions, and a table for each kind of figure."""
    sections = [f"# Evaluation of {report.drafter['name']}", _conditions(report), _acceptance_table(report)]
    sections.append(_position_table(report))
    if report.pooled.calibration is not None:
        sections.append(calibration_table(report))
    if report.pooled.thresholds is not None:
        sections.append(threshold_table(report))
    if report.pooled.speed is not None:
        sections.append(_speed_table(report))
    return "\n\n".join([*sections, *(f"Note: {note}" for note in report.notes)]) + "\n"


def _sets(report: EvalReport) -> dict[str, SetReport]:
    """The sets, and all of them pooled where there are several."""
    return report.sets if len(report.sets) == 1 else report.sets | {POOLED: report.pooled}


def _conditions(report: EvalReport) -> str:
    settings, environment = report.settings, report.environment
    decoding = "greedy" if settings["temperature"] == 0 else f"sampled at temperature {settings['temperature']}"
    commit = environment["git_commit"] or "unknown"
    return (
        f"Target {report.target['name']} ({report.target['fingerprint']}), drafter {report.drafter['fingerprint']} with "
        f"blocks of {report.drafter['block_size']}; {settings['dtype']}, {decoding}, answers of at most "
        f"{settings['max_new_tokens']} tokens; every block verified at full length. {environment['device']}, "
        f"{environment['threads']} threads, torch {environment['torch']}, transformers {environment['transformers']}, "
        f"commit {commit[:12]}{' with changes' if environment['git_dirty'] else ''}."
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _acceptance_table(report: EvalReport) -> str:
    header = ["set", "prompts", "skipped", "rounds", "acceptance length", "drafts per round", "verify rate"]
    rows = []
    for name, figures in _sets(report).items():
        acceptance = figures.acceptance
        counts = [f"{count:,}" for count in (figures.prompts, figures.skipped, acceptance["rounds"])]
        means = [f"{acceptance['acceptance_length']:.3f}", f"{acceptance['drafts_per_round']:.2f}"]
        rows.append([name, *counts, *means, _number(acceptance["verify_rate"], ".1%")])
    return "## Acceptance\n\n" + compact_table(header, rows)


def _position_table(report: EvalReport) -> str:
    header = ["set", *(f"position {position}" for position in range(report.drafter["block_size"]))]
    rows = [
        [name, *(_number(share, ".1%") for share in figures.acceptance["acceptance_rate_by_position"])]
        for name, figures in _sets(report).items()
    ]
    return "## Conditional acceptance\n\n" + compact_table(header, rows)


def calibration_table(report: EvalReport) -> str:
    """Calibration by position and on average as a Markdown section."""
    header = ["set", "position", "rounds", "survived", "T", "ECE", "floor", "AUC", "Brier"]
    rows = []
    for name, figures in _sets(report).items():
        calibration = figures.calibration
        if calibration is None:
            continue
        by_position = figures is report.pooled or len(report.sets) == 1
        for position, count in enumerate(calibration["counts"] if by_position else []):
            metrics = _before_after(calibration["before"], calibration["after"], position)
            temperature = _number(calibration["temperatures"] and calibration["temperatures"][position], ".3f")
            survived, floor = f"{calibration['survived'][position]:.1%}", f"{calibration['ece_floor'][position]:.2%}"
            rows.append([name, str(position), f"{count:,}", survived, temperature, metrics[0], floor, *metrics[1:]])
        metrics = _before_after(calibration["means"]["before"], calibration["means"]["after"], None)
        floor = f"{sum(calibration['ece_floor']) / len(calibration['ece_floor']):.2%}"
        rows.append([name, "mean", "", "", "", metrics[0], floor, *metrics[1:]])
    return "## Calibration of survival, before and after scaling\n\n" + compact_table(header, rows)


def _before_after(before: dict[str, Any], after: dict[str, Any] | None, position: int | None) -> list[str]:
    """ECE, AUC and Brier; of a position, or (`None`) of means."""
    cells = []
    for name, form in (("ece", ".2%"), ("auc", ".3f"), ("brier", ".4f")):
        values = [
            figures[name] if position is None else figures[name][position] for figures in (before, after) if figures
        ]
        cells.append(" -> ".join(format(value, form) if value is not None else "none" for value in values))
    return cells


def threshold_table(report: EvalReport) -> str:
    """The sweep over thresholds as a Markdown section."""
    header = ["threshold", "drafts per round", "acceptance length", "verify rate"]
    rows = [
        [
            f"{point.threshold:g}",
            f"{point.drafts_per_round:.2f}",
            f"{point.acceptance_length:.3f}",
            _number(point.verify_rate, ".1%"),
        ]
        for point in report.pooled.thresholds or ()
    ]
    return "## Confidence thresholds, all sets\n\n" + compact_table(header, rows)


def _speed_table(report: EvalReport) -> str:
    header = ["set", "prompts", "plain tok/s", "assisted tok/s", "ratio", "95 %"]
    rows = []
    for name, figures in _sets(report).items():
        if (speed := figures.speed) is not None:
            interval = "" if speed.interval is None else "{:.3f} to {:.3f}".format(*speed.interval)
            speeds = f"{speed.plain:.1f}", f"{speed.assisted:.1f}", f"{speed.ratio:.3f}"
            rows.append([name, str(speed.num_prompts), *speeds, interval])
    schedule = f"schedule {report.timing['schedule']}, one prompt at a time" if report.timing else ""
    return f"## Speed ({schedule})\n\n" + compact_table(header, rows)


def plot_acceptance(path: Path, report: EvalReport) -> None:
    """Draw conditional acceptance rate by position, a line for each set and one for all, which has one standard error."""
    figure, (axes,) = _figure(1)
    for name, figures in _sets(report).items():
        acceptance = figures.acceptance
        rates = zip(acceptance["acceptance_rate_by_position"], acceptance["tried_by_position"], strict=True)
        known = [(position, share, count) for position, (share, count) in enumerate(rates) if count]
        positions, shares, counts = zip(*known, strict=True) if known else ((), (), ())
        errors = [math.sqrt(share * (1 - share) / count) for share, count in zip(shares, counts, strict=True)]
        is_main = name == POOLED or len(report.sets) == 1  # the bars of many sets would hide each other
        axes.errorbar(positions, shares, yerr=errors if is_main else None, capsize=3, **_style(name))
    axes.set(xlabel="position", ylabel="accepted, given that all earlier positions were", ylim=(0, 1.02))
    axes.set_xticks(range(report.drafter["block_size"]))
    _save(figure, axes, path)


def plot_thresholds(path: Path, report: EvalReport) -> None:
    """Draw acceptance length and verify rate by confidence threshold, a line for each set and one for all."""
    figure, panels = _figure(2)
    labels = {"acceptance_length": "acceptance length", "verify_rate": "accepted of the verified drafts"}
    for panel, (field, label) in zip(panels, labels.items(), strict=True):
        for name, figures in _sets(report).items():
            points = [point for point in figures.thresholds or () if getattr(point, field) is not None]
            values = [getattr(point, field) for point in points]
            panel.plot([point.threshold for point in points], values, **_style(name))
        panel.set(xlabel="confidence threshold", ylabel=label)
    panels[0].set_ylim(bottom=1)
    panels[1].set_ylim(0, 1.02)
    _save(figure, panels[0], path)


def plot_reliability_of(path: Path, rounds: Rounds, temperatures: Sequence[float] | None) -> None:
    """Draw observed against predicted survival, a panel for each position that was ever verified."""
    reached = int(rounds.verified.max())
    rounds = Rounds.of(rounds.logits[:, :reached], rounds.accepted, rounds.verified)
    unscaled = [1.0] * reached
    report = calibration_report(rounds, unscaled if temperatures is None else temperatures)
    after = None if temperatures is None else position_bins(rounds, temperatures)
    plot_reliability(path, report, before=position_bins(rounds, unscaled), after=after)


def _figure(num_panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # its absence is reported before recording

    figure = Figure(figsize=(6.2 if num_panels == 1 else 9.6, 4.4), layout="constrained")
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def _style(name: str) -> dict[str, Any]:
    # Matplotlib reads text between dollars as mathematics, and leaves labels with a leading underscore out of a legend.
    label = name.replace("$", r"\$")
    style = {
        "label": f" {label}" if label.startswith("_") else label,
        "marker": "o",
        "markersize": 3,
        "linewidth": 1.2,
    }
    return style | ({"color": "black", "linewidth": 2.4} if name == POOLED else {})


def _save(figure: Any, axes: Any, path: Path) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)), fontsize=9, frameon=False)
    for panel in figure.axes:
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


__all__ = [
    *("calibration_table", "markdown", "plot_acceptance", "plot_reliability_of", "plot_thresholds"),
    *("threshold_table", "write_report"),
]
