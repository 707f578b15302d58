"""The start of a training run: in a folder that no other run has used, or from a checkpoint of the same run."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.configuration_dspark import BACKBONE_TRAITS
from training.common.settings import check_same_settings


logger = logging.get_logger("training.train")

_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_target_layers", "block_size", "sample_from_anchor", "target_layer_ids"),
    *("mask_token_id", "markov_rank", "markov_head_type", "draft_vocab_size", "enable_confidence_head"),
    *("confidence_head_with_markov", *BACKBONE_TRAITS),
)


def checkpoint_to_resume(folder: Path, resume: str | None) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` asks for; none for a new run in `folder`.

    Raises:
        ValueError: if there is no such checkpoint, or a new run would mix with another one.
    """
    if resume is None or resume.lower() == "false":
        last = last_whole_checkpoint(folder)
        present = [path.name for path in (last, folder / "drafter", folder / "adapter") if path and path.exists()]
        if present:
            raise ValueError(
                f"`output_dir`: `{folder}` holds {present} of another run. Continue that run with "
                "`--resume-from-checkpoint true`, choose another folder, or remove this one."
            )
        return None
    if resume.lower() == "true":
        last = last_whole_checkpoint(folder)
        if last is None:
            raise ValueError(f"`resume_from_checkpoint`: there is no checkpoint in `{folder}`.")
        return last
    if not _is_whole(Path(resume)):
        raise ValueError(f"`resume_from_checkpoint` must be `true` or the folder of a checkpoint, got `{resume}`.")
    return Path(resume)


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    steps = {path: path.name.rpartition("-")[2] for path in folder.glob("checkpoint-*")}
    numbered = {path: int(step) for path, step in steps.items() if step.isdecimal()}  # others are a user's copies
    for checkpoint in sorted(numbered, key=lambda path: numbered[path], reverse=True):
        if _is_whole(checkpoint):
            return checkpoint
        logger.warning(f"`{checkpoint}` was cut short and is skipped.")
    return None


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint has the state of training, which `Trainer` writes last."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def check_resumed(checkpoint: Path, drafter: DSparkModel) -> None:
    """Refuse to resume a checkpoint of another drafter, whose weights would be ignored silently.

    Raises:
        ValueError: names the fields that differ, with both values, or weights of other names or shapes (adapters).
    """
    # A checkpoint from before a field existed has its default.
    saved = DSparkConfig().to_dict() | json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    current = drafter.config.to_dict()
    shape = {name: current[name] for name in _SHAPE}
    way_out = "Resume with the same arguments, or choose another `output_dir`."
    check_same_settings(saved, shape, subject=f"`{checkpoint}` holds a drafter", way_out=way_out)
    _check_weights(checkpoint, drafter)


def _check_weights(checkpoint: Path, drafter: DSparkModel) -> None:
    path = checkpoint / "model.safetensors"
    if not path.is_file():  # sharded, by several processes
        return
    try:
        with safe_open(path, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"`{path}` is damaged ({error}); resume from an earlier checkpoint.") from error
    current = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    different = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
    if different:
        raise ValueError(
            f"`{checkpoint}` holds other weights than asked for now, {different[:3]} among them. Resume with the same "
            "arguments (`peft` and `lora_rank` too), or choose another `output_dir`."
        )


__all__ = ["check_resumed", "checkpoint_to_resume", "last_whole_checkpoint"]
