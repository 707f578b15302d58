"""What a drafter borrows from its target: features, embedding and LM head, by reference and at call time.

The target's modules are called, never copied or unwrapped, so tied weights, padded vocabularies, scaled embeddings,
`device_map` hooks and quantised layers work as they do in the target itself.

Shapes: `R` rows, `T` tokens, `L` tapped layers, `D` hidden size, `V` vocabulary, `Vd` draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .compat_transformers import selects_hidden_states
from .configuration_dspark import DSparkConfig


logger = logging.get_logger(__name__)


def hidden_state_indices(target_layer_ids: Sequence[int]) -> list[int]:
    """Entries of `hidden_states` that hold the tapped layers: `id + 1` (`-1` is the embedding output, entry 0)."""
    return [layer_id + 1 for layer_id in target_layer_ids]


def hidden_states_argument(target_layer_ids: Sequence[int]) -> bool | list[int]:
    """The value of `output_hidden_states` that returns the tapped states, and as few others as possible."""
    return hidden_state_indices(target_layer_ids) if selects_hidden_states() else True


def tapped_features(hidden_states: Sequence[torch.Tensor], target_layer_ids: Sequence[int]) -> torch.Tensor:
    """Concatenate the tapped hidden states, in list order: `[R, T, L * D]`; layers may sit on several devices."""
    tapped = [hidden_states[index] for index in hidden_state_indices(target_layer_ids)]
    if tapped[0].dim() != 3:
        raise ValueError(
            f"The target's hidden states have shape {tuple(tapped[0].shape)}; a DSpark drafter reads states of shape "
            "[rows, tokens, hidden size], so this target cannot be used."
        )
    return torch.cat([states.to(tapped[0].device) for states in tapped], dim=-1)


def input_device(target: PreTrainedModel) -> torch.device:
    """The device of the target's token ids (with a `device_map`, the device of its embedding)."""
    weight: torch.Tensor = target.get_input_embeddings().weight  # type: ignore[assignment]  # of an embedding
    return weight.device


def token_buckets(target: PreTrainedModel) -> Callable[[int], int]:
    """The next token count that the target runs efficiently, as a function of the count needed; never falling.

    On a CPU, oneDNN makes a kernel for each new token count in reduced precision, which takes 5 to 30 ms of a round. Few
    distinct counts avoid that; neighboring counts differ by a quarter at most.
    """
    prepares = input_device(target).type == "cpu" and target.dtype in (torch.bfloat16, torch.float16)
    return _few_counts if prepares else int


def _few_counts(count: int) -> int:
    step = 1 if count < 8 else 2 if count < 16 else 4 if count < 64 else 8
    return -(-count // step) * step


def check_target(target: PreTrainedModel, config: DSparkConfig) -> None:
    """Refuse a target that the drafter was not made for.

    Raises:
        TypeError: for something other than a model.
        ValueError: names the first field that differs, with both values.
    """
    if getattr(target, "config", None) is None:
        raise TypeError(f"`target` must be a causal language model of Transformers, got {type(target).__name__}.")
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"A DSpark drafter assists decoder-only targets; {type(target).__name__} is an encoder-decoder model."
        )
    if target.get_output_embeddings() is None or target.get_input_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no LM head or no input embedding for the drafter to borrow.")
    text = target.config.get_text_config()
    head, embedding = target.get_output_embeddings(), target.get_input_embeddings()
    pairs = {
        "hidden_size": (text.hidden_size, config.hidden_size),
        "embedding size": (getattr(embedding, "embedding_dim", config.hidden_size), config.hidden_size),
        "LM head input size": (getattr(head, "in_features", config.hidden_size), config.hidden_size),
        "vocab_size": (text.vocab_size, config.vocab_size),
        "num_hidden_layers": (text.num_hidden_layers, config.num_target_layers or text.num_hidden_layers),
    }
    for name, (actual, expected) in pairs.items():
        if actual != expected:
            trained_for = f" (trained for {config.target_name_or_path})" if config.target_name_or_path else ""
            raise ValueError(
                f"This drafter{trained_for} does not fit the target {type(target).__name__}: the target's `{name}` is "
                f"{actual}, the drafter expects {expected}. Load the drafter that was made for this target."
            )
    if max(hidden_state_indices(config.target_layer_ids)) >= text.num_hidden_layers:  # type: ignore[arg-type]
        raise ValueError(
            f"This drafter does not fit the target {type(target).__name__}: it taps the layers {config.target_layer_ids}, "
            f"and of the target's {text.num_hidden_layers} the last that can be tapped is {text.num_hidden_layers - 2}."
        )


class TargetBinding:
    """Embedding and LM head of one target, seen from one drafter.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target; checked with `check_target`.
        config ([`DSparkConfig`]): The drafter's configuration.
        draft_token_ids (`torch.LongTensor` of shape `(Vd,)`, *optional*):
            Target ids of a reduced draft vocabulary, whose LM head rows are taken once, here.

    Raises:
        ValueError: if the target does not fit the drafter.
    """

    def __init__(self, target: PreTrainedModel, config: DSparkConfig, draft_token_ids: torch.Tensor | None = None):
        check_target(target, config)
        self.target = target
        self.vocab_size = config.vocab_size
        self.embedding = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        text = target.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.scale = _logit_scale(text)
        self.draft_token_ids = draft_token_ids
        self._rows = _head_rows(self.lm_head, draft_token_ids)

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Input embeddings `[..., D]` as the target's first layer sees them, on the device and in the dtype of `like`."""
        weight = getattr(self.embedding, "weight", like)
        return self.embedding(token_ids.to(weight.device)).to(device=like.device, dtype=like.dtype)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `U` `[..., Vd]` of backbone outputs `[..., D]`, soft-capped as the target's are."""
        if self._rows is not None:
            weight, bias = self._rows
            logits = nn.functional.linear(hidden.to(device=weight.device, dtype=weight.dtype), weight, bias)
            return self._finish(logits).to(hidden.device)
        logits = self.target_logits(hidden)
        return logits if self.draft_token_ids is None else logits[..., self.draft_token_ids]

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits `[..., V]` of last hidden states `[..., D]` (after the final norm)."""
        weight = getattr(self.lm_head, "weight", hidden)
        logits = self.lm_head(hidden.to(device=weight.device, dtype=logits_dtype(self.lm_head, hidden.dtype)))
        # Embedding rows beyond the vocabulary (padding for tensor cores) do not stand for tokens.
        return self._finish(logits[..., : self.vocab_size]).to(hidden.device)

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def logits_dtype(lm_head: nn.Module, hidden_dtype: torch.dtype) -> torch.dtype:
    """The dtype an LM head computes in: that of its weight, or of the hidden states where the weight is quantised."""
    weight = getattr(lm_head, "weight", None)
    return weight.dtype if isinstance(weight, torch.Tensor) and weight.is_floating_point() else hidden_dtype


def _logit_scale(text_config: Any) -> float:
    """Factor some families apply to the LM head's output (Cohere and Falcon-H1 multiply, Granite divides)."""
    scale = getattr(text_config, "logit_scale", None) or getattr(text_config, "lm_head_multiplier", None) or 1.0
    scaling = getattr(text_config, "logits_scaling", None) or 1.0
    # HyperCLOVA X multiplies by the field that Granite divides by.
    return scale * scaling if text_config.model_type == "hyperclovax" else scale / scaling


def _head_rows(
    lm_head: nn.Module, draft_token_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The LM head's rows for a reduced draft vocabulary, or `None` where only the module itself may be used."""
    if draft_token_ids is None:
        return None
    weight = getattr(lm_head, "weight", None)
    if type(lm_head) is not nn.Linear or weight is None or weight.is_meta or not weight.is_floating_point():
        logger.warning_once(
            f"The target's LM head ({type(lm_head).__name__}) is quantised or off-loaded, so its rows for the reduced "
            "draft vocabulary cannot be taken; drafting uses the whole head and is slower."
        )
        return None
    ids = draft_token_ids.to(weight.device)
    bias = lm_head.bias.detach()[ids] if lm_head.bias is not None else None  # type: ignore[redundant-expr]
    return weight.detach()[ids], bias


__all__ = [
    "TargetBinding",
    "check_target",
    "hidden_state_indices",
    "hidden_states_argument",
    "input_device",
    "logits_dtype",
    "tapped_features",
    "token_buckets",
]
