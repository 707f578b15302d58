"""What a card claims about greedy decoding, read from its table, its `model-index` and `.eval_results`, or from a report.

A card says the same number in several places; where they differ, one of them is wrong, whatever is measured. The pooled row
of the table has to be what its other rows add up to.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from hub_upload.card.quotes import slug
from training.evaluation.report import POOLED, EvalReport, SetReport


ROUNDING = 0.005  # half of the last digit that the table shows
_GREEDY = re.compile(r"^#+ Greedy\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
_LINES = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
_CELL_END = re.compile(r"(?<!\\)\|")
_COLUMNS = ("set", "prompts", "rounds", "accepted length", "acceptance by position")


@dataclass(frozen=True)
class Claim:
    """Figures of a set: prompts and rounds behind them, accepted length, conditional acceptance by position."""

    prompts: int
    rounds: int
    acceptance_length: float
    acceptance: tuple[float | None, ...]


@dataclass(frozen=True)
class Claims:
    """Claims by set and over all sets, and how far rounding may have moved them."""

    sets: dict[str, Claim]
    pooled: Claim
    rounding: float

    def lengths(self, groups: set[str]) -> dict[str, float]:
        """The accepted length claimed for each of some of the sets."""
        return {name: self.sets[name].acceptance_length for name in groups}

    def prompts(self, groups: set[str]) -> int:
        """Prompts behind these claims."""
        return sum(self.sets[name].prompts for name in groups)


def claims_of_card(folder: Path) -> Claims | None:
    """What the table under `Greedy` says; `None` if the card has none.

    Raises:
        ValueError: if there is one that cannot be read.
    """
    section = _GREEDY.search((folder / "README.md").read_text(encoding="utf-8"))
    rows = {} if section is None else _table(section[1])
    if not rows:
        return None
    claims = {name: _claim(name, row) for name, row in rows.items()}
    pooled = claims.pop(POOLED, None)
    if pooled is None:
        if len(claims) != 1:
            raise ValueError(f"`README.md`: the table under `Greedy` has no row `{POOLED}`.")
        pooled = next(iter(claims.values()))
    return Claims(claims, pooled, ROUNDING)


def claims_of_report(report: EvalReport) -> Claims:
    """What a report of `training.evaluate` says."""
    return Claims({name: _of_set(part) for name, part in report.sets.items()}, _of_set(report.pooled), 0.0)


def contradictions(folder: Path, card: Claims, report: Claims | None) -> list[str]:
    """Where the card contradicts itself, or the report that it is made of; one line each."""
    return [*_sums(card), *_metadata(folder, card), *(_differences(card, report) if report else ())]


def _of_set(part: SetReport) -> Claim:
    figures = part.acceptance
    acceptance = tuple(figures["acceptance_rate_by_position"])
    return Claim(part.prompts, figures["rounds"], figures["acceptance_length"], acceptance)


def _table(text: str) -> dict[str, dict[str, str]]:
    """Rows of the table with the columns of claims, by their first cell."""
    tables = [
        [
            [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(line.strip()[1:-1])]
            for line in lines.splitlines()
        ]
        for lines in _LINES.findall(text)
    ]
    tables = [rows for rows in tables if set(_COLUMNS) <= set(rows[0])]
    if not tables:
        return {}
    if len(tables) > 1:
        raise ValueError(f"`README.md` has {len(tables)} tables of accepted lengths under `Greedy`.")
    rows = tables[0]
    names = [row[0] for row in rows[2:]]
    if wrong := sorted({row[0] for row in rows[2:] if len(row) != len(rows[0]) or names.count(row[0]) > 1}):
        raise ValueError(
            f"`README.md`: rows {wrong} of the table under `Greedy` are there twice, or of other columns."
        )
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def _claim(name: str, row: dict[str, str]) -> Claim:
    try:
        counts = [int(row[column].replace(",", "")) for column in ("prompts", "rounds")]
        acceptance = tuple(None if cell == "-" else float(cell) for cell in row["acceptance by position"].split())
        length = float(row["accepted length"])
        if not 1 <= length < math.inf:
            raise ValueError(f"an accepted length is at least 1, got {length}")
        if min(counts) < 1 or not all(share is None or 0 <= share <= 1 for share in acceptance):
            raise ValueError(f"counts are at least 1 and acceptance lies in [0, 1], got {counts} and {acceptance}")
        return Claim(counts[0], counts[1], length, acceptance)
    except ValueError as error:
        raise ValueError(
            f"`README.md`: the row `{name}` of the table under `Greedy` cannot be read: {error}."
        ) from error


def _sums(card: Claims) -> Iterator[str]:
    if len(card.sets) < 2:
        return
    for name in ("prompts", "rounds"):
        total = sum(getattr(claim, name) for claim in card.sets.values())
        if total != getattr(card.pooled, name):
            yield f"{name} of the sets add up to {total}, not to {getattr(card.pooled, name)}"
    tokens = sum(claim.rounds * claim.acceptance_length for claim in card.sets.values())
    mean = tokens / sum(claim.rounds for claim in card.sets.values())
    if abs(mean - card.pooled.acceptance_length) > 2 * ROUNDING:
        yield f"accepted lengths of the sets pool to {mean:.2f}, not to {card.pooled.acceptance_length}"


def _metadata(folder: Path, card: Claims) -> Iterator[str]:
    known = {slug(name): claim.acceptance_length for name, claim in card.sets.items()}
    results = ModelCard.load(folder / "README.md").data.eval_results or []
    values = [
        ("model-index", result.dataset_config or result.dataset_name, result.metric_value)
        for result in results
        if result.metric_type == "acceptance_length" and "greedy" in (result.metric_name or "greedy")
    ]
    for path in sorted((folder / ".eval_results").glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            if "accepted length" in (notes := entry.get("notes", "")) and "greedy" in notes:
                values.append((path.name, entry["dataset"]["task_id"], entry["value"]))
    for source, name, value in values:
        stated = known.get(slug(str(name)))
        if stated is None:
            yield f"{source} has a set `{name}` that the table has not"
        elif not isinstance(value, int | float) or not abs(value - stated) <= ROUNDING + 1e-9:
            yield f"{source} says {value} for `{name}`, the table {stated}"


def _differences(card: Claims, report: Claims) -> Iterator[str]:
    if set(card.sets) != set(report.sets):
        yield f"the report has the sets {sorted(report.sets)}, the card {sorted(card.sets)}"
        return
    for name in (*card.sets, POOLED):
        said, true = (each.pooled if name == POOLED else each.sets[name] for each in (card, report))
        if (said.prompts, said.rounds) != (true.prompts, true.rounds):
            yield f"`{name}` has {said.prompts} prompts and {said.rounds} rounds, {true.prompts} and {true.rounds} in the report"
        shares = [
            (said.acceptance_length, true.acceptance_length),
            *zip(said.acceptance, true.acceptance, strict=False),
        ]
        for stated, measured in shares:
            if stated != measured and (stated is None or measured is None or abs(stated - measured) > ROUNDING + 1e-9):
                yield f"`{name}` says {stated}, the report {measured if measured is None else round(measured, 3)}"


__all__ = ["ROUNDING", "Claim", "Claims", "claims_of_card", "claims_of_report", "contradictions"]
