"""Evaluation from end to end: record rounds, time both ways of decoding, compute the figures, write the report."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from modeling_dspark import DSparkModel
from training.common.environment import environment
from training.confidence.pair import (
    PairArguments,
    load_drafter,
    load_fitting_target,
    max_prompt_length,
    recording_settings,
)
from training.confidence.rounds import join, write_records
from training.evaluation.outputs import markdown, write_report
from training.evaluation.report import POOLED, EvalReport, SetReport, set_report
from training.evaluation.runs import (
    PromptSet,
    plan_batches,
    plan_sets,
    read_sets,
    record_rounds,
    record_speed,
)


Records = dict[int, dict[str, Any]]


@dataclass(kw_only=True)
class EvaluateArguments(PairArguments):
    """Arguments of `dspark evaluate`."""

    output: str = field(default="runs/evaluation", metadata={"help": "Folder of the report, plots and records."})
    group_by: str | None = field(
        default=None, metadata={"help": "Field of a prompt that names its set; by default `source`, else `category`."}
    )
    limit: int | None = field(default=None, metadata={"help": "Use only the first N prompts of each set."})
    thresholds: list[float] = field(
        default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95],
        metadata={"help": "Confidence thresholds of the sweep, in [0, 1]; they cost no decoding."},
    )
    no_speed: bool = field(default=False, metadata={"help": "Time nothing; speed takes most of a run."})
    speed_limit: int | None = field(default=None, metadata={"help": "Time only the first N prompts of each set."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "speed_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if not self.thresholds or not all(0 <= threshold <= 1 for threshold in self.thresholds):
            raise ValueError(f"`thresholds` must be one or more numbers in [0, 1], got {self.thresholds}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("The plots need matplotlib: `pip install matplotlib`.")


@dataclass(frozen=True)
class Evaluation:
    """A drafter, its target and the prompts, ready to be run.

    Attributes:
        arguments (`EvaluateArguments`): Arguments of the command.
        drafter ([`DSparkModel`]), target ([`~transformers.PreTrainedModel`]): The pair.
        sets (`dict[str, PromptSet]`): Prompts by set.
        settings (`dict`): The settings that recorded rounds depend on.
    """

    arguments: EvaluateArguments
    drafter: DSparkModel
    target: PreTrainedModel
    sets: dict[str, PromptSet]
    settings: dict[str, Any]

    @property
    def has_confidence(self) -> bool:
        return self.drafter.confidence_head is not None

    def rounds(self) -> Records:
        """Record the rounds of every prompt at full length; by prompt."""
        arguments = self.arguments
        return record_rounds(
            plan_batches(self.sets, arguments.batch_size),
            drafter=self.drafter,
            target=self.target,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )

    def speeds(self) -> Records:
        """Time plain and assisted decoding; by prompt."""
        temperature, limit = self.arguments.temperature, self.arguments.speed_limit
        return record_speed(
            [prompt for prompts in self.sets.values() for prompt in prompts.prompts[:limit]],
            drafter=self.drafter,
            target=self.target,
            max_new_tokens=self.arguments.max_new_tokens,
            sampling={"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {},
        )

    def figures(self, records: Records, speeds: Records) -> dict[str, SetReport]:
        """Figures of each set, and of all under `POOLED`."""
        pooled = PromptSet(
            tuple(prompt for prompt_set in self.sets.values() for prompt in prompt_set.prompts),
            sum(prompt_set.skipped for prompt_set in self.sets.values()),
        )
        return {
            name: set_report(
                [records[prompt.index] for prompt in prompt_set.prompts],
                num_draft_positions=self.drafter.config.block_size,
                temperatures=self.drafter.config.confidence_temperatures,
                thresholds=sorted(set(self.arguments.thresholds)) if self.has_confidence else None,
                speeds=[speeds[prompt.index] for prompt in prompt_set.prompts if prompt.index in speeds],
                skipped=prompt_set.skipped,
            )
            for name, prompt_set in (self.sets | {POOLED: pooled}).items()
        }


def prepare(arguments: EvaluateArguments) -> Evaluation:
    """Read the prompts and load both models.

    Raises:
        ValueError: for an argument that does not fit, with the way out.
    """
    group_by, lines, records = read_sets(arguments.prompts, group_by=arguments.group_by, limit=arguments.limit)
    drafter = load_drafter(arguments)
    target, tokenizer = load_fitting_target(arguments, drafter)
    defaults: Any = target.generation_config
    if defaults.pad_token_id is None:  # or `generate` warns at every call
        defaults.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    sets = plan_sets(lines, records, tokenizer, max_length=max_prompt_length(arguments, target))
    settings = recording_settings(arguments, drafter, target, tokenizer)
    settings |= {"batch_size": arguments.batch_size, "group_by": group_by}
    return Evaluation(arguments, drafter, target, sets, settings)


def evaluate(arguments: EvaluateArguments) -> EvalReport:
    """Record, time, compute and write; returns the report."""
    evaluation = prepare(arguments)
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    records = evaluation.rounds()
    write_records(output / "rounds.jsonl", evaluation.settings, by_line(records))
    facts = environment(arguments.dtype, arguments.device)
    moment = {name: facts.pop(name) for name in ("date", "load_average_1min")}
    speeds: Records = {}
    conditions = None
    if not arguments.no_speed:
        conditions = speed_conditions(evaluation.drafter, facts)
        speeds = evaluation.speeds()
        write_records(output / "speed.jsonl", evaluation.settings | conditions, by_line(speeds))
    figures = evaluation.figures(records, speeds)
    pooled = figures.pop(POOLED)
    report = EvalReport(
        **describe(evaluation),
        environment=facts,
        pooled=pooled,
        sets=figures,
        notes=tuple(notes(evaluation, figures)),
        timing=conditions and conditions | moment,
    )
    rounds = join(list(records.values()), evaluation.drafter.config.block_size)
    write_report(output, report, rounds if evaluation.has_confidence else None)
    tqdm.write(markdown(report))
    tqdm.write(f"written to {output}")
    return report


def by_line(records: Records) -> list[dict[str, Any]]:
    """The records in the order of the prompts file."""
    return [records[index] for index in sorted(records)]


def speed_conditions(drafter: DSparkModel, facts: dict[str, Any]) -> dict[str, Any]:
    """The conditions of timings besides the settings of the rounds."""
    config = drafter.config
    return {
        "schedule": config.default_num_assistant_tokens_schedule,
        "num_assistant_tokens": config.default_num_assistant_tokens or config.block_size,
        "confidence_threshold": config.default_assistant_confidence_threshold,
        "confidence_temperatures": config.confidence_temperatures,
        **{name: facts[name] for name in ("device", "threads", "torch", "transformers")},
    }


def describe(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """`drafter`, `target` and `settings` of the report, which may be published: files and folders by their names alone."""
    arguments, config, target = evaluation.arguments, evaluation.drafter.config, evaluation.target
    settings = dict(evaluation.settings)
    target_name = Path(arguments.target or str(config.target_name_or_path))
    drafter = {
        "name": Path(arguments.drafter).resolve().name,
        "fingerprint": settings.pop("drafter"),
        "parameters": evaluation.drafter.num_parameters(),
        "confidence_head": evaluation.has_confidence,
    }
    fields = ("block_size", "num_hidden_layers", "markov_head_type", "markov_rank", "draft_vocab_size")
    drafter |= {name: getattr(config, name) for name in (*fields, "confidence_temperatures")}
    own = ("limit", "speed_limit", "max_prompt_tokens", "thresholds", "device")
    return {
        "drafter": drafter,
        "target": {
            "name": target_name.name if target_name.is_dir() else str(target_name),
            "fingerprint": settings.pop("target"),
            "parameters": target.num_parameters(),
            "model_type": target.config.model_type,
        },
        "settings": {"prompts": Path(arguments.prompts).name}
        | settings
        | {name: getattr(arguments, name) for name in own},
    }


def notes(evaluation: Evaluation, figures: dict[str, SetReport]) -> list[str]:
    """What the report leaves out, and why."""
    lines = []
    if not evaluation.has_confidence:
        lines.append("The drafter has no confidence head, so calibration and thresholds are left out.")
    elif evaluation.drafter.config.confidence_temperatures is None:
        lines.append(
            "The drafter's config has no `confidence_temperatures`, so confidence is unscaled and there are no figures "
            "after scaling; `dspark calibrate` fits them."
        )
    if unknown := [name for name, s in figures.items() if s.calibration is None and evaluation.has_confidence]:
        lines.append(
            f"No draft was verified in {unknown}, so there are no figures of confidence; allow longer answers."
        )
    if evaluation.arguments.no_speed:
        lines.append("Speed was not measured (`--no-speed`).")
    return lines


__all__ = ["EvaluateArguments", "evaluate"]
