"""What the course of a training depends on: noted in its checkpoints, and compared before one of them is gone on with.

That is its data, their order, the objective and the optimiser. The drafter's layers and blocks are in a checkpoint's config
(`training.run.resuming`). What says how long, how often, where or how fast is left out: steps, epochs and the schedule of the
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
from training.data.conversations import Conversation
from training.data.features import fingerprint
from training.run.arguments import DSparkTrainingArguments
from training.run.options import DataArguments, DrafterArguments


logger = logging.get_logger("training.train")

_FILE = "run_settings.json"
_OBJECTIVE = (
    *("num_anchors", "ce_weight", "soft_weight", "l1_weight", "confidence_weight", "loss_decay"),
    "l1_warmup_fraction",
)
# A checkpoint has them too, and its values would win over those asked for.
_OPTIMISER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


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
        arguments (`DrafterArguments`): What is trained.
        data (`DataArguments`): On what.
        training (`DSparkTrainingArguments`): How.
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`DSparkModel`]): The drafter before training, without adapters.
        conversations (`Sequence[Conversation]`): What is trained and evaluated on.
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
        **{name: getattr(training, name) for name in (*_OBJECTIVE, *_OPTIMISER)},
    }


def _content(conversations: Sequence[Conversation]) -> str:
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(conversation.content)
    tokens = sum(len(conversation.input_ids) for conversation in conversations)
    return f"{len(conversations)} conversations, {tokens} tokens, hash {digest.hexdigest()[:16]}"


def note_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a checkpoint, before anything else of it: a whole one has them.

    A checkpoint that is written over counts as cut short until its state of training, the last file, is written again.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
    write_atomically(checkpoint / _FILE, json.dumps(settings, indent=1) + "\n")


def check_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with a run of other settings. What an earlier version did not note is warned of.

    Raises:
        ValueError: names the arguments that differ, with both values.
    """
    saved = _noted(checkpoint / _FILE)
    if unknown := [name for name in settings if name not in saved]:
        logger.warning(
            f"`{checkpoint}` is of an earlier version, which did not note {unknown}: whether they are as in its run is not "
            "checked."
        )
    different = {
        name: (saved[name], value) for name, value in settings.items() if name in saved and saved[name] != value
    }
    if different:
        by_content = (
            " `answers` are compared by content, to which `prompts`, `max_length`, `max_conversations` and the target's "
            "tokenizer belong."
        )
        raise ValueError(
            f"`{checkpoint}` is of a run with other settings (then, now): {different}.{by_content * ('answers' in different)} "
            "Resume with those of then, or begin another run: in another `output_dir`, without `resume_from_checkpoint`."
        )


def _noted(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{path}` is damaged ({error}); resume from another checkpoint.") from error


__all__ = ["check_settings", "note_settings", "run_settings"]
