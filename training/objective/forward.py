"""The training forward: all packed blocks through the backbone and, teacher-forced, through the heads.

The same `forward` and the same head steps as in decoding; only what is packed differs.

Shapes: `B` sequences, `T` tokens, `N` blocks, `K` positions, `n` supervised positions, `D` hidden size, `r` Markov rank.
"""

from dataclasses import dataclass

import torch

from modeling_dspark import DSparkModel
from modeling_dspark.draft_propose import state_before_draft
from modeling_dspark.target_binding import TargetBinding
from training.data.blocks import Blocks, block_inputs, block_mask, block_positions, flex_block_mask


@dataclass(frozen=True)
class BlockOutputs:
    """Backbone and head states of the supervised positions, in order: hidden `[n, D]`, latent `[n, r]`, confidence `[n]`."""

    hidden: torch.Tensor
    latent: torch.Tensor | None
    confidence_logits: torch.Tensor | None


def forward_blocks(
    drafter: DSparkModel,
    binding: TargetBinding,
    blocks: Blocks,
    *,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    wrapped: torch.nn.Module | None = None,
) -> BlockOutputs:
    """All packed blocks through the backbone and, teacher-forced, through the heads up to the vocabulary.

    A drafter that takes blocks itself (`forwards_blocks`) is called with them.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        binding ([`TargetBinding`]): What it borrows from the target.
        blocks ([`Blocks`]): Of the batch.
        input_ids (`torch.LongTensor` of shape `(B, T)`): Tokens of the sequences.
        features (`torch.Tensor` of shape `(B, T, L * D)`): Tapped hidden states.
        wrapped (`torch.nn.Module`, *optional*):
            The drafter as a distributed run wraps it. Gradients are exchanged only if its forward is what is called.
    """
    model = drafter if wrapped is None else wrapped  # `or` would ask a compiled model for its length
    if getattr(drafter, "forwards_blocks", False):
        return model(binding, blocks, input_ids=input_ids, features=features)
    num_context, num_positions = input_ids.shape[1], drafter.config.num_block_positions
    make_mask = flex_block_mask if drafter.config._attn_implementation == "flex_attention" else block_mask
    noise = block_inputs(blocks, input_ids, drafter.config.mask_token_id, num_positions)
    block = model(
        noise_embeds=binding.embed(noise, like=drafter.norm.weight),
        context_hidden_states=features.to(drafter.dtype),
        position_ids=block_positions(blocks, num_context, num_positions),
        attention_mask=make_mask(blocks, num_context, num_positions),
    ).last_hidden_state.unflatten(1, (-1, num_positions))
    hidden = block[:, :, -blocks.labels.shape[-1] :]
    selected = hidden[blocks.supervised]
    latent = previous = None
    head = drafter.markov_head
    if head is not None:
        embedded = head.embed(blocks.previous).to(hidden.dtype)
        latents, state = [], state_before_draft(drafter, block[:, :, 0], blocks.previous[:, :, 0])
        for position in range(hidden.shape[2]):
            step, state = head.step(embedded[:, :, position], hidden[:, :, position], state)
            latents.append(step)
        latent = torch.stack(latents, dim=2)[blocks.supervised]
        previous = embedded[blocks.supervised]
    confidence = None if drafter.confidence_head is None else drafter.confidence_head(selected, previous)
    return BlockOutputs(selected, latent, confidence)


__all__ = ["BlockOutputs", "forward_blocks"]
