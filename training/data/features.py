"""Target features for training, computed in the step; `training.data.feature_cache` stores them on disk.

Shapes: `B` sequences, `T` tokens, `L` tapped layers, `D` hidden size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from modeling_dspark.target_binding import TargetBinding, hidden_states_argument, tapped_features
from training.data.conversations import Conversation


@dataclass(frozen=True)
class TargetFeatures:
    """The target's states that training on a batch needs.

    Attributes:
        features (`torch.Tensor` of shape `(B, T, L * D)`): Tapped hidden states.
        last_hidden (`torch.Tensor` of shape `(B, T, D)`): After the final norm.
        logsumexp (`torch.Tensor` of shape `(B, T)`, *optional*):
            Of the target's logits over its whole vocabulary, in fp32. `None`: the loss computes it with the logits.
    """

    features: torch.Tensor
    last_hidden: torch.Tensor
    logsumexp: torch.Tensor | None


def bytes_per_token(hidden_size: int, num_layers: int) -> int:
    """Size of a token on disk: tapped and last hidden states in bf16, and the log-sum-exp in fp32."""
    return 2 * hidden_size * (num_layers + 1) + 4


def fingerprint(model: PreTrainedModel) -> str:
    """Identifies a model by some numbers of every parameter, wherever it is stored."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)][:64]
        digest.update(name.encode() + sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def compute_features(
    target: PreTrainedModel,
    binding: TargetBinding,
    input_ids: torch.Tensor,
    *,
    target_layer_ids: Sequence[int],
    needed: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    chunk_size: int = 512,
) -> TargetFeatures:
    """One forward of the target over right-padded `input_ids` `[B, T]`.

    The log-sum-exp is computed at the `needed` positions `[B, T]`, if given (it costs a pass through the LM head). `starts`
    `[B, T]` says where the conversation of each token starts, if rows hold several (`training.data.packing`).
    """
    # Padding sits on the right and attention is causal, so no mask is needed. Where positions start again, Transformers
    # separates the packed conversations, if it is given neither a mask nor a cache.
    packed = {} if starts is None else {"position_ids": torch.arange(starts.shape[1], device=starts.device) - starts}
    tapped = hidden_states_argument(target_layer_ids)  # the others are dropped during the forward
    outputs = target.base_model(input_ids=input_ids, output_hidden_states=tapped, use_cache=False, **packed)
    last = outputs.last_hidden_state
    features = tapped_features(outputs.hidden_states, target_layer_ids)
    if needed is None:
        return TargetFeatures(features, last, None)
    logsumexp = torch.zeros(input_ids.shape, dtype=torch.float32, device=last.device)
    rows = last[needed]
    chunks = [binding.target_logits(chunk).float().logsumexp(dim=-1) for chunk in rows.split(chunk_size)]
    if chunks:
        logsumexp[needed] = torch.cat(chunks)
    return TargetFeatures(features, last, logsumexp)


def pad_ids(conversations: Sequence[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and response masks, `[B, T]` each."""
    width = max(len(conversation.input_ids) for conversation in conversations)
    input_ids = torch.zeros(len(conversations), width, dtype=torch.long)
    response_mask = torch.zeros(len(conversations), width, dtype=torch.bool)
    for row, conversation in enumerate(conversations):
        length = len(conversation.input_ids)
        input_ids[row, :length] = torch.tensor(conversation.input_ids)
        response_mask[row, :length] = conversation.response_mask
    return input_ids, response_mask


__all__ = ["TargetFeatures", "bytes_per_token", "compute_features", "fingerprint", "pad_ids"]
