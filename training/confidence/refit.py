"""A linear confidence head fitted anew by logistic regression, and the drafter's folder with it in the old one's place.

Shapes: `n` positions, `F` inputs of the head.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm

from modeling_dspark import DSparkModel
from training.common.files import write_atomically
from training.confidence.calibration import HoldoutArguments
from training.confidence.inputs import Positions, record_positions
from training.confidence.pair import (
    load_drafter_with_confidence,
    load_fitting_target,
    max_prompt_length,
    plan_prompts,
)


_WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # the first frees all weights, the last little but the offset
_FOLDS = 4


@dataclass(kw_only=True)
class RefitArguments(HoldoutArguments):
    """Arguments of `dspark refit-confidence`."""

    output: str = field(metadata={"help": "New folder for the drafter with the refitted head (config, weights, log)."})
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
        present = [name for name in ("config.json", "model.safetensors") if (Path(self.output) / name).exists()]
        if present and not self.overwrite:
            raise ValueError(
                f"`output` (`{self.output}`) holds a drafter already, {present}; pass `--overwrite`, or another folder."
            )
        if Path(self.drafter).is_dir() and not (Path(self.drafter) / "model.safetensors").is_file():
            raise ValueError(
                f"`drafter` (`{self.drafter}`) has no model.safetensors, in which the new head would be put."
            )
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ValueError(f"`weight_decay` must be at least 0, got {self.weight_decay}.")


def fit_head(head: nn.Linear, inputs: torch.Tensor, outcomes: torch.Tensor, weight_decay: float) -> nn.Linear:
    """Logistic regression that starts from the head's weights; returns a new layer in fp32.

    Args:
        head (`nn.Linear`): The layer as trained, `[1, F]`.
        inputs (`torch.Tensor` of shape `(n, F)`): What it saw.
        outcomes (`torch.BoolTensor` of shape `(n,)`): Whether the position was accepted.
        weight_decay (`float`): L2 penalty on the change of standardized weights.
    """
    mean, scale = inputs.mean(dim=0), inputs.std(dim=0, correction=0).clamp(min=1e-6)
    start, bias = head.weight.detach().float().cpu()[0], head.bias.detach().float().cpu()
    change = torch.zeros_like(start, requires_grad=True)  # in units of standardized inputs
    shift = torch.zeros((), requires_grad=True)
    standardized = (inputs - mean) / scale
    before = inputs @ start + bias
    optimizer = torch.optim.LBFGS([change, shift], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = before + standardized @ change + shift
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
    """The penalty with the least loss in cross-validation.

    Args:
        head (`nn.Linear`): As for `fit_head`.
        inputs (`torch.Tensor` of shape `(n, F)`): As for `fit_head`, in the order of the answers: folds are contiguous,
            since positions of one answer are alike.
        outcomes (`torch.BoolTensor` of shape `(n,)`): As for `fit_head`.
    """
    if len(inputs) < 2:
        raise ValueError(f"Only {len(inputs)} positions were verified, too few to fit on; pass more prompts.")
    folds = torch.arange(len(inputs)).chunk(_FOLDS)

    def loss(weight_decay: float) -> float:
        total = 0.0
        for fold in folds:
            rest = torch.ones(len(inputs), dtype=torch.bool).index_fill(0, fold, False)
            fitted = fit_head(head, inputs[rest], outcomes[rest], weight_decay)
            total += len(fold) * _loss(fitted, inputs[fold], outcomes[fold])
        return total

    return min(tqdm(_WEIGHT_DECAYS, desc="weight decay", leave=False), key=loss)


def refit(arguments: RefitArguments) -> dict[str, float]:
    """Record, fit, measure and write; returns the head's loss before and after, in nats per held-out position."""
    drafter = load_drafter_with_confidence(arguments, keeps_temperatures=False)
    answers = _record(arguments, drafter)
    if len(answers) < 2:
        raise ValueError(f"Only {len(answers)} answer had a verified draft, too few to fit on; pass more prompts.")
    num_fit = len(answers) - arguments.num_held_out(len(answers))
    inputs, outcomes = _join(answers[:num_fit])
    held_out = _join(answers[num_fit:])
    head: nn.Linear = drafter.confidence_head.proj  # type: ignore[union-attr]  # checked when it was loaded
    weight_decay = arguments.weight_decay
    if weight_decay is None:
        weight_decay = choose_weight_decay(head, inputs, outcomes)
    fitted = fit_head(head, inputs, outcomes, weight_decay)
    report = {
        "weight_decay": weight_decay,
        "num_positions_fit": len(inputs),
        "num_positions_held_out": len(held_out[0]),
        "loss_before": _loss(head, *held_out),
        "loss_after": _loss(fitted, *held_out),
    }
    tqdm.write(json.dumps(report))
    if not report["loss_after"] < report["loss_before"]:  # or not a number
        raise ValueError(
            f"The refitted head is no better on the held-out positions ({report}); no drafter is written. Pass more "
            "`prompts`."
        )
    if not arguments.dry_run:
        _save(arguments, fitted, report)
        tqdm.write(f"written to {arguments.output}")
    return report


def _record(arguments: RefitArguments, drafter: DSparkModel) -> list[Positions]:
    target, tokenizer = load_fitting_target(arguments, drafter)
    max_length = max_prompt_length(arguments, target)
    return record_positions(
        plan_prompts(arguments, tokenizer, max_length=max_length, num_prompts=arguments.num_prompts),
        drafter=drafter,
        target=target,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )


def _join(answers: Sequence[Positions]) -> Positions:
    return torch.cat([inputs for inputs, _ in answers]), torch.cat([outcomes for _, outcomes in answers])


@torch.no_grad()
def _loss(head: nn.Linear, inputs: torch.Tensor, outcomes: torch.Tensor) -> float:
    logits = nn.functional.linear(inputs, head.weight.float().cpu(), head.bias.float().cpu()).squeeze(-1)
    return float(nn.functional.binary_cross_entropy_with_logits(logits, outcomes.float()))


def _save(arguments: RefitArguments, fitted: nn.Linear, report: dict[str, float]) -> None:
    """Copy the drafter's folder with the new head and without temperatures, which belonged to the old head."""
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


__all__ = ["RefitArguments", "choose_weight_decay", "fit_head", "refit"]
