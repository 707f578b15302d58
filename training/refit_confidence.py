"""Fit a drafter's confidence head anew, on rounds of prompts that the drafter was not trained on.

    python -m training.refit_confidence --drafter runs/my-drafter/drafter --prompts held_out.jsonl \\
        --output runs/my-drafter/refitted

A head that was trained along with its backbone has seen answers that the backbone knows better than new ones, and so
promises too much. The head is linear, so given verified rounds the rest is a logistic regression: `[h_k; W1[prev]]`
against whether position `k` was accepted, over the positions whose predecessors were. How far it may go from the trained head is
found by cross-validation. Only `confidence_head` changes. Calibrate afterwards, on other prompts (`training.calibrate`).

What was recorded stays next to the output, in `OUTPUT-rounds.jsonl` (`training.confidence.inputs`): the same command goes on
from it, also with more prompts at the end of the file or another `--weight_decay`.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm

from training.calibrate import (
    CalibrateArguments,
    load_drafter,
    load_fitting_target,
    plan_prompts,
    recording_settings,
)
from training.common.commands import exit_status
from training.confidence.inputs import record_positions
from training.regenerate import from_command_line, write_atomically


_WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # the first lets all weights go, the last little but the offset
_FOLDS = 4


@dataclass
class RefitArguments(CalibrateArguments):
    """Arguments of `python -m training.refit_confidence`; those of calibration, where they apply."""

    drafter: str = field(metadata={"help": "Local folder of the drafter; nothing in it is changed."})
    output: str = field(metadata={"help": "New folder for the drafter with the refitted head (config, weights, log)."})
    holdout: float = field(
        default=0.5, metadata={"help": "Share of the positions to measure on instead of to fit on."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the answers when sampling."})
    dry_run: bool = field(default=False, metadata={"help": "Record, fit and measure, and write no drafter."})
    weight_decay: float | None = field(
        default=None,
        metadata={"help": "L2 penalty on the change of the head's weights; by default found by cross-validation."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace a drafter that is in `output` already."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output:
            raise ValueError("`output` must name a folder for the refitted drafter.")
        if Path(self.output).resolve() == Path(self.drafter).resolve():
            raise ValueError(f"`output` (`{self.output}`) is the drafter's own folder; choose another one.")
        theirs = [name for name in ("config.json", "model.safetensors") if (Path(self.output) / name).exists()]
        if theirs and not self.overwrite:
            raise ValueError(
                f"`output` (`{self.output}`) holds a drafter already, {theirs}; pass `--overwrite`, or another folder."
            )
        if Path(self.drafter).is_dir() and not (Path(self.drafter) / "model.safetensors").is_file():
            raise ValueError(
                f"`drafter` (`{self.drafter}`) has no model.safetensors, in which the new head would be put."
            )
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ValueError(f"`weight_decay` must be at least 0, got {self.weight_decay}.")


def fit_head(head: nn.Linear, inputs: torch.Tensor, outcomes: torch.Tensor, weight_decay: float) -> nn.Linear:
    """Logistic regression from the head's present weights on; returns a new layer in fp32.

    Args:
        head (`nn.Linear`): The layer as trained, `[1, F]`.
        inputs (`torch.Tensor` of shape `(n, F)`): What it saw.
        outcomes (`torch.BoolTensor` of shape `(n,)`): Whether the position was accepted.
        weight_decay (`float`): L2 penalty on the change of standardised weights.
    """
    mean, scale = inputs.mean(dim=0), inputs.std(dim=0, correction=0).clamp(min=1e-6)
    start, bias = head.weight.detach().float().cpu()[0], head.bias.detach().float().cpu()
    change = torch.zeros_like(start, requires_grad=True)  # in units of standardised inputs
    shift = torch.zeros((), requires_grad=True)
    standardised = (inputs - mean) / scale
    before = inputs @ start + bias
    optimizer = torch.optim.LBFGS([change, shift], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = before + standardised @ change + shift
        value = nn.functional.binary_cross_entropy_with_logits(logits, outcomes.float())
        value = value + weight_decay * change.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    fitted = nn.Linear(head.in_features, 1)
    with torch.no_grad():
        fitted.weight.copy_((start + change / scale)[None])
        fitted.bias.copy_(bias + shift - (change / scale) @ mean)
    return fitted


def choose_weight_decay(head: nn.Linear, inputs: torch.Tensor, outcomes: torch.Tensor) -> float:
    """The penalty whose heads have the least loss on the parts that they were not fitted on, in cross-validation.

    Args:
        head (`nn.Linear`): As for `fit_head`.
        inputs (`torch.Tensor` of shape `(n, F)`): As for `fit_head`, at least two, in the order of the answers: parts are
            cut from one piece, since positions of one answer are alike.
        outcomes (`torch.BoolTensor` of shape `(n,)`): As for `fit_head`.
    """
    parts = torch.arange(len(inputs)).chunk(_FOLDS)

    def loss(weight_decay: float) -> float:
        total = 0.0
        for part in parts:
            others = torch.ones(len(inputs), dtype=torch.bool).index_fill(0, part, False)
            fitted = fit_head(head, inputs[others], outcomes[others], weight_decay)
            total += len(part) * _loss(fitted, inputs[part], outcomes[part])
        return total

    return min(tqdm(_WEIGHT_DECAYS, desc="weight decay", leave=False), key=loss)


def rounds_file(output: str) -> Path:
    """Where rounds are recorded: next to the output, which may be published."""
    folder = Path(output).resolve()
    return folder.with_name(f"{folder.name}-rounds.jsonl")


def refit(arguments: RefitArguments) -> dict[str, float]:
    """Run the command; returns the loss of the head before and after, in nats a position, on a held-out part."""
    drafter = load_drafter(arguments)
    target, tokenizer = load_fitting_target(arguments, drafter)
    longest = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    kept = rounds_file(arguments.output)
    kept.parent.mkdir(parents=True, exist_ok=True)
    inputs, outcomes = record_positions(
        kept,
        recording_settings(arguments, drafter, target, tokenizer),
        plan_prompts(arguments, tokenizer, longest),
        drafter=drafter,
        target=target,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
    )
    num_fit = round(len(inputs) * (1 - arguments.holdout))
    if not 1 < num_fit < len(inputs):
        raise ValueError(
            f"Only {len(inputs)} positions were verified, too few to fit on; put more prompts at the end of `prompts`. What was "
            f"recorded is kept in `{kept}`."
        )
    head: nn.Linear = drafter.confidence_head.proj  # type: ignore[union-attr]  # checked when it was loaded
    weight_decay = arguments.weight_decay
    if weight_decay is None:
        weight_decay = choose_weight_decay(head, inputs[:num_fit], outcomes[:num_fit])
    fitted = fit_head(head, inputs[:num_fit], outcomes[:num_fit], weight_decay)
    report = {
        "weight_decay": weight_decay,
        "num_positions_fit": num_fit,
        "num_positions_held_out": len(inputs) - num_fit,
        "loss_before": _loss(head, inputs[num_fit:], outcomes[num_fit:]),
        "loss_after": _loss(fitted, inputs[num_fit:], outcomes[num_fit:]),
    }
    tqdm.write(json.dumps(report))
    if not report["loss_after"] < report["loss_before"]:  # or not a number
        raise ValueError(
            f"The refitted head is no better on the held-out positions ({report}); no drafter is written. Put more prompts at the "
            f"end of `prompts` and repeat the command: what was recorded is kept in `{kept}`."
        )
    if not arguments.dry_run:
        _save(arguments, fitted, report)
        tqdm.write(f"written to {arguments.output}")
    return report


@torch.no_grad()
def _loss(head: nn.Linear, inputs: torch.Tensor, outcomes: torch.Tensor) -> float:
    logits = nn.functional.linear(inputs, head.weight.float().cpu(), head.bias.float().cpu()).squeeze(-1)
    return float(nn.functional.binary_cross_entropy_with_logits(logits, outcomes.float()))


def _save(arguments: RefitArguments, fitted: nn.Linear, report: dict[str, float]) -> None:
    """The drafter's folder again, with the new head, without temperatures (they belonged to the old one)."""
    source, output = Path(arguments.drafter), Path(arguments.output)
    weights = load_file(source / "model.safetensors")
    for name, parameter in fitted.named_parameters():
        key = f"confidence_head.proj.{name}"
        weights[key] = parameter.detach().to(weights[key].dtype)
    output.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name not in ("model.safetensors", "config.json"):
            shutil.copyfile(path, output / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("confidence_temperatures", None)
    # The config first: an old head without temperatures does no harm, a new one with old temperatures would.
    write_atomically(output / "config.json", json.dumps(config, indent=2) + "\n")
    partial = output / ".model.safetensors.partial"
    try:
        save_file(weights, partial, metadata={"format": "pt"})
        partial.replace(output / "model.safetensors")
    finally:
        partial.unlink(missing_ok=True)
    write_atomically(output / "refit_confidence.json", json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(
        exit_status(
            lambda: refit(from_command_line(RefitArguments, "refit_confidence", __doc__)),
            when_interrupted="what is recorded is kept, and the same command goes on from it.",
        )
    )
