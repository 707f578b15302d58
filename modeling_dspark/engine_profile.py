"""The measured costs of a pair on this machine: from memory, from the user's cache folder, or measured now."""

import hashlib
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from .draft_binding import head_choice, why_heads_are_not_fused
from .engine_measure import measure
from .engine_processors import RowProcessors
from .fused_build import cache_folder
from .model_protocol import Drafter
from .schedule_costs import CostProfile
from .target_binding import input_device


logger = logging.get_logger(__name__)

_TRIAL_ROWS = 4
_LOOP_VERSION = 5  # raised when the cost of a round changes
_known: "WeakKeyDictionary[PreTrainedModel, dict[str, CostProfile]]" = WeakKeyDictionary()


def profile(
    drafter: Drafter, target: PreTrainedModel, *, refresh: bool = False, fused_head: str | None = None
) -> CostProfile:
    """The costs of `drafter` and `target` on this machine, from memory, from the user's cache folder, or measured.

    The folder is `$DSPARK_CACHE/costs`, by default `~/.cache/dspark/costs`. A file that is damaged, or belongs to
    another key, is measured again and replaced.

    Raises:
        ValueError: if the target cannot be packed, or does not fit the drafter.
    """
    key = profile_key(drafter, target, fused_head)
    digest = _name_of(key)
    known = _known.setdefault(target, {})
    if digest not in known or refresh:
        costs = None if refresh else _stored(digest, key)
        if costs is None:
            with torch.random.fork_rng(_accelerators(target)):  # a measurement draws tokens; the caller's seed stays
                costs = measure(drafter, target, key, fused_head=fused_head)
            _store(costs, digest)
        known[digest] = costs
    return known[digest]


def profile_of_call(
    drafter: Drafter,
    target: PreTrainedModel,
    processors: RowProcessors,
    prompt: torch.Tensor,
    *,
    fused_head: str | None = None,
) -> CostProfile:
    """The costs of a call with logits processors, which are measured once per set of processors and stored with the rest.

    The user's own processors are not called, and count as free.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): The target.
        processors ([`RowProcessors`]): Of the call.
        prompt (`torch.LongTensor` of shape `(n,)`): Tokens for a trial of the processors.
        fused_head (`str`, *optional*): What the heads run on; see [`DraftBinding`].
    """
    costs = profile(drafter, target, fused_head=fused_head)
    name = " ".join(type(processor).__name__ for processor in processors.known)
    if not name:
        return costs
    if name not in costs.processing:
        seconds = processing_seconds(processors, prompt, drafter.config.vocab_size)
        costs = replace(costs, processing=costs.processing | {name: seconds})
        digest = _name_of(profile_key(drafter, target, fused_head))
        _known[target][digest] = costs
        _store(costs, digest)
    return replace(costs, seconds_per_logits=costs.processing[name])


def processing_seconds(processors: RowProcessors, prompt: torch.Tensor, vocab_size: int) -> float:
    """Measure the cost of Transformers' own processors for one row of logits."""
    trial = RowProcessors(processors.known, processors.batch_size)
    trial.num_pads = {0: 0}
    logits = torch.linspace(-1.0, 1.0, vocab_size, device=prompt.device).repeat(_TRIAL_ROWS, 1)
    fastest = float("inf")
    for _ in range(2):
        begun = time.perf_counter()
        trial(logits.clone(), lambda: [prompt] * _TRIAL_ROWS, [0] * _TRIAL_ROWS)
        if prompt.device.type == "cuda":
            torch.cuda.synchronize(prompt.device)
        fastest = min(fastest, time.perf_counter() - begun)
    return fastest / _TRIAL_ROWS


def costs_folder() -> Path:
    """The folder of stored profiles."""
    return cache_folder() / "costs"


def profile_key(drafter: Drafter, target: PreTrainedModel, fused_head: str | None = None) -> dict[str, Any]:
    """Everything that a measurement depends on."""
    device = input_device(target)
    accelerator = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if accelerator else f"{_cpu_name()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype),
        "drafter_dtype": str(drafter.dtype),
        "attention": target.config._attn_implementation,
        "target": _digest(target.config),
        "drafter": _digest(drafter.config),
        "loop": _LOOP_VERSION,
        "fused_head": why_heads_are_not_fused(drafter, target, head_choice(fused_head)) is None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _stored(digest: str, key: dict[str, Any]) -> CostProfile | None:
    """The profile of that name, if it exists and was measured for `key`."""
    try:
        path = costs_folder() / f"{digest}.json"
        if not path.exists():
            return None
        costs = CostProfile.load(path)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.warning(f"The stored cost profile is measured again: {error}")
        return None
    return costs if costs.key == key else None


def _name_of(key: dict[str, Any]) -> str:
    """The name of the file for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def _store(costs: CostProfile, digest: str) -> None:
    try:
        costs.save(costs_folder() / f"{digest}.json")
    except (OSError, RuntimeError) as error:
        logger.warning_once(f"The cost profile could not be stored, so the next program measures again: {error}.")


def _accelerators(target: PreTrainedModel) -> list[torch.device]:
    device = input_device(target)
    return [device] if device.type == "cuda" else []


def _cpu_name() -> str:
    """The model of the CPU, if the system reports it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _digest(config: PretrainedConfig) -> str:
    """A model's shape and name; weights do not change what a round costs."""
    return hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]


__all__ = ["processing_seconds", "profile", "profile_key", "profile_of_call"]
