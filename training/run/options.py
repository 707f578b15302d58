"""The command line of `python -m training.train`: the drafter and its data, from flags, a YAML file and defaults.

Transformers' own training arguments, and those of the method, are in `training.run.arguments`.
"""

import argparse
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from modeling_dspark.configuration_dspark import BACKBONE_TRAITS
from training.common.commands import CommandParser, check_choice
from training.common.targets import EMBEDDED_TARGET
from training.run.architectures import ARCHITECTURES
from training.run.arguments import DSparkTrainingArguments


_RENAMED = {"soft_weight": "kd_weight"}  # names of release 0.1


@dataclass
class DrafterArguments:
    """The drafter to train, and its target."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "A folder, a Hub id, or `smollm2-135m-instruct`."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "Weights of the frozen target."})
    target_shape: str | None = field(
        default=None,
        metadata={
            "help": "JSON of the target's config fields, for `--dry-run` without the Hub; beside the YAML file."
        },
    )
    drafter: str | None = field(
        default=None, metadata={"help": "Continue training this drafter instead of a new one."}
    )
    architecture: str = field(
        default="dspark",
        metadata={"help": "`dspark`, or as a baseline `eagle`: autoregressive, one layer, no decoding loop."},
    )
    num_draft_layers: int = field(default=5, metadata={"help": "Layers of the draft backbone."})
    block_size: int = field(default=7, metadata={"help": "Draft positions of a block."})
    sample_from_anchor: bool = field(
        default=True,
        metadata={"help": "Whether position 0 is the anchor; false: DFlash's older layout, one position more."},
    )
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped target layers."})
    num_taps: int = field(default=5, metadata={"help": "Tapped layers, spread evenly, if no ids are given."})
    mask_token_id: int | None = field(
        default=None, metadata={"help": "A token the target never produces; a new drafter needs one."}
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the sequential head; 0 = none."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "vanilla, gated or rnn."})
    confidence_head: bool = field(default=True, metadata={"help": "Whether to train a confidence head."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Size of a reduced draft vocabulary."})
    init_from_target_layers: list[int] | None = field(
        default=None, metadata={"help": "Start each draft layer from this target layer."}
    )

    # Of a new drafter's layers; defaults are those of `training.run.initialization.config_for_target`.
    hidden_act: str | None = field(default=None, metadata={"help": "Activation of the feed-forward layers."})
    attention_scale: float | None = field(default=None, metadata={"help": "Factor of the attention scores."})
    attention_k_eq_v: bool | None = field(default=None, metadata={"help": "Whether values are the projected keys."})
    value_norm: bool | None = field(default=None, metadata={"help": "Whether values have a norm, without a scale."})
    sandwich_norms: bool | None = field(
        default=None, metadata={"help": "Whether attention and feed-forward have norms on both sides."}
    )
    layer_scalar: bool | None = field(default=None, metadata={"help": "Whether a buffer scales a layer's output."})

    peft: str | None = field(
        default=None,
        metadata={"help": "`lora`: fine-tune `drafter` by low-rank adapters; its heads are trained whole."},
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Adapters are scaled by lora_alpha / lora_rank."})

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.target_dtype, None), torch.dtype):
            raise ValueError(f"`target_dtype` must be a dtype of PyTorch, like bfloat16, got {self.target_dtype!r}.")
        check_choice("architecture", self.architecture, ARCHITECTURES)
        if self.peft not in (None, "lora"):
            raise ValueError(f"`peft` must be `lora` or left out, got {self.peft!r}.")
        if self.peft and self.drafter is None:
            raise ValueError("`peft: lora` fine-tunes a trained drafter; name it with `drafter`.")
        if self.lora_rank < 1 or self.lora_alpha < 1:
            raise ValueError(
                f"`lora_rank` and `lora_alpha` must be at least 1, got {self.lora_rank} and {self.lora_alpha}."
            )

    def traits(self) -> dict[str, Any]:
        """The given fields of the drafter's layers."""
        return {name: value for name in BACKBONE_TRAITS if (value := getattr(self, name)) is not None}


@dataclass
class DataArguments:
    """The training data."""

    prompts: str = field(
        default="", metadata={"help": "The prompts, for answers that do not hold their `prompt_ids`."}
    )
    answers: list[str] = field(default_factory=list, metadata={"help": "Files written by `training.regenerate`."})
    max_length: int = field(default=512, metadata={"help": "Longer conversations are cut."})
    max_conversations: int | None = field(default=None, metadata={"help": "Use only the first N conversations."})
    num_eval_conversations: int = field(default=64, metadata={"help": "Held out from training, for evaluation."})
    feature_cache: str | None = field(default=None, metadata={"help": "Folder for target features, computed once."})
    feature_cache_gb: float = field(
        default=20.0, metadata={"help": "Largest size of that folder, other data included."}
    )

    def __post_init__(self) -> None:
        if self.num_eval_conversations < 0 or self.max_length < 2:
            raise ValueError(
                f"`num_eval_conversations` must be at least 0 and `max_length` at least 2, got "
                f"{self.num_eval_conversations} and {self.max_length}."
            )
        if self.max_conversations is not None and self.max_conversations < 1:
            raise ValueError(f"`max_conversations` must be at least 1, got {self.max_conversations}.")
        if not self.feature_cache_gb >= 0:  # or not a number
            raise ValueError(f"`feature_cache_gb` must be at least 0, got {self.feature_cache_gb}.")


def parse_arguments(
    argv: list[str], description: str | None = None
) -> tuple[DrafterArguments, DataArguments, DSparkTrainingArguments]:
    """Flags over YAML (`--config file`) over defaults.

    Raises:
        ValueError: for an unknown key in the YAML file, naming it.
    """
    groups: Any = (DrafterArguments, DataArguments, DSparkTrainingArguments)
    # No abbreviations: `--conf` would be taken for `--config` here, and not be read below.
    parser = CommandParser(groups, command="train", description=description, allow_abbrev=False)
    argv = list(argv)
    parser.add_argument("--config", help="YAML file of arguments; every key is also a flag.")
    only_config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only_config.add_argument("--config", action="append", default=[])
    files = only_config.parse_known_args(argv)[0].config
    if len(files) > 1:
        raise ValueError(f"`--config` may be given once, got {files}.")
    if files:
        content = _read_yaml(Path(files[0]), {item.name for group in groups for item in fields(group)} | set(_RENAMED))
        parser.set_defaults(**{name: None for name, value in content.items() if value is None})
        argv = _as_flags(content) + argv  # of a flag given twice, the later one counts
    for place, word in enumerate(argv):
        if names := _new_name(word):
            message = f"`{names[0]}` is deprecated and goes with the next release; write `{names[1]}`."
            warnings.warn(message, FutureWarning, stacklevel=2)
            argv[place] = f"--{names[1]}{word[2 + len(names[0]) :]}"
    parsed = parser.parse_args_into_dataclasses(args=argv)
    return parsed[0], parsed[1], parsed[2]


def _new_name(word: str) -> tuple[str, str] | None:
    """Old and new name of a flag of release 0.1."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    return (name, _RENAMED[name]) if word.startswith("--") and name in _RENAMED else None


def _read_yaml(path: Path, known: set[str]) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"`--config` needs a YAML file, got `{path}`.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`--config`: `{path}` is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` must hold `key: value` lines, got {content!r}.")
    unknown = sorted(str(name) for name in content if name not in known)
    if unknown:
        raise ValueError(f"`{path}` has unknown keys {unknown}; `--help` lists the known ones.")
    if content.get("target_shape") is not None:
        content["target_shape"] = str(path.parent / str(content["target_shape"]))  # it ships next to the recipe
    return content


def _as_flags(content: dict[str, Any]) -> list[str]:
    """YAML values as flags, so that both are converted and checked in the same way."""
    flags: list[str] = []
    for name, value in content.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return flags


__all__ = ["DataArguments", "DrafterArguments", "parse_arguments"]
