"""A study as text and plots: acceptance lengths, DSpark's margins with their intervals, and acceptance rate by position.

Margins compare rounds over the same answers, so intervals come from answers drawn in pairs. They show the spread over
prompts, not over seeds of training.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.report import markdown_table
from training.evaluation.outputs import calibration_table, threshold_table
from training.evaluation.report import FORMAT, EvalReport


OURS = "dspark"
COMPARED = (OURS, "dflash")
EAGLE = "eagle"
_DRAWS = 2000


def study_tables(content: dict[str, Any]) -> str:
    """All tables of a study."""
    results = content["results"]
    groups = list(dict.fromkeys(case["group"] for case in results if case["group"] != "references"))
    parts = [f"{group}\n\n{tau_table(results, group)}" for group in groups]
    if any(case["drafter"] == OURS for case in results):
        parts.append(f"margins\n\n{margin_table(results)}")
    if "depth" in groups:
        parts.append(f"margins by depth\n\n{depth_table(results)}")
    if "main" in groups:
        parts.append(f"acceptance rate by position\n\n{acceptance_table(results)}")
    if "confidence" in content:
        parts += confidence_tables(content["confidence"])
    return "\n\n".join(parts) + "\n"


def tau_table(results: Sequence[dict[str, Any]], group: str) -> str:
    """Acceptance length by set as Markdown, with the rows to compare a group with: references, or the main group's own."""

    def wanted(case: dict[str, Any]) -> bool:
        against = case["group"] == "references" if group == "main" else case["drafter"] in COMPARED
        return case["group"] == group or against

    cases = [case for case in results if wanted(case)]
    names = list(cases[0]["tau"])
    return markdown_table(
        ["drafter", *names], [[case["drafter"], *(f"{case['tau'][name]:.3f}" for name in names)] for case in cases]
    )


def margin_table(results: Sequence[dict[str, Any]]) -> str:
    """DSpark's acceptance length over that of each other drafter, less 1, by set; the 95 % interval over all."""
    cases = {case["drafter"]: case for case in results if case["group"] in ("references", "main")}
    ours = cases.pop(OURS)
    rows = []
    for name, rival in cases.items():
        ratios = [_total(rival["rounds"], [source]) / _total(ours["rounds"], [source]) for source in ours["rounds"]]
        mean, low, high = margin(ours["rounds"], rival["rounds"])
        rows.append([name, *(f"{ratio - 1:+.1%}" for ratio in ratios), f"{mean:+.1%} [{low:+.1%}, {high:+.1%}]"])
    return markdown_table([f"{OURS} over", *ours["rounds"], "all"], rows)


def depth_table(results: Sequence[dict[str, Any]]) -> str:
    """DSpark's margins by its number of layers: over DFlash with as many, and over the autoregressive drafter with one."""
    by_name = {case["drafter"]: case for case in results}
    rows = []
    for case in _of_kind(results, OURS, "depth"):
        rivals = (by_name.get(case["drafter"].replace(OURS, COMPARED[1], 1)), by_name.get(EAGLE))
        margins = [margin(case["rounds"], rival["rounds"]) if rival else None for rival in rivals]
        cells = ["-" if m is None else f"{m[0]:+.1%} [{m[1]:+.1%}, {m[2]:+.1%}]" for m in margins]
        rows.append([case["settings"]["fields"]["num_draft_layers"], *cells])
    rows.sort()
    return markdown_table(["layers of dspark", f"over {COMPARED[1]} with as many", f"over {EAGLE} with one"], rows)


def margin(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> tuple[float, float, float]:
    """The ratio of acceptance lengths, less 1, over all answers, and its 95 % interval with answers drawn by set.

    Both made the same tokens, so the ratio of acceptance lengths is the inverse ratio of rounds.
    """
    generator = torch.Generator().manual_seed(0)
    sums = [torch.zeros(_DRAWS, dtype=torch.long) for _ in range(2)]
    for source, rounds in ours.items():
        drawn = torch.randint(len(rounds), (_DRAWS, len(rounds)), generator=generator)
        for total, counts in zip(sums, (rounds, theirs[source]), strict=True):
            total += torch.tensor(counts)[drawn].sum(dim=1)
    edges = torch.quantile(sums[1].double() / sums[0], torch.tensor([0.025, 0.975], dtype=torch.float64))
    low, high = (edges - 1).tolist()
    return _total(theirs, theirs) / _total(ours, ours) - 1, low, high


def _total(rounds: dict[str, list[int]], sources: Any) -> int:
    return sum(sum(rounds[source]) for source in sources)


def acceptance_table(results: Sequence[dict[str, Any]]) -> str:
    """Conditional acceptance rate by position of the main drafters as Markdown."""
    lines = position_lines(results)
    draft_positions = max(map(len, lines.values()))
    rows = [
        [name, *(f"{values[i]:.3f}" if i < len(values) else "-" for i in range(draft_positions))]
        for name, values in lines.items()
    ]
    return markdown_table(["drafter", *range(draft_positions)], rows)


def confidence_tables(confidence: dict[str, Any]) -> list[str]:
    """Calibration and the sweep over thresholds of the calibrated drafter, as Markdown."""
    names = {field.name for field in fields(EvalReport)}
    content = {name: value for name, value in confidence.items() if name in names}
    report = EvalReport.from_json(json.dumps({"format": FORMAT} | content))
    return [calibration_table(report), threshold_table(report)]


def curve_table(results: Sequence[dict[str, Any]], steps: Sequence[int]) -> str:
    """Acceptance length in training at some steps as Markdown, and DSpark's margin over the other compared drafter."""
    curves = {case["drafter"]: dict(case["curve"]) for case in results if case["group"] == "main"}
    rows = [[name, *(f"{curve[step]:.3f}" for step in steps)] for name, curve in curves.items()]
    ours, rival = (curves[name] for name in COMPARED)
    rows.append([f"{OURS} over {COMPARED[1]}", *(f"{ours[step] / rival[step] - 1:+.1%}" for step in steps)])
    return markdown_table(["drafter", *steps], rows)


def position_lines(results: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Conditional acceptance from position 0 to the last tried one, by drafter."""
    return {
        case["drafter"]: [value for value in case["acceptance"] if value is not None]
        for case in results
        if case["group"] == "main"
    }


def plot_study(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Conditional acceptance rate by position; acceptance length by step of training, by depth and by block size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawn = [case for case in results if len(case.get("acceptance", ())) > 1]
    positions = {name: list(enumerate(values)) for name, values in position_lines(drawn).items()}
    curves = {case["drafter"]: case["curve"] for case in results if case["group"] == "main" and case["curve"]}
    figures: dict[str, Any] = {
        "study_positions": ("position", "conditional acceptance", positions),
        "study_curves": ("step", "acceptance length in training", curves),
    }
    for name, field, across in (("depth", "num_draft_layers", "draft layers"), ("block", "block_size", "block size")):
        figures[f"study_{name}"] = (across, "acceptance length", _lines_by(results, name, field))
    written = []
    for name, (across, up, lines) in figures.items():
        if not lines:
            continue
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel=across, ylabel=up)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written


def _of_kind(results: Sequence[dict[str, Any]], kind: str, group: str) -> list[dict[str, Any]]:
    """A drafter of the main group, and its variants in another group."""
    return [case for case in results if case["drafter"] == kind or case["drafter"].startswith(f"{kind}-{group}-")]


def _lines_by(results: Sequence[dict[str, Any]], group: str, field: str) -> dict[str, list[tuple[int, float]]]:
    lines = {}
    for kind in COMPARED:
        points = [(case["settings"]["fields"][field], case["tau"]["all"]) for case in _of_kind(results, kind, group)]
        if len(points) > 1:
            lines[kind] = sorted(points)
    return lines


__all__ = [
    *("COMPARED", "OURS", "acceptance_table", "confidence_tables", "depth_table", "margin", "margin_table"),
    *("plot_study", "study_tables", "tau_table"),
]
