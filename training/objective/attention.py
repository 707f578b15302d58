"""Attention for packed training blocks, chunk by chunk: the same result as one dense masked call, for less work.

Blocks are sorted by anchor, so a chunk of blocks reads the context only from the start of its first conversation up to
its last anchor, and of all block keys only its own. Registered with Transformers as the attention implementation
`dspark_chunked`.

Shapes: `B` sequences, `H` heads, `Q` block positions, `C` context positions, `d` head size.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


CHUNKED_ATTENTION = "dspark_chunked"
_BLOCKS_PER_CHUNK = 16


def chunked_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA over chunks of whole blocks.

    Args:
        module (`torch.nn.Module`): The attention module; its config gives the block size.
        query (`torch.Tensor` of shape `(B, H, Q, d)`): Of the block positions.
        key (`torch.Tensor` of shape `(B, Hkv, C + Q, d)`): Of the context and the block positions.
        value (`torch.Tensor` of shape `(B, Hkv, C + Q, d)`): Like `key`.
        attention_mask (`torch.BoolTensor` of shape `(B, 1, Q, C + Q)`): From `training.data.blocks.block_mask`.
        kwargs: As for Transformers' SDPA.

    Returns:
        `tuple`: the output `[B, Q, H, d]`, and `None`.
    """
    num_queries = query.shape[2]
    num_context = key.shape[2] - num_queries
    chunk = _BLOCKS_PER_CHUNK * module.config.num_block_positions
    outputs = []
    for start in range(0, num_queries, chunk):
        end = min(start + chunk, num_queries)
        read = attention_mask[:, 0, start:end, :num_context].any(dim=1).any(dim=0).nonzero()
        visible = slice(int(read[0]), int(read[-1]) + 1) if read.numel() else slice(0, 0)
        own = slice(num_context + start, num_context + end)
        output, _ = sdpa_attention_forward(
            module,
            query[:, :, start:end],
            torch.cat([key[:, :, visible], key[:, :, own]], dim=2),
            torch.cat([value[:, :, visible], value[:, :, own]], dim=2),
            torch.cat([attention_mask[:, :, start:end, visible], attention_mask[:, :, start:end, own]], dim=-1),
            **kwargs,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(CHUNKED_ATTENTION, chunked_attention)

__all__ = ["CHUNKED_ATTENTION", "chunked_attention"]
