"""The settings that the course of a training depends on: noted in its checkpoints, and compared when one is resumed.

These are its data, their order, the objective and the optimizer. The drafter's layers and blocks are in a checkpoint's
config (`training.run.resuming`). Length, frequency, place and speed are left out: steps, epochs and the schedule of the
learning rate, logging and checkpoints, workers, how a step is split or packed, the feature cache, and where files are.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from modeling_dspark import DSparkModel
from training.common.files import write_atomically
from training.common.settings import check_same_settings
from training.data.conversations import Conversation
from training.data.features import fingerprint
from training.run.arguments import DSparkTrainingArguments
from training.run.options import DataArguments, DrafterArguments


logger = logging.get_logger("training.train")

_FILE = "run_settings.json"
_RENAMED = {"soft_weight": "kd_weight"}  # in checkpoints of release 0.1
_OBJECTIVE = (
    *("num_anchors", "ce_weight", "kd_weight", "l1_weight", "confidence_weight", "loss_decay"),
    "l1_warmup_fraction",
)
# A checkpoint has them too, and its values would win over the arguments.
_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def run_settings(
    arguments: DrafterArguments,
    data: DataArguments,
    training: DSparkTrainingArguments,
    *,
    target: PreTrainedModel,
    drafter: DSparkModel,
    conversations: Sequence[Conversation],
) -> dict[str, Any]:
    """Settings by the argument that makes them; data and models by their content, wherever they are.

    Args:
        arguments (`DrafterArguments`): The drafter.
        data (`DataArguments`): Its data.
        training (`DSparkTrainingArguments`): The method.
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`DSparkModel`]): The drafter before training, without adapters.
        conversations (`Sequence[Conversation]`): Data for training and evaluation.
    """
    group_size = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    return {
        "answers": _content(conversations),
        "num_eval_conversations": data.num_eval_conversations,
        "target": fingerprint(target),
        "target_dtype": arguments.target_dtype,
        "drafter": None if arguments.drafter is None else fingerprint(drafter),
        "lora_alpha": arguments.lora_alpha if arguments.peft else None,
        "seed": training.seed,
        "data_seed": training.seed if training.data_seed is None else training.data_seed,
        "per_device_train_batch_size * gradient_accumulation_steps * processes": group_size,
        "optim": OptimizerNames(training.optim).value.removesuffix("_fused"),  # the same steps, faster
        **{name: getattr(training, name) for name in (*_OBJECTIVE, *_OPTIMIZER)},
    }


def _content(conversations: Sequence[Conversation]) -> str:
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(conversation.content)
    tokens = sum(len(conversation.input_ids) for conversation in conversations)
    return f"{len(conversations)} conversations, {tokens} tokens, hash {digest.hexdigest()[:16]}"


def note_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a checkpoint, before its other files, so that every complete checkpoint has them.

    A checkpoint that is overwritten counts as cut short until its trainer state, the last file, is written again.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
    write_atomically(checkpoint / _FILE, json.dumps(settings, indent=1) + "\n")


def check_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Refuse to resume a run of other settings; warn of settings that an earlier version did not note.

    Raises:
        ValueError: names the arguments that differ, with both values.
    """
    saved = _noted(checkpoint / _FILE)
    if unknown := [name for name in settings if name not in saved]:
        logger.warning(
            f"`{checkpoint}` is from an earlier version, which did not note {unknown}: they are not compared with the run's."
        )
    by_content = (
        "`answers` are compared by content, which depends on `prompts`, `max_length`, `max_conversations` and the target's "
        "tokenizer. "
    )
    way_out = (
        f"{by_content * (saved.get('answers') != settings.get('answers'))}Resume with those of then, or begin another run: in "
        "another `output_dir`, without `resume_from_checkpoint`."
    )
    noted = {name: value for name, value in settings.items() if name in saved}
    check_same_settings(saved, noted, subject=f"`{checkpoint}` is of a run", way_out=way_out)


def _noted(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {_RENAMED.get(name, name): value for name, value in saved.items()}


__all__ = ["check_settings", "note_settings", "run_settings"]
