"""A target and its drafter from the command line: options, loading, prompts.

The drafter is loaded as a user without this repository would: `AutoModel.from_pretrained(..., trust_remote_code=True)`
on a packaged folder. Nothing here imports `modeling_dspark`.
"""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lib.measure import ASSISTED, PLAIN
from training.common.files import read_jsonl
from training.common.targets import EMBEDDED_TARGET, load_target, load_tokenizer
from training.data.prompts import prompt_ids


DEFAULT_DRAFTER = "build/dspark-smollm2-135m-instruct"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer and a drafter, in one dtype."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Token ids of a prompt through the target's chat template."""
        return prompt_ids(self.tokenizer, record)


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_model_options(parser: argparse.ArgumentParser, *, drafter_help: str = "") -> argparse._ArgumentGroup:
    """Options that choose the models; returns their group."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", default=EMBEDDED_TARGET, help=f"the model to speed up: `{EMBEDDED_TARGET}`, a folder or a Hub id"
    )
    group.add_argument(
        "--drafter",
        default=DEFAULT_DRAFTER,
        help="its DSpark drafter: a folder made by `python -m hub_upload package`, or a Hub id; its code is "
        f"run{drafter_help}",
    )
    group.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="weights of both models")
    return group


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose the models and how the drafter is used."""
    add_model_options(parser)
    group = parser.add_argument_group("drafting (default: the drafter's own settings)")
    group.add_argument(
        "--num-assistant-tokens",
        type=int,
        metavar="N",
        help="verify at most N draft tokens a round (0 drafts nothing)",
    )
    group.add_argument(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="stop a draft before the first token whose calibrated confidence is below C, in [0, 1]; exactly 0.4 is "
        "what Transformers fills in by itself and counts as not set",
    )
    group.add_argument(
        "--schedule",
        choices=("fixed", "confidence", "throughput", "throughput_lagged"),
        help="how many drafts to verify (see docs/scheduling.md)",
    )


def drafting_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The drafting options that were given, under the names they have in `generate`."""
    given = {
        "num_assistant_tokens": options.num_assistant_tokens,
        "assistant_confidence_threshold": options.confidence_threshold,
        "num_assistant_tokens_schedule": options.schedule,
    }
    return {name: value for name, value in given.items() if value is not None}


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
    if model.generation_config.pad_token_id is None:  # `generate` would say so again at every call
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return Pair(model, load_drafter(drafter, dtype), tokenizer)


def check_drafter(name_or_path: str) -> None:
    """Refuse a drafter folder that is missing, or holds no remote code; a Hub id passes.

    Raises:
        ValueError: says which command makes the folder.
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
                f"`python -m hub_upload package hub_upload/repos/dspark-smollm2-135m-instruct {DEFAULT_DRAFTER}`; "
                "`--drafter` takes another folder or a Hub id."
            )
        return
    if not _has_remote_code(folder):
        raise ValueError(
            f"`{name_or_path}` is not a packaged drafter (a config.json with `auto_map`, and the remote code). Make one: "
            f"`python -m hub_upload package {name_or_path} build/{folder.name}`."
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
    "DEFAULT_DRAFTER",
    "Pair",
    "add_model_options",
    "add_pair_options",
    "check_drafter",
    "describe_drafter",
    "drafting_arguments",
    "load_drafter",
    "load_pair",
    "load_prompts",
    "methods_of",
    "positive_int",
    "target_label",
]
