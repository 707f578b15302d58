"""A card's metadata in the Hub's own forms: the YAML header with its `model-index`, and `.eval_results/*.yaml`."""

import math
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from hub_upload.card.inputs import CardInputs
from hub_upload.card.quotes import Source, slug
from hub_upload.card.tables import TABLES


CARD = "README.md"
TAGS = ["dspark", "speculative-decoding", "custom_generate"]
METRIC = "acceptance_length"
_METRICS = (METRIC, "accepted_length")  # the second in cards of 0.1
_PHRASES = ("acceptance length", "accepted length")


def metadata(inputs: CardInputs) -> ModelCardData:
    """The YAML header."""
    facts = inputs.facts
    results = [result for evaluation in inputs.evaluations for result in _model_index(evaluation, facts.benchmark)]
    return ModelCardData(
        language=list(facts.language) or None,
        license=facts.license,
        license_link=facts.license_link or None,
        library_name="transformers",
        base_model=facts.base_model,
        base_model_relation="adapter",  # the nearest to a drafter among the Hub's words
        pipeline_tag="text-generation",
        tags=list(TAGS),
        datasets=list(facts.datasets) or None,
        model_name=facts.repo_id.split("/")[1] if results else None,
        eval_results=results or None,
    )


def eval_results(inputs: CardInputs) -> dict[str, str]:
    """`.eval_results` by path, one file per evaluation; none without a benchmark to report them to.

    The Hub shows an entry on the leaderboard of its benchmark, beside the results of other models. An acceptance length
    does not belong on that of GSM8K, say, which ranks correct answers; so entries name the author's benchmark only.
    """
    if not inputs.facts.benchmark:
        return {}
    return {
        f".eval_results/{METRIC}_{slug(Path(report.name).stem)}.yaml": _entries(report, inputs.facts.benchmark)
        for report in inputs.evaluations
    }


def greedy_lengths(folder: Path) -> dict[str, list[float]]:
    """The acceptance lengths that a card's `model-index` and `.eval_results` state for greedy decoding.

    Args:
        folder (`Path`): A package.

    Returns:
        `dict[str, list[float]]`: the distinct values by set, whose name is a `slug`; several where a card has several
        greedy evaluations.

    Raises:
        ValueError: if the metadata cannot be read, or a value is not an acceptance length.
    """
    try:
        stated = [*_of_model_index(folder / CARD), *_of_eval_results(folder / ".eval_results")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"the metadata of `{CARD}` or `.eval_results` cannot be read: {error!r}") from error
    lengths: dict[str, list[float]] = {}
    for name, value in stated:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
            raise ValueError(f"an acceptance length is a number of at least 1, and `{name}` has {value!r}")
        lengths[slug(name)] = sorted({*lengths.get(slug(name), ()), float(value)})
    return lengths


def _of_model_index(card: Path) -> list[tuple[str, Any]]:
    results = ModelCard.load(card).data.eval_results or []
    return [
        (str(result.dataset_config or result.dataset_name), result.metric_value)
        for result in results
        if result.metric_type in _METRICS and "greedy" in (result.metric_name or "greedy")
    ]


def _of_eval_results(folder: Path) -> list[tuple[str, Any]]:
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))]
    entries = [(entry, entry.get("notes", "")) for file in files for entry in file]
    return [
        (str(entry["dataset"]["task_id"]), entry["value"])
        for entry, notes in entries
        if "greedy" in notes and any(phrase in notes for phrase in _PHRASES)
    ]


def _entries(evaluation: Source, benchmark: str) -> str:
    entries = [
        EvalResultEntry(
            dataset_id=benchmark,
            task_id=slug(name),
            value=value,
            date=evaluation.at("timing.date"),
            notes=f"acceptance length (tau), {_conditions(evaluation)}",
        )
        for name, value in _lengths(evaluation).items()
    ]
    return yaml_dump(eval_result_entries_to_yaml(entries))


def _model_index(evaluation: Source, benchmark: str) -> list[EvalResult]:
    prompts = evaluation.quote("settings.prompts")
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=benchmark or Path(prompts).stem,
            dataset_name=f"{name} ({prompts})",
            dataset_config=slug(name),
            metric_type=METRIC,
            metric_name=f"Acceptance length (tau), {_conditions(evaluation)}",
            metric_value=value,
        )
        for name, value in _lengths(evaluation).items()
    ]


def _lengths(evaluation: Source) -> dict[str, float]:
    sets: dict[str, Any] = evaluation.at("sets")
    return {name: float(f"{part['acceptance'][METRIC]:.4f}") for name, part in sets.items()}


def _conditions(evaluation: Source) -> str:
    decoding = evaluation.quote("settings.temperature", TABLES["decoding"])
    return f"{decoding}, {evaluation.quote('settings.dtype')}, whole blocks verified"


__all__ = ["CARD", "METRIC", "TAGS", "eval_results", "greedy_lengths", "metadata"]
