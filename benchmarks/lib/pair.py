"""A target and its drafter: loading, prompts, and what identifies them in a report.

The drafter is loaded as a user without this repository would load it: `AutoModel.from_pretrained(...,
trust_remote_code=True)` on a packaged folder. Its own copy of the code is what runs and what is measured; nothing here
imports `modeling_dspark`. The target is as `from_pretrained` returns it, in evaluation mode; every column of a table is
timed on this one object, and nothing freezes its weights (with frozen weights PyTorch copies the LM head at every
prefill, which slows plain decoding).
"""

import argparse
import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lib.measure import ASSISTED, PLAIN
from benchmarks.lib.options import DEFAULT_DRAFTER, drafting_arguments
from training.common.files import read_jsonl
from training.common.targets import EMBEDDED_TARGET, load_target, load_tokenizer
from training.data.prompts import prompt_ids


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer and a drafter, in one dtype."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Token ids of a prompt through the target's chat template."""
        return prompt_ids(self.tokenizer, record)


def methods_of(pair: Pair, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Plain and assisted decoding as methods for `benchmarks.lib.measure`."""
    return {PLAIN: {}, ASSISTED: {"assistant_model": pair.drafter, **drafting_arguments(options)}}


def load_pair(target: str, drafter: str, dtype: str) -> Pair:
    """Load both models and the tokenizer.

    Raises:
        ValueError: if the drafter's folder is missing or not a package, or the target cannot be loaded.
        OSError: if the drafter is neither a folder nor on the Hub.
    """
    check_drafter(drafter)  # first, since the target may have to be converted, which takes half a minute
    model = load_target(target, getattr(torch, dtype))
    tokenizer = load_tokenizer(target)
    if model.generation_config.pad_token_id is None:  # `generate` would warn at every call
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return Pair(model, load_drafter(drafter, dtype), tokenizer)


def check_drafter(name_or_path: str) -> None:
    """Refuse a drafter folder that is missing or holds no remote code; a Hub id passes.

    Raises:
        ValueError: names the command that makes the folder.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        # Never taken for a Hub id: a stranger could own that name there, and a drafter's code is run.
        is_local = (
            name_or_path == DEFAULT_DRAFTER or name_or_path.count("/") != 1 or name_or_path.startswith((".", "~"))
        )
        if is_local:
            raise ValueError(
                f"There is no drafter folder `{name_or_path}`. Run `make demo`, which makes the default one, or "
                f"`dspark package hub_upload/repos/dspark-smollm2-135m-instruct {DEFAULT_DRAFTER}`; "
                "`--drafter` takes another folder or a Hub id."
            )
        return
    if not _has_remote_code(folder):
        raise ValueError(
            f"`{name_or_path}` is not a packaged drafter (a config.json with `auto_map`, and the remote code). Make one: "
            f"`dspark package {name_or_path} build/{folder.name}`."
        )


def _has_remote_code(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return "auto_map" in config and (folder / "modeling_dspark.py").is_file()
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def load_drafter(name_or_path: str, dtype: str) -> PreTrainedModel:
    """Load a packaged drafter with the code that is in the package."""
    check_drafter(name_or_path)
    try:
        drafter = AutoModel.from_pretrained(name_or_path, trust_remote_code=True, dtype=getattr(torch, dtype))
    except OSError as error:
        raise OSError(f"`--drafter {name_or_path}` cannot be loaded. {error}") from error
    return drafter.eval()


def code_of(drafter: PreTrainedModel, name: str) -> Any:
    """A module of the code that `drafter` came with, e.g. `"engine_loop"`.

    Raises:
        ValueError: if that code has no such module, since it is of another version.
    """
    package = type(drafter).__module__.rpartition(".")[0]
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"`--drafter {drafter.name_or_path}` is packaged with code that has no `{name}.py`. Package it again: "
            "`dspark package FOLDER OUTPUT --overwrite`."
        ) from error


def eos_token_ids(target: PreTrainedModel) -> list[int]:
    """The end-of-text tokens that `generate` stops at."""
    ids = target.generation_config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def load_prompts(path: str | Path, per_set: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Prompts of a JSONL file by their `source`, the first `per_set` of each.

    Raises:
        ValueError: if the file is missing, broken or empty.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for record in read_jsonl(path):
        sets.setdefault(record.get("source", "prompts"), []).append(record)
    if not sets:
        raise ValueError(f"`{path}` holds no prompts.")
    return {source: records[:per_set] for source, records in sets.items()}


def load_prompt_ids(pair: Pair, path: str | Path) -> list[list[int]]:
    """Token ids of all prompts of a file."""
    return [pair.prompt_ids(record) for records in load_prompts(path).values() for record in records]


def target_label(name_or_path: str) -> str:
    """How results call the target."""
    return "SmolLM2-135M-Instruct (dequantised Q4_1)" if name_or_path == EMBEDDED_TARGET else name_or_path


def describe_drafter(drafter: PreTrainedModel, name_or_path: str) -> dict[str, Any]:
    """What identifies a drafter in results."""
    weights = Path(name_or_path) / "model.safetensors"
    return {
        "name": name_or_path,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else None,
        "parameters": drafter.num_parameters(),
        "block_size": drafter.config.block_size,
        "num_hidden_layers": drafter.config.num_hidden_layers,
        "draft_vocab_size": drafter.config.draft_vocab_size,
    }


__all__ = [
    "Pair",
    "check_drafter",
    "code_of",
    "describe_drafter",
    "eos_token_ids",
    "load_drafter",
    "load_pair",
    "load_prompt_ids",
    "load_prompts",
    "methods_of",
    "target_label",
]
