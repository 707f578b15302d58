"""A drafter on disk with its target: loaded and checked for the commands that record rounds, and identified in them."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_dspark import DSparkModel
from modeling_dspark.target_binding import check_target
from training.common.commands import check_choice
from training.common.files import read_jsonl
from training.common.targets import DTYPES, chat_template_hash, check_device, load_target, load_tokenizer
from training.confidence.rounds import Prompt
from training.data.features import fingerprint
from training.data.prompts import prompt_ids


logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class PairArguments:
    """Arguments of the commands that answer prompts with a drafter."""

    drafter: str = field(metadata={"help": "Local folder of the drafter; nothing in it is changed."})
    prompts: str = field(metadata={"help": "JSONL file of prompts (`turns` or `text`) not used in training."})
    target: str | None = field(default=None, metadata={"help": "The target; by default the one the drafter names."})
    max_new_tokens: int = field(default=192, metadata={"help": "Longest answer, in tokens."})
    max_prompt_tokens: int = field(default=512, metadata={"help": "Longer prompts are skipped and counted."})
    batch_size: int = field(default=16, metadata={"help": "Prompts answered at once where rounds are recorded."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature of the answers; 0 is greedy."})
    seed: int = field(default=0, metadata={"help": "Seed of the answers when sampling."})
    dtype: str = field(default="bfloat16", metadata={"help": "Weights of both: bfloat16, float16 or float32."})
    device: str = field(default="cpu", metadata={"help": "Where both run, e.g. `cuda`."})

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be a number >= 0, got {self.temperature}.")
        check_choice("dtype", self.dtype, DTYPES)


def load_drafter(arguments: PairArguments) -> DSparkModel:
    """The drafter of a local folder.

    Raises:
        ValueError: if there is none, or no such device.
    """
    check_device(arguments.device)
    if not (Path(arguments.drafter) / "config.json").is_file():
        raise ValueError(
            f"`drafter` must be a local folder with a drafter; there is no `{arguments.drafter}/config.json`. Download a "
            "drafter from the Hub first: `hf download ID --local-dir FOLDER`."
        )
    return DSparkModel.from_pretrained(arguments.drafter, dtype=arguments.dtype).to(arguments.device).eval()


def load_drafter_with_confidence(arguments: PairArguments, *, keeps_temperatures: bool) -> DSparkModel:
    """A drafter to calibrate.

    Args:
        arguments ([`PairArguments`]): Name the drafter.
        keeps_temperatures (`bool`): Whether temperatures are to be written into its config.

    Raises:
        ValueError: if it has no confidence head, or its config cannot keep temperatures.
    """
    drafter = load_drafter(arguments)
    if drafter.confidence_head is None:
        raise ValueError(
            f"`drafter`: `{arguments.drafter}` has no confidence head (`enable_confidence_head=False`), so there is "
            "nothing to calibrate. Train one with `confidence_head: true`."
        )
    path = Path(arguments.drafter) / "config.json"
    model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    if keeps_temperatures and model_type != drafter.config.model_type:
        raise ValueError(
            f"`drafter`: `{path}` is of type {model_type!r}, a DeepSpec checkpoint, which is read without temperatures. "
            "Save it with `DSparkModel.from_pretrained(...).save_pretrained(...)` and calibrate that folder, or pass "
            "`--dry-run`."
        )
    return drafter


def load_fitting_target(
    arguments: PairArguments, drafter: DSparkModel
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, after a check that the drafter was made for them."""
    name = arguments.target or drafter.config.target_name_or_path
    if name is None:
        raise ValueError("`target` is not given, and the drafter's config does not name one; pass `--target`.")
    target: Any = load_target(name, arguments.dtype)
    check_target(target, drafter.config)
    tokenizer = load_tokenizer(name)
    if drafter.config.chat_template_sha256 not in (None, chat_template_hash(tokenizer)):
        logger.warning(
            f"The chat template of `{name}` is not the one the drafter was trained with, so acceptance may be lower."
        )
    return target.to(arguments.device), tokenizer


def max_prompt_length(arguments: PairArguments, target: PreTrainedModel) -> int:
    """The maximum number of prompt tokens: as asked for, and with room for an answer."""
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    limit = arguments.max_prompt_tokens
    return limit if positions is None else min(limit, positions - arguments.max_new_tokens)


def plan_prompts(
    arguments: PairArguments, tokenizer: PreTrainedTokenizerBase, *, max_length: int, num_prompts: int | None
) -> list[Prompt]:
    """The first `num_prompts` prompts without those of more than `max_length` tokens, which are counted."""
    records = read_jsonl(arguments.prompts)
    prompts = [Prompt(index, tuple(prompt_ids(tokenizer, line))) for index, line in enumerate(records[:num_prompts])]
    chosen = [prompt for prompt in prompts if len(prompt.input_ids) <= max_length]
    if len(chosen) < 2:
        raise ValueError(
            f"`prompts`: `{arguments.prompts}` has {len(records)} prompts, of which {len(chosen)} have at most {max_length} "
            "tokens; at least 2 are needed (one to fit, one held out)."
        )
    if len(chosen) < len(prompts):
        logger.warning(f"{len(prompts) - len(chosen)} prompts of more than {max_length} tokens are skipped.")
    return chosen


def recording_settings(
    arguments: PairArguments, drafter: DSparkModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What recorded rounds depend on."""
    return {
        "drafter": fingerprint(drafter),
        "target": fingerprint(target),
        "dtype": arguments.dtype,
        "prompts_sha256": hashlib.sha256(Path(arguments.prompts).read_bytes()).hexdigest()[:16],
        "chat_template_sha256": chat_template_hash(tokenizer),
        "num_draft_positions": drafter.config.block_size,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed if arguments.temperature > 0 else None,
    }


__all__ = [
    *("PairArguments", "load_drafter", "load_drafter_with_confidence", "load_fitting_target", "max_prompt_length"),
    *("plan_prompts", "recording_settings"),
]
