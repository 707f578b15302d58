"""Time ways of generating against each other on the same prompts, and judge whether the texts agree.

All methods answer a prompt in the same run, turn and turn about, so that a machine that slows down slows all of them.
A method is a name and its arguments of `generate`. Decoding is greedy; nothing here loads, prints or writes.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


Methods = Mapping[str, dict[str, Any]]

PLAIN, ASSISTED, PROMPT_LOOKUP = "plain", "assisted", "prompt_lookup"


@dataclass(frozen=True)
class Call:
    """One `generate` call.

    Attributes:
        tokens (`list[int]`): New tokens, the end-of-text token included.
        seconds (`float`): Wall time of the whole call, prefill included.
        run (`RunStatistics`, *optional*): What the drafter counted, if one assisted.
    """

    tokens: list[int]
    seconds: float
    run: Any | None = None


@dataclass(frozen=True)
class Measurement:
    """One prompt answered by every method, `repeats` times each.

    Attributes:
        prompt_ids (`list[int]`): The prompt.
        calls (`dict[str, list[Call]]`): The calls of each method, in the order they were made.
    """

    prompt_ids: list[int]
    calls: dict[str, list[Call]]

    def tokens(self, method: str) -> list[int]:
        """New tokens of a method (decoding is greedy, so all its repeats give the same)."""
        return self.calls[method][-1].tokens

    def seconds(self, method: str) -> float:
        """Median wall time of a method's calls."""
        return statistics.median(call.seconds for call in self.calls[method])

    def tokens_per_second(self, method: str) -> float:
        """New tokens over the median wall time of the whole call."""
        return len(self.tokens(method)) / self.seconds(method)

    def ratio(self, method: str = ASSISTED) -> float:
        """Tokens per second of a method over those of plain decoding."""
        return self.tokens_per_second(method) / self.tokens_per_second(PLAIN)

    def run(self, method: str = ASSISTED) -> Any:
        """The drafter's counts of one call (repeats would only count the same rounds again)."""
        return self.calls[method][-1].run


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part, and how close the target was to choosing the other token.

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


def timed_call(
    target: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int, arguments: Mapping[str, Any]
) -> Call:
    """Greedy `generate` over one prompt.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        prompt_ids (`Sequence[int]`): The prompt.
        max_new_tokens (`int`): Longest answer.
        arguments (`Mapping[str, Any]`): Further arguments of `generate`, e.g. `assistant_model`.
    """
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    attention_mask = torch.ones_like(input_ids)
    start = time.perf_counter()
    output = target.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **arguments,
    )
    tokens = output[0, input_ids.shape[1] :].tolist()  # waits for the device, so it belongs to the time
    seconds = time.perf_counter() - start
    drafter = arguments.get("assistant_model")
    return Call(tokens, seconds, None if drafter is None else drafter.last_run)


def warm_up(target: PreTrainedModel, prompt_ids: Sequence[int], methods: Methods, *, max_new_tokens: int = 16) -> None:
    """Run every method briefly: the first call of each kind and shape pays for allocations and compiled kernels."""
    for arguments in methods.values():
        timed_call(target, prompt_ids, max_new_tokens=max_new_tokens, arguments=arguments)


def measure(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    methods: Methods,
    *,
    max_new_tokens: int,
    repeats: int = 1,
    first: int = 0,
    on_call: Callable[[], Any] | None = None,
) -> Measurement:
    """Time all methods on one prompt, interleaved; the one that starts changes with every repeat.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        prompt_ids (`Sequence[int]`): The prompt.
        methods (`Mapping[str, dict]`): Arguments of `generate` for each method.
        max_new_tokens (`int`): Longest answer.
        repeats (`int`, *optional*, defaults to `1`): Calls of each method.
        first (`int`, *optional*, defaults to `0`): Which method starts; pass the prompt's number to alternate.
        on_call (`Callable`, *optional*): Called after each call, for a progress bar.

    Raises:
        ValueError: if `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {repeats}.")
    names = list(methods)
    calls: dict[str, list[Call]] = {name: [] for name in names}
    for repeat in range(repeats):
        start = (first + repeat) % len(names)
        for name in names[start:] + names[:start]:
            call = timed_call(target, prompt_ids, max_new_tokens=max_new_tokens, arguments=methods[name])
            calls[name].append(call)
            if on_call is not None:
                on_call()
    return Measurement(list(prompt_ids), calls)


def pooled_speed(measurements: Iterable[Measurement], method: str) -> float:
    """Tokens per second over several prompts: sum of tokens over sum of median seconds."""
    measurements = list(measurements)
    seconds = sum(measurement.seconds(method) for measurement in measurements)
    return sum(len(measurement.tokens(method)) for measurement in measurements) / seconds


def pooled_run(runs: Iterable[Any]) -> Any:
    """Pool the drafter's counts of several calls, so that every round weighs the same.

    Raises:
        ValueError: if there are no runs, or they come from drafters of different block sizes.
    """
    runs = list(runs)
    sizes = {run.block_size for run in runs}
    if len(sizes) != 1:
        raise ValueError(f"`runs` must hold the counts of at least one call of one drafter, got block sizes {sizes}.")
    pooled = type(runs[0])(runs[0].block_size)  # the class came with the drafter's own code
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
        one = plain[position] if position < len(plain) else None
        other = assisted[position] if position < len(assisted) else None
        return Difference(position, one, other)
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
