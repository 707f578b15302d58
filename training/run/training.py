"""Training from end to end: read the data, build or resume a drafter, train it, save it; or estimate its cost."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, set_seed
from transformers.utils import logging

from modeling_dspark import DSparkModel
from modeling_dspark.target_binding import check_target
from training.common.files import only_writer
from training.common.targets import is_missing_folder, load_target, load_tokenizer
from training.data.batches import ConversationDataset
from training.data.conversations import Conversation, check_tokens, load_conversations
from training.data.feature_cache import FeatureCache
from training.data.features import fingerprint
from training.data.packing import check_packing
from training.objective.attention import CHUNKED_ATTENTION
from training.run.adapters import add_lora, merge_lora, save_adapter
from training.run.arguments import DSparkTrainingArguments
from training.run.drafters import build_drafter, fresh_config
from training.run.dry_run import DryRun, dry_run, given_config, meta_target
from training.run.options import DataArguments, DrafterArguments
from training.run.resuming import check_resumed, checkpoint_to_resume
from training.run.settings import check_settings, run_settings
from training.run.trainer import DSparkTrainer


logger = logging.get_logger("training.train")


def split_conversations(conversations: list[Conversation], num_eval: int) -> tuple[list[int], list[int]]:
    """Training and evaluation indices; the evaluation part is spread evenly over the data."""
    if num_eval >= len(conversations):
        raise ValueError(
            f"`num_eval_conversations` ({num_eval}) must be below the number of conversations ({len(conversations)})."
        )
    held_out = {round(index * len(conversations) / num_eval) for index in range(num_eval)} if num_eval else set()
    everything = range(len(conversations))
    return [i for i in everything if i not in held_out], [i for i in everything if i in held_out]


def check_given(arguments: DrafterArguments, data: DataArguments | None, *, torch_compile: bool | None = None) -> None:
    """Refuse, before anything is read, a new drafter without a `mask_token_id`, and `data` without answers.

    Raises:
        ValueError: names the missing argument, or the combination.
    """
    if torch_compile and arguments.architecture == "eagle":
        raise ValueError(
            "`torch_compile` cannot be combined with `architecture: eagle`: its steps, each over more keys than the one before, "
            "are unrolled into one graph, which did not compile within ten minutes. Leave it out."
        )
    if data is not None and not data.answers:
        raise ValueError("`answers` is required: one or more files of `dspark regenerate`.")
    if arguments.drafter is not None and is_missing_folder(arguments.drafter):
        raise ValueError(f"`drafter`: there is no folder `{arguments.drafter}`.")
    if arguments.drafter is None and arguments.mask_token_id is None:
        raise ValueError(
            "`mask_token_id` is required for a new drafter: a token id that the target never produces, like a reserved token "
            "of its tokenizer, or an id above the tokenizer's that is still below the target's `vocab_size`."
        )


def estimate(arguments: DrafterArguments, data: DataArguments, training: DSparkTrainingArguments) -> DryRun:
    """The sizes of a training run, from shapes alone."""
    target = meta_target(arguments.target, arguments.target_shape, arguments.target_dtype)
    if arguments.drafter is None:
        config = fresh_config(arguments, target, tokenizer=None)
    else:
        config = given_config(arguments.drafter)
    check_target(target, config)
    lora_rank = arguments.lora_rank if arguments.peft else None
    return dry_run(target, config, training, max_length=data.max_length, lora_rank=lora_rank)


def run(drafter: DrafterArguments, data: DataArguments, training: DSparkTrainingArguments) -> DSparkModel | DryRun:
    """Train, or make a dry run; returns the trained drafter, or the sizes of the dry run."""
    check_given(drafter, None if training.dry_run else data, torch_compile=training.torch_compile)
    if training.dry_run:
        sizes = estimate(drafter, data, training)
        sys.stdout.write(str(sizes))
        return sizes
    folder = Path(training.output_dir)
    checkpoint = checkpoint_to_resume(folder, training.resume_from_checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    # The other processes of a run work for the first one, which writes.
    with only_writer(folder) if training.process_index == 0 else nullcontext():
        return train(drafter, data, training, checkpoint)


def train(
    drafter_arguments: DrafterArguments,
    data: DataArguments,
    training: DSparkTrainingArguments,
    checkpoint: Path | None,
) -> DSparkModel:
    """Train, from a checkpoint if there is one, and save; returns the trained drafter."""
    set_seed(training.seed)
    tokenizer = load_tokenizer(drafter_arguments.target)
    conversations, counts = load_conversations(data.prompts, data.answers, tokenizer, max_length=data.max_length)
    conversations = conversations[: data.max_conversations]
    logger.warning(f"{len(conversations)} conversations; {json.dumps(counts)}")
    target: Any = load_target(drafter_arguments.target, drafter_arguments.target_dtype)
    check_tokens(conversations, target)
    target.to(training.device)
    drafter = build_drafter(drafter_arguments, target, tokenizer, conversations)
    settings = run_settings(
        drafter_arguments, data, training, target=target, drafter=drafter, conversations=conversations
    )
    adapters = None
    if drafter_arguments.peft:
        adapters = add_lora(drafter, rank=drafter_arguments.lora_rank, alpha=drafter_arguments.lora_alpha)
    drafter.set_attn_implementation(CHUNKED_ATTENTION if training.device.type == "cpu" else "flex_attention")
    if checkpoint is not None:
        check_resumed(checkpoint, drafter)
        check_settings(checkpoint, settings)
    if training.packing and data.feature_cache is None:
        check_packing(target, drafter.bind(target), drafter.config.target_layer_ids)  # type: ignore[arg-type]  # filled in
    cache = feature_cache(drafter_arguments, data, training, target, drafter, conversations)
    trainer = make_trainer(data, training, target, drafter, conversations, cache, run_settings=settings)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
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
    """The feature cache, built, if one is asked for."""
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
    *,
    run_settings: dict[str, Any],
) -> DSparkTrainer:
    """The trainer, with the conversations split for training and evaluation."""
    shared: dict[str, Any] = {"num_anchors": training.num_anchors, "seed": training.seed, "cache": cache}
    train_indices, eval_indices = split_conversations(conversations, data.num_eval_conversations)
    if eval_indices and training.eval_strategy == "no":
        logger.warning(
            f"{len(eval_indices)} conversations are held out and not measured: pass `--eval-strategy epoch` (or `steps`), "
            "or `--num-eval-conversations 0` to train on them too."
        )
    return DSparkTrainer(
        model=drafter,
        args=training,
        target=target,
        train_dataset=ConversationDataset(conversations, indices=train_indices, **shared),
        eval_dataset=ConversationDataset(conversations, indices=eval_indices, **shared) if eval_indices else None,
        run_settings=run_settings,
    )


def save(trainer: DSparkTrainer, adapters: Any, folder: Path) -> None:
    """Write the drafter for use, its adapters if it has any, and the log; by one process."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # gathered where they are sharded
    if not trainer.is_world_process_zero():
        return
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in weights.items()}  # `torch_compile` adds it
    trained: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if adapters is not None:
        save_adapter(trained, adapters, folder / "adapter")
        merge_lora(trained)
        state = trained.state_dict()
    trained.save_pretrained(folder / "drafter", state_dict=state)
    log = "".join(json.dumps(entry) + "\n" for entry in trainer.state.log_history)
    (folder / "log.jsonl").write_text(log)
    logger.warning(f"The drafter is in `{folder / 'drafter'}`.")


__all__ = ["check_given", "run", "split_conversations", "train"]
