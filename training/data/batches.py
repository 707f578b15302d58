"""From conversations to batches, padded or packed: anchors, order and collation, all functions of (seed, epoch).

A resumed run therefore sees the same blocks in the same order as an undisturbed one. No model here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from training.data.blocks import sample_anchors
from training.data.conversations import Conversation
from training.data.feature_cache import FeatureCache
from training.data.packing import join, pack


def seeded(*values: int) -> torch.Generator:
    """A generator that depends on all of `values`, the same in every process."""
    return torch.Generator().manual_seed(hash(values) % 2**63)  # tuples of integers hash alike everywhere


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
        generator = seeded(self.seed, self.epoch, index)
        return {
            "conversation": conversation,
            "anchors": sample_anchors(conversation.response_mask, self.num_anchors, generator=generator),
            "features": self.cache.load(index) if self.cache is not None else None,
        }


def collate(items: list[dict[str, Any]], *, packed_length: int | None = None) -> dict[str, Any]:
    """Pad a batch: ids, response masks, anchors and, from a cache, features; packed rows also have the start of each conversation.

    Args:
        items (`list[dict[str, Any]]`): Of a [`ConversationDataset`].
        packed_length (`int`, *optional*): Tokens of a row that holds several conversations; `None`: one row each.
    """
    lengths = [len(item["conversation"].input_ids) for item in items]
    rows = [[index] for index in range(len(items))] if packed_length is None else pack(lengths, packed_length)
    packed = [join([items[index] for index in row]) for row in rows]
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in packed], batch_first=True)
        for name in packed[0]
        if name not in ("starts", "anchors")
    }
    if packed_length is not None:
        width = batch["input_ids"].shape[1]
        # Padding is a conversation of its own.
        batch["starts"] = torch.stack([_extended(row["starts"], width, row["starts"].shape[0]) for row in packed])
    num_blocks = max(1, *(row["anchors"].shape[0] for row in packed))
    batch["anchors"] = torch.stack([_extended(row["anchors"], num_blocks, 0) for row in packed])
    sizes = torch.tensor([row["anchors"].shape[0] for row in packed])
    batch["keep"] = torch.arange(num_blocks) < sizes[:, None]
    return batch


def _extended(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return torch.cat([values, values.new_full((length - values.shape[0],), fill)])


class EpochSampler(Sampler):
    """Sequences of similar length together, in an order drawn from (seed, epoch).

    Args:
        dataset ([`ConversationDataset`]): Knows the epoch.
        group_size (`int`): Sequences of one optimizer step; grouping does not depend on how a step is split.
        seed (`int`): Seed of the run.
    """

    def __init__(self, dataset: ConversationDataset, group_size: int, seed: int):
        self.dataset, self.group_size, self.seed = dataset, group_size, seed

    def __iter__(self) -> Iterator[int]:
        lengths = [len(self.dataset.conversations[index].input_ids) for index in self.dataset.indices]
        generator = seeded(self.seed, self.dataset.epoch)
        return iter(get_length_grouped_indices(lengths, self.group_size, generator=generator))

    def __len__(self) -> int:
        return len(self.dataset)


__all__ = ["ConversationDataset", "EpochSampler", "collate", "seeded"]
