"""A Hugging Face `Trainer` for drafters: the forward over packed blocks, the loss, and its metrics.

Shapes: `B` sequences, `T` tokens, `N` blocks, `K` slots, `n` supervised slots, `D` hidden size, `r` Markov rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from modeling_dspark import DSparkModel
from modeling_dspark.target_dspark import TargetBinding
from training.blocks import Blocks, block_inputs, block_mask, block_positions, make_blocks, sample_anchors
from training.data import Conversation
from training.features import FeatureCache, TargetFeatures, compute_features, pad_ids
from training.losses import LossWeights, SlotTerms, confidence_loss, linear_between, slot_weights, weighted_slot_loss


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the choices of the method; see `python -m training.train --help`."""

    output_dir: str = field(default="runs/drafter", metadata={"help": "Checkpoints, logs and the final drafter."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks sampled from each sequence, an epoch."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of cross-entropy with the next token."})
    soft_weight: float = field(
        default=0.0, metadata={"help": "Weight of cross-entropy with the target's distribution."}
    )
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the total-variation term."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    loss_decay: float | None = field(
        default=4.0, metadata={"help": "Decay of the slot weights exp(-(k - 1) / decay)."}
    )
    l1_warmup_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Share of training over which total variation replaces cross-entropy with the target's "
            "distribution (at the start it has almost no gradient)."
        },
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: the collator makes tensors."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_anchors < 1:
            raise ValueError(f"`num_anchors` must be at least 1, got {self.num_anchors}.")
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be false.")
        self.loss_weights(0.0)

    def loss_weights(self, fraction: float) -> LossWeights:
        """Weights of the loss terms after `fraction` of training."""
        share = linear_between(0.0, 1.0, fraction / self.l1_warmup_fraction) if self.l1_warmup_fraction else 1.0
        return LossWeights(
            ce=self.ce_weight,
            soft=self.soft_weight + (1 - share) * self.l1_weight,
            l1=share * self.l1_weight,
            confidence=self.confidence_weight,
            decay=self.loss_decay,
        )


class ConversationDataset(Dataset):
    """Conversations with their anchors, drawn from (seed, epoch, index) so that a resumed run sees the same blocks."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        *,
        num_anchors: int,
        seed: int,
        cache: FeatureCache | None = None,
        indices: Sequence[int] | None = None,
    ):
        self.conversations = conversations
        self.indices = list(range(len(conversations))) if indices is None else list(indices)
        self.num_anchors, self.seed, self.cache = num_anchors, seed, cache
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self.indices[item]
        conversation = self.conversations[index]
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, index)) % 2**63)
        return {
            "conversation": conversation,
            "anchors": sample_anchors(conversation.response_mask, self.num_anchors, generator=generator),
            "features": self.cache.load(index) if self.cache is not None else None,
        }


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad a batch: ids, response masks, anchors and, from a cache, features."""
    input_ids, response_mask = pad_ids([item["conversation"] for item in items])
    num_blocks = max(1, *(item["anchors"].shape[0] for item in items))
    anchors = torch.zeros(len(items), num_blocks, dtype=torch.long)
    keep = torch.zeros(len(items), num_blocks, dtype=torch.bool)
    for row, item in enumerate(items):
        anchors[row, : item["anchors"].shape[0]] = item["anchors"]
        keep[row, : item["anchors"].shape[0]] = True
    batch = {"input_ids": input_ids, "response_mask": response_mask, "anchors": anchors, "keep": keep}
    if items[0]["features"] is not None:
        for name in ("features", "last_hidden", "logsumexp"):
            rows = [getattr(item["features"], name) for item in items]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return batch


@dataclass(frozen=True)
class BlockOutputs:
    """Backbone and head states of the supervised slots, in order: hidden `[n, D]`, latent `[n, r]`, confidence `[n]`."""

    hidden: torch.Tensor
    latent: torch.Tensor | None
    confidence_logits: torch.Tensor | None


def forward_blocks(
    drafter: DSparkModel, binding: TargetBinding, blocks: Blocks, *, input_ids: torch.Tensor, features: torch.Tensor
) -> BlockOutputs:
    """All packed blocks through the backbone and, teacher-forced, through the heads up to the vocabulary."""
    num_context = input_ids.shape[1]
    noise = block_inputs(blocks, input_ids, drafter.config.mask_token_id)
    hidden = drafter(
        noise_embeds=binding.embed(noise, like=drafter.norm.weight),
        context_hidden_states=features.to(drafter.dtype),
        position_ids=block_positions(blocks, num_context),
        attention_mask=block_mask(blocks, num_context),
    ).last_hidden_state.view(*blocks.labels.shape, -1)
    selected = hidden[blocks.supervised]
    latent = previous = None
    head = drafter.markov_head
    if head is not None:
        embedded = head.embed(blocks.previous).to(hidden.dtype)
        latents, state = [], None
        for slot in range(hidden.shape[2]):
            step, state = head.step(embedded[:, :, slot], hidden[:, :, slot], state)
            latents.append(step)
        latent = torch.stack(latents, dim=2)[blocks.supervised]
        previous = embedded[blocks.supervised]
    confidence = None if drafter.confidence_head is None else drafter.confidence_head(selected, previous)
    return BlockOutputs(selected, latent, confidence)


class DSparkTrainer(Trainer):
    """Trains a drafter; the target is frozen.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        Other arguments as for [`~transformers.Trainer`].
    """

    args: DSparkTrainingArguments

    def __init__(self, *args: Any, target: PreTrainedModel, **kwargs: Any):
        super().__init__(*args, data_collator=collate, **kwargs)  # type: ignore[misc]  # `args` holds no collator
        self.target = target
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
        )
        target = self._target_features(inputs, drafter)
        outputs = forward_blocks(
            drafter, self.binding, blocks, input_ids=inputs["input_ids"], features=target.features
        )
        loss_weights = self.args.loss_weights(self.state.global_step / max(self.state.max_steps, 1))
        weights = self._slot_weights(blocks)[blocks.supervised]
        total, terms = self._slot_loss(drafter, blocks, outputs, target, weights=weights, loss_weights=loss_weights)
        if outputs.confidence_logits is not None:
            bce = confidence_loss(outputs.confidence_logits, terms.l1, weights)
            total = total + loss_weights.confidence * bce
        self._count(model.training, blocks, terms, outputs.confidence_logits, total, weights)
        if num_items_in_batch is None:
            loss = total / weights.sum().clamp(min=1e-6)
        else:
            loss = total * self.accelerator.num_processes / num_items_in_batch
        return (loss, terms) if return_outputs else loss

    def _slot_weights(self, blocks: Blocks) -> torch.Tensor:
        weights = slot_weights(blocks.labels.shape[-1], self.args.loss_decay, device=blocks.labels.device)
        return weights.expand_as(blocks.labels)

    def _target_features(self, inputs: dict[str, Any], drafter: DSparkModel) -> TargetFeatures:
        if "features" in inputs:
            return TargetFeatures(inputs["features"], inputs["last_hidden"], inputs["logsumexp"])
        return compute_features(
            self.target,
            self.binding,
            inputs["input_ids"],
            target_layer_ids=drafter.config.target_layer_ids,  # type: ignore[arg-type]  # filled in by the config
            needed=inputs["response_mask"],
        )

    def _slot_loss(
        self,
        drafter: DSparkModel,
        blocks: Blocks,
        outputs: BlockOutputs,
        target: TargetFeatures,
        *,
        weights: torch.Tensor,
        loss_weights: LossWeights,
    ) -> tuple[torch.Tensor, SlotTerms]:
        rows = torch.arange(blocks.anchors.shape[0], device=weights.device)[:, None, None]
        width = target.logsumexp.shape[1]
        flat = (rows * width + blocks.label_sources)[blocks.supervised]
        # A position serves several blocks: its target logits are computed once.
        positions, slot_position = flat.unique(return_inverse=True)
        with torch.no_grad():
            target_logits = self.binding.draft_logits(target.last_hidden.flatten(0, 1)[positions])
        logsumexp = target.logsumexp.flatten()[positions]
        labels = self._to_draft.to(weights.device)[blocks.labels[blocks.supervised]]

        def draft_logits_of(part: slice) -> torch.Tensor:
            logits = self.binding.draft_logits(outputs.hidden[part])
            if outputs.latent is not None:
                logits = logits + drafter.markov_head.bias(outputs.latent[part])  # type: ignore[union-attr]
            return logits

        return weighted_slot_loss(
            draft_logits_of,
            lambda part: (target_logits[slot_position[part]], logsumexp[slot_position[part]]),
            labels=labels,
            weights=weights,
            loss_weights=loss_weights,
        )

    @torch.no_grad()
    def _count(
        self,
        training: bool,
        blocks: Blocks,
        terms: SlotTerms,
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
            "slots": supervised.sum(dim=(0, 1)).float(),
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
        blocks, slots = values["blocks"].clamp(min=1), values["slots"].clamp(min=1)
        metrics = {
            "tau": float(values["tau"] / blocks),
            "tau_greedy": float(values["tau_greedy"] / blocks),
            "slot_loss": float(values["loss"] / values["weight"].clamp(min=1e-6)),
        }
        for slot, (accept, agree) in enumerate(zip(values["accept"] / slots, values["agree"] / slots, strict=True)):
            metrics[f"acceptance/{slot}"] = float(accept)
            metrics[f"agreement/{slot}"] = float(agree)
        if "confidence_error" in values:
            metrics["confidence_error"] = float(values["confidence_error"] / slots.sum())
        return {name: round(value, 4) for name, value in metrics.items()}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Merge the running metrics into what Transformers logs."""
        if "eval_loss" in logs:
            logs |= {f"eval_{name}": value for name, value in self._take_metrics(False).items()}
        elif "loss" in logs:
            logs |= self._take_metrics(True)
        super().log(logs, *args, **kwargs)

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

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler | None:
        dataset: Any = train_dataset or self.train_dataset
        lengths = [len(dataset.conversations[index].input_ids) for index in dataset.indices]
        return LengthGroupedSampler(self.args.train_batch_size, lengths=lengths, generator=self._sampler_generator())

    def _sampler_generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.args.data_seed or self.args.seed)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Sum of slot weights over all accumulation steps and ranks."""
        total = torch.zeros((), device=device)
        for inputs in batch_samples:
            blocks = make_blocks(
                inputs["input_ids"],
                inputs["response_mask"],
                anchors=inputs["anchors"],
                keep=inputs["keep"],
                block_size=self.accelerator.unwrap_model(self.model).config.block_size,
            )
            total += self._slot_weights(blocks)[blocks.supervised].sum().to(device)
        return self.accelerator.reduce(total, reduction="sum").clamp(min=1e-6)


__all__ = [
    "BlockOutputs",
    "ConversationDataset",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "collate",
    "forward_blocks",
]
