"""An autoregressive drafter in the style of EAGLE-3, as a baseline: one decoder layer that runs once per draft token.

It reads what a DSpark drafter reads (fused target features) and the token after each of them, and feeds its own hidden
state back for the next draft. Training unrolls those steps ("training-time test"). With `block_size=1` it is a
multi-token-prediction module of one token. It is made for studies: it trains, can be replayed and drafts greedily for
one text, but `generate` does not take it.

Shapes: `B` sequences, `T` tokens, `N` blocks, `K` positions, `D` hidden size, `H` heads, `d` head size.
"""

from typing import Any

import torch
from torch import nn

from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.draft_tokens import argmax
from modeling_dspark.model_backbone import DSparkDecoderLayer, DSparkRMSNorm
from modeling_dspark.model_cache import RaggedCache
from modeling_dspark.target_binding import TargetBinding
from training.data.blocks import Blocks
from training.objective.forward import BlockOutputs


class EagleConfig(DSparkConfig):
    """Configuration of an [`EagleDrafter`]: one layer, no sequential head and no confidence head."""

    model_type = "dspark_eagle"
    _auto_class = None  # no remote code
    has_no_defaults_at_init = True  # the defaults of its base are refused

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.num_hidden_layers != 1 or self.markov_rank != 0 or self.enable_confidence_head:
            raise ValueError(
                "An autoregressive drafter has `num_hidden_layers=1`, `markov_rank=0` and `enable_confidence_head=False`, got "
                f"{self.num_hidden_layers}, {self.markov_rank} and {self.enable_confidence_head}."
            )


class EagleDrafter(DSparkModel):
    """A layer over pairs of (state at a position, embedding of the token after it).

    The state is `fc(features)` where the target has been, and the layer's own output after that.
    """

    config_class = EagleConfig
    forwards_blocks = True
    _auto_class = None

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        size = config.hidden_size
        self.embed_norm = DSparkRMSNorm(size, eps=config.rms_norm_eps)
        self.in_proj = nn.Linear(2 * size, size, bias=False)
        self.post_init()

    @torch.no_grad()
    def start_inputs(self) -> None:
        """Begin with the sum of both inputs, which a copied target layer knows better than a random mix."""
        identity = torch.eye(self.config.hidden_size)
        self.in_proj.weight.copy_(torch.cat([identity, identity], dim=1))

    def forward(  # type: ignore[override]  # takes blocks, where a DSpark drafter takes embeddings
        self, binding: TargetBinding, blocks: Blocks, *, input_ids: torch.Tensor, features: torch.Tensor
    ) -> BlockOutputs:
        """All blocks, position after position, with the true token before each position and the drafter's own states.

        Position `k` of a block at anchor `a` stands at position `a - 1 + k`; it reads positions before `a - 1`, and the positions
        before it.
        """
        layer: DSparkDecoderLayer = self.layers[0]  # type: ignore[assignment]  # of a module list
        states = self.fc(features.to(self.dtype))
        following = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))  # no position reads the end
        context = self._join(binding, following, states)
        start, columns = (blocks.anchors - 1).clamp(min=0), torch.arange(states.shape[1], device=states.device)
        keys, values = _keys_and_values(self, layer, context, columns - blocks.starts)
        visible = (columns < start[..., None]) & (columns >= blocks.block_starts[..., None])  # [B, N, T]
        place = start - blocks.block_starts  # within its conversation
        own = torch.eye(start.shape[1], dtype=torch.bool, device=start.device).expand(len(start), -1, -1)
        state = states.gather(1, start[..., None].expand(-1, -1, states.shape[-1]))
        hidden = []
        for position in range(blocks.labels.shape[-1]):
            inputs = self._join(binding, blocks.previous[..., position], state)
            new_keys, new_values = _keys_and_values(self, layer, inputs, place + position)
            keys, values = torch.cat([keys, new_keys], dim=1), torch.cat([values, new_values], dim=1)
            visible = torch.cat([visible, own], dim=-1)
            state = self._layer(layer, inputs, place + position, keys, values, visible)
            hidden.append(self.norm(state))
        return BlockOutputs(torch.stack(hidden, dim=2)[blocks.supervised], None, None)

    @torch.no_grad()
    def draft(
        self, binding: TargetBinding, cache: RaggedCache, tokens: torch.Tensor, features: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Greedy drafts `[1, num_tokens]` of one text, one after the other.

        Args:
            binding ([`TargetBinding`]): The target's embedding and LM head.
            cache ([`RaggedCache`]): One row, of all pairs before; advanced over the pairs of this call.
            tokens (`torch.LongTensor` of shape `(1, C)`): The token after each position that is new, the anchor last.
            features (`torch.Tensor` of shape `(1, C, L * D)`): Of those positions.
            num_tokens (`int`): Drafts to make.
        """
        layer: DSparkDecoderLayer = self.layers[0]  # type: ignore[assignment]  # of a module list
        place = cache.lengths[0]
        end = place + features.shape[1]
        cache.reserve(end + num_tokens)
        inputs, drafts = self._join(binding, tokens, self.fc(features.to(self.dtype))), []
        while True:
            new = slice(place, place + inputs.shape[1])
            positions = torch.arange(new.start, new.stop, device=inputs.device)[None]
            new_keys, new_values = _keys_and_values(self, layer, inputs, positions)
            keys, values = cache.buffers(0, new_keys, new_values)
            keys[:1, new], values[:1, new] = new_keys, new_values
            place = new.stop
            state = self._layer(layer, inputs[:, -1:], positions[:, -1:], keys[:1, :place], values[:1, :place], None)
            drafts.append(self.to_target_ids(argmax(binding.draft_logits(self.norm(state)[0])))[None])
            if len(drafts) == num_tokens:
                cache.lengths[0] = end
                return torch.cat(drafts, dim=1)
            inputs = self._join(binding, drafts[-1], state)

    def _join(self, binding: TargetBinding, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_norm(binding.embed(tokens, like=self.norm.weight))
        return self.in_proj(torch.cat([embedded, self.hidden_norm(states)], dim=-1))

    def _layer(
        self,
        layer: DSparkDecoderLayer,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        attention = layer.self_attn
        queries = attention.queries(layer.input_layernorm(inputs), self.rotary_emb(inputs, positions))
        output = nn.functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if visible is None else visible[:, None],
            scale=attention.scaling,
            enable_gqa=True,
        )
        return layer.after_attention(inputs, attention.o_proj(output.transpose(1, 2).flatten(2)))


def _keys_and_values(
    drafter: EagleDrafter, layer: DSparkDecoderLayer, inputs: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, P, H, d]` of inputs `[B, P, D]` at positions `[B, P]`."""
    return layer.self_attn.keys_and_values(layer.input_layernorm(inputs), drafter.rotary_emb(inputs, positions))


__all__ = ["EagleConfig", "EagleDrafter"]
