"""A new drafter for a target: its configuration, its draft vocabulary, and a warm start from late target layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.configuration_dspark import BACKBONE_TRAITS, GEMMA4_TRAITS
from training.common.targets import chat_template_hash


_GEMMA4 = ("gemma4_text", "gemma4_unified_text")


def default_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """`num_taps` layers spread evenly from layer 1 to the last one that can be tapped."""
    last = num_target_layers - 2
    if not 1 <= num_taps <= last + 1:
        raise ValueError(f"A target of {num_target_layers} layers has {last + 1} layers to tap, got {num_taps} taps.")
    first = min(1, last)
    step = (last - first) / max(num_taps - 1, 1)
    return sorted({round(first + step * tap) for tap in range(num_taps)} if num_taps > 1 else {last})


def config_for_target(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    target_name: str,
    *,
    config_class: type[DSparkConfig] = DSparkConfig,
    **choices: Any,
) -> DSparkConfig:
    """Configuration of a drafter with the target's sizes, and for Gemma 4 the traits of its layers.

    `choices` are fields of `config_class` and win.
    """
    text = target.config.get_text_config()
    layer = _global_layer(text)
    fields = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    fields |= {name: getattr(layer, name) for name in ("intermediate_size", "num_key_value_heads")}
    fields |= {
        name: getattr(text, name)
        for name in ("max_position_embeddings", "rope_parameters", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    fields["rope_parameters"] = _global_rope(fields["rope_parameters"])
    fields["head_dim"] = getattr(layer, "head_dim", None) or text.hidden_size // text.num_attention_heads
    fields["rms_norm_eps"] = getattr(text, "rms_norm_eps", 1e-6)
    fields["num_target_layers"] = text.num_hidden_layers
    fields["target_name_or_path"] = target_name
    fields["chat_template_sha256"] = chat_template_hash(tokenizer) if tokenizer is not None else None
    return config_class(**(fields | _traits(text) | choices))


def _global_layer(text_config: Any) -> Any:
    """Config of the full-attention layers, like the drafter's, where each kind of layer has its own heads (Gemma 4)."""
    return text_config.per_layer_config["full_attention"] if text_config.is_heterogeneous else text_config


def _traits(text_config: Any) -> dict[str, Any]:
    """Traits of the target family's layers that a drafter shares: those of Gemma 4, as in DeepSpec's drafters for it."""
    if text_config.model_type not in _GEMMA4:
        return {}
    return GEMMA4_TRAITS | {
        "hidden_act": text_config.hidden_activation,
        "attention_k_eq_v": text_config.attention_k_eq_v,
    }


def _global_rope(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of the full-attention layers, like the drafter's, where each kind of layer has its own."""
    return rope_parameters.get("full_attention", rope_parameters)


@torch.no_grad()
def warm_start(drafter: DSparkModel, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
    """Copy late target layers into the draft layers, and give them the context that they had in the target.

    The fusion starts as the identity on the last tapped layer, and the context norm as the input norm of the first
    copied layer, so that keys and values of the context start as the target's own. An architecture with other inputs
    (the autoregressive baseline) starts them itself.

    Raises:
        ValueError: unless there is one target layer per draft layer, of the same shapes and traits.
    """
    base: Any = target.get_decoder()
    layers = base.layers
    inside = all(0 <= layer_id < len(layers) for layer_id in layer_ids)
    if len(layer_ids) != drafter.config.num_hidden_layers or not inside:
        raise ValueError(
            f"`init_from_target_layers` needs {drafter.config.num_hidden_layers} ids in [0, {len(layers)}), "
            f"got {list(layer_ids)}."
        )
    sources = [_layer_state(layers[layer_id]) for layer_id in layer_ids]
    for layer_id, source in zip(layer_ids, sources, strict=True):
        _check_traits(drafter, layers[layer_id], layer_id, target)
        own = drafter.layers[0].state_dict()
        mismatched = [n for n in own if n in source and source[n].shape != own[n].shape]
        if mismatched:
            raise ValueError(f"Target layer {layer_id} has other shapes than a draft layer: {mismatched}.")
    for layer, source in zip(drafter.layers, sources, strict=True):
        layer.load_state_dict({name: source.get(name, weight) for name, weight in layer.state_dict().items()})
    size = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:] = torch.eye(size)
    if drafter.config.model_type == DSparkConfig.model_type:
        drafter.hidden_norm.weight.copy_(_norm_scale(layers[layer_ids[0]].input_layernorm))
    else:
        drafter.start_inputs()  # type: ignore[operator]  # an architecture with inputs of its own starts them itself
    drafter.norm.weight.copy_(_norm_scale(base.norm))


def _check_traits(drafter: DSparkModel, source: Any, layer_id: int, target: PreTrainedModel) -> None:
    """Refuse to copy weights that a draft layer would use differently."""
    text, attention = target.config.get_text_config(), source.self_attn
    drafts = {name: getattr(drafter.config, name) for name in BACKBONE_TRAITS}
    drafts["attention_scale"] = drafter.layers[0].self_attn.scaling  # type: ignore[union-attr]  # of a decoder layer
    targets = {
        "hidden_act": getattr(text, "hidden_activation", None) or text.hidden_act,
        "attention_scale": attention.scaling,
        "attention_k_eq_v": getattr(attention, "v_proj", attention) is None,
        "value_norm": hasattr(attention, "v_norm"),
        "sandwich_norms": hasattr(source, "pre_feedforward_layernorm"),
        "layer_scalar": hasattr(source, "layer_scalar"),
    }
    different = {name: (targets[name], value) for name, value in drafts.items() if targets[name] != value}
    if different:
        raise ValueError(
            f"`init_from_target_layers`: target layer {layer_id} has other traits than a draft layer (target's, drafter's): "
            f"{different}. Choose other layers, give the drafter the target's values, or leave out the warm start."
        )


def _layer_state(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of a target layer, with the scales of its norms as the drafter's norms apply them."""
    norms = {
        f"{name}.weight": _norm_scale(norm) for name, norm in layer.named_modules() if _is_scaled_norm(name, norm)
    }
    return layer.state_dict() | norms


def _is_scaled_norm(name: str, module: nn.Module) -> bool:
    return name.endswith("norm") and getattr(module, "weight", None) is not None


def _norm_scale(norm: nn.Module) -> torch.Tensor:
    """The factors of an RMS norm: its weight, or in Gemma 1 to 3 its weight plus one."""
    weight: torch.Tensor = norm.weight  # type: ignore[assignment]  # of a norm with a scale
    return weight + (norm(torch.ones_like(weight)) - weight).mean().round().clamp(min=0)


@torch.no_grad()
def start_markov_embedding(drafter: DSparkModel, target: PreTrainedModel) -> None:
    """Start `W1` from the principal components of the target's embedding, scaled to unit variance.

    Similar tokens start with similar rows, and rows that training seldom meets are not noise.
    """
    if drafter.markov_head is None:
        return
    module: Any = target.get_input_embeddings()
    embedding = module.weight.detach().float()[: drafter.config.vocab_size]
    embedding = embedding - embedding.mean(dim=0)
    rank = min(drafter.config.markov_rank, embedding.shape[1])
    _, vectors = torch.linalg.eigh(embedding.T @ embedding)
    components = embedding @ vectors[:, -rank:].flip(1)
    drafter.markov_head.markov_w1.weight[:, :rank] = components / components.std(dim=0).clamp(min=1e-6)


def set_draft_vocabulary(drafter: DSparkModel, token_ids: torch.Tensor) -> None:
    """Store a reduced draft vocabulary: `d2t[draft] = target - draft`."""
    drafter.d2t.copy_(token_ids - torch.arange(token_ids.shape[0]))


__all__ = ["config_for_target", "default_layer_ids", "set_draft_vocabulary", "start_markov_embedding", "warm_start"]
