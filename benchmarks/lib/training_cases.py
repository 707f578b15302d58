"""The cases of `benchmarks.training_step`: the loss and a whole training step, ours and a naive one of the same maths.

The naive loss is the formulas as one would write them: all logits of drafter and target at once, autograd for the rest.
Weights and data are random, since time and memory do not depend on them. Nothing here times, prints or writes.

Shapes: `n` positions, `D` hidden size, `r` rank, `V` vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_dspark import DSparkModel
from training.data.batches import ConversationDataset, collate
from training.data.conversations import Conversation
from training.objective.attention import CHUNKED_ATTENTION
from training.objective.distributions import draft_logits
from training.objective.losses import LossWeights, PositionTerms, weighted_position_loss
from training.run.arguments import DSparkTrainingArguments
from training.run.initialization import config_for_target
from training.run.trainer import DSparkTrainer


OURS, NAIVE = "ours", "naive"
WAYS = (OURS, NAIVE)


def naive_position_loss(
    logits: torch.Tensor, p: torch.Tensor, *, labels: torch.Tensor, weights: torch.Tensor, loss_weights: LossWeights
) -> tuple[torch.Tensor, PositionTerms]:
    """Loss and metrics over whole logits `[n, V]` and probabilities `[n, V]`, differentiated by autograd."""
    log_q = logits.float().log_softmax(dim=-1)
    q = log_q.exp()
    ce = -log_q.gather(1, labels[:, None]).squeeze(1)
    soft = -(p * log_q).sum(dim=-1) if loss_weights.kd else torch.zeros_like(ce)
    l1 = (q - p).abs().sum(dim=-1) + (1 - p.sum(dim=-1)).clamp(min=0)
    agreement = (log_q.argmax(dim=-1) == p.argmax(dim=-1)).float()
    total = (weights * (loss_weights.ce * ce + loss_weights.kd * soft + loss_weights.l1 * l1)).sum()
    return total, PositionTerms(ce.detach(), soft.detach(), l1.detach(), agreement)


class LossCase:
    """The loss alone, forward and backward, from the states that feed both LM heads; every position has its own state.

    Args:
        positions, vocabulary, hidden, rank (`int`): Sizes.
        dtype (`str`): `float32`, or `bfloat16` for a bf16 LM head under autocast, with `W2` and its gradient in fp32.
    """

    def __init__(self, *, positions: int, vocabulary: int, hidden: int, rank: int, dtype: str):
        torch.manual_seed(0)
        self.mixed = dtype == "bfloat16"
        target_dtype = getattr(torch, dtype)
        self.head = (0.05 * torch.randn(vocabulary, hidden)).to(target_dtype)
        self.last_hidden = torch.randn(positions, hidden).to(target_dtype)
        self.hidden = torch.randn(positions, hidden).requires_grad_()
        self.latent = torch.randn(positions, rank).requires_grad_()
        self.w2 = (0.02 * torch.randn(vocabulary, rank)).requires_grad_()
        self.labels = torch.randint(vocabulary, (positions,))
        self.weights = torch.rand(positions)

    def run(self, way: str, *, positions: int | None = None) -> float:
        """Loss and gradients by one way, over the first `positions`; returns the loss."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mixed):
            total = (self._ours if way == OURS else self._naive)(slice(positions))
        total.backward()
        return float(total.detach())

    def clear(self) -> None:
        self.hidden.grad = self.latent.grad = self.w2.grad = None

    def _logits(self, hidden: torch.Tensor, latent: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(hidden, self.head) + functional.linear(latent, self.w2)  # type: ignore[arg-type]

    @torch.no_grad()
    def _probabilities(self, part: slice) -> torch.Tensor:
        return functional.linear(self.last_hidden[part], self.head).float().softmax(dim=-1)

    def _ours(self, part: slice) -> torch.Tensor:
        return weighted_position_loss(
            self.hidden[part],
            self.latent[part],
            draft_logits_of=self._logits,
            target_of=self._probabilities,
            labels=self.labels[part],
            weights=self.weights[part],
            loss_weights=LossWeights(),
            parameters=[self.w2],
        )[0]

    def _naive(self, part: slice) -> torch.Tensor:
        return naive_position_loss(
            self._logits(self.hidden[part], self.latent[part]),
            self._probabilities(part),
            labels=self.labels[part],
            weights=self.weights[part],
            loss_weights=LossWeights(),
        )[0]


class NaiveTrainer(DSparkTrainer):
    """The trainer with whole logits: the target's logits are computed once per token, but for all tokens at once."""

    def _position_loss(
        self, drafter: Any, blocks: Any, outputs: Any, target: Any, *, weights: Any, loss_weights: Any
    ) -> Any:
        rows = torch.arange(blocks.anchors.shape[0])[:, None, None]
        flat = (rows * target.last_hidden.shape[1] + blocks.label_sources)[blocks.supervised]
        sources, inverse = flat.unique(return_inverse=True)
        with torch.no_grad():
            logits = self.binding.target_logits(target.last_hidden.flatten(0, 1)[sources])
            p = logits.float().softmax(dim=-1)[inverse]
        return naive_position_loss(
            draft_logits(drafter, self.binding, outputs.hidden, outputs.latent),
            p,
            labels=blocks.labels[blocks.supervised],
            weights=weights,
            loss_weights=loss_weights,
        )


class StepCase:
    """A whole training step on one batch: target, backbone, heads, loss, backward, AdamW.

    Target and drafter have the shapes of SmolLM2-135M and a drafter for it, over the whole vocabulary.

    Args:
        dtype (`str`): `float32`, or `bfloat16` for a bf16 target and autocast.
        sequences, tokens, anchors, layers, vocabulary (`int`): Sizes of the batch and of the drafter.
        folder (`str`): Where the trainer would write.
    """

    def __init__(
        self,
        *,
        dtype: str,
        sequences: int,
        tokens: int,
        anchors: int,
        layers: int,
        vocabulary: int,
        folder: str,
        **sizes: Any,
    ):
        torch.manual_seed(0)
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        shape |= {"num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": vocabulary}
        target = LlamaForCausalLM(LlamaConfig(**(shape | sizes))).to(getattr(torch, dtype)).eval()
        target.requires_grad_(False)  # as in training; a target that decodes is never frozen here
        last = target.config.num_hidden_layers - 2
        choices = {"num_hidden_layers": layers, "target_layer_ids": [0, last], "mask_token_id": 3, "markov_rank": 64}
        self.drafter = DSparkModel(config_for_target(target, None, "random", **choices)).train()
        self.drafter.set_attn_implementation(CHUNKED_ATTENTION)
        ids = torch.randint(4, vocabulary, (sequences, tokens)).tolist()
        dataset = ConversationDataset([Conversation(tuple(row), 8) for row in ids], num_anchors=anchors, seed=0)
        self.batch = collate([dataset[index] for index in range(sequences)])
        arguments = DSparkTrainingArguments(
            output_dir=folder, use_cpu=True, report_to="none", bf16=dtype == "bfloat16", num_anchors=anchors
        )
        trainers: dict[str, Callable[..., DSparkTrainer]] = {OURS: DSparkTrainer, NAIVE: NaiveTrainer}
        self.trainers = {
            way: make(model=self.drafter, args=arguments, target=target, train_dataset=dataset)
            for way, make in trainers.items()
        }
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-5)

    @property
    def num_draft_positions(self) -> int:
        """Upper bound of the supervised positions of the batch."""
        return int(self.batch["keep"].sum()) * self.drafter.config.block_size

    def run(self, way: str) -> float:
        """One step by one way; returns the loss."""
        trainer = self.trainers[way]
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self.drafter, self.batch)
        loss.backward()
        self.optimizer.step()
        self.clear()
        return float(loss.detach())

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


__all__ = ["NAIVE", "OURS", "WAYS", "LossCase", "StepCase", "naive_position_loss"]
