"""Calibration from end to end: record rounds, fit temperatures on one share of the prompts, measure them on the rest."""

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import set_seed
from transformers.utils import logging

from training.confidence.outputs import table, write_outputs, write_temperatures
from training.confidence.pair import (
    PairArguments,
    load_drafter_with_confidence,
    load_fitting_target,
    max_prompt_length,
    plan_prompts,
    recording_settings,
)
from training.confidence.rounds import batch_seed, join, make_engine, record, rounds_of, write_records
from training.confidence.scaling import TEMPERATURE_GRID, CalibrationReport, calibration_report, fit_temperatures


logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class HoldoutArguments(PairArguments):
    """Arguments of the commands that fit on one share of the prompts and measure on the rest."""

    num_prompts: int | None = field(default=None, metadata={"help": "Use only the first N prompts."})
    holdout: float = field(default=0.5, metadata={"help": "Share of the prompts to measure on instead of to fit on."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_prompts is not None and self.num_prompts < 2:
            raise ValueError(f"`num_prompts` must be at least 2 (one to fit, one held out), got {self.num_prompts}.")
        if not 0 < self.holdout < 1:
            raise ValueError(f"`holdout` must lie between 0 and 1, got {self.holdout}.")

    def num_held_out(self, num_prompts: int) -> int:
        """How many of `num_prompts` prompts are held out: at least one, and not all."""
        return min(max(round(self.holdout * num_prompts), 1), num_prompts - 1)


@dataclass(kw_only=True)
class CalibrateArguments(HoldoutArguments):
    """Arguments of `dspark calibrate`."""

    drafter: str = field(metadata={"help": "Local folder of the drafter; its config.json receives the temperatures."})
    output: str = field(metadata={"help": "Folder of the recorded rounds, the report and the figure."})
    seed: int = field(default=0, metadata={"help": "Seed of the split, and of the answers when sampling."})
    dry_run: bool = field(default=False, metadata={"help": "Do everything but write to the drafter's config.json."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("The reliability diagram needs matplotlib: `pip install matplotlib`.")


Records = list[dict[str, Any]]


def calibrate(arguments: CalibrateArguments) -> CalibrationReport:
    """Record, fit, measure and write; returns the figures of the held-out prompts."""
    drafter = load_drafter_with_confidence(arguments, keeps_temperatures=not arguments.dry_run)
    target, tokenizer = load_fitting_target(arguments, drafter)
    prompts = plan_prompts(
        arguments,
        tokenizer,
        max_length=max_prompt_length(arguments, target),
        num_prompts=arguments.num_prompts,
    )
    settings = recording_settings(arguments, drafter, target, tokenizer)
    set_seed(batch_seed(arguments.seed, len(prompts)))
    engine = make_engine(drafter, target, arguments.temperature)
    sizes = {"max_new_tokens": arguments.max_new_tokens, "batch_size": arguments.batch_size}
    finished = record(engine, prompts, device=target.device, **sizes)
    progress = tqdm(finished, total=len(prompts), unit="prompt", desc="rounds")
    by_prompt = {index: {"prompt": index} | rounds_of(statistics) for index, statistics in progress}
    records = [by_prompt[prompt.index] for prompt in prompts]
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    write_records(output / "rounds.jsonl", settings, records)
    report = fit_and_write(arguments, records, settings)
    if not arguments.dry_run:
        write_temperatures(Path(arguments.drafter), report.temperatures)
        tqdm.write(f"`confidence_temperatures` are in `{Path(arguments.drafter) / 'config.json'}`")
    tqdm.write(f"written to {output}")
    return report


def fit_and_write(arguments: CalibrateArguments, records: Records, settings: dict[str, Any]) -> CalibrationReport:
    """Fit on one share of the records, measure on the rest, and write all but the drafter's config."""
    fit, held_out = split_records(records, arguments)
    num_draft_positions = settings["num_draft_positions"]
    fit_rounds, held_out_rounds = join(fit, num_draft_positions), join(held_out, num_draft_positions)
    fitted = calibration_report(held_out_rounds, fit_temperatures(fit_rounds))
    tqdm.write(table(fitted))
    _warn(fitted)
    report = fitted if _helps(fitted) else calibration_report(held_out_rounds, [1.0] * num_draft_positions)
    details = {"settings": settings, "arguments": _published(arguments)} | sample_counts(fit, held_out)
    write_outputs(
        Path(arguments.output),
        report,
        fit=calibration_report(fit_rounds, report.temperatures),
        held_out_rounds=held_out_rounds,
        details=details | {"fitted": {"temperatures": fitted.temperatures, "ece": fitted.after.means()["ece"]}},
        dataset=Path(arguments.prompts).name,
    )
    return report


def split_records(records: Records, arguments: HoldoutArguments) -> tuple[Records, Records]:
    """Records to fit on and records to measure on: split by prompt, since rounds of one answer are alike."""
    with_drafts = [record for record in records if record["accepted"]]
    if len(with_drafts) < 2:
        raise ValueError(
            f"Only {len(with_drafts)} of {len(records)} answers had a round with drafts; pass more prompts or a larger "
            "`max_new_tokens`."
        )
    random.Random(arguments.seed).shuffle(with_drafts)
    num_held_out = arguments.num_held_out(len(with_drafts))
    return with_drafts[num_held_out:], with_drafts[:num_held_out]


def sample_counts(fit: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Prompts and rounds of both shares, and the acceptance length over all rounds that drafted."""
    shares = {"fit": fit, "held_out": held_out}
    num_rounds = {name: sum(len(record["accepted"]) for record in records) for name, records in shares.items()}
    new_tokens = sum(sum(record["new_tokens"]) for records in shares.values() for record in records)
    return {
        "num_prompts": {name: len(records) for name, records in shares.items()},
        "num_rounds": num_rounds,
        "acceptance_length": new_tokens / sum(num_rounds.values()),
    }


def _published(arguments: CalibrateArguments) -> dict[str, Any]:
    """The arguments for the report, which may be published: files and folders by their names alone."""
    names = {name: Path(getattr(arguments, name)).name for name in ("drafter", "prompts", "output")}
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
            f"With {min(report.counts)} to {max(report.counts)} held-out rounds per position, exact confidences would show "
            f"an ECE of up to {max(report.ece_floor):.1%}; record more prompts for a finer figure."
        )


__all__ = ["CalibrateArguments", "HoldoutArguments", "calibrate", "sample_counts", "split_records"]
