"""Read a drafter's checkpoint strictly: this project's format, and those of `formats.table`.

A missing, unexpected or mis-shaped tensor is an error that lists it; nothing is left at random values. Copies of the
target's embedding and LM head are dropped, since both are borrowed from the target.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.utils import cached_file

from .table import COPIES, DROPPED, Format, detect
from .tensors import StoredTensor, stored_tensors
from .translate import fields_of, unsupported


_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_checkpoint(
    load: Callable[..., Any], model_class: Any, name_or_path: Any, *model_args: Any, **kwargs: Any
) -> Any:
    """Call `load` (Transformers' `from_pretrained`) and refuse anything but a complete drafter.

    Raises:
        ValueError: if the folder holds another model or traits that are not supported, a file is corrupt, or a tensor
            is missing, unexpected or mis-shaped.
    """
    wants_info, source = kwargs.pop("output_loading_info", False), str(name_or_path)
    if kwargs.get("config") is None and name_or_path is not None:
        kwargs |= _foreign(
            model_class, name_or_path, {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs}
        )
    kwargs["ignore_mismatched_sizes"] = True  # reported below, together with the rest
    try:
        model, info = load(name_or_path, *model_args, output_loading_info=True, **kwargs)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # safetensors is not among the imports remote code may have
            raise
        raise ValueError(
            f"A weight file of `{source}` is corrupt or truncated ({error}). Download or copy it again."
        ) from error
    _refuse_incomplete(info, source)
    _check_draft_vocabulary(model, source)
    if kwargs.get("key_mapping"):
        vars(model).pop("_weight_conversions", None)  # or `save_pretrained` would give the tensors their old names
    return (model, info) if wants_info else model


def read_config(name_or_path: Any, **file_arguments: Any) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`.

    Raises:
        ValueError: if there is none, or it is no JSON object.
    """
    path: str = cached_file(  # type: ignore[assignment]  # raises where there is none
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
    """Our configuration of a checkpoint of another format, whose tensors have been compared with it.

    Args:
        kind ([`Format`]): Its format.
        raw (`dict`): The content of its `config.json`.
        tensors (`dict`): Its tensors by name.
        source (`str`): Where it came from, for messages.
        model_class (`type`): [`DSparkModel`].

    Raises:
        ValueError: lists all that does not fit.
    """
    problems: list[str] = []
    config = None
    try:
        problems += unsupported(kind, raw)
        config = model_class.config_class(**fields_of(kind, raw, tensors))
        if not isinstance(config.dtype, torch.dtype | None):
            raise TypeError(f"`dtype` is {config.dtype!r}")
    except (TypeError, AttributeError, StrictDataclassError) as error:
        problems.append(f"a value in its config is not of the type expected ({str(error).rstrip('.')})")
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    if config is not None:
        ours = {kind.rename(name): tensor for name, tensor in tensors.items()}
        problems += misfits(model_class, config, ours)
    if problems:
        raise ValueError(f"The checkpoint `{source}` ({kind.name}'s format) cannot be used: {'; '.join(problems)}.")
    return config


def misfits(model_class: Any, config: Any, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """What is missing, unexpected or of the wrong shape among tensors with our names."""
    if config.num_hidden_layers > len(tensors):  # before that many are built
        return [f"`num_hidden_layers` is {config.num_hidden_layers}, and there are {len(tensors)} tensors in all"]
    try:
        with torch.device("meta"):
            wanted = model_class(config).state_dict()
    except RuntimeError as error:
        return [f"no tensors are of the sizes in its config ({error})"]
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
    if not any(lists[what] for what in lists if what != "unexpected") and config.draft_vocab_size and "t2d" in tensors:
        lists["contradictory"] = vocabulary_misfits(tensors["d2t"].read(), tensors["t2d"].read())
    return [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]


def _dtypes_for(name: str) -> tuple[str, ...]:
    """What a tensor may be: weights of other dtypes are quantised, and mean nothing without their scales."""
    return ("I64", "I32") if name == "d2t" else ("F64", "F32", "F16", "BF16")


def vocabulary_misfits(d2t: torch.Tensor, t2d: torch.Tensor) -> list[str]:
    """What two maps of a draft vocabulary, `d2t` `[Vd]` and `t2d` `[V]`, say of each other that is not so."""
    tokens = (d2t.long() + torch.arange(len(d2t))).sort().values
    marked = t2d.nonzero().flatten()
    if torch.equal(tokens, marked):
        return []
    return [f"`d2t` names {len(tokens.unique())} tokens, and `t2d` marks {len(marked)}, not the same ones"]


def _foreign(model_class: Any, name_or_path: Any, file_arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` with which a checkpoint of another format loads as ours; none for ours."""
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


__all__ = ["config_from", "load_checkpoint", "misfits", "read_config", "vocabulary_misfits"]
