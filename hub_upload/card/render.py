"""Render a model card, its plots and its `.eval_results` from reports and facts. Nothing is measured here."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard

from hub_upload.card.facts import FACTS_FILE, stated
from hub_upload.card.header import CARD, eval_results, metadata
from hub_upload.card.inputs import CardInputs, read_inputs
from hub_upload.card.quotes import check_numbers, check_prose, slug
from hub_upload.card.tables import TABLES
from training.common.files import write_atomically
from training.evaluation.outputs import plot_acceptance
from training.evaluation.report import EvalReport


MARK = "<!-- Made by `python -m hub_upload card`"
_TEMPLATE = Path(__file__).parents[1] / "templates" / "model_card.md"


def card_files(drafter: Path, *, facts: Path | None = None, reports: Sequence[Path] | None = None) -> dict[str, bytes]:
    """The files of a card: `README.md`, a plot per evaluation, `.eval_results/*.yaml`.

    Args:
        drafter (`Path`): Folder of the drafter.
        facts (`Path`, *optional*): The facts file; by default `facts.yaml` of the folder.
        reports (`Sequence[Path]`, *optional*): Reports; by default those that the facts file lists.

    Returns:
        `dict[str, bytes]`: Contents by path, the same for the same inputs.

    Raises:
        ValueError: if an input is missing, broken or of another drafter, or if a number comes from no source.
    """
    inputs = read_inputs(drafter, facts=facts, reports=reports)
    plots = plot_names(inputs)
    files = {CARD: render(inputs, plots).encode()}
    for name, evaluation in zip(plots, inputs.evaluations, strict=True):
        files[name] = _plot(evaluation.data)
    return files | {name: text.encode() for name, text in eval_results(inputs).items()}


def write_card(
    drafter: Path,
    *,
    output: Path | None = None,
    facts: Path | None = None,
    reports: Sequence[Path] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write a card, its plots and its `.eval_results`.

    Args:
        drafter (`Path`): Folder of the drafter.
        output (`Path`, *optional*): File of the card; by default `README.md` of the folder.
        facts (`Path`, *optional*): The facts file; by default `facts.yaml` of the folder.
        reports (`Sequence[Path]`, *optional*): Reports; by default those that the facts file lists.
        overwrite (`bool`, *optional*, defaults to `False`): Replace a card that was not made by this function.

    Raises:
        ValueError: as `card_files` does, or if a card written by hand would be lost.
    """
    target = output or drafter / CARD
    if target.is_file() and MARK not in target.read_text(encoding="utf-8") and not overwrite:
        raise ValueError(
            f"`{target}` was not made by this command; pass `--overwrite` to replace it, or another `--output`."
        )
    files = card_files(drafter, facts=facts, reports=reports)
    paths = [target if name == CARD else target.parent / name for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return paths


def check_card(drafter: Path, files: dict[str, bytes]) -> None:
    """Refuse a folder whose card differs from what its facts and reports make.

    Raises:
        ValueError: if a file is there and differs.
    """
    for name, content in files.items():
        path = drafter / name
        if path.is_file() and path.read_bytes() != content and path.suffix != ".png":  # matplotlib's versions differ
            raise ValueError(
                f"`{path}` is not what {FACTS_FILE} and the reports make: it was edited, or a report is newer. Run "
                f"`python -m hub_upload card {drafter}`."
            )


def render(inputs: CardInputs, plots: Sequence[str]) -> str:
    """The text of the card, with its metadata.

    Raises:
        ValueError: if a number in it comes from no source.
    """
    text = "---\n{{ card_data }}\n---\n\n{{ body }}"
    card = ModelCard.from_template(metadata(inputs), template_str=text, body=_body(inputs, plots))
    return str(card).rstrip("\n") + "\n"


def plot_names(inputs: CardInputs) -> list[str]:
    """Paths of the plots, one per evaluation."""
    several = len(inputs.evaluations) > 1
    return [
        f"images/acceptance_{slug(Path(each.name).stem)}.png" if several else "images/acceptance.png"
        for each in inputs.evaluations
    ]


def _body(inputs: CardInputs, plots: Sequence[str]) -> str:
    facts = inputs.facts
    sources: dict[str, Any] = {
        "config": inputs.config,
        "weights": inputs.weights,
        "calibration": inputs.calibration,
        "evaluations": inputs.evaluations,
        "latencies": inputs.latencies,
        "tables": TABLES,
    }

    def prose(name: str, text: str, **more: Any) -> str:
        check_prose(name, text)
        return _fill(name, text, **sources, **more)

    texts: dict[str, Any] = {name: prose(name, getattr(facts, name)) for name in ("summary", "thinking")}
    texts["training"] = prose("training", facts.training, stated=stated(facts))
    texts["limits"] = [prose("limits", limit) for limit in facts.limits]
    template = _TEMPLATE.read_text(encoding="utf-8")
    check_numbers("template", template)
    return _fill("template", template, **sources, **texts, facts=facts, plots=plots)


def _fill(name: str, text: str, **values: Any) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(text).render(**values).strip()
    except (jinja2.TemplateError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"`{name}` of the card cannot be filled in: {error}.") from error


def _plot(report: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.png"
        plot_acceptance(path, EvalReport.from_json(json.dumps(report)))
        return path.read_bytes()


__all__ = ["card_files", "check_card", "plot_names", "render", "write_card"]
