"""Target features of a list of conversations, computed once into a bounded folder of shards on disk.

Shards are named after a hash of their conversations, the target and the tapped layers: features of other data can share
the folder, more conversations only add shards, and a shard never serves other data. The size is predicted, logged and
checked before anything is written.

Shapes: `T` tokens, `L` tapped layers, `D` hidden size.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from modeling_dspark.target_binding import TargetBinding
from training.data.conversations import Conversation
from training.data.features import TargetFeatures, bytes_per_token, compute_features, pad_ids
from training.data.shards import ShardFolder, size_text


logger = logging.get_logger("training.data.features")

_TENSORS = ("features", "last_hidden", "logsumexp")
_HEADER_BYTES = 512  # more than the names, shapes and offsets of three tensors take


class FeatureCache:
    """Features of a list of conversations on disk.

    Args:
        folder (`str` or `Path`): Where the shards are.
        conversations (`Sequence[Conversation]`): The conversations to cache.
        target_name (`str`): Part of a shard's identity.
        target_layer_ids (`Sequence[int]`): Tapped layers, part of a shard's identity.
        hidden_size (`int`): Of the target.
        shard_size (`int`, *optional*, defaults to `64`): Conversations per shard.
    """

    def __init__(
        self,
        folder: str | Path,
        conversations: Sequence[Conversation],
        *,
        target_name: str,
        target_layer_ids: Sequence[int],
        hidden_size: int,
        shard_size: int = 64,
    ):
        self.shards = ShardFolder(folder)
        self.conversations = conversations
        self.target_layer_ids = list(target_layer_ids)
        self.hidden_size = hidden_size
        self.shard_size = shard_size
        self._target_name = target_name
        lengths = [len(conversation.input_ids) for conversation in conversations]
        self._offsets = [sum(lengths[i - i % shard_size : i]) for i in range(len(lengths))]

    @property
    def num_shards(self) -> int:
        return -(-len(self.conversations) // self.shard_size)

    @property
    def num_bytes(self) -> int:
        """Predicted size on disk."""
        return sum(self._shard_bytes(shard) for shard in range(self.num_shards))

    def _conversations_of(self, shard: int) -> Sequence[Conversation]:
        return self.conversations[shard * self.shard_size : (shard + 1) * self.shard_size]

    def _shard_bytes(self, shard: int) -> int:
        tokens = sum(len(conversation.input_ids) for conversation in self._conversations_of(shard))
        return tokens * bytes_per_token(self.hidden_size, len(self.target_layer_ids)) + _HEADER_BYTES

    def build(self, target: PreTrainedModel, binding: TargetBinding, *, limit_gb: float) -> None:
        """Compute what is missing, with a progress bar; the size is logged and checked first.

        Args:
            target ([`~transformers.PreTrainedModel`]): The target.
            binding ([`TargetBinding`]): What the drafter borrows from it.
            limit_gb (`float`): Largest size of the folder, features of other data included.

        Raises:
            ValueError: if the folder would exceed `limit_gb`, or the disk cannot hold what is missing.
        """
        names = {shard: self._name(shard) for shard in range(self.num_shards)}
        others = self.shards.num_bytes(without=names.values())
        self._check_limit(others, limit_gb)
        self.shards.remove_partial()
        missing = set(self.shards.missing({name: len(self._conversations_of(shard)) for shard, name in names.items()}))
        sizes = {shard: self._shard_bytes(shard) for shard, name in names.items() if name in missing}
        needed = sum(sizes.values())
        free = self.shards.check_space(needed)
        logger.warning(
            f"Feature cache `{self.shards.folder}`: {size_text(self.num_bytes)}, of which {size_text(needed)} are missing; "
            f"{size_text(free)} are free."
        )
        bar = tqdm(names, desc=f"features ({size_text(self.num_bytes)})", unit="shard")
        for shard in bar:
            if shard in sizes:
                tensors = self._compute(shard, target, binding)
                count = len(self._conversations_of(shard))
                self.shards.write(names[shard], tensors, num_conversations=count, needed=needed)
                needed -= sizes[shard]

    def _check_limit(self, others: int, limit_gb: float) -> None:
        if self.num_bytes + others > limit_gb * 1e9:
            beside = f" beside {size_text(others)} of other features in `{self.shards.folder}`" if others else ""
            raise ValueError(
                f"The feature cache would take {size_text(self.num_bytes)}{beside}, more than "
                f"`feature_cache_gb={limit_gb}`. Raise it, use fewer conversations (`max_conversations`)"
                f"{', delete the other features' if others else ''}, or leave out `feature_cache` to compute features in "
                "the step."
            )

    def load(self, index: int) -> TargetFeatures:
        """Features of one conversation, without a batch dimension.

        Raises:
            ValueError: if its shard is missing or damaged.
        """
        shard, start = self.shards.open(self._name(index // self.shard_size)), self._offsets[index]
        tokens = slice(start, start + len(self.conversations[index].input_ids))
        return TargetFeatures(**{name: shard.get_slice(name)[tokens] for name in _TENSORS})

    @functools.cache  # noqa: B019 - the cache lives as long as training does
    def _name(self, shard: int) -> str:
        digest = hashlib.sha256(json.dumps([self._target_name, self.target_layer_ids]).encode())
        for conversation in self._conversations_of(shard):
            digest.update(conversation.content)
        return f"features-{digest.hexdigest()[:16]}"

    def _compute(
        self, shard: int, target: PreTrainedModel, binding: TargetBinding, batch_size: int = 16
    ) -> dict[str, torch.Tensor]:
        """Content of a shard: the tokens of its conversations one after the other, `[T, ...]`."""
        conversations = self._conversations_of(shard)
        order = sorted(range(len(conversations)), key=lambda index: len(conversations[index].input_ids))
        rows: dict[int, TargetFeatures] = {}
        for begin in range(0, len(order), batch_size):
            indices = order[begin : begin + batch_size]
            input_ids, response_mask = pad_ids([conversations[index] for index in indices])
            batch = compute_features(
                target,
                binding,
                input_ids.to(target.device),
                target_layer_ids=self.target_layer_ids,
                needed=response_mask.to(target.device),
            )
            for row, index in enumerate(indices):
                length = len(conversations[index].input_ids)
                rows[index] = TargetFeatures(
                    batch.features[row, :length].to("cpu", torch.bfloat16),
                    batch.last_hidden[row, :length].to("cpu", torch.bfloat16),
                    batch.logsumexp[row, :length].cpu(),  # type: ignore[index]  # at the `needed` positions
                )
        return {
            name: torch.cat([getattr(rows[index], name) for index in range(len(rows))]).contiguous()
            for name in _TENSORS
        }


__all__ = ["FeatureCache"]
