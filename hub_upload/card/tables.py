"""Tables and phrases of a model card, each a function of a report or of a part of one.

A template passes them as the form of a quotation: `evaluation.quote("", tables.acceptance)`.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from training.common.tables import by_position, markdown_table, speed_tables
from training.evaluation.report import POOLED


def acceptance(report: dict[str, Any]) -> str:
    """Acceptance length and acceptance rate by position, by set and pooled."""
    header = ["set", "prompts", "rounds", "acceptance length", "drafts per round", "verify rate"]
    header.append("acceptance rate by position")
    rows = []
    for name, part in _parts(report).items():
        figures = part["acceptance"]
        shares = by_position(figures["acceptance_rate_by_position"], figures["tried_by_position"])
        lengths = [f"{figures['acceptance_length']:.2f}", f"{figures['drafts_per_round']:.2f}"]
        counts = [f"{part['prompts']:,}", f"{figures['rounds']:,}"]
        rows.append([name, *counts, *lengths, _percent(figures["verify_rate"], 1), shares])
    return markdown_table(header, rows)


def speed(report: dict[str, Any]) -> str:
    """Tokens per second with and without the drafter, by set and pooled; only of sets that were timed."""
    header = ["set", "prompts", "plain tok/s", "assisted tok/s", "ratio", "95 % interval"]
    rows = []
    for name, part in _parts(report).items():
        if figures := part["speed"]:
            interval = "-" if figures["interval"] is None else "{:.2f} to {:.2f}".format(*figures["interval"])
            speeds = [f"{figures[method]:.1f}" for method in ("plain", "assisted")]
            rows.append([name, figures["num_prompts"], *speeds, f"{figures['ratio']:.2f}x", interval])
    return markdown_table(header, rows)


def calibration(file: dict[str, Any]) -> str:
    """Temperatures and held-out errors by position, of a calibration file in SGLang's form."""
    columns = zip(file["temperatures"], file["ece_before"], file["ece_after"], strict=True)
    rows = [
        [position, f"{t:.3f}", f"{before:.2%}", f"{after:.2%}"] for position, (t, before, after) in enumerate(columns)
    ]
    means = [f"{sum(file[name]) / len(file[name]):.2%}" for name in ("ece_before", "ece_after")]
    return markdown_table(["position", "temperature", "ECE before", "ECE after"], [*rows, ["mean", "", *means]])


def confidence(figures: dict[str, Any]) -> str:
    """Calibration errors on the prompts of an evaluation, as means over positions, and the ECE of exact predictions."""
    kinds = (("ece", "ECE", ".2%"), ("auc", "AUC", ".3f"), ("brier", "Brier score", ".4f"))
    phrases = []
    for name, title, form in kinds:
        values = [
            means[name] for means in (figures["means"]["before"], figures["means"]["after"]) if means is not None
        ]
        if None not in values:
            phrases.append(f"{title} {' -> '.join(format(value, form) for value in values)}")
    floor = sum(figures["ece_floor"]) / len(figures["ece_floor"])
    return f"{', '.join(phrases)}. With this number of rounds, exact predictions would show an ECE of {floor:.2%}"


def decoding(temperature: float) -> str:
    """How answers were decoded."""
    return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"


def listed(values: Sequence[Any]) -> str:
    """`1, 10 and 19`."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def commit(environment: dict[str, Any]) -> str:
    """The commit that was measured."""
    if environment["git_commit"] is None:
        return "unknown"
    return f"`{environment['git_commit'][:12]}`{' with changes' if environment['git_dirty'] else ''}"


def day(moment: str) -> str:
    """The day of a time in ISO 8601."""
    return moment.split("T", maxsplit=1)[0]


def _parts(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sets = {" ".join(name.replace("|", "\\|").split()): part for name, part in report["sets"].items()}
    return sets if len(sets) == 1 else sets | {POOLED: report["pooled"]}


def _percent(share: float | None, digits: int) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


TABLES = MappingProxyType(
    {
        function.__name__: function
        for function in (acceptance, speed, calibration, confidence, decoding, listed, commit, day, speed_tables)
    }
)

__all__ = ["TABLES"]
