"""Where the time of a decoding round goes: target forward, draft backbone, heads, and the rest.

The functions of one target, drafter and binding are wrapped for one call, on the objects themselves, and unwrapped
after it. Timing them costs little but not nothing, so these calls are never those that a speed is computed from.
"""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.lib.measure import ASSISTED, PLAIN, Methods, timed_call, warm_up
from benchmarks.lib.pair import Pair, code_of


Durations = dict[str, list[float]]

TARGET, BACKBONE, BASE_LOGITS, HEADS = (
    "target forward",
    "draft backbone",
    "base logits",
    "sequential and confidence head",
)
BINDING, REST = "binding to the target (once a call)", "rest: decoding loop, glue, set-up of the call"


def measure_breakdown(
    pair: Pair, prompts: Sequence[Sequence[int]], methods: Methods, *, max_new_tokens: int
) -> dict[str, Any]:
    """Time the parts of plain and assisted decoding over `prompts` (token ids); the prefill is counted apart.

    Returns:
        `dict`: for each of both methods the rounds (target forwards after the prefill), seconds of the prefills, and for
        each part its milliseconds a round, its median milliseconds a call, and its share of the time after the prefill.
    """
    # The first call also finds out whether the target can be packed, with forwards of its own.
    warm_up(pair.target, prompts[0], {name: methods[name] for name in (PLAIN, ASSISTED)}, max_new_tokens=2)
    report = {}
    for name in (PLAIN, ASSISTED):
        durations: Durations = defaultdict(list)
        rounds, prefill = 0, 0.0
        for prompt_ids in prompts:
            call_durations, seconds = profile_call(pair, prompt_ids, methods[name], max_new_tokens=max_new_tokens)
            first = call_durations[TARGET].pop(0)
            rounds += len(call_durations[TARGET])
            prefill += first
            inside = sum(map(sum, call_durations.values()))
            call_durations[REST].append(seconds - first - inside)
            for part, values in call_durations.items():
                durations[part].extend(values)
        report[name] = {"rounds": rounds, "prefill_seconds": round(prefill, 4), "parts": _parts(durations, rounds)}
    return report


def profile_call(
    pair: Pair, prompt_ids: Sequence[int], arguments: dict[str, Any], *, max_new_tokens: int
) -> tuple[Durations, float]:
    """One `generate` call: seconds of every call of each part (the target's first is the prefill), and of the whole."""
    durations: Durations = defaultdict(list)
    with _timed(pair, durations):
        call = timed_call(pair.target, prompt_ids, max_new_tokens=max_new_tokens, arguments=arguments)
    return durations, call.seconds


def _parts(durations: Durations, rounds: int) -> dict[str, dict[str, float]]:
    total = sum(map(sum, durations.values()))
    return {
        part: {
            "ms_per_round": round(1000 * sum(values) / max(rounds, 1), 3),
            "ms_per_call_median": round(1000 * statistics.median(values), 3),
            "calls": len(values),
            "share": round(sum(values) / total, 4),
        }
        for part, values in durations.items()
        if values
    }


@contextmanager
def _timed(pair: Pair, durations: Durations) -> Iterator[None]:
    """Wrap the parts; none of them runs inside another."""
    target, drafter, drafting = pair.target, pair.drafter, code_of(pair.drafter, "draft_propose")
    bind = _timing(drafter.bind, durations[BINDING])

    def timed_bind(*args: Any, **kwargs: Any) -> Any:
        binding = bind(*args, **kwargs)
        binding.draft_logits = _timing(binding.draft_logits, durations[BASE_LOGITS])
        return binding

    wrapped = [
        (target, "forward", _timing(target.forward, durations[TARGET])),
        (drafter, "forward", _timing(drafter.forward, durations[BACKBONE])),
        (drafting, "_position_by_position", _timing(drafting._position_by_position, durations[HEADS])),
        (drafting, "fused_block", _timing(drafting.fused_block, durations[HEADS])),
        (drafter, "bind", timed_bind),
    ]
    before = [vars(owner).get(name) for owner, name, _ in wrapped]  # `device_map` hooks sit there too
    for owner, name, replacement in wrapped:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(wrapped, before, strict=True):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _timing(function: Callable, durations: list[float]) -> Callable:
    @functools.wraps(function)  # keeps the signature, which Transformers inspects
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            durations.append(time.perf_counter() - start)

    return timed


__all__ = ["measure_breakdown", "profile_call"]
