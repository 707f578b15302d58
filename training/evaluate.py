"""Measure a drafter on sets of prompts: acceptance, calibration, confidence thresholds, and speed.

    python -m training.evaluate --drafter runs/my-drafter/drafter --prompts eval.jsonl
    python -m training.evaluate --drafter runs/my-drafter/drafter --prompts eval.jsonl --output runs/evaluation \\
        --limit 20 --temperature 0.8 --no_speed

The prompts are answered in batches with every block verified at full length, whatever the drafter's schedule; then, one
at a time, by plain `generate` and by `generate` with the drafter, in turns. The output folder receives `report.json`,
`report.md` and the plots. A run that was stopped goes on from `rounds.jsonl` and `speed.jsonl` when it is started again
with the same arguments.
"""

import importlib.util
import math
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from modeling_dspark import DSparkModel
from training.calibrate import load_fitting_target, recording_settings
from training.common.commands import exit_status
from training.common.environment import environment
from training.common.targets import check_device
from training.confidence.rounds import join
from training.evaluation.outputs import markdown, write_report
from training.evaluation.report import POOLED, EvalReport, SetReport, set_report
from training.evaluation.runs import (
    PromptSet,
    answer_with,
    plan_batches,
    plan_sets,
    read_sets,
    record_rounds,
    record_speed,
)
from training.regenerate import from_command_line


Records = dict[int, dict[str, Any]]


@dataclass
class EvaluateArguments:
    """Arguments of `python -m training.evaluate`."""

    drafter: str = field(metadata={"help": "Local folder of the drafter; nothing in it is changed."})
    prompts: str = field(metadata={"help": "JSONL file of prompts (`turns` or `text`) not used in training."})
    output: str = field(default="runs/evaluation", metadata={"help": "Folder of the report, plots and records."})
    target: str | None = field(default=None, metadata={"help": "The target; by default the one the drafter names."})
    group_by: str | None = field(
        default=None, metadata={"help": "Field of a prompt that names its set; by default `source`, else `category`."}
    )
    limit: int | None = field(default=None, metadata={"help": "Use only the first N prompts of each set."})
    max_new_tokens: int = field(default=192, metadata={"help": "Longest answer, in tokens."})
    max_prompt_tokens: int = field(default=512, metadata={"help": "Longer prompts are skipped and counted."})
    batch_size: int = field(
        default=16, metadata={"help": "Prompts of a set answered at once where rounds are recorded (not where timed)."}
    )
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature of the answers; 0 is greedy."})
    thresholds: list[float] = field(
        default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95],
        metadata={"help": "Confidence thresholds of the sweep, in [0, 1]; they cost no decoding."},
    )
    no_speed: bool = field(default=False, metadata={"help": "Time nothing; speed takes most of a run."})
    speed_limit: int | None = field(default=None, metadata={"help": "Time only the first N prompts of each set."})
    seed: int = field(default=0, metadata={"help": "Seed of the answers when sampling."})
    dtype: str = field(default="bfloat16", metadata={"help": "Weights of both: bfloat16, float16 or float32."})
    device: str = field(default="cpu", metadata={"help": "Where both run, e.g. `cuda`."})

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "limit", "speed_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be a number >= 0, got {self.temperature}.")
        if not self.thresholds or not all(0 <= threshold <= 1 for threshold in self.thresholds):
            raise ValueError(f"`thresholds` must be one or more numbers in [0, 1], got {self.thresholds}.")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"`dtype` must be bfloat16, float16 or float32, got {self.dtype!r}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("The plots need matplotlib: `pip install matplotlib`.")


def load_drafter(arguments: EvaluateArguments) -> DSparkModel:
    """The drafter of a local folder.

    Raises:
        ValueError: if there is none.
    """
    check_device(arguments.device)
    if not (Path(arguments.drafter) / "config.json").is_file():
        raise ValueError(
            f"`drafter` must be a local folder with a drafter; there is no `{arguments.drafter}/config.json`. Download a "
            "drafter of the Hub first: `hf download ID --local-dir FOLDER`."
        )
    return DSparkModel.from_pretrained(arguments.drafter, dtype=arguments.dtype).to(arguments.device).eval()


def longest_prompt(arguments: EvaluateArguments, target: PreTrainedModel) -> int:
    """Most tokens of a prompt: what was asked for, and what leaves room for an answer."""
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    longest = arguments.max_prompt_tokens
    return longest if positions is None else min(longest, positions - arguments.max_new_tokens)


@dataclass(frozen=True)
class Evaluation:
    """A drafter, its target and the prompts, ready to be run.

    Attributes:
        arguments (`EvaluateArguments`): Arguments of the command.
        drafter ([`DSparkModel`]), target ([`~transformers.PreTrainedModel`]): The pair.
        sets (`dict[str, PromptSet]`): Prompts by set.
        settings (`dict`): What recorded rounds depend on.
    """

    arguments: EvaluateArguments
    drafter: DSparkModel
    target: PreTrainedModel
    sets: dict[str, PromptSet]
    settings: dict[str, Any]

    @property
    def has_confidence(self) -> bool:
        return self.drafter.confidence_head is not None

    def rounds(self, path: Path) -> Records:
        """Record what is not in the file yet; rounds by prompt."""
        arguments = self.arguments
        answer = answer_with(
            self.drafter,
            self.target,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        batches = plan_batches(self.sets, arguments.batch_size)
        return record_rounds(path, self.settings, batches, answer=answer, with_confidence=self.has_confidence)

    def speeds(self, path: Path, conditions: dict[str, Any]) -> Records:
        """Time what is not in the file yet; timings by prompt."""
        temperature = self.arguments.temperature
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        limit = self.arguments.speed_limit
        return record_speed(
            path,
            self.settings | conditions,
            [prompt for part in self.sets.values() for prompt in part.prompts[:limit]],
            drafter=self.drafter,
            target=self.target,
            max_new_tokens=self.arguments.max_new_tokens,
            sampling=sampling,
        )

    def figures(self, records: Records, speeds: Records) -> dict[str, SetReport]:
        """Figures of each set, and of all under `POOLED`."""
        parts = self.sets | {
            POOLED: PromptSet(
                tuple(prompt for part in self.sets.values() for prompt in part.prompts),
                sum(part.skipped for part in self.sets.values()),
            )
        }
        return {
            name: set_report(
                [records[prompt.index] for prompt in part.prompts],
                num_draft_positions=self.drafter.config.block_size,
                temperatures=self.drafter.config.confidence_temperatures,
                thresholds=sorted(set(self.arguments.thresholds)) if self.has_confidence else None,
                speeds=[speeds[prompt.index] for prompt in part.prompts if prompt.index in speeds],
                skipped=part.skipped,
            )
            for name, part in parts.items()
        }


def prepare(arguments: EvaluateArguments) -> Evaluation:
    """Read the prompts and load both models; finds arguments that do not fit.

    Raises:
        ValueError: names the argument, and says what to do.
    """
    group_by, lines, records = read_sets(arguments.prompts, group_by=arguments.group_by, limit=arguments.limit)
    drafter = load_drafter(arguments)
    target, tokenizer = load_fitting_target(arguments, drafter)
    defaults: Any = target.generation_config
    if defaults.pad_token_id is None:  # or `generate` says so at every call
        defaults.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    sets = plan_sets(lines, records, tokenizer, longest=longest_prompt(arguments, target))
    settings = recording_settings(arguments, drafter, target, tokenizer)
    settings |= {"batch_size": arguments.batch_size, "group_by": group_by}
    return Evaluation(arguments, drafter, target, sets, settings)


def evaluate(arguments: EvaluateArguments) -> EvalReport:
    """Run the command; returns the report that it wrote."""
    evaluation = prepare(arguments)
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    records = evaluation.rounds(output / "rounds.jsonl")
    facts = environment(arguments.dtype, arguments.device) | {"evaluate": version("evaluate")}
    moment = {name: facts.pop(name) for name in ("date", "load_average_1min")}
    speeds: Records = {}
    conditions = None
    if not arguments.no_speed:
        conditions = speed_conditions(evaluation.drafter, facts)
        speeds = evaluation.speeds(output / "speed.jsonl", conditions)
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


def speed_conditions(drafter: DSparkModel, facts: dict[str, Any]) -> dict[str, Any]:
    """What timings depend on besides the settings of the rounds."""
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
    said = []
    if not evaluation.has_confidence:
        said.append("The drafter has no confidence head, so calibration and thresholds are left out.")
    elif evaluation.drafter.config.confidence_temperatures is None:
        said.append(
            "The drafter's config has no `confidence_temperatures`, so confidence is unscaled and there are no figures "
            "after scaling; `python -m training.calibrate` fits them."
        )
    if unknown := [name for name, part in figures.items() if part.calibration is None and evaluation.has_confidence]:
        said.append(f"No draft was verified in {unknown}, so there is nothing on confidence; allow longer answers.")
    if evaluation.arguments.no_speed:
        said.append("Speed was not measured (`--no_speed`).")
    return said


if __name__ == "__main__":
    sys.exit(
        exit_status(
            lambda: evaluate(from_command_line(EvaluateArguments, "evaluate", __doc__)),
            when_interrupted="what is recorded is kept, and the same command goes on from it.",
        )
    )
