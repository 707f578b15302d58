"""The sources of a conversion: a drafter's checkpoint in any known format, and its target.

Only headers and small tensors are read here; the rest is streamed while writing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.utils import cached_file

from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.formats.load import config_from, mismatches, read_config
from modeling_dspark.formats.table import COPIES, DROPPED, detect
from modeling_dspark.formats.tensors import StoredTensor, stored_tensors


CALIBRATION = "calibration.json"
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's checkpoint.

    Attributes:
        source (`str`): Folder or Hub id.
        kind (`str`): Name of its format.
        config ([`DSparkConfig`]): Its configuration.
        tensors (`dict[str, StoredTensor]`): The drafter's tensors, by our names.
        copies (`dict[str, StoredTensor]`): Copies of the target's embedding and LM head, if it has any.
        calibration (`bytes`, *optional*): Its `calibration.json`.
    """

    source: str
    kind: str
    config: DSparkConfig
    tensors: Mapping[str, StoredTensor]
    copies: Mapping[str, StoredTensor]
    calibration: bytes | None

    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids `[Vd]` of a reduced draft vocabulary, or `None`.

        Raises:
            ValueError: if they are not distinct tokens of the target.
        """
        if self.config.draft_vocab_size is None:
            return None
        d2t = self.tensors["d2t"].read().long()
        ids = d2t + torch.arange(len(d2t))
        if not bool(((ids >= 0) & (ids < self.config.vocab_size)).all()) or len(ids.unique()) != len(ids):
            raise ValueError(
                f"The checkpoint `{self.source}` has a `d2t` that does not map its draft vocabulary to distinct tokens."
            )
        return ids


@dataclass(frozen=True)
class Target:
    """The target of a conversion: its name as given, fields of its config, and its two matrices."""

    name: str
    architectures: list[str]
    num_layers: int
    softcap: float | None
    embedding: StoredTensor
    head: StoredTensor


def open_checkpoint(source: str) -> Checkpoint:
    """Open a drafter's checkpoint and check that it is complete.

    Args:
        source (`str`): Folder or Hub id, in any known format.

    Raises:
        ValueError: lists the problems.
    """
    try:
        raw, stored = read_config(source), stored_tensors(source)
    except OSError as error:
        raise ValueError(f"`{source}` is neither a folder nor a repository that can be read: {error}") from error
    kind = detect(raw, stored, source)
    if not stored:
        raise ValueError(f"`{source}` has no weights in safetensors files (`model.safetensors`).")
    if kind is None:
        config, renamed = _own_config(raw, stored, source), dict(stored)
    else:
        config = config_from(kind, raw, stored, source, DSparkModel)
        renamed = {kind.rename(name): tensor for name, tensor in stored.items()}
    calibration = _calibration(source, config)
    checkpoint = Checkpoint(
        source=source,
        kind="dspark" if kind is None else kind.name,
        config=config,
        tensors={name: tensor for name, tensor in sorted(renamed.items()) if name not in DROPPED},
        copies={name: renamed[name] for name in COPIES if name in renamed},
        calibration=calibration,
    )
    checkpoint.draft_token_ids()
    return checkpoint


def _own_config(raw: dict[str, Any], stored: Mapping[str, StoredTensor], source: str) -> DSparkConfig:
    try:
        config = DSparkConfig.from_dict(raw)
    except StrictDataclassError as error:
        raise ValueError(f"The config.json of `{source}`: {error}.") from error
    if problems := mismatches(DSparkModel, config, stored):
        raise ValueError(f"The checkpoint `{source}` does not fit its configuration; {'; '.join(problems)}.")
    return config


def _calibration(source: str, config: DSparkConfig) -> bytes | None:
    """The content of `calibration.json`; a config without temperatures takes them from there."""
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(source, CALIBRATION, **optional)
    if path is None:
        return None
    data = Path(path).read_bytes()
    try:
        listed = json.loads(data)["temperatures"]
        temperatures = [float(value) for value in listed]
        if not isinstance(listed, list) or not all(0 < value < math.inf for value in temperatures):
            raise ValueError(f"{listed} are not all positive numbers")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"`{CALIBRATION}` of `{source}` has no list of `temperatures` ({error}).") from error
    if config.confidence_temperatures is None:
        if not config.enable_confidence_head or len(temperatures) != config.block_size:
            raise ValueError(
                f"`{CALIBRATION}` of `{source}` has {len(temperatures)} temperatures, but the drafter "
                f"{config.block_size if config.enable_confidence_head else 'no'} confidences."
            )
        config.confidence_temperatures = temperatures
    elif temperatures != config.confidence_temperatures:
        raise ValueError(
            f"`{source}` contradicts itself: `confidence_temperatures` are {config.confidence_temperatures} in its "
            f"config.json and {temperatures} in `{CALIBRATION}`."
        )
    return data


def open_target(name: str, config: DSparkConfig) -> Target:
    """Open the target of a drafter.

    Args:
        name (`str`): `smollm2-135m-instruct`, a local folder or a Hub id.
        config ([`DSparkConfig`]): The drafter's configuration.

    Raises:
        ValueError: if it does not fit the drafter, is quantized, or has no embedding or LM head that can be found.
    """
    from training.common.targets import resolve_target

    folder = resolve_target(name)
    whole, stored = AutoConfig.from_pretrained(folder), stored_tensors(folder)
    text = whole.get_text_config()
    pairs = {name: (getattr(text, name), getattr(config, name)) for name in ("hidden_size", "vocab_size")}
    pairs["num_hidden_layers"] = (text.num_hidden_layers, config.num_target_layers or text.num_hidden_layers)
    for field, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise ValueError(
                f"The target `{name}` does not fit the drafter: its `{field}` is {theirs}, expected {ours}."
            )
    embedding = _matrix(name, stored, ("embed_tokens.weight", "wte.weight", "embed_in.weight"), config)
    tied = whole.tie_word_embeddings or text.tie_word_embeddings
    head = embedding if tied else _matrix(name, stored, ("lm_head.weight", "embed_out.weight"), config)
    softcap = getattr(text, "final_logit_softcapping", None)
    return Target(name, whole.architectures or [], text.num_hidden_layers, softcap, embedding, head)


def _matrix(
    target: str, stored: Mapping[str, StoredTensor], endings: tuple[str, ...], config: DSparkConfig
) -> StoredTensor:
    found = [tensor for name, tensor in stored.items() if name.endswith(endings)]
    if len(found) != 1:
        raise ValueError(
            f"The target `{target}` has {len(found)} tensors in safetensors files whose name ends with "
            f"{' or '.join(endings)}, expected 1."
        )
    tensor = found[0]
    if tensor.dtype not in ("F32", "F16", "BF16", "F64"):
        raise ValueError(f"The target `{target}` is quantized ({tensor.dtype}); give the original.")
    if len(tensor.shape) != 2 or tensor.shape[0] < config.vocab_size or tensor.shape[1] != config.hidden_size:
        raise ValueError(
            f"The target `{target}` has a matrix of shape {list(tensor.shape)}, expected "
            f"[{config.vocab_size}, {config.hidden_size}]."
        )
    return replace(tensor, shape=(config.vocab_size, config.hidden_size))  # rows beyond the vocabulary are padding


def check_copies(checkpoint: Checkpoint, target: Target) -> None:
    """Compare the copies of the target's matrices in a checkpoint with the target's own.

    Raises:
        ValueError: if a copy differs: it was trained, or is another target's.
    """
    ids = checkpoint.draft_token_ids()
    for name, theirs in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.head)):
        copy = checkpoint.copies.get(name)
        if copy is None:
            continue
        rows = ids.tolist() if name == "lm_head.weight" and ids is not None else range(copy.shape[0])
        for first in range(0, copy.shape[0], _ROWS_AT_ONCE):
            part = rows[first : first + _ROWS_AT_ONCE]
            ours, original = copy.read(range(first, first + len(part))), theirs.read(part)
            if not torch.equal(ours, original.to(ours.dtype)):
                raise ValueError(
                    f"`{name}` of `{checkpoint.source}` is not that of the target `{target.name}`. A drafter borrows the "
                    "target's embedding and LM head, so a drafter that trained its own cannot be converted. If this is the "
                    "wrong target, give the right one with `--target`."
                )


__all__ = ["CALIBRATION", "Checkpoint", "Target", "check_copies", "open_checkpoint", "open_target"]
