"""A Hugging Face `Trainer` for drafters: the loss over packed blocks, normalized globally, and its metrics.

Shapes: `B` sequences, `T` tokens, `N` blocks, `K` positions, `n` supervised positions, `Vd` draft vocabulary.
"""

import functools
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from modeling_dspark import DSparkModel
from training.data.batches import EpochSampler, collate
from training.data.blocks import Blocks, make_blocks
from training.data.features import TargetFeatures, compute_features
from training.objective.distributions import TargetDistribution, bias_parameters, draft_logits
from training.objective.forward import BlockOutputs, forward_blocks
from training.objective.losses import (
    LossWeights,
    PositionTerms,
    confidence_loss,
    position_weights,
    weighted_position_loss,
)
from training.run.arguments import DSparkTrainingArguments
from training.run.settings import note_settings


class DSparkTrainer(Trainer):
    """Trains a drafter, and freezes the target.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target, which needs no gradients from then on.
        run_settings (`dict`, *optional*): Noted in every checkpoint, and compared when one is resumed.
        Other arguments as for [`~transformers.Trainer`].
    """

    args: DSparkTrainingArguments

    def __init__(self, *args: Any, target: PreTrainedModel, run_settings: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, data_collator=self._collate, **kwargs)  # type: ignore[misc]  # `args` holds no collator
        # The loss is already divided by the global batch's weight; Transformers must not divide it again.
        self.model_accepts_loss_kwargs = True
        self.target = target.requires_grad_(False)
        self.run_settings = run_settings or {}
        drafter: DSparkModel = self.model  # type: ignore[assignment]
        self.binding = drafter.bind(target)
        config = drafter.config
        self._to_draft = torch.arange(config.vocab_size)
        if drafter.draft_token_ids is not None:
            self._to_draft = torch.full((config.vocab_size,), -1)
            self._to_draft[drafter.draft_token_ids.cpu()] = torch.arange(config.draft_vocab_size)  # type: ignore[arg-type]
        self._sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """`sum(w * terms) / sum(w)`, the denominator taken over the global batch."""
        drafter = self.accelerator.unwrap_model(model)
        blocks = make_blocks(
            inputs["input_ids"],
            inputs["response_mask"],
            anchors=inputs["anchors"],
            keep=inputs["keep"],
            block_size=drafter.config.block_size,
            starts=inputs.get("starts"),
        )
        target = self._target_features(inputs, drafter)
        outputs = forward_blocks(
            drafter,
            self.binding,
            blocks,
            input_ids=inputs["input_ids"],
            features=target.features,
            wrapped=model,
        )
        loss_weights = self.args.loss_weights(self.state.global_step / max(self.state.max_steps, 1))
        weights = self._position_weights(blocks)[blocks.supervised]
        total, terms = self._position_loss(
            drafter, blocks, outputs, target, weights=weights, loss_weights=loss_weights
        )
        if outputs.confidence_logits is not None:
            bce = confidence_loss(outputs.confidence_logits, terms.l1, weights)
            total = total + loss_weights.confidence * bce
        self._count(model.training, blocks, terms, outputs.confidence_logits, total, weights)
        if num_items_in_batch is None:
            loss = total / weights.sum().clamp(min=1e-6)
        else:
            loss = total * self.accelerator.num_processes / num_items_in_batch
        return (loss, terms) if return_outputs else loss

    def _collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(items, packed_length=self.args.packed_length if self.args.packing else None)

    def _position_weights(self, blocks: Blocks) -> torch.Tensor:
        weights = position_weights(blocks.labels.shape[-1], self.args.loss_decay, device=blocks.labels.device)
        return weights.expand_as(blocks.labels)

    def _target_features(self, inputs: dict[str, Any], drafter: DSparkModel) -> TargetFeatures:
        if "features" in inputs:
            return TargetFeatures(inputs["features"], inputs["last_hidden"], inputs["logsumexp"])
        return compute_features(
            self.target,
            self.binding,
            inputs["input_ids"],
            target_layer_ids=drafter.config.target_layer_ids,  # type: ignore[arg-type]  # filled in by the config
            starts=inputs.get("starts"),
        )

    def _position_loss(
        self,
        drafter: DSparkModel,
        blocks: Blocks,
        outputs: BlockOutputs,
        target: TargetFeatures,
        *,
        weights: torch.Tensor,
        loss_weights: LossWeights,
    ) -> tuple[torch.Tensor, PositionTerms]:
        rows = torch.arange(blocks.anchors.shape[0], device=weights.device)[:, None, None]
        flat = rows * target.last_hidden.shape[1] + blocks.label_sources
        distribution = TargetDistribution(
            self.binding,
            target.last_hidden.flatten(0, 1),
            positions=flat[blocks.supervised],
            logsumexp=None if target.logsumexp is None else target.logsumexp.flatten(),
        )
        return weighted_position_loss(
            outputs.hidden,
            outputs.latent,
            draft_logits_of=functools.partial(draft_logits, drafter, self.binding),
            target_of=distribution.probabilities,
            labels=self._to_draft.to(weights.device)[blocks.labels[blocks.supervised]],
            weights=weights,
            loss_weights=loss_weights,
            parameters=bias_parameters(drafter),
        )

    @torch.no_grad()
    def _count(
        self,
        training: bool,
        blocks: Blocks,
        terms: PositionTerms,
        confidence_logits: torch.Tensor | None,
        total: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Add this batch to the running sums behind the logged metrics."""
        supervised = blocks.supervised
        accept = torch.zeros(supervised.shape, device=weights.device)
        accept[supervised] = 1 - terms.l1 / 2
        agree = torch.zeros_like(accept)
        agree[supervised] = terms.agreement
        sums = {
            "positions": supervised.sum(dim=(0, 1)).float(),
            "accept": accept.sum(dim=(0, 1)),
            "agree": agree.sum(dim=(0, 1)),
            "blocks": supervised[..., 0].sum().float(),
            "tau": (accept.cumprod(dim=-1).sum() + supervised[..., 0].sum()),
            "tau_greedy": (agree.cumprod(dim=-1).sum() + supervised[..., 0].sum()),
            "weight": weights.sum(),
            "loss": total.detach(),
        }
        if confidence_logits is not None:
            error = (torch.sigmoid(confidence_logits.float()) - (1 - terms.l1 / 2)).abs()
            sums["confidence_error"] = error.sum()
        store = self._sums[training]
        for name, value in sums.items():
            store[name] = store.get(name, 0) + value.detach()

    def _take_metrics(self, training: bool) -> dict[str, float]:
        sums, self._sums[training] = self._sums[training], {}
        if not sums:
            return {}
        names = sorted(sums)
        flat = torch.cat([sums[name].reshape(-1) for name in names])
        flat = self.accelerator.reduce(flat, reduction="sum").cpu()
        sizes = [sums[name].numel() for name in names]
        values = dict(zip(names, flat.split(sizes), strict=True))
        blocks, positions = values["blocks"].clamp(min=1), values["positions"].clamp(min=1)
        metrics = {
            "tau": float(values["tau"] / blocks),
            "tau_greedy": float(values["tau_greedy"] / blocks),
            "position_loss": float(values["loss"] / values["weight"].clamp(min=1e-6)),
        }
        for position, (accept, agree) in enumerate(
            zip(values["accept"] / positions, values["agree"] / positions, strict=True)
        ):
            metrics[f"acceptance/{position}"] = float(accept)
            metrics[f"agreement/{position}"] = float(agree)
        if "confidence_error" in values:
            metrics["confidence_error"] = float(values["confidence_error"] / positions.sum())
        return {name: round(value, 6) for name, value in metrics.items()}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Merge the running metrics into what Transformers logs."""
        if "eval_loss" in logs:
            logs |= {f"eval_{name}": value for name, value in self._take_metrics(False).items()}
        elif "loss" in logs:
            self.check_loss()
            logs |= self._take_metrics(True)
        super().log(logs, *args, **kwargs)

    def check_loss(self) -> None:
        """Stop if a loss since the last log entry was not finite; in every process, since the sum is over all."""
        loss = self._sums[True].get("loss")
        value = 0.0 if loss is None else float(self.accelerator.reduce(loss.clone(), reduction="sum"))
        if not math.isfinite(value):
            raise ValueError(
                f"The loss is {value} at step {self.state.global_step}: stopped before a broken drafter is saved. Lower "
                "`learning_rate`, or check the target's logits for NaN."
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """An entry of the log at every checkpoint, so that a resumed run pools over the same steps as an undisturbed run."""
        if self.control.should_save and self.args.logging_strategy != IntervalStrategy.NO:
            self.control.should_log = True
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """No checkpoint of a drafter whose loss was not finite, however seldom the loss is logged."""
        self.check_loss()
        try:
            if self.args.should_save:
                folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                note_settings(folder, self.run_settings)
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer has its own error for a full disk
            raise ValueError(
                f"The checkpoint of step {self.state.global_step} in `{self.args.output_dir}` could not be written "
                f"({str(error).splitlines()[0]}). With space on the disk, `--resume-from-checkpoint true` continues from the "
                "last complete one."
            ) from error

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: ARG002 - Transformers passes it
        ignore_keys: Any = None,  # noqa: ARG002 - Transformers passes it
    ) -> tuple[torch.Tensor, None, None]:
        """Loss only; the metrics come from the running sums."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        group_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        dataset: Any = train_dataset or self.train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(dataset, group_size, seed)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Sum of position weights over all accumulation steps and ranks."""
        total = torch.zeros((), device=device)
        for inputs in batch_samples:
            blocks = make_blocks(
                inputs["input_ids"],
                inputs["response_mask"],
                anchors=inputs["anchors"],
                keep=inputs["keep"],
                block_size=self.accelerator.unwrap_model(self.model).config.block_size,
                starts=inputs.get("starts"),
            )
            total += self._position_weights(blocks)[blocks.supervised].sum().to(device)
        return self.accelerator.reduce(total, reduction="sum").clamp(min=1e-6)


__all__ = ["DSparkTrainer"]
