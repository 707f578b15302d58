"""Time of a decoding round by part: target forward, draft backbone, base logits, heads, acceptance, and the rest.

An observer of the engine notes the time at each stage of a round; plain decoding has hooks around the target's forward.
Their cost is small but not zero, so these calls are never those that a speed is computed from.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.lib.measure import ASSISTED, PLAIN, Methods, timed_call, warm_up
from benchmarks.lib.pair import Pair


Durations = dict[str, list[float]]

TARGET, BACKBONE, BASE_LOGITS, HEADS, ACCEPTANCE, REST = (
    "target forward",
    "draft backbone",
    "base logits",
    "heads and schedule",
    "acceptance",
    "rest: decoding loop, set-up of the call",
)


class StageTimer:
    """Seconds of each part of an engine's rounds; an `EngineObserver`.

    Attributes:
        durations (`dict[str, list[float]]`): By part, one entry per round.
        first_round (`float`, *optional*): When the first round began, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.durations: Durations = defaultdict(list)
        self.first_round: float | None = None
        self._last = 0.0

    def _stage(self, part: str) -> None:
        now = time.perf_counter()
        self.durations[part].append(now - self._last)
        self._last = now

    def begun(self, _requests: Any) -> None:
        """The time since the round before is the loop's own, except in the first round."""
        if self.first_round is None:
            self.first_round = self._last = time.perf_counter()
        else:
            self._stage(REST)

    def encoded(self, _hidden_states: Any) -> None:
        """The backbone has run."""
        self._stage(BACKBONE)

    def scored(self, _block: Any) -> None:
        """The base logits exist."""
        self._stage(BASE_LOGITS)

    def drafted(self, _drafts: Any) -> None:
        """Drafts exist and are scheduled."""
        self._stage(HEADS)

    def verified(self, _drafts: Any) -> None:
        """The target has run."""
        self._stage(TARGET)

    def settled(self, _drafts: Any) -> None:
        """Texts have their new tokens."""
        self._stage(ACCEPTANCE)


def measure_breakdown(
    pair: Pair, prompts: Sequence[Sequence[int]], methods: Methods, *, max_new_tokens: int
) -> dict[str, Any]:
    """Time the parts of plain and assisted decoding over `prompts` (token ids); the prefill is counted separately.

    Returns:
        `dict`: for both methods the rounds (target forwards after the prefill), the seconds before the first of them, and by
        part the milliseconds per round, the median milliseconds per call, and the share of the time after the prefill.
    """
    # The first call also probes whether the target can be packed, with forwards of its own.
    warm_up(pair.target, prompts[0], {name: methods[name] for name in (PLAIN, ASSISTED)}, max_new_tokens=2)
    report = {}
    for name, profile_call in ((PLAIN, profile_plain), (ASSISTED, profile_assisted)):
        durations: Durations = defaultdict(list)
        prefill = 0.0
        for prompt_ids in prompts:
            of_call, seconds = profile_call(pair, prompt_ids, methods[name], max_new_tokens=max_new_tokens)
            prefill += seconds
            for part, values in of_call.items():
                durations[part].extend(values)
        rounds = len(durations[TARGET])
        report[name] = {"rounds": rounds, "prefill_seconds": round(prefill, 4), "parts": _parts(durations, rounds)}
    return report


def profile_plain(
    pair: Pair, prompt_ids: Sequence[int], arguments: dict[str, Any], *, max_new_tokens: int
) -> tuple[Durations, float]:
    """One plain `generate` call: seconds of each part after the prefill, and seconds of the prefill."""
    with _timed_forwards(pair.target) as forwards:
        call = timed_call(pair.target, prompt_ids, max_new_tokens=max_new_tokens, arguments=arguments)
    prefill, *rounds = forwards
    return {TARGET: rounds, REST: [call.seconds - sum(forwards)]}, prefill


def profile_assisted(
    pair: Pair, prompt_ids: Sequence[int], arguments: dict[str, Any], *, max_new_tokens: int
) -> tuple[Durations, float]:
    """One assisted call in the packed loop: seconds of each part of its rounds, and seconds before the first round."""
    timer, drafter = StageTimer(), pair.drafter
    drafting = {name: value for name, value in arguments.items() if name != "assistant_model"}
    arguments = {"custom_generate": drafter.decode, "observer": timer, **drafting}
    begun = time.perf_counter()
    call = timed_call(pair.target, prompt_ids, max_new_tokens=max_new_tokens, arguments=arguments)
    ended = begun + call.seconds
    if timer.first_round is None:  # the prefill gave the only token
        return timer.durations, call.seconds
    prefill = timer.first_round - begun
    timer.durations[REST].append(max(0.0, ended - timer.first_round - sum(map(sum, timer.durations.values()))))
    return timer.durations, prefill


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
def _timed_forwards(target: Any) -> Iterator[list[float]]:
    """Seconds of the target's forwards while this lasts."""
    seconds: list[float] = []
    begun = 0.0

    def before(*_: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def after(*_: Any) -> None:
        seconds.append(time.perf_counter() - begun)

    hooks = [target.register_forward_pre_hook(before), target.register_forward_hook(after)]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


__all__ = ["HEADS", "StageTimer", "measure_breakdown", "profile_assisted", "profile_plain"]
