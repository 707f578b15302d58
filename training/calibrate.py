"""Calibrate a drafter's confidence by sequential temperature scaling (STS).

    python -m training.calibrate --drafter runs/my-drafter/drafter --prompts held_out.jsonl --output runs/calibration
    python -m training.calibrate --drafter runs/my-drafter/drafter --prompts held_out.jsonl --output runs/calibration \\
        --temperature 0.8 --num_prompts 500 --dry_run

Answers prompts the drafter was not trained on, with every block verified at full length; fits temperatures on one part
of the prompts and measures them on the rest. The drafter's config.json receives `confidence_temperatures`; the output
folder receives `rounds.jsonl` (a run that was stopped goes on from there), `calibration.json` (the form that SGLang
reads), `report.json` and `reliability.png`.
"""

import hashlib
import importlib.util
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from modeling_dspark import DSparkModel, RunStatistics
from modeling_dspark.target_binding import check_target
from training.common.commands import exit_status
from training.common.targets import chat_template_hash, check_device, load_target, load_tokenizer
from training.confidence.outputs import table, write_outputs, write_temperatures
from training.confidence.rounds import Prompt, join, make_engine, record, record_to_file
from training.confidence.scaling import TEMPERATURE_GRID, CalibrationReport, calibration_report, fit_temperatures
from training.data.features import fingerprint
from training.regenerate import from_command_line, prompt_ids, read_jsonl


logger = logging.get_logger(__name__)


@dataclass
class CalibrateArguments:
    """Arguments of `python -m training.calibrate`."""

    drafter: str = field(metadata={"help": "Local folder of the drafter; its config.json receives the temperatures."})
    prompts: str = field(metadata={"help": "JSONL file of prompts (`turns` or `text`) not used in training."})
    output: str = field(metadata={"help": "Folder of the recorded rounds, the report and the figure."})
    target: str | None = field(default=None, metadata={"help": "The target; by default the one the drafter names."})
    num_prompts: int | None = field(default=None, metadata={"help": "Use only the first N prompts."})
    max_new_tokens: int = field(default=192, metadata={"help": "Longest answer, in tokens."})
    max_prompt_tokens: int = field(default=512, metadata={"help": "Longer prompts are skipped and counted."})
    batch_size: int = field(default=16, metadata={"help": "Prompts answered at once."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature of the answers; 0 is greedy."})
    holdout: float = field(default=0.5, metadata={"help": "Share of the prompts to measure on instead of to fit on."})
    seed: int = field(default=0, metadata={"help": "Seed of the split, and of the answers when sampling."})
    dtype: str = field(default="bfloat16", metadata={"help": "Weights of both: bfloat16, float16 or float32."})
    device: str = field(default="cpu", metadata={"help": "Where both run, e.g. `cuda`."})
    dry_run: bool = field(default=False, metadata={"help": "Do all but write to the drafter's config.json."})

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_prompts is not None and self.num_prompts < 2:
            raise ValueError(f"`num_prompts` must be at least 2 (one to fit, one held out), got {self.num_prompts}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be a number >= 0, got {self.temperature}.")
        if not 0 < self.holdout < 1:
            raise ValueError(f"`holdout` must lie between 0 and 1, got {self.holdout}.")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"`dtype` must be bfloat16, float16 or float32, got {self.dtype!r}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("The reliability diagram needs matplotlib: `pip install matplotlib`.")


class AnswerArguments(Protocol):
    """What commands that record answers have in common."""

    prompts: str
    target: str | None
    max_new_tokens: int
    temperature: float
    seed: int
    dtype: str
    device: str


def load_drafter(arguments: CalibrateArguments) -> DSparkModel:
    """The drafter; refuses one that has no confidence head, or whose config would not keep temperatures."""
    check_device(arguments.device)
    path = Path(arguments.drafter) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"`drafter` must be a local folder with a config.json, which receives the temperatures; there is no "
            f"`{path}`. Download a drafter of the Hub first: `hf download ID --local-dir FOLDER`."
        )
    drafter = DSparkModel.from_pretrained(arguments.drafter, dtype=arguments.dtype)
    if drafter.confidence_head is None:
        raise ValueError(
            f"`drafter`: `{arguments.drafter}` has no confidence head (`enable_confidence_head=False`), so there is "
            "nothing to calibrate. Train one with `confidence_head: true`."
        )
    model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    if model_type != drafter.config.model_type and not arguments.dry_run:
        raise ValueError(
            f"`drafter`: `{path}` is of type {model_type!r}, a DeepSpec checkpoint, which is read without temperatures. "
            "Save it with `DSparkModel.from_pretrained(...).save_pretrained(...)` and calibrate that folder, or pass "
            "`--dry_run`."
        )
    return drafter.to(arguments.device).eval()


def load_fitting_target(
    arguments: AnswerArguments, drafter: DSparkModel
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, after a check that the drafter was made for them."""
    name = arguments.target or drafter.config.target_name_or_path
    if name is None:
        raise ValueError("`target` is not given, and the drafter's config does not name one; pass `--target`.")
    target: Any = load_target(name, arguments.dtype)
    check_target(target, drafter.config)
    tokenizer = load_tokenizer(name)
    if drafter.config.chat_template_sha256 not in (None, chat_template_hash(tokenizer)):
        logger.warning(
            f"The chat template of `{name}` is not the one the drafter was trained with, so acceptance may be lower."
        )
    return target.to(arguments.device), tokenizer


def plan_prompts(
    arguments: CalibrateArguments, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> list[Prompt]:
    """Prompts to answer; those too long, or with no room for an answer, are left out and counted."""
    records = read_jsonl(arguments.prompts)
    longest = arguments.max_prompt_tokens
    if max_length is not None:
        longest = min(longest, max_length - arguments.max_new_tokens)
    prompts = [
        Prompt(index, tuple(prompt_ids(tokenizer, line)))
        for index, line in enumerate(records[: arguments.num_prompts])
    ]
    chosen = [prompt for prompt in prompts if len(prompt.input_ids) <= longest]
    if len(chosen) < 2:
        raise ValueError(
            f"`prompts`: `{arguments.prompts}` has {len(records)} prompts, of which {len(chosen)} have at most {longest} "
            "tokens; at least 2 are needed (one to fit, one held out)."
        )
    if len(chosen) < len(prompts):
        logger.warning(f"{len(prompts) - len(chosen)} prompts of more than {longest} tokens are skipped.")
    return chosen


def recording_settings(
    arguments: AnswerArguments, drafter: DSparkModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What recorded rounds depend on; rounds of other settings are never mixed with these."""
    return {
        "drafter": fingerprint(drafter),
        "target": fingerprint(target),
        "dtype": arguments.dtype,
        "prompts_sha256": hashlib.sha256(Path(arguments.prompts).read_bytes()).hexdigest()[:16],
        "chat_template_sha256": chat_template_hash(tokenizer),
        "num_draft_positions": drafter.config.block_size,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed if arguments.temperature > 0 else None,
    }


def split_records(
    records: Sequence[dict[str, Any]], holdout: float, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split by prompt, since rounds of one answer are alike: what to fit on, and what to measure on."""
    useful = [each for each in records if each["accepted"]]
    if len(useful) < 2:
        raise ValueError(
            f"Only {len(useful)} of {len(records)} answers had a round with drafts; pass more prompts or a larger "
            "`max_new_tokens`."
        )
    random.Random(seed).shuffle(useful)
    num_held_out = min(max(round(holdout * len(useful)), 1), len(useful) - 1)
    return useful[num_held_out:], useful[:num_held_out]


def sample_counts(fit: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Prompts and rounds of both parts, and the accepted length over all rounds that drafted."""
    parts = {"fit": fit, "held_out": held_out}
    num_rounds = {name: sum(len(each["accepted"]) for each in part) for name, part in parts.items()}
    new_tokens = sum(sum(each["new_tokens"]) for part in parts.values() for each in part)
    return {
        "num_prompts": {name: len(part) for name, part in parts.items()},
        "num_rounds": num_rounds,
        "acceptance_length": new_tokens / sum(num_rounds.values()),
    }


def calibrate(arguments: CalibrateArguments) -> CalibrationReport:
    """Run the command; returns the figures of the held-out prompts."""
    drafter = load_drafter(arguments)
    target, tokenizer = load_fitting_target(arguments, drafter)
    max_length = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    prompts = plan_prompts(arguments, tokenizer, max_length)
    settings = recording_settings(arguments, drafter, target, tokenizer)

    def recorder(pending: Sequence[Prompt]) -> Iterator[tuple[int, RunStatistics]]:
        # A resumed run draws other answers than it drew before.
        set_seed((arguments.seed * 1_000_003 + len(pending)) % 2**32)
        engine = make_engine(drafter, target, arguments.temperature)
        sizes = {"max_new_tokens": arguments.max_new_tokens, "batch_size": arguments.batch_size}
        return record(engine, pending, device=target.device, **sizes)

    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    records = record_to_file(output / "rounds.jsonl", settings, prompts, recorder)
    fit, held_out = split_records(records, arguments.holdout, arguments.seed)
    num_draft_positions = drafter.config.block_size
    fit_rounds, held_out_rounds = join(fit, num_draft_positions), join(held_out, num_draft_positions)
    fitted = calibration_report(held_out_rounds, fit_temperatures(fit_rounds))
    tqdm.write(table(fitted))
    _warn(fitted)
    report = fitted if _helps(fitted) else calibration_report(held_out_rounds, [1.0] * num_draft_positions)
    details = {"settings": settings, "arguments": _named(arguments)} | sample_counts(fit, held_out)
    write_outputs(
        output,
        report,
        fit=calibration_report(fit_rounds, report.temperatures),
        held_out_rounds=held_out_rounds,
        details=details | {"fitted": {"temperatures": fitted.temperatures, "ece": fitted.after.means()["ece"]}},
        dataset=Path(arguments.prompts).name,
    )
    if not arguments.dry_run:
        write_temperatures(Path(arguments.drafter), report.temperatures)
        tqdm.write(f"`confidence_temperatures` are in `{Path(arguments.drafter) / 'config.json'}`")
    tqdm.write(f"written to {output}")
    return report


def _named(arguments: CalibrateArguments) -> dict[str, Any]:
    """The arguments for the report, which may be published: files and folders by their names alone."""
    names = {
        name: Path(value).name for name in ("drafter", "prompts", "output") if (value := getattr(arguments, name))
    }
    return asdict(arguments) | names


def _helps(report: CalibrationReport) -> bool:
    """Whether held-out survival is closer to the truth with the temperatures than without."""
    before, after = report.before.means()["ece"], report.after.means()["ece"]
    if after >= before:
        logger.warning(
            f"On the held-out prompts the mean ECE is {before:.2%} without and {after:.2%} with the temperatures, so all are "
            "set to 1, which changes nothing. If the floor is near these figures, record more prompts."
        )
    return after < before


def _warn(report: CalibrationReport) -> None:
    ends = TEMPERATURE_GRID[0], TEMPERATURE_GRID[-1]
    positions = [position for position, value in enumerate(report.temperatures) if value in ends]
    if positions:
        logger.warning(
            f"The temperatures of positions {positions} are at an end of the grid {ends}: there the head's logits say little. "
            "Record more prompts, or train the head longer."
        )
    if max(report.ece_floor) > 0.01:
        logger.warning(
            f"With {min(report.counts)} to {max(report.counts)} held-out rounds a position, exact confidences would show an "
            f"ECE of up to {max(report.ece_floor):.1%}; record more prompts for a finer figure."
        )


if __name__ == "__main__":
    sys.exit(
        exit_status(
            lambda: calibrate(from_command_line(CalibrateArguments, "calibrate", __doc__)),
            when_interrupted="what is recorded is kept, and the same command goes on from it.",
        )
    )
