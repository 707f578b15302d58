"""Time ways of generating against each other on the same prompts.

All methods answer a prompt with the same target and in turns, so that a machine that slows down slows all of them.
A method is a name and its arguments of `generate`; decoding is greedy by default. Nothing here loads, prints or writes.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


Methods = Mapping[str, dict[str, Any]]

PLAIN, ASSISTED = "plain", "assisted"


@dataclass(frozen=True)
class Call:
    """One `generate` call.

    Attributes:
        tokens (`list[int]`): New tokens, the end-of-text token included.
        seconds (`float`): Wall time of the whole call, prefill included.
        run (`RunStatistics`, *optional*): The drafter's counts, if a drafter assisted.
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


def timed_call(
    target: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int, arguments: Mapping[str, Any]
) -> Call:
    """Time `generate` over one prompt, greedy by default.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        prompt_ids (`Sequence[int]`): The prompt.
        max_new_tokens (`int`): Longest answer.
        arguments (`Mapping[str, Any]`): Further arguments of `generate`, e.g. `assistant_model`.
    """
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    attention_mask = torch.ones_like(input_ids)
    start = time.perf_counter()
    output = target.generate(  # type: ignore[operator]  # causal language models have it
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        **{"do_sample": False, **arguments},
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
    """Time all methods on one prompt, interleaved; the starting method changes with every repeat.

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


__all__ = ["ASSISTED", "PLAIN", "Call", "Measurement", "Methods", "measure", "pooled_speed", "timed_call", "warm_up"]
