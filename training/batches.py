"""From conversations to padded batches: anchors, order and collation, all functions of (seed, epoch).

A resumed run therefore sees the same blocks in the same order as an undisturbed one. No model here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from training.blocks import sample_anchors
from training.data import Conversation
from training.feature_cache import FeatureCache
from training.features import pad_ids


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


class EpochSampler(Sampler):
    """Sequences of similar length together, in an order drawn from (seed, epoch).

    Args:
        dataset ([`ConversationDataset`]): Knows the epoch.
        group_size (`int`): Sequences of one optimiser step; grouping does not depend on how a step is split.
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
