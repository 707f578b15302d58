"""The draft backbone's layers: block queries that attend to the projected context and to their own block.

In each layer keys and values are the projections of the context (the fused target features, which no layer changes)
followed by those of the block; queries come from the block only, and attention inside the block is not causal.
The configuration holds the differences between families (Gemma 4's norms, values and scale). This file is independent
of anchors, tokens, heads and losses.

Shapes: `R` rows, `C` context positions, `Q` block positions (`K` when decoding, many packed blocks when training),
`D` hidden size, `d` head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import logging

from .configuration_dspark import DSparkConfig
from .model_cache import DSparkCache


logger = logging.get_logger(__name__)


class DSparkRMSNorm(Qwen3RMSNorm):
    """RMS norm with a learned scale."""


class DSparkRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary embedding whose inverse frequencies stay in fp32 when the model is cast."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "DSparkRotaryEmbedding":
        exact = {name: buffer for name, buffer in self.named_buffers(recurse=False) if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            cast = getattr(self, name)
            if cast.dtype != buffer.dtype:
                setattr(self, name, buffer.to(cast.device))
        return self


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings `cos`, `sin` `[R, N, d]` to `states` `[R, N, heads, d]`."""
    return states * cos.unsqueeze(2) + rotate_half(states) * sin.unsqueeze(2)


class DSparkAttention(nn.Module):
    """Attention from the block to the context and the block."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        head_dim: int = config.head_dim  # type: ignore[assignment]  # filled in by the config
        num_kv_heads: int = config.num_key_value_heads  # type: ignore[assignment]  # filled in by the config
        self.head_dim = head_dim
        self.num_key_value_groups = config.num_attention_heads // num_kv_heads
        self.scaling = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.is_causal = False
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, size, bias=bias)
        self.q_norm = DSparkRMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = DSparkRMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: DSparkCache | None,
    ) -> torch.Tensor:
        num_rows, num_queries = hidden_states.shape[:2]
        cos, sin = position_embeddings
        sources = torch.cat([context, hidden_states], dim=1)
        queries = self.queries(hidden_states, (cos[:, -num_queries:], sin[:, -num_queries:]))
        keys, values = self.keys_and_values(sources, position_embeddings)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        implementation = attention_for(self.config._attn_implementation, attention_mask)
        if cache is not None and implementation == "sdpa":
            return self.o_proj(self._attend_folded(queries, keys, values, attention_mask).flatten(2))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, _ = attend(
            self,
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        return self.o_proj(output.reshape(num_rows, num_queries, -1))

    def queries(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Normed and rotated queries `[R, Q, G * H, d]` of `hidden_states` `[R, Q, D]`."""
        return rotate(self.q_norm(self._heads(self.q_proj(hidden_states))), *position_embeddings)

    def keys_and_values(
        self, sources: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed and rotated keys, and values, `[R, N, H, d]` each, of `sources` `[R, N, D]`."""
        keys = self._heads(self.k_proj(sources))
        values = keys if self.v_proj is None else self._heads(self.v_proj(sources))
        if self.config.value_norm:
            values = nn.functional.rms_norm(values, values.shape[-1:], eps=self.config.rms_norm_eps)
        return rotate(self.k_norm(keys), *position_embeddings), values

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def _attend_folded(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """SDPA of a decoded block: all its queries may read the same positions, so no key is repeated."""
        folded = fold_heads(queries, keys.shape[2])
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :1].expand(-1, -1, folded.shape[2], -1)
        output = nn.functional.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=attention_mask, scale=self.scaling
        )
        return unfold_heads(output, self.num_key_value_groups)

    def extend_context(
        self,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *,
        cache: DSparkCache,
        row: int,
    ) -> None:
        """Write keys and values of context `[1, C, D]` to one row of the cache, without any query."""
        keys, values = self.keys_and_values(context, position_embeddings)
        cache.extend(keys[0], values[0], self.layer_idx, row=row)


def fold_heads(queries: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[R, Q, G * H, d]` to `[R, H, G * Q, d]`: the queries of all heads that share a key/value head, in one matrix."""
    split = queries.unflatten(2, (num_heads, -1))  # [R, Q, H, G, d]
    return split.permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold_heads(output: torch.Tensor, groups: int) -> torch.Tensor:
    """`[R, H, G * Q, d]` to `[R, Q, G * H, d]`."""
    return output.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each with a norm before it, or one before and one after; the context stays
    unchanged."""

    layer_scalar: torch.Tensor

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.layer_scalar:
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: DSparkCache | None,
    ) -> torch.Tensor:
        attended = self.self_attn(
            self.input_layernorm(hidden_states),
            context,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
        )
        return self.after_attention(hidden_states, attended)

    def after_attention(self, hidden_states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: residuals `[R, Q, D]` and the attention's output of the same shape to the layer's."""
        if self.config.sandwich_norms:
            hidden_states = hidden_states + self.post_attention_layernorm(attended)
            output = self.mlp(self.pre_feedforward_layernorm(hidden_states))
            hidden_states = hidden_states + self.post_feedforward_layernorm(output)
        else:  # `post_attention_layernorm` then comes before the feed-forward
            hidden_states = hidden_states + attended
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        # In mixed precision, the buffer may be wider than the states.
        return hidden_states * self.layer_scalar.to(hidden_states.dtype) if self.config.layer_scalar else hidden_states


def attention_bias(mask: Any, implementation: str, dtype: torch.dtype) -> Any:
    """Turn a boolean mask (`True` = may be read) into what the attention implementation takes.

    Eager and flex attention add a tensor to the scores; flex also takes a `BlockMask`, which passes unchanged.
    """
    if implementation not in ("eager", "flex_attention") or not _is_boolean(mask):
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def attention_for(implementation: str, mask: Any) -> str:
    """The implementation to use with `mask`: flash attention has no arbitrary masks, so ragged rows go to SDPA."""
    if mask is None or not implementation.startswith("flash_attention"):
        return implementation
    logger.warning_once(
        "Flash attention takes no mask for rows whose contexts differ in length, so the drafter uses `sdpa` for them."
    )
    return "sdpa"


def _is_boolean(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.bool


__all__ = [
    "DSparkAttention",
    "DSparkDecoderLayer",
    "DSparkRMSNorm",
    "DSparkRotaryEmbedding",
    "attention_bias",
    "attention_for",
    "fold_heads",
    "unfold_heads",
]
