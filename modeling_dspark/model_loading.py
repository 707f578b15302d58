"""Loads a drafter's checkpoint strictly: every missing, unexpected or mis-shaped tensor is listed in an error, and no weight
stays at random values.
"""

from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError


FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_strictly(load: Callable[..., Any], name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
    """Call `load` (Transformers' `from_pretrained`) and refuse anything but a complete drafter.

    Raises:
        ValueError: if a file is corrupt, or a tensor is missing, unexpected or mis-shaped.
    """
    wants_info, source = kwargs.pop("output_loading_info", False), str(name_or_path)
    kwargs["ignore_mismatched_sizes"] = True  # reported below, together with the rest
    try:
        model, info = load(name_or_path, *model_args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(
            f"A weight file of `{source}` is corrupt or truncated ({error}). Download or copy it again."
        ) from error
    _refuse_incomplete(info, source)
    _check_draft_vocabulary(model, source)
    if kwargs.get("key_mapping"):
        vars(model).pop("_weight_conversions", None)  # or `save_pretrained` would give the tensors their old names
    return (model, info) if wants_info else model


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


__all__ = ["FILE_ARGUMENTS", "load_strictly"]
