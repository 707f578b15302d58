"""Several conversations in one row: how they are chosen and joined, and whether a target keeps them apart.

A conversation has the same features in a packed row as alone: positions start again, the target and the drafter see
nothing of the others, and blocks end where it ends.

Shapes: `T` tokens, `N` blocks, `L` tapped layers, `D` hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_dspark.target_binding import TargetBinding
from training.data.features import compute_features


_CACHED = ("features", "last_hidden", "logsumexp")


def pack(lengths: Sequence[int], packed_length: int) -> list[list[int]]:
    """Rows of indices whose lengths add up to at most `packed_length`: longest first, each into the first row with room.

    A sequence longer than `packed_length` has a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, left in enumerate(room) if left >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(packed_length)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def join(items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One row of items of a [`~training.data.batches.ConversationDataset`].

    Returns:
        `dict`: `input_ids`, `response_mask` and `starts` (where the conversation of each token starts) `[T]`, `anchors`
        `[N]` counted from the start of the row, and features where they are cached.
    """
    lengths = torch.tensor([len(item["conversation"].input_ids) for item in items])
    starts = lengths.cumsum(0) - lengths
    row = {
        "input_ids": torch.tensor([token for item in items for token in item["conversation"].input_ids]),
        "response_mask": torch.cat([item["conversation"].response_mask for item in items]),
        "starts": starts.repeat_interleave(lengths),
        "anchors": torch.cat([item["anchors"] + start for item, start in zip(items, starts, strict=True)]),
    }
    if items[0]["features"] is not None:
        row |= {name: torch.cat([getattr(item["features"], name) for item in items]) for name in _CACHED}
    return row


def check_packing(target: PreTrainedModel, binding: TargetBinding, target_layer_ids: Sequence[int]) -> None:
    """Refuse a target that does not keep packed conversations apart, or whose positions do not start again.

    Two short random conversations go through the target, packed and alone. This detects layers with a state (convolutions,
    linear attention), and models and attention implementations without support for packing, whatever their names.

    Raises:
        ValueError: if packing changes the features of the second conversation.
    """
    length = 8
    vocab_size = target.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, 2 * length), generator=torch.Generator().manual_seed(0)).to(target.device)
    starts = (torch.arange(2 * length, device=ids.device) // length * length)[None]
    needed = torch.zeros_like(ids, dtype=torch.bool)
    options: dict[str, Any] = {"target_layer_ids": target_layer_ids}
    packed = compute_features(target, binding, ids, starts=starts, needed=needed, **options)
    alone = compute_features(target, binding, ids[:, length:], needed=needed[:, length:], **options)
    error = 0.0
    for states, reference in ((packed.features, alone.features), (packed.last_hidden, alone.last_hidden)):
        difference = (states[:, length:].float() - reference.float()).norm(dim=-1)
        error = max(error, float((difference / reference.float().norm(dim=-1)).mean()))
    # A leak changes a token's state as a whole; rounding in half precision stays far below a twentieth.
    if not error < (1e-3 if target.dtype == torch.float32 else 0.05):
        raise ValueError(
            f"`packing`: with the attention implementation `{target.config._attn_implementation}`, a target of type "
            f"`{target.config.model_type}` does not keep packed conversations apart (features differ by {error:.1%}). Set "
            "`packing` to false, or choose `feature_cache`, whose features are computed one conversation per row."
        )


__all__ = ["check_packing", "join", "pack"]
