"""Metadata of a card in the Hub's own forms: the YAML header with its `model-index`, and `.eval_results/*.yaml`."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from hub_upload.card.inputs import CardInputs
from hub_upload.card.quotes import Source, slug
from hub_upload.card.tables import TABLES


TAGS = ["dspark", "speculative-decoding", "custom_generate"]
METRIC = "acceptance_length"


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
        base_model_relation="adapter",  # of the Hub's words, the nearest to a drafter
        pipeline_tag="text-generation",
        tags=list(TAGS),
        datasets=list(facts.datasets) or None,
        model_name=facts.repo_id.split("/")[1] if results else None,
        eval_results=results or None,
    )


def eval_results(inputs: CardInputs) -> dict[str, str]:
    """`.eval_results` by path, one file for each evaluation; none without a benchmark to report them to.

    The Hub shows an entry on the leaderboard of its benchmark, beside the results of other models. An accepted length does
    not belong on that of, say, GSM8K, which is one of right answers; so entries name the author's benchmark only.
    """
    if not inputs.facts.benchmark:
        return {}
    return {
        f".eval_results/{METRIC}_{slug(Path(each.name).stem)}.yaml": _entries(each, inputs.facts.benchmark)
        for each in inputs.evaluations
    }


def _entries(evaluation: Source, benchmark: str) -> str:
    entries = [
        EvalResultEntry(
            dataset_id=benchmark,
            task_id=slug(name),
            value=value,
            date=evaluation.at("timing.date"),
            notes=f"accepted length (tau), {_conditions(evaluation)}",
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
            metric_name=f"Accepted length (tau), {_conditions(evaluation)}",
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


__all__ = ["METRIC", "TAGS", "eval_results", "metadata"]
