"""Target features for training: computed in the step, or once into a bounded cache on disk.

The cache is a folder of safetensors shards, each named after a hash of its conversations, the target and the tapped
layers: features of other data can share the folder, more conversations only add shards, and a shard that is there is
right. Shards are written atomically, so an interrupted run goes on where it was. The size is predicted and checked
before anything is written.

Shapes: `B` sequences, `T` tokens, `L` tapped layers, `D` hidden size.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from modeling_dspark.target_dspark import TargetBinding, tapped_features
from training.data import Conversation


@dataclass(frozen=True)
class TargetFeatures:
    """What training needs of the target for a batch.

    Attributes:
        features (`torch.Tensor` of shape `(B, T, L * D)`): Tapped hidden states.
        last_hidden (`torch.Tensor` of shape `(B, T, D)`): After the final norm.
        logsumexp (`torch.Tensor` of shape `(B, T)`): Of the target's logits over its whole vocabulary, in fp32.
    """

    features: torch.Tensor
    last_hidden: torch.Tensor
    logsumexp: torch.Tensor


def fingerprint(target: PreTrainedModel) -> str:
    """Identifies a target by some numbers of every parameter: another model at the same path is another target."""
    digest = hashlib.sha256()
    for name, parameter in target.named_parameters():
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
    needed: torch.Tensor,
    chunk_size: int = 512,
) -> TargetFeatures:
    """One forward of the frozen target over right-padded `input_ids` `[B, T]`.

    The log-sum-exp is computed at the `needed` positions `[B, T]` only (it costs a pass through the LM head).
    """
    # Padding sits on the right and attention is causal, so no mask is needed.
    outputs = target.base_model(input_ids=input_ids, output_hidden_states=True, use_cache=False)
    last = outputs.last_hidden_state
    logsumexp = torch.zeros(input_ids.shape, dtype=torch.float32, device=last.device)
    rows = last[needed]
    parts = [binding.target_logits(part).float().logsumexp(dim=-1) for part in rows.split(chunk_size)]
    if parts:
        logsumexp[needed] = torch.cat(parts)
    return TargetFeatures(tapped_features(outputs.hidden_states, target_layer_ids), last, logsumexp)


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


class FeatureCache:
    """Features of a list of conversations on disk.

    Args:
        folder (`str` or `Path`): Where the shards are.
        conversations (`Sequence[Conversation]`): What the cache is for.
        target_name (`str`): Part of a shard's identity.
        target_layer_ids (`Sequence[int]`): Tapped layers, part of a shard's identity.
        hidden_size (`int`): Of the target.
        shard_size (`int`, *optional*, defaults to `64`): Conversations a shard.
    """

    def __init__(
        self,
        folder: str | Path,
        conversations: Sequence[Conversation],
        *,
        target_name: str,
        target_layer_ids: Sequence[int],
        hidden_size: int,
        shard_size: int = 64,
    ):
        self.folder = Path(folder)
        self.conversations = conversations
        self.target_layer_ids = list(target_layer_ids)
        self.hidden_size = hidden_size
        self.shard_size = shard_size
        self._target_name = target_name
        self._open: dict[int, safe_open] = {}
        lengths = [len(conversation.input_ids) for conversation in conversations]
        self._offsets = [sum(lengths[i - i % shard_size : i]) for i in range(len(lengths))]

    @property
    def num_bytes(self) -> int:
        """Predicted size on disk."""
        tokens = sum(len(conversation.input_ids) for conversation in self.conversations)
        return tokens * (2 * self.hidden_size * (len(self.target_layer_ids) + 1) + 4)

    def build(self, target: PreTrainedModel, binding: TargetBinding, *, limit_gb: float) -> None:
        """Compute what is missing, with a progress bar.

        Raises:
            ValueError: if the cache would exceed `limit_gb`.
        """
        if self.num_bytes > limit_gb * 1e9:
            raise ValueError(
                f"The feature cache would take {self.num_bytes / 1e9:.1f} GB, more than `feature_cache_gb={limit_gb}`. "
                "Raise it, use fewer conversations (`max_conversations`), or leave out `feature_cache` to compute "
                "features in the step."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        num_shards = -(-len(self.conversations) // self.shard_size)
        for shard in tqdm(range(num_shards), desc=f"features ({self.num_bytes / 1e9:.1f} GB)", unit="shard"):
            if not self._path(shard).is_file():
                self._write(shard, target, binding)

    def load(self, index: int) -> TargetFeatures:
        """Features of one conversation, without a batch dimension."""
        shard, start = index // self.shard_size, self._offsets[index]
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self._path(shard), framework="pt")
            except SafetensorError as error:
                path = self._path(shard)
                raise ValueError(
                    f"The feature shard `{path}` is damaged ({error}); delete it and start again."
                ) from error
        part = slice(start, start + len(self.conversations[index].input_ids))
        tensors = {name: self._open[shard].get_slice(name)[part] for name in ("features", "last_hidden", "logsumexp")}
        return TargetFeatures(**tensors)

    @functools.cache  # noqa: B019 - the cache lives as long as training does
    def _path(self, shard: int) -> Path:
        digest = hashlib.sha256(json.dumps([self._target_name, self.target_layer_ids]).encode())
        for conversation in self.conversations[shard * self.shard_size : (shard + 1) * self.shard_size]:
            spans = conversation.response_spans
            content = (conversation.input_ids, conversation.response_start, *([spans] if spans else []))
            digest.update(str(content).encode())
        return self.folder / f"features-{digest.hexdigest()[:16]}.safetensors"

    def _write(self, shard: int, target: PreTrainedModel, binding: TargetBinding, batch_size: int = 16) -> None:
        start = shard * self.shard_size
        conversations = self.conversations[start : start + self.shard_size]
        order = sorted(range(len(conversations)), key=lambda index: len(conversations[index].input_ids))
        rows: dict[int, TargetFeatures] = {}
        for begin in range(0, len(order), batch_size):
            indices = order[begin : begin + batch_size]
            input_ids, response_mask = pad_ids([conversations[index] for index in indices])
            batch = compute_features(
                target,
                binding,
                input_ids.to(target.device),
                target_layer_ids=self.target_layer_ids,
                needed=response_mask.to(target.device),
            )
            for row, index in enumerate(indices):
                length = len(conversations[index].input_ids)
                rows[index] = TargetFeatures(
                    batch.features[row, :length].to("cpu", torch.bfloat16),
                    batch.last_hidden[row, :length].to("cpu", torch.bfloat16),
                    batch.logsumexp[row, :length].cpu(),
                )
        tensors = {
            name: torch.cat([getattr(rows[index], name) for index in range(len(rows))]).contiguous()
            for name in ("features", "last_hidden", "logsumexp")
        }
        scratch = self._path(shard).with_suffix(".partial")
        save_file(tensors, scratch)
        scratch.replace(self._path(shard))


__all__ = ["FeatureCache", "TargetFeatures", "compute_features", "fingerprint", "pad_ids"]
