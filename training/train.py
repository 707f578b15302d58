"""Train a DSpark drafter for a target.

    python -m training.train --config training/configs/smollm2-135m.yaml
    python -m training.train --config training/configs/smollm2-135m.yaml --learning_rate 3e-4 --max_steps 100
    python -m training.train --config training/configs/smollm2-135m.yaml --resume_from_checkpoint true

Every key of the YAML file is a flag and the other way round; flags win; unknown keys are refused. The drafter that
training ends with is saved in `output_dir/drafter`, a folder that `AutoModel.from_pretrained` loads.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from modeling_dspark import DSparkModel
from training.arguments import DSparkTrainingArguments
from training.attention import CHUNKED_ATTENTION
from training.batches import ConversationDataset
from training.data import Conversation, choose_draft_vocabulary, load_conversations
from training.feature_cache import FeatureCache
from training.features import fingerprint
from training.initialization import (
    config_for_target,
    default_layer_ids,
    set_draft_vocabulary,
    start_markov_embedding,
    warm_start,
)
from training.packing import check_packing
from training.targets import EMBEDDED_TARGET, load_target, load_tokenizer
from training.trainer import DSparkTrainer


logger = logging.get_logger("training.train")


@dataclass
class DrafterArguments:
    """What drafter to train, for what target."""

    target: str = field(default=EMBEDDED_TARGET, metadata={"help": "A folder, a Hub id, or `smollm2-135m-instruct`."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "Weights of the frozen target."})
    drafter: str | None = field(default=None, metadata={"help": "Go on from this drafter instead of a fresh one."})
    num_draft_layers: int = field(default=5, metadata={"help": "Layers of the draft backbone."})
    block_size: int = field(default=7, metadata={"help": "Draft positions of a block."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped target layers."})
    num_taps: int = field(default=5, metadata={"help": "Tapped layers, spread evenly, if no ids are given."})
    mask_token_id: int | None = field(default=None, metadata={"help": "A token the target never produces."})
    markov_rank: int = field(default=256, metadata={"help": "Rank of the sequential head; 0 = none."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "vanilla, gated or rnn."})
    confidence_head: bool = field(default=True, metadata={"help": "Whether to train a confidence head."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Size of a reduced draft vocabulary."})
    init_from_target_layers: list[int] | None = field(
        default=None, metadata={"help": "Start each draft layer from this target layer."}
    )


@dataclass
class DataArguments:
    """What to train on."""

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


def parse_arguments(argv: list[str]) -> tuple[DrafterArguments, DataArguments, DSparkTrainingArguments]:
    """Flags over YAML (`--config file`) over defaults.

    Raises:
        ValueError: for an unknown key in the YAML file, naming it.
    """
    groups: Any = (DrafterArguments, DataArguments, DSparkTrainingArguments)
    parser = HfArgumentParser(groups, description=__doc__.split("\n\n")[0])
    argv = list(argv)
    parser.add_argument("--config", help="YAML file of arguments; every key is also a flag.")
    only_config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only_config.add_argument("--config", action="append", default=[])
    files = only_config.parse_known_args(argv)[0].config
    if len(files) > 1:
        raise ValueError(f"`--config` may be given once, got {files}.")
    if files:
        content = _read_yaml(Path(files[0]), {item.name for group in groups for item in fields(group)})
        parser.set_defaults(**{name: None for name, value in content.items() if value is None})
        argv = _as_flags(content) + argv  # of a flag given twice, the later one counts
    parsed = parser.parse_args_into_dataclasses(args=argv)
    return parsed[0], parsed[1], parsed[2]


def _read_yaml(path: Path, known: set[str]) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"`--config` needs a YAML file, got `{path}`.")
    content = yaml.safe_load(path.read_text()) or {}
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` must hold `key: value` lines, got {content!r}.")
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"`{path}` has unknown keys {unknown}; `--help` lists the known ones.")
    return content


def _as_flags(content: dict[str, Any]) -> list[str]:
    """YAML values as flags, so that both are converted and checked in the same way."""
    flags: list[str] = []
    for name, value in content.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return flags


def check_resumed(folder: Path, drafter: DSparkModel) -> None:
    """Refuse to resume a checkpoint of a drafter with another configuration.

    Raises:
        ValueError: names the fields that differ, with both values.
    """
    saved = json.loads((folder / "config.json").read_text())
    current = drafter.config.to_dict()
    fields_ = (
        "block_size",
        "target_layer_ids",
        "mask_token_id",
        "markov_rank",
        "markov_head_type",
        "draft_vocab_size",
    )
    different = {name: (saved.get(name), current[name]) for name in fields_ if saved.get(name) != current[name]}
    if different:
        raise ValueError(
            f"`{folder}` holds a drafter with other settings than asked for now (then, now): {different}. Resume with the "
            "same arguments, or choose another `output_dir`."
        )


def split_conversations(conversations: list[Conversation], num_eval: int) -> tuple[list[int], list[int]]:
    """Training and evaluation indices; the evaluation part is spread evenly over the data."""
    if num_eval >= len(conversations):
        raise ValueError(
            f"`num_eval_conversations` ({num_eval}) must be below the number of conversations ({len(conversations)})."
        )
    held_out = {round(index * len(conversations) / num_eval) for index in range(num_eval)} if num_eval else set()
    everything = range(len(conversations))
    return [i for i in everything if i not in held_out], [i for i in everything if i in held_out]


def build_drafter(
    arguments: DrafterArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
) -> DSparkModel:
    """A drafter to start from: a given one, or a fresh one with its draft vocabulary and warm start."""
    if arguments.drafter is not None:
        logger.warning(f"Going on from `{arguments.drafter}`; arguments that shape a fresh drafter are not used.")
        return DSparkModel.from_pretrained(arguments.drafter, dtype=torch.float32)
    text = target.config.get_text_config()
    ids = arguments.target_layer_ids or default_layer_ids(text.num_hidden_layers, arguments.num_taps)
    if arguments.mask_token_id is None:
        raise ValueError("`mask_token_id` is required for a new drafter: a token id that the target never produces.")
    config = config_for_target(
        target,
        tokenizer,
        arguments.target,
        num_hidden_layers=arguments.num_draft_layers,
        block_size=arguments.block_size,
        target_layer_ids=ids,
        mask_token_id=arguments.mask_token_id,
        markov_rank=arguments.markov_rank,
        markov_head_type=arguments.markov_head_type,
        enable_confidence_head=arguments.confidence_head,
        confidence_head_with_markov=arguments.markov_rank > 0,
        draft_vocab_size=arguments.draft_vocab_size,
    )
    drafter = DSparkModel(config)
    if arguments.draft_vocab_size is not None:
        eos = text.eos_token_id
        always = [] if eos is None else eos if isinstance(eos, list) else [eos]
        tokens, coverage = choose_draft_vocabulary(conversations, arguments.draft_vocab_size, text.vocab_size, always)
        set_draft_vocabulary(drafter, tokens)
        logger.warning(f"Draft vocabulary: {len(tokens)} tokens cover {coverage:.2%} of the answer tokens.")
    if arguments.init_from_target_layers is not None:
        warm_start(drafter, target, arguments.init_from_target_layers)
        start_markov_embedding(drafter, target)
    return drafter


def main(argv: list[str] | None = None) -> DSparkModel:
    """Run the command; returns the trained drafter."""
    drafter_arguments, data, training = parse_arguments(sys.argv[1:] if argv is None else argv)
    set_seed(training.seed)
    tokenizer = load_tokenizer(drafter_arguments.target)
    conversations, counts = load_conversations(data.prompts, data.answers, tokenizer, max_length=data.max_length)
    conversations = conversations[: data.max_conversations]
    logger.warning(f"{len(conversations)} conversations; {json.dumps(counts)}")
    target: Any = load_target(drafter_arguments.target, drafter_arguments.target_dtype)
    target.to(training.device)
    drafter = build_drafter(drafter_arguments, target, tokenizer, conversations)
    cache = None
    if data.feature_cache is not None:
        cache = FeatureCache(
            data.feature_cache,
            conversations,
            target_name=f"{drafter_arguments.target_dtype} {fingerprint(target)}",
            target_layer_ids=drafter.config.target_layer_ids,  # type: ignore[arg-type]  # filled in by the config
            hidden_size=drafter.config.hidden_size,
        )
        cache.build(target, drafter.bind(target), limit_gb=data.feature_cache_gb)
    elif training.packing:
        check_packing(target, drafter.bind(target), drafter.config.target_layer_ids)  # type: ignore[arg-type]
    if training.device.type == "cpu":
        drafter.set_attn_implementation(CHUNKED_ATTENTION)
    shared: dict[str, Any] = {"num_anchors": training.num_anchors, "seed": training.seed, "cache": cache}
    train_indices, eval_indices = split_conversations(conversations, data.num_eval_conversations)
    trainer = DSparkTrainer(
        model=drafter,
        args=training,
        target=target,
        train_dataset=ConversationDataset(conversations, indices=train_indices, **shared),
        eval_dataset=ConversationDataset(conversations, indices=eval_indices, **shared) if eval_indices else None,
    )
    resume: Any = training.resume_from_checkpoint
    if str(resume).lower() == "true":
        resume = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
        if resume is None:
            raise ValueError(f"`resume_from_checkpoint`: there is no checkpoint in `{training.output_dir}`.")
    if resume:
        check_resumed(Path(resume), drafter)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        folder = Path(training.output_dir) / "drafter"
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        log = "".join(json.dumps(entry) + "\n" for entry in trainer.state.log_history)
        (Path(training.output_dir) / "log.jsonl").write_text(log)
    return drafter


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
