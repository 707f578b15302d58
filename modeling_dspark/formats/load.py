"""Read a drafter's checkpoint strictly, in this project's format or one of `formats.table`.

Missing, unexpected and mis-shaped tensors are errors; no weight keeps a random value. Copies of the target's embedding and
LM head are dropped, since both are borrowed from the target.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import cached_file

from .table import COPIES, DROPPED, Format, detect
from .tensors import StoredTensor, stored_tensors
from .translate import to_config_fields, unsupported


def read_config(name_or_path: Any, **file_arguments: Any) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`.

    Raises:
        ValueError: if there is none, or it is not a JSON object.
    """
    path: str = cached_file(  # type: ignore[assignment]  # raises if there is none
        name_or_path, "config.json", **file_arguments
    )
    if path is None:
        raise ValueError(f"`{name_or_path}` is not a drafter's folder: it has no config.json.")
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"The config.json of `{name_or_path}` is not JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"The config.json of `{name_or_path}` is not a JSON object.")
    return raw


def config_from(
    kind: Format, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor], source: str, model_class: Any
) -> Any:
    """Our configuration of a checkpoint of another format, checked against its tensors.

    Args:
        kind ([`Format`]): Its format.
        raw (`dict`): The content of its `config.json`.
        tensors (`dict`): Its tensors by name.
        source (`str`): Where the checkpoint came from, for messages.
        model_class (`type`): [`DSparkModel`].

    Raises:
        ValueError: lists all problems.
    """
    problems: list[str] = []
    config = None
    try:
        problems += unsupported(kind, raw)
        config = model_class.config_class(**to_config_fields(kind, raw, tensors))
        if not isinstance(config.dtype, torch.dtype | None):
            raise TypeError(f"`dtype` is {config.dtype!r}")
    except (TypeError, AttributeError, StrictDataclassError) as error:
        problems.append(f"a value in its config is not of the type expected ({str(error).rstrip('.')})")
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    if config is not None:
        ours = {kind.rename(name): tensor for name, tensor in tensors.items()}
        problems += mismatches(model_class, config, ours)
    if problems:
        raise ValueError(f"The checkpoint `{source}` ({kind.name}'s format) cannot be used: {'; '.join(problems)}.")
    return config


def mismatches(model_class: Any, config: Any, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Tensors, by our names, that are missing, unexpected, or of the wrong shape or dtype; a line per kind."""
    if config.num_hidden_layers > len(tensors):  # checked before that many are built
        return [f"`num_hidden_layers` is {config.num_hidden_layers}, but there are {len(tensors)} tensors in all"]
    try:
        with torch.device("meta"):
            wanted = model_class(config).state_dict()
    except RuntimeError as error:
        return [f"no tensor can have the sizes in its config ({error})"]
    expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    dropped = set(DROPPED) if config.draft_vocab_size else set(COPIES)
    head = (config.draft_vocab_size or config.vocab_size, config.hidden_size)
    copies = {"embed_tokens.weight": (config.vocab_size, config.hidden_size), "lm_head.weight": head}
    shapes = expected | {name: shape for name, shape in copies.items() if name in tensors}
    lists = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - expected.keys() - dropped),
        "mismatched": [
            f"{name} is {list(tensors[name].shape)}, expected {list(shapes[name])}"
            for name in sorted(shapes.keys() & tensors.keys())
            if tensors[name].shape != shapes[name]
        ],
        "not of a supported dtype": [
            f"{name} is {tensors[name].dtype}"
            for name in sorted(shapes.keys() & tensors.keys())
            if tensors[name].dtype not in _dtypes_for(name)
        ],
    }
    if not any(lists[kind] for kind in lists if kind != "unexpected") and config.draft_vocab_size and "t2d" in tensors:
        lists["contradictory"] = vocabulary_mismatches(tensors["d2t"].read(), tensors["t2d"].read())
    return [f"{kind}: {', '.join(names)}" for kind, names in lists.items() if names]


def _dtypes_for(name: str) -> tuple[str, ...]:
    """Supported dtypes of a tensor. Weights of other dtypes are quantized, and mean nothing without their scales."""
    return ("I64", "I32") if name == "d2t" else ("F64", "F32", "F16", "BF16")


def vocabulary_mismatches(d2t: torch.Tensor, t2d: torch.Tensor) -> list[str]:
    """Contradictions between two maps of a draft vocabulary, `d2t` `[Vd]` and `t2d` `[V]`."""
    tokens = (d2t.long() + torch.arange(len(d2t))).sort().values
    marked = t2d.nonzero().flatten()
    if torch.equal(tokens, marked):
        return []
    return [f"`d2t` names {len(tokens.unique())} tokens, and `t2d` marks {len(marked)}, not the same ones"]


def foreign_arguments(model_class: Any, name_or_path: Any, file_arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that make a checkpoint of another format load as ours; none for our format."""
    source, raw = str(name_or_path), read_config(name_or_path, **file_arguments)
    own = model_class.config_class.model_type
    if detect(raw, {}, source, own) is None:
        return {}
    tensors = stored_tensors(name_or_path, **file_arguments)
    kind = detect(raw, tensors, source, own)
    if kind is None or not tensors:
        raise ValueError(f"`{source}` has no weights in safetensors files (`model.safetensors`).")
    config = config_from(kind, raw, tensors, source, model_class)
    renamed = {f"^{re.escape(name)}$": ours for name in tensors if (ours := kind.rename(name)) != name}
    return {"config": config, "key_mapping": renamed} if renamed else {"config": config}


__all__ = ["config_from", "foreign_arguments", "mismatches", "read_config", "vocabulary_mismatches"]
