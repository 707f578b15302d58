"""Anchors, blocks and their mask: the trained positions and what they may see. Integers only, no model.

A block starts at an anchor (position `a` in the response whose next token is also in the response). Position `k` has label
`x[a + 1 + k]`, previous token `x[a + k]`, position `a + k`; it sees context positions `< a` and its own block.

A row may hold several conversations (`training.data.packing`). Positions count from the start of a conversation, and a block
sees and is supervised by its own conversation only.

Shapes: `B` sequences, `T` tokens, `N` blocks per sequence, `K` block size, `P` positions of a block in the backbone (`K`, or
`K + 1` where the anchor's own position predicts nothing).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch.

    Attributes:
        anchors (`torch.LongTensor` of shape `(B, N)`): Anchor positions; 0 where `keep` is false.
        keep (`torch.BoolTensor` of shape `(B, N)`): Whether the block is real.
        previous (`torch.LongTensor` of shape `(B, N, K)`): Token before each position's label.
        labels (`torch.LongTensor` of shape `(B, N, K)`): Token each position predicts (0 where not supervised).
        supervised (`torch.BoolTensor` of shape `(B, N, K)`): A position counts while all before it in its block count.
        starts (`torch.LongTensor` of shape `(B, T)`): Where the conversation of each token starts.
    """

    anchors: torch.Tensor
    keep: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    supervised: torch.Tensor
    starts: torch.Tensor

    @property
    def block_starts(self) -> torch.Tensor:
        """Where the conversation of each block starts: `[B, N]`."""
        return self.starts.gather(1, self.anchors)

    @property
    def label_sources(self) -> torch.Tensor:
        """Positions `a + k` whose target distribution predicts position `k`: `[B, N, K]`, not clamped to the sequence."""
        return self.positions(self.labels.shape[-1])

    def positions(self, num_positions: int) -> torch.Tensor:
        """Positions `[B, N, P]` of a block that starts at its anchor."""
        return self.anchors[..., None] + torch.arange(num_positions, device=self.anchors.device)


def anchor_candidates(response_mask: torch.Tensor) -> torch.Tensor:
    """Positions `[B, T]` in the response whose next token is in the response too."""
    candidates = torch.zeros_like(response_mask)
    candidates[:, :-1] = response_mask[:, :-1] & response_mask[:, 1:]
    return candidates


def sample_anchors(
    response_mask: torch.Tensor, num_anchors: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Up to `num_anchors` distinct anchors of one sequence (`response_mask` `[T]`), sorted."""
    candidates = anchor_candidates(response_mask[None])[0].nonzero().squeeze(1)
    chosen = torch.randperm(candidates.shape[0], generator=generator)[:num_anchors]
    return candidates[chosen].sort().values


def make_blocks(
    input_ids: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    starts: torch.Tensor | None = None,
) -> Blocks:
    """Labels and supervision of the blocks at `anchors` `[B, N]` of sequences `input_ids` `[B, T]`.

    `starts` `[B, T]` says where the conversation of each token starts, if rows hold several.
    """
    starts = torch.zeros_like(input_ids) if starts is None else starts
    rows, length = input_ids.shape
    draft_positions = torch.arange(block_size, device=input_ids.device)
    label_positions = anchors[..., None] + 1 + draft_positions  # [B, N, K]
    inside = label_positions < length
    safe = label_positions.clamp(max=length - 1).view(rows, -1)
    in_response = response_mask.gather(1, safe).view_as(label_positions)
    inside &= starts.gather(1, safe).view_as(label_positions) == starts.gather(1, anchors)[..., None]
    supervised = (inside & in_response & keep[..., None]).int().cumprod(dim=-1).bool()
    labels = input_ids.gather(1, safe).view_as(label_positions)
    previous = torch.cat([input_ids.gather(1, anchors)[..., None], labels[..., :-1]], dim=-1)
    return Blocks(anchors, keep, previous, labels.masked_fill(~supervised, 0), supervised, starts)


def block_inputs(blocks: Blocks, input_ids: torch.Tensor, mask_token_id: int, num_positions: int) -> torch.Tensor:
    """Block tokens `[B, N * P]`: the anchor, then mask tokens."""
    noise = blocks.labels.new_full((*blocks.anchors.shape, num_positions), mask_token_id)
    noise[..., 0] = torch.where(blocks.keep, input_ids.gather(1, blocks.anchors), mask_token_id)
    return noise.flatten(1)


def block_positions(blocks: Blocks, num_context: int, num_positions: int) -> torch.Tensor:
    """Positions `[B, T + N * P]` of the context followed by all blocks."""
    context = torch.arange(num_context, device=blocks.anchors.device) - blocks.starts
    draft_positions = blocks.positions(num_positions) - blocks.block_starts[..., None]
    return torch.cat([context, draft_positions.flatten(1)], dim=1)


def block_mask(blocks: Blocks, num_context: int, num_positions: int) -> torch.Tensor:
    """Mask `[B, 1, N * P, T + N * P]`: a block sees context of its conversation before its anchor, and itself.

    Dummy blocks see themselves too, so that no query has nothing to attend to; they are never supervised.
    """
    rows, num_blocks = blocks.anchors.shape
    device = blocks.anchors.device
    owner = torch.arange(num_blocks, device=device).repeat_interleave(num_positions)  # [N * P]
    anchors = blocks.anchors.gather(1, owner.expand(rows, -1))  # [B, N * P]
    starts = blocks.block_starts.gather(1, owner.expand(rows, -1))
    columns = torch.arange(num_context, device=device)
    context = (columns >= starts[..., None]) & (columns < anchors[..., None])
    own = (owner[:, None] == owner).expand(rows, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def flex_block_mask(blocks: Blocks, num_context: int, num_positions: int) -> BlockMask:
    """`block_mask` as flex attention takes it: a rule, and which tiles it leaves empty."""
    anchors, num_queries = blocks.anchors, blocks.anchors.shape[1] * num_positions
    rule = partial(_may_read, anchors, blocks.block_starts, num_context, num_positions)
    return create_block_mask(rule, len(anchors), None, num_queries, num_context + num_queries, device=anchors.device)


def _may_read(
    anchors: torch.Tensor,
    starts: torch.Tensor,
    num_context: int,
    num_positions: int,
    row: torch.Tensor,
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    own = query // num_positions
    in_context = (key >= starts[row, own]) & (key < anchors[row, own])
    return torch.where(key < num_context, in_context, (key - num_context) // num_positions == own)


__all__ = [
    *("Blocks", "anchor_candidates", "block_inputs", "block_mask", "block_positions", "flex_block_mask"),
    *("make_blocks", "sample_anchors"),
]
