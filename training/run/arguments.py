"""Arguments of training that belong to the method; everything else is Transformers' own."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from training.objective.losses import LossWeights, linear_between


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the choices of the method; see `dspark train --help`."""

    output_dir: str = field(default="runs/drafter", metadata={"help": "Checkpoints, logs and the final drafter."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks sampled from each sequence per epoch."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of cross-entropy with the next token."})
    kd_weight: float = field(
        default=0.0, metadata={"help": "Weight of distillation: cross-entropy with the target's distribution."}
    )
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the total-variation term."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    loss_decay: float | None = field(
        default=4.0, metadata={"help": "Decay of the position weights exp(-(k - 1) / decay)."}
    )
    l1_warmup_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Share of training over which total variation replaces distillation (at the start total variation has "
            "almost no gradient)."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print parameters, memory per GPU and the size of a feature cache; load and train nothing."},
    )
    packing: bool = field(
        default=False,
        metadata={"help": "Pack the conversations of a batch into rows of `packed_length` tokens, to pad less."},
    )
    packed_length: int = field(
        default=1024, metadata={"help": "Tokens per packed row; a longer conversation has its own row."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: the collator makes tensors."}
    )

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or self.dry_run  # a dry run describes GPUs on any machine
        if self.ddp_find_unused_parameters:
            raise ValueError(
                "`ddp_find_unused_parameters` must be false: the heads run outside the drafter's forward, so DDP would take "
                "them for unused. Every parameter gets a gradient."
            )
        self.ddp_find_unused_parameters = False
        super().__post_init__()
        if self.num_anchors < 1:
            raise ValueError(f"`num_anchors` must be at least 1, got {self.num_anchors}.")
        if self.packed_length < 1:
            raise ValueError(f"`packed_length` must be at least 1, got {self.packed_length}.")
        if not 0 <= self.l1_warmup_fraction <= 1:
            raise ValueError(f"`l1_warmup_fraction` must lie in [0, 1], got {self.l1_warmup_fraction}.")
        if self.gradient_accumulation_steps < 1:
            raise ValueError(
                f"`gradient_accumulation_steps` must be at least 1, got {self.gradient_accumulation_steps}."
            )
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < math.inf:
            raise ValueError(f"`num_train_epochs` must be above 0, got {self.num_train_epochs}; or give `max_steps`.")
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be false.")
        self.loss_weights(0.0)

    def loss_weights(self, fraction: float) -> LossWeights:
        """Weights of the loss terms after `fraction` of training."""
        share = linear_between(0.0, 1.0, fraction / self.l1_warmup_fraction) if self.l1_warmup_fraction else 1.0
        return LossWeights(
            ce=self.ce_weight,
            kd=self.kd_weight + (1 - share) * self.l1_weight,
            l1=share * self.l1_weight,
            confidence=self.confidence_weight,
            decay=self.loss_decay,
        )


__all__ = ["DSparkTrainingArguments"]
