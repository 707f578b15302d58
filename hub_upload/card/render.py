"""A model card, with its plots and `.eval_results`, out of reports and facts. Measures nothing, and adds no number."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard
from jinja2.sandbox import SandboxedEnvironment

from hub_upload.card.facts import FACTS_FILE, stated
from hub_upload.card.inputs import CardInputs, read_inputs
from hub_upload.card.header import eval_results, metadata
from hub_upload.card.quotes import BLANK, check_quoted, slug
from hub_upload.card.tables import TABLES
from training.common.files import write_atomically
from training.evaluation.outputs import plot_acceptance
from training.evaluation.report import EvalReport


CARD = "README.md"
MARK = "<!-- Made by `python -m hub_upload card`"
_FILTERS = ("capitalize", "trim", "wordwrap")  # which make no other number of one
_QUOTING = tuple(
    getattr(jinja2.nodes, name) for name in ("Output", "TemplateData", "Call", "Getattr", "Name", "Const", "Filter")
)
_TEMPLATE = Path(__file__).parents[1] / "templates" / "model_card.md"


def card_files(drafter: Path, *, facts: Path | None = None, reports: Sequence[Path] | None = None) -> dict[str, bytes]:
    """The files of a card: `README.md`, a plot for each evaluation, `.eval_results/*.yaml`.

    Args:
        drafter (`Path`): Folder of the drafter.
        facts (`Path`, *optional*): The facts file; by default `facts.yaml` of the folder.
        reports (`Sequence[Path]`, *optional*): Reports; by default those that the facts file lists.

    Returns:
        `dict[str, bytes]`: Contents by path, the same for the same inputs.

    Raises:
        ValueError: if an input is missing, broken, or of another drafter, or a number is in no source.
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
    """Write a card, and beside it its plots and `.eval_results`.

    Args:
        drafter (`Path`): Folder of the drafter.
        output (`Path`, *optional*): File of the card; by default `README.md` of the folder.
        facts (`Path`, *optional*): The facts file; by default `facts.yaml` of the folder.
        reports (`Sequence[Path]`, *optional*): Reports; by default those that the facts file lists.
        overwrite (`bool`, *optional*, defaults to `False`): Replace a card that was not made by this function.

    Raises:
        ValueError: as `card_files` does, or if a card that someone wrote would be lost.
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
    """Refuse a folder whose card is not what its facts and reports make.

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
        ValueError: if a number in it is in no source.
    """
    check_quoted(_body(inputs, plots, blank=True))
    body = _body(inputs, plots, blank=False)
    template = "---\n{{ card_data }}\n---\n\n{{ body }}"
    return str(ModelCard.from_template(metadata(inputs), template_str=template, body=body)).rstrip("\n") + "\n"


def plot_names(inputs: CardInputs) -> list[str]:
    """Where the plots are, one for each evaluation."""
    several = len(inputs.evaluations) > 1
    return [
        f"images/acceptance_{slug(Path(each.name).stem)}.png" if several else "images/acceptance.png"
        for each in inputs.evaluations
    ]


def _body(inputs: CardInputs, plots: Sequence[str], *, blank: bool) -> str:
    def shown(source: Any) -> Any:
        return source.blanked() if blank and source is not None else source

    facts: dict[str, Any] = inputs.facts.blanked() if blank else vars(inputs.facts)
    values: dict[str, Any] = {
        "config": shown(inputs.config),
        "weights": shown(inputs.weights),
        "calibration": shown(inputs.calibration),
        "evaluations": [shown(source) for source in inputs.evaluations],
        "latencies": [shown(source) for source in inputs.latencies],
        "tables": TABLES,
    }
    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters = {name: environment.filters[name] for name in _FILTERS}

    def fill(name: str, text: str, *, only_quotes: bool = True, **more: Any) -> str:
        try:
            if only_quotes:
                _check_prose(environment.parse(text))
            return environment.from_string(text).render(**values, **more).strip()
        except (jinja2.TemplateError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"`{name}` of the card cannot be filled in: {error}.") from error

    prose = {name: fill(name, facts[name]) for name in ("summary", "thinking")}
    prose["training"] = fill("training", facts["training"], stated=shown(stated(inputs.facts)))
    limits = [fill("limits", limit) for limit in facts["limits"]]
    plots = [BLANK for _ in plots] if blank else plots
    template = _TEMPLATE.read_text(encoding="utf-8")
    return fill("template", template, only_quotes=False, facts=facts, plots=plots, limits=limits, **prose)


def _check_prose(tree: jinja2.nodes.Template) -> None:
    """Refuse all but quotations: what branches could say another thing when sources are blank, and what counts is endless."""
    for node in tree.find_all(jinja2.nodes.Node):
        if not isinstance(node, _QUOTING):
            raise jinja2.TemplateError(
                f"it may have `{{{{ SOURCE.quote(...) }}}}` in it, and nothing else of Jinja (`{type(node).__name__}`)"
            )


def _plot(report: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.png"
        plot_acceptance(path, EvalReport.from_json(json.dumps(report)))
        return path.read_bytes()


__all__ = ["CARD", "card_files", "check_card", "plot_names", "render", "write_card"]
