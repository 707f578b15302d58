"""The formats of published DSpark drafters as a table: how to recognize each, and where it has our fields.

A format is recognized by its fields and tensors, never by the name of an architecture alone. Nothing is read here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modeling_dspark.configuration_dspark import GEMMA4_TRAITS, DSparkConfig


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LAYER_FIELDS = (
    *SIZES,
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "rope_parameters", "attention_bias", "attention_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
HEAD_FIELDS = (
    *("mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    "draft_vocab_size",
)
# Fields of this project alone. Other formats carry them too, and their readers ignore them.
OWN_FIELDS = (
    *("num_target_layers", "target_name_or_path", "chat_template_sha256", "confidence_temperatures"),
    *("default_num_assistant_tokens", "default_assistant_confidence_threshold"),
    "default_num_assistant_tokens_schedule",
)
COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target's
DROPPED = (*COPIES, "t2d")  # `t2d` repeats `d2t`
# Traits of drafters in several formats that no tensor reveals: causal blocks, attention sinks, rotary embeddings of
# neighboring dimensions, blocks conditioned on their noise level.
_TRAITS = {
    **dict.fromkeys(("dflash_query_causal", "is_causal", "attention_sink_bias", "log_snr_conditioning"), (False,)),
    "rope_is_neox_style": (True,),
}


@dataclass(frozen=True)
class Format:
    """A format. Places are dotted paths into its `config.json`.

    Attributes:
        name (`str`): For messages.
        required (`tuple[str, ...]`): Places that must be there.
        sign (`str`): A place that distinguishes the format from those after it in the table; empty for the last.
        values (`tuple`): Allowed values at the sign; empty means any.
        tensors (`tuple[str, ...]`): Prefixes of names; if any are given, some tensor must have one.
        layers (`str`): Place of the fields of the backbone.
        heads (`str`): Place of the fields of the heads; fields that are missing there are at the top.
        places (`dict[str, tuple[str, ...]]`): Places of our fields that have another name; the first that exists counts.
        layer_shift (`int`): Added to the ids of tapped layers.
        anchor_position (`bool` or `str`): Whether the anchor's position drafts, or the place that says so (if it is empty: no).
        fixed (`dict`): Our fields with the same value for all drafters of the format.
        neutral (`dict[str, tuple]`): Places of unsupported traits, with the values that mean their absence.
        known (`tuple[str, ...]`): If not empty: all allowed names at `heads`.
        renames (`dict[str, str]`): Regular expressions for names of tensors, and their replacements.
        architectures (`tuple[str, ...]`): If not empty: `architectures`, if given, must name one of these.
    """

    name: str
    required: tuple[str, ...]
    sign: str = ""
    values: tuple = ()
    tensors: tuple[str, ...] = ()
    layers: str = ""
    heads: str = ""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_shift: int = 0
    anchor_position: bool | str = True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()

    def matches(self, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
        """Whether a config and the names of its tensors have this format."""
        value = look_up(raw, self.sign) if self.sign else None
        if self.sign and (value is None or (self.values and value not in self.values)):
            return False
        return not self.tensors or any(name.startswith(self.tensors) for name in tensors)

    def place(self, name: str) -> str:
        """The place to write a field of ours to."""
        return self._places(name)[0]

    def _places(self, name: str) -> tuple[str, ...]:
        prefix = self.layers if name in LAYER_FIELDS else self.heads
        return self.places.get(name, (f"{prefix}.{name}" if prefix else name, name))

    def read(self, raw: Mapping[str, Any], name: str) -> Any:
        """The value of a field of ours, or `None`."""
        places = self._places(name)
        return next((value for place in places if (value := look_up(raw, place)) is not None), None)

    def rename(self, name: str) -> str:
        """Our name of a tensor."""
        for pattern, ours in self.renames.items():
            name = re.sub(pattern, ours, name)
        return name


SPECULATORS = Format(
    "speculators",
    required=("transformer_layer_config", "aux_hidden_state_layer_ids", "block_size", "mask_token_id"),
    sign="speculators_model_type",
    layers="transformer_layer_config",
    places={
        "target_layer_ids": ("aux_hidden_state_layer_ids",),
        "target_name_or_path": ("target_name_or_path", "speculators_config.verifier.name_or_path"),
    },
    layer_shift=-1,
    anchor_position="sample_from_anchor",
    neutral={**_TRAITS, "speculators_model_type": ("dspark", "dflash")},
)
_NESTED = Format(
    "DFlash",
    required=("dflash_config.target_layer_ids", "dflash_config.mask_token_id"),
    sign="dflash_config",
    heads="dflash_config",
    places={
        "block_size": ("block_size", "dflash_config.block_size"),
        "enable_confidence_head": (
            *("dflash_config.enable_confidence_head", "dflash_config.use_confidence_head", "enable_confidence_head"),
        ),
    },
    neutral={
        **_TRAITS,
        **dict.fromkeys(("dflash_config.causal", "dflash_config.use_swa"), (False,)),
        "dflash_config.attention_sink_bias": (False,),
        **dict.fromkeys(("dflash_config.input_embedding_scale", "dflash_config.output_multiplier"), (1.0,)),
        "dflash_config.attention_mode": ("gqa",),
    },
    known=(
        *(*HEAD_FIELDS, "target_layer_ids", "block_size", "use_confidence_head", "projector_type", "shift_label"),
        *("causal", "attention_mode", "use_swa", "attention_sink_bias", "input_embedding_scale", "output_multiplier"),
        *("confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma", "num_anchors"),  # training
    ),
)
MODEL_OPTIMIZER = replace(
    _NESTED,
    name="Model-Optimizer",
    tensors=("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.", "confidence_proj."),
    neutral={**_NESTED.neutral, "dflash_config.shift_label": (True,)},
    renames={
        r"^(markov_w1|markov_w2|gate_proj|joint_proj)\.": r"markov_head.\1.",
        r"^confidence_proj\.": "confidence_head.proj.",
    },
)
SPECFORGE = replace(
    _NESTED,
    name="SpecForge",
    tensors=("markov_head.", "logit_head.", "confidence_head."),
    renames={r"^logit_head\.": "markov_head."},
)
SPECFORGE_WITHOUT_HEADS = replace(_NESTED, name="SpecForge", sign="dflash_config.projector_type", values=("dspark",))
DFLASH = replace(
    _NESTED,
    anchor_position="dflash_config.shift_label",
    neutral={**_NESTED.neutral, "dflash_config.projector_type": ("dflash",)},
)
DEEPSPEC = Format(
    "DeepSpec",
    required=("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "num_target_layers"),
    neutral={**_TRAITS, "sample_from_anchor": (True,)},
    architectures=("Qwen3DSparkModel",),
)
# All layers of a drafter for Gemma 4 are like the target's layers with full attention.
_GEMMA4 = replace(
    DEEPSPEC,
    name="DeepSpec (Gemma 4)",
    required=(
        *(*DEEPSPEC.required, "attention_k_eq_v", "global_head_dim", "hidden_activation", "rope_parameters"),
        "num_key_value_heads",
    ),
    sign="model_type",
    values=("gemma4_text", "gemma4_unified_text"),
    places={
        "head_dim": ("global_head_dim",),
        "hidden_act": ("hidden_activation",),
        "rope_parameters": ("rope_parameters.full_attention", "rope_parameters"),
    },
    fixed={**GEMMA4_TRAITS, "attention_k_eq_v": False},
    neutral={
        **DEEPSPEC.neutral,
        **dict.fromkeys(("enable_moe_block", "use_double_wide_mlp"), (False,)),
        "hidden_size_per_layer_input": (0,),
    },
    architectures=("Gemma4DSparkModel",),
)
_GEMMA4_KEYS_AS_VALUES = replace(
    _GEMMA4,
    required=(*_GEMMA4.required[:-1], "num_global_key_value_heads"),
    sign="attention_k_eq_v",
    values=(True,),
    places={**_GEMMA4.places, "num_key_value_heads": ("num_global_key_value_heads",)},
    fixed={**GEMMA4_TRAITS, "attention_k_eq_v": True},
)
DEEPSPEC_ROWS = (_GEMMA4_KEYS_AS_VALUES, _GEMMA4, DEEPSPEC)
FORMATS = (
    SPECULATORS,
    MODEL_OPTIMIZER,
    SPECFORGE,
    SPECFORGE_WITHOUT_HEADS,
    DFLASH,
    *DEEPSPEC_ROWS,
)  # the first that fits


def look_up(raw: Mapping[str, Any], place: str) -> Any:
    """The value at a dotted path, or `None`."""
    value: Any = raw
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def detect(
    raw: Mapping[str, Any], tensors: Mapping[str, Any], source: str, own: str = DSparkConfig.model_type
) -> Format | None:
    """The format of a checkpoint, or `None` for this project's own.

    Args:
        raw (`dict`): The content of its `config.json`.
        tensors (`dict`): Its tensors by name.
        source (`str`): Where the checkpoint came from, for messages.
        own (`str`, *optional*, defaults to `"dspark"`): `model_type` of this project's format.

    Raises:
        ValueError: if it is not a DSpark drafter.
    """
    # An early format of SpecForge has our `model_type`.
    if raw.get("model_type") == own and "dflash_config" not in raw:
        return None
    kind = next(kind for kind in FORMATS if kind.matches(raw, tensors))
    places = (*kind.required, *(f"{kind.layers}.{name}" if kind.layers else name for name in SIZES))
    missing = [place for place in places if look_up(raw, place) is None]
    if kind.read(raw, "block_size") is None:
        missing = sorted({*missing, "block_size"})
    if missing:
        raise ValueError(
            f"`{source}` is not a DSpark drafter: its config is of type {raw.get('model_type')!r} "
            f"(architectures {raw.get('architectures')}) and, read as {kind.name}'s, lacks {missing}."
        )
    return kind


__all__ = [
    "COPIES",
    "DEEPSPEC_ROWS",
    "DROPPED",
    "FORMATS",
    "HEAD_FIELDS",
    "LAYER_FIELDS",
    "OWN_FIELDS",
    "SIZES",
    "SPECULATORS",
    "Format",
    "detect",
    "look_up",
]
