"""Read a drafter's checkpoint strictly: this project's format and DeepSpec's, as published.

A missing, unexpected or mis-shaped tensor is an error that lists it; nothing is left at random values. The copies of the
target's embedding and LM head that DeepSpec ships are dropped, since they are borrowed from the target.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from .configuration_dspark import GEMMA4_TRAITS, DSparkConfig


_GEMMA4 = "Gemma4DSparkModel"
_DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel", _GEMMA4)
_DEEPSPEC_MARKS = ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "num_target_layers")
_DEEPSPEC_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "attention_dropout", "dtype", "torch_dtype"),
    *("block_size", "target_layer_ids", "num_target_layers", "mask_token_id", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov", "pad_token_id", "bos_token_id", "eos_token_id"),
)
_GEMMA4_MARKS = ("attention_k_eq_v", "global_head_dim", "hidden_activation", "rope_parameters")
_GEMMA4_UNSUPPORTED = ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp")
_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_checkpoint(
    load: Callable[..., Any], model_class: Any, name_or_path: Any, *model_args: Any, **kwargs: Any
) -> Any:
    """Call `load` (Transformers' `from_pretrained`) and refuse anything but a complete drafter.

    Raises:
        ValueError: if the folder holds another model, a DeepSpec field is missing, a file is corrupt, or a tensor is
            missing, unexpected or mis-shaped.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    if kwargs.get("config") is None and name_or_path is not None:
        raw = _read_config(name_or_path, {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs})
        if raw.get("model_type") != model_class.config_class.model_type:
            kwargs["config"] = config_from_deepspec(raw, str(name_or_path), model_class.config_class)
    kwargs["ignore_mismatched_sizes"] = True  # reported below, together with the rest
    try:
        model, info = load(name_or_path, *model_args, output_loading_info=True, **kwargs)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # safetensors is not among the imports remote code may have
            raise
        raise ValueError(
            f"A weight file of `{name_or_path}` is corrupt or truncated ({error}). Download or copy it again."
        ) from error
    _refuse_incomplete(info, str(name_or_path))
    _check_draft_vocabulary(model, str(name_or_path))
    return (model, info) if wants_info else model


def config_from_deepspec(raw: dict[str, Any], source: str, config_class: type = DSparkConfig) -> DSparkConfig:
    """Configuration of a DeepSpec checkpoint (a flat copy of the target's, with DSpark's fields).

    Args:
        raw (`dict`): The content of its `config.json`.
        source (`str`): Where it came from, for messages.
        config_class (`type`, *optional*, defaults to [`DSparkConfig`]): Class to make.

    Raises:
        ValueError: if `raw` is not a DeepSpec drafter, or one with traits that are not supported.
    """
    missing = [name for name in _DEEPSPEC_MARKS if name not in raw]
    if missing:
        raise ValueError(
            f"`{source}` is not a DSpark drafter: its config is of type {raw.get('model_type')!r} "
            f"(architectures {raw.get('architectures')}) and lacks {missing}."
        )
    architectures = raw.get("architectures") or []
    if not set(architectures) & set(_DEEPSPEC_ARCHITECTURES):
        raise ValueError(
            f"`{source}` has architectures {architectures}; of the DeepSpec drafters, {_DEEPSPEC_ARCHITECTURES} are read."
        )
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"`{source}` has layer types {sorted(layer_types)}; only `full_attention` is supported.")
    fields = {name: raw[name] for name in _DEEPSPEC_FIELDS if raw.get(name) is not None}
    if _GEMMA4 in architectures:
        fields |= _gemma4_fields(raw, source)
    if fields["markov_rank"] == 0:
        fields |= {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    return config_class(**fields)


def _gemma4_fields(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """What a DeepSpec drafter for Gemma 4 has otherwise: its layers are all like the target's full-attention layers."""
    if used := {name: raw[name] for name in _GEMMA4_UNSUPPORTED if raw.get(name)}:
        raise ValueError(
            f"`{source}` has {', '.join(f'{name}={value!r}' for name, value in used.items())}; drafters with experts, "
            "per-layer inputs or a double-wide feed-forward are not supported."
        )
    kv_heads = "num_global_key_value_heads" if raw.get("attention_k_eq_v") else "num_key_value_heads"
    if missing := [name for name in (*_GEMMA4_MARKS, kv_heads) if raw.get(name) is None]:
        raise ValueError(f"`{source}` is a {_GEMMA4}, and its config lacks {missing}.")
    return GEMMA4_TRAITS | {
        "attention_k_eq_v": raw["attention_k_eq_v"],
        "num_key_value_heads": raw[kv_heads],
        "head_dim": raw["global_head_dim"],
        "hidden_act": raw["hidden_activation"],
        "rope_parameters": raw["rope_parameters"].get("full_attention", raw["rope_parameters"]),
    }


def _read_config(name_or_path: Any, file_arguments: dict[str, Any]) -> dict[str, Any]:
    path: str = cached_file(  # type: ignore[assignment]  # raises where there is none
        name_or_path, "config.json", **file_arguments
    )
    if path is None:
        raise ValueError(f"`{name_or_path}` is not a drafter's folder: it has no config.json.")
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"The config.json of `{name_or_path}` is not JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"The config.json of `{name_or_path}` is not a JSON object.")
    return raw


def _refuse_incomplete(info: dict[str, Any], source: str) -> None:
    problems = []
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(name) or ())
        if keys:
            problems.append(f"{name.split('_')[0]}: {', '.join(keys)}")
    if problems:
        raise ValueError(f"The checkpoint `{source}` does not fit its configuration; {'; '.join(problems)}.")


def _check_draft_vocabulary(model: Any, source: str) -> None:
    ids = model.draft_token_ids
    if ids is None or ids.is_meta:
        return
    inside = bool(((ids >= 0) & (ids < model.config.vocab_size)).all())
    if not inside or ids.unique().numel() != ids.numel():
        raise ValueError(
            f"The checkpoint `{source}` has a `d2t` that does not map its draft vocabulary to distinct tokens in "
            f"[0, vocab_size = {model.config.vocab_size})."
        )


__all__ = ["config_from_deepspec", "load_checkpoint"]
