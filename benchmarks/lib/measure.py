"""Compare the texts of two ways of generating, and pool a drafter's counts over several calls.

Timing is in `training.evaluation.timing`. Decoding is greedy; nothing here loads, prints or writes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from training.evaluation.timing import (
    ASSISTED,
    PLAIN,
    Call,
    Measurement,
    Methods,
    measure,
    pooled_speed,
    timed_call,
    warm_up,
)


PROMPT_LOOKUP = "prompt_lookup"


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part, and how close the two tokens were for the target.

    Attributes:
        position (`int`): New tokens before the first difference, all equal.
        plain_token (`int`, *optional*): Token of the plain output there; `None` where that output has ended.
        assisted_token (`int`, *optional*): Token of the assisted output there.
        logit_gap (`float`, *optional*):
            Distance of the two tokens' logits in one forward of the target over the common prefix, in its own dtype.
        dtype_step (`float`, *optional*): Spacing of that dtype's numbers at the larger of the two logits.
    """

    position: int
    plain_token: int | None
    assisted_token: int | None
    logit_gap: float | None = None
    dtype_step: float | None = None


def left_padded(target: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Prompts as a batch for `generate`: `input_ids` and `attention_mask` `[R, T]`, on the target's device."""
    width, pad = max(map(len, prompts)), target.generation_config.pad_token_id or 0
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    tensors = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return {name: tensor.to(target.device) for name, tensor in tensors.items()}


def pooled_run(runs: Iterable[Any]) -> Any:
    """Pool the drafter's counts over several calls, so that every round weighs the same.

    Raises:
        ValueError: if there are no runs, or they come from drafters of different block sizes.
    """
    runs = list(runs)
    sizes = {run.block_size for run in runs}
    if len(sizes) != 1:
        raise ValueError(f"`runs` must hold the counts of at least one call of one drafter, got block sizes {sizes}.")
    pooled = type(runs[0])(runs[0].block_size)  # the class is that of the drafter's own code
    for run in runs:
        pooled.extend(run)
    return pooled


def first_difference(
    target: PreTrainedModel, prompt_ids: Sequence[int], plain: Sequence[int], assisted: Sequence[int]
) -> Difference | None:
    """Compare two greedy outputs token for token; `None` means that they are identical.

    Where they part, the target runs once more over the prompt and the common tokens, and the logits of the two tokens
    are compared: in bf16 a near-tie can fall either way, since the same numbers summed in batches of another size
    round differently.
    """
    if list(plain) == list(assisted):
        return None
    pairs = zip(plain, assisted, strict=False)
    position = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(plain), len(assisted)))
    if position == min(len(plain), len(assisted)):
        plain_token = plain[position] if position < len(plain) else None
        assisted_token = assisted[position] if position < len(assisted) else None
        return Difference(position, plain_token, assisted_token)
    prefix = torch.tensor([[*prompt_ids, *plain[:position]]], device=target.device)
    with torch.no_grad():
        logits = target(input_ids=prefix, use_cache=False).logits[0, -1]
    chosen = logits[[plain[position], assisted[position]]].float().tolist()
    step = _spacing(max(map(abs, chosen)), logits.dtype)
    return Difference(position, plain[position], assisted[position], abs(chosen[0] - chosen[1]), step)


def _spacing(magnitude: float, dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return limits.eps * 2.0 ** math.floor(math.log2(max(magnitude, limits.tiny)))


__all__ = [
    "ASSISTED",
    "PLAIN",
    "PROMPT_LOOKUP",
    "Call",
    "Difference",
    "Measurement",
    "Methods",
    "first_difference",
    "measure",
    "pooled_run",
    "pooled_speed",
    "timed_call",
    "warm_up",
]
