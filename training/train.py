"""Train a DSpark drafter for a target.

    python -m training.train --config training/configs/smollm2-135m.yaml
    python -m training.train --config training/configs/smollm2-135m.yaml --learning_rate 3e-4 --max_steps 100
    python -m training.train --config training/configs/smollm2-135m.yaml --resume_from_checkpoint true
    python -m training.train --config training/configs/qwen3-8b.yaml --dry_run

Every key of the YAML file is a flag and the other way round; flags win; unknown keys are refused. The drafter that
training ends with is saved in `output_dir/drafter`, a folder that `AutoModel.from_pretrained` loads.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.configuration_dspark import BACKBONE_TRAITS
from modeling_dspark.target_dspark import check_target
from training.adapters import add_lora, merge_lora, save_adapter
from training.arguments import DSparkTrainingArguments
from training.attention import CHUNKED_ATTENTION
from training.batches import ConversationDataset
from training.data import Conversation, check_tokens, choose_draft_vocabulary, load_conversations
from training.dry_run import DryRun, dry_run, given_config, meta_target
from training.eagle import EagleDrafter
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
from training.targets import load_target, load_tokenizer
from training.train_options import DataArguments, DrafterArguments, parse_arguments
from training.trainer import DSparkTrainer


logger = logging.get_logger("training.train")

ARCHITECTURES: dict[str, Any] = {"dspark": DSparkModel, "eagle": EagleDrafter}


def check_resumed(folder: Path, drafter: DSparkModel) -> None:
    """Refuse to resume a checkpoint of a drafter with another configuration.

    Raises:
        ValueError: names the fields that differ, with both values.
    """
    # A checkpoint that was written before there was a field has its default.
    saved = DSparkConfig().to_dict() | json.loads((folder / "config.json").read_text())
    current = drafter.config.to_dict()
    fields_ = (
        "block_size",
        "target_layer_ids",
        "mask_token_id",
        "markov_rank",
        "markov_head_type",
        "draft_vocab_size",
        *BACKBONE_TRAITS,
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


def fresh_config(
    arguments: DrafterArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> DSparkConfig:
    """Configuration of a new drafter.

    Raises:
        ValueError: without a `mask_token_id`, or if the arguments make no drafter for this target.
    """
    text = target.config.get_text_config()
    ids = arguments.target_layer_ids or default_layer_ids(text.num_hidden_layers, arguments.num_taps)
    if arguments.mask_token_id is None:
        raise ValueError("`mask_token_id` is required for a new drafter: a token id that the target never produces.")
    return config_for_target(
        target,
        tokenizer,
        arguments.target,
        config_class=ARCHITECTURES[arguments.architecture].config_class,
        num_hidden_layers=arguments.num_draft_layers,
        block_size=arguments.block_size,
        sample_from_anchor=arguments.sample_from_anchor,
        target_layer_ids=ids,
        mask_token_id=arguments.mask_token_id,
        markov_rank=arguments.markov_rank,
        markov_head_type=arguments.markov_head_type,
        enable_confidence_head=arguments.confidence_head,
        confidence_head_with_markov=arguments.markov_rank > 0,
        draft_vocab_size=arguments.draft_vocab_size,
        **arguments.traits(),
    )


def build_drafter(
    arguments: DrafterArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
) -> DSparkModel:
    """A drafter to start from: a given one, or a fresh one with its draft vocabulary and warm start."""
    architecture = ARCHITECTURES[arguments.architecture]
    if arguments.drafter is not None:
        logger.warning(f"Going on from `{arguments.drafter}`; arguments that shape a fresh drafter are not used.")
        return architecture.from_pretrained(arguments.drafter, dtype=torch.float32)
    config = fresh_config(arguments, target, tokenizer)
    drafter = architecture(config)
    if arguments.draft_vocab_size is not None:
        text = target.config.get_text_config()
        eos = text.eos_token_id
        always = [] if eos is None else eos if isinstance(eos, list) else [eos]
        tokens, coverage = choose_draft_vocabulary(conversations, arguments.draft_vocab_size, text.vocab_size, always)
        set_draft_vocabulary(drafter, tokens)
        logger.warning(f"Draft vocabulary: {len(tokens)} tokens cover {coverage:.2%} of the answer tokens.")
    if arguments.init_from_target_layers is not None:
        warm_start(drafter, target, arguments.init_from_target_layers)
        start_markov_embedding(drafter, target)
    return drafter


def estimate(arguments: DrafterArguments, data: DataArguments, training: DSparkTrainingArguments) -> DryRun:
    """The dry run: sizes, from shapes alone."""
    target = meta_target(arguments.target, arguments.target_shape, arguments.target_dtype)
    if arguments.drafter is None:
        config = fresh_config(arguments, target, tokenizer=None)
    else:
        config = given_config(arguments.drafter)
    check_target(target, config)
    return dry_run(target, config, training, max_length=data.max_length)


def main(argv: list[str] | None = None) -> DSparkModel | DryRun:
    """Run the command; returns the trained drafter, or what a dry run found."""
    drafter_arguments, data, training = parse_arguments(
        sys.argv[1:] if argv is None else argv, __doc__.split("\n\n")[0]
    )
    if training.dry_run:
        found = estimate(drafter_arguments, data, training)
        sys.stdout.write(str(found))
        return found
    set_seed(training.seed)
    tokenizer = load_tokenizer(drafter_arguments.target)
    conversations, counts = load_conversations(data.prompts, data.answers, tokenizer, max_length=data.max_length)
    conversations = conversations[: data.max_conversations]
    logger.warning(f"{len(conversations)} conversations; {json.dumps(counts)}")
    target: Any = load_target(drafter_arguments.target, drafter_arguments.target_dtype)
    check_tokens(conversations, target)
    target.to(training.device)
    drafter = build_drafter(drafter_arguments, target, tokenizer, conversations)
    adapters = None
    if drafter_arguments.peft:
        adapters = add_lora(drafter, rank=drafter_arguments.lora_rank, alpha=drafter_arguments.lora_alpha)
    drafter.set_attn_implementation(CHUNKED_ATTENTION if training.device.type == "cpu" else "flex_attention")
    if training.packing and data.feature_cache is None:
        check_packing(target, drafter.bind(target), drafter.config.target_layer_ids)  # type: ignore[arg-type]  # filled in
    cache = feature_cache(drafter_arguments, data, training, target, drafter, conversations)
    trainer = make_trainer(data, training, target, drafter, conversations, cache)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(training, drafter))
    trainer.check_loss()
    save(trainer, adapters, Path(training.output_dir))
    return drafter


def feature_cache(
    arguments: DrafterArguments,
    data: DataArguments,
    training: DSparkTrainingArguments,
    target: PreTrainedModel,
    drafter: DSparkModel,
    conversations: list[Conversation],
) -> FeatureCache | None:
    """The feature cache, complete, if one is asked for."""
    if data.feature_cache is None:
        return None
    cache = FeatureCache(
        data.feature_cache,
        conversations,
        target_name=f"{arguments.target_dtype} {fingerprint(target)}",
        target_layer_ids=drafter.config.target_layer_ids,  # type: ignore[arg-type]  # filled in by the config
        hidden_size=drafter.config.hidden_size,
    )
    with training.main_process_first(desc="features"):  # the others find what it wrote
        cache.build(target, drafter.bind(target), limit_gb=data.feature_cache_gb)
    return cache


def make_trainer(
    data: DataArguments,
    training: DSparkTrainingArguments,
    target: PreTrainedModel,
    drafter: DSparkModel,
    conversations: list[Conversation],
    cache: FeatureCache | None,
) -> DSparkTrainer:
    """The trainer, with the conversations split for training and evaluation."""
    shared: dict[str, Any] = {"num_anchors": training.num_anchors, "seed": training.seed, "cache": cache}
    train_indices, eval_indices = split_conversations(conversations, data.num_eval_conversations)
    return DSparkTrainer(
        model=drafter,
        args=training,
        target=target,
        train_dataset=ConversationDataset(conversations, indices=train_indices, **shared),
        eval_dataset=ConversationDataset(conversations, indices=eval_indices, **shared) if eval_indices else None,
    )


def checkpoint_to_resume(training: DSparkTrainingArguments, drafter: DSparkModel) -> str | None:
    """The checkpoint that `resume_from_checkpoint` asks for.

    Raises:
        ValueError: if there is none, or it is of a drafter of another configuration.
    """
    resume: Any = training.resume_from_checkpoint
    if str(resume).lower() == "true":
        resume = last_whole_checkpoint(Path(training.output_dir))
        if resume is None:
            raise ValueError(f"`resume_from_checkpoint`: there is no checkpoint in `{training.output_dir}`.")
    if resume:
        check_resumed(Path(resume), drafter)
    return resume


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end. The state of training is what `Trainer` writes last."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        try:
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            return str(checkpoint)
        except (OSError, ValueError):
            logger.warning(f"`{checkpoint}` was cut short and is passed over.")
    return None


def save(trainer: DSparkTrainer, adapters: Any, folder: Path) -> None:
    """Write the drafter for use, its adapters if it has any, and the log; by one process."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # whole, also where every process has a part
    if not trainer.is_world_process_zero():
        return
    trained: Any = trainer.accelerator.unwrap_model(trainer.model)
    if adapters is not None:
        save_adapter(trained, adapters, folder / "adapter")
        merge_lora(trained)
        state = trained.state_dict()
    trained.save_pretrained(folder / "drafter", state_dict=state)
    log = "".join(json.dumps(entry) + "\n" for entry in trainer.state.log_history)
    (folder / "log.jsonl").write_text(log)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
