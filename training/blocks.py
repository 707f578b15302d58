"""Anchors, blocks and their mask: which slots are trained and what they may see. Integers only, no model.

A block starts at an anchor (position `a` in the response whose next token is also in the response). Slot `k` has label
`x[a + 1 + k]`, previous token `x[a + k]`, position `a + k`; it sees context positions `< a` and its own block.

A row may hold several conversations (`training.packing`). Positions count from the start of a conversation, and a block
sees and is supervised by its own conversation only.

Shapes: `B` sequences, `T` tokens, `N` blocks a sequence, `K` block size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch.

    Attributes:
        anchors (`torch.LongTensor` of shape `(B, N)`): Anchor positions; 0 where `keep` is false.
        keep (`torch.BoolTensor` of shape `(B, N)`): Whether the block is real.
        previous (`torch.LongTensor` of shape `(B, N, K)`): Token before each slot's label.
        labels (`torch.LongTensor` of shape `(B, N, K)`): Token each slot predicts (0 where not supervised).
        supervised (`torch.BoolTensor` of shape `(B, N, K)`): A slot counts while all before it in its block count.
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
        """Positions `a + k` whose target distribution predicts slot `k`: `[B, N, K]`, not clamped to the sequence."""
        return self.anchors[..., None] + torch.arange(self.labels.shape[-1], device=self.anchors.device)


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
    slots = torch.arange(block_size, device=input_ids.device)
    label_positions = anchors[..., None] + 1 + slots  # [B, N, K]
    inside = label_positions < length
    safe = label_positions.clamp(max=length - 1).view(rows, -1)
    in_response = response_mask.gather(1, safe).view_as(label_positions)
    inside &= starts.gather(1, safe).view_as(label_positions) == starts.gather(1, anchors)[..., None]
    supervised = (inside & in_response & keep[..., None]).int().cumprod(dim=-1).bool()
    labels = input_ids.gather(1, safe).view_as(label_positions)
    previous = torch.cat([input_ids.gather(1, anchors)[..., None], labels[..., :-1]], dim=-1)
    return Blocks(anchors, keep, previous, labels.masked_fill(~supervised, 0), supervised, starts)


def block_inputs(blocks: Blocks, input_ids: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """Block tokens `[B, N * K]`: the anchor, then mask tokens."""
    noise = torch.full_like(blocks.labels, mask_token_id)
    noise[..., 0] = torch.where(blocks.keep, input_ids.gather(1, blocks.anchors), mask_token_id)
    return noise.flatten(1)


def block_positions(blocks: Blocks, num_context: int) -> torch.Tensor:
    """Positions `[B, T + N * K]` of the context followed by all blocks."""
    context = torch.arange(num_context, device=blocks.anchors.device) - blocks.starts
    slots = blocks.label_sources - blocks.block_starts[..., None]
    return torch.cat([context, slots.flatten(1)], dim=1)


def block_mask(blocks: Blocks, num_context: int) -> torch.Tensor:
    """Mask `[B, 1, N * K, T + N * K]`: a block sees context of its conversation before its anchor, and
    itself.

    Dummy blocks see themselves too, so that no query has nothing to attend to; they are never supervised.
    """
    rows, num_blocks = blocks.anchors.shape
    block_size = blocks.labels.shape[-1]
    device = blocks.anchors.device
    owner = torch.arange(num_blocks, device=device).repeat_interleave(block_size)  # [N * K]
    anchors = blocks.anchors.gather(1, owner.expand(rows, -1))  # [B, N * K]
    starts = blocks.block_starts.gather(1, owner.expand(rows, -1))
    columns = torch.arange(num_context, device=device)
    context = (columns >= starts[..., None]) & (columns < anchors[..., None])
    own = (owner[:, None] == owner).expand(rows, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


__all__ = [
    "Blocks",
    "anchor_candidates",
    "block_inputs",
    "block_mask",
    "block_positions",
    "make_blocks",
    "sample_anchors",
]
