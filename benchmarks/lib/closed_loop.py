"""A closed loop: a fixed number of requests in flight, each replaced by the next one as soon as it has finished.

Every policy of drafting gets the same requests in the same order and runs up to the same numbers of new tokens, so that
policies differ in time alone. Prompts and limits are ragged: requests join and leave at different times, and a slice of
the loop holds prefills as well as rounds. Nothing here prints or writes.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.lib.pair import Pair, code_of, eos_token_ids


PLAIN = "plain"
SCHEDULED = ("confidence", "throughput", "throughput_lagged")
_FIXED = re.compile(r"fixed([1-9]\d*)")
_STRIDE = 37  # between the limits of consecutive requests: prime, so that limits repeat late
_FEWEST_TOKENS = 2  # of a request that starts the loop: from the prefill and from a round


class Workload:
    """The sequence of requests: prompts in a shuffled order that starts again at its end, each with a length limit.

    Args:
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): About the average limit: limits run from half of it to four thirds of it.
        seed (`int`, *optional*, defaults to `0`): Of the order.

    Raises:
        ValueError: without prompts, or for a limit that leaves no room for a range.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int = 0):
        if not prompts:
            raise ValueError(f"`prompts` must hold at least one prompt, got {prompts!r}.")
        if max_new_tokens < 2 * _FEWEST_TOKENS:
            raise ValueError(f"`max_new_tokens` must be at least {2 * _FEWEST_TOKENS}, got {max_new_tokens}.")
        self.prompts = [torch.tensor(list(prompt)) for prompt in prompts]
        random.Random(seed).shuffle(self.prompts)
        self._least, self._most = max_new_tokens // 2, max_new_tokens + max_new_tokens // 3

    @property
    def max_length(self) -> int:
        """Length limit of a text."""
        return max(map(len, self.prompts)) + self._most

    def request(self, number: int) -> tuple[torch.Tensor, int]:
        """Prompt `[n]` and maximum new tokens of request `number`."""
        limit = self._least + number * _STRIDE % (self._most - self._least + 1)
        return self.prompts[number % len(self.prompts)], limit


@dataclass(frozen=True)
class Slice:
    """A stretch of one policy's run.

    Attributes:
        tokens (`int`): New tokens.
        seconds (`float`): Wall time, prefills included.
        decoding_tokens (`int`): Of these, tokens of steps in which no request joined.
        decoding_seconds (`float`): The time of these steps.
        steps (`int`): Steps of the loop.
        counts (`Counter`):
            Over the rounds of all requests: `rounds`, `new_tokens` (without those of prefills), `verified` drafts, and
            `plain` rounds.
    """

    tokens: int
    seconds: float
    decoding_tokens: int = 0
    decoding_seconds: float = 0.0
    steps: int = 0
    counts: Counter = field(default_factory=Counter)


class ClosedLoop:
    """`concurrency` requests of `workload` in flight on `engine`.

    Attributes:
        texts (`dict[int, list[int]]`): New tokens of the requests that have finished, by their number.
    """

    def __init__(self, engine: Any, workload: Workload, concurrency: int):
        self.engine, self.workload, self.concurrency = engine, workload, concurrency
        self.texts: dict[int, list[int]] = {}
        self._num_added = 0
        self._tokens = 0  # of requests that have finished
        self._counts: Counter = Counter()

    @property
    def num_tokens(self) -> int:
        """New tokens so far, over all requests."""
        return self._tokens + sum(len(request.tokens) for request in self.engine.requests)

    def step(self) -> tuple[float, int]:
        """Fill up, then one step of the engine: its seconds, and how many requests joined."""
        begun = time.perf_counter()
        joined = self._fill()
        finished = self.engine.step()
        seconds = time.perf_counter() - begun
        for request in finished:
            self.texts[request.index] = request.tokens.tolist()
            self._tokens += len(request.tokens)
            self._counts += counts_of(request.statistics)
        return seconds, joined

    def run_until(self, num_tokens: int) -> Slice:
        """Step until there are `num_tokens` new tokens since the beginning; a step may bring some more."""
        first, before = self.num_tokens, self._all_counts()
        seconds, decoding_seconds, decoding_tokens, steps = 0.0, 0.0, 0, 0
        known = first
        while known < num_tokens:
            took, joined = self.step()
            seconds, steps, now = seconds + took, steps + 1, self.num_tokens
            if not joined:
                decoding_seconds, decoding_tokens = decoding_seconds + took, decoding_tokens + now - known
            known = now
        counts = self._all_counts()
        counts.subtract(before)
        return Slice(known - first, seconds, decoding_tokens, decoding_seconds, steps, counts)

    def _fill(self) -> int:
        joined = self.concurrency - len(self.engine.requests)
        for _ in range(joined):
            prompt, limit = self.workload.request(self._num_added)
            if self._num_added < self.concurrency:
                # As if the loop had run for long, with its requests at different points of their texts.
                limit = max(limit * (self._num_added + 1) // self.concurrency, _FEWEST_TOKENS)
            self.engine.add_request(prompt, max_new_tokens=limit)
            self._num_added += 1
        return joined

    def _all_counts(self) -> Counter:
        return sum((counts_of(request.statistics) for request in self.engine.requests), Counter(self._counts))


def counts_of(statistics: Any) -> Counter:
    """The counts of a `RunStatistics` that a slice keeps."""
    return Counter(
        rounds=statistics.rounds,
        new_tokens=sum(statistics.new_tokens),
        verified=sum(statistics.verified),
        plain=statistics.plain_rounds,
    )


def default_policies(block_size: int) -> list[str]:
    """All policies for a drafter with this block size."""
    return [PLAIN, *(f"fixed{length}" for length in range(1, block_size + 1)), *SCHEDULED]


def check_policies(policies: Sequence[str], block_size: int) -> None:
    """Refuse unknown policies, duplicates, and a list without the baseline.

    Raises:
        ValueError: names the policy and the known ones.
    """
    offered = default_policies(block_size)
    for policy in policies:
        if policy not in offered or list(policies).count(policy) > 1:
            raise ValueError(f"`--policies` takes each of {', '.join(offered)} at most once, got {policy!r}.")
    if PLAIN not in policies:
        raise ValueError(f"`--policies` must hold {PLAIN!r}, the baseline of all ratios, got {list(policies)}.")


def fresh_costs(pair: Pair, policies: Sequence[str | None], *, allow_busy: bool) -> Any:
    """The cost profile for these policies, `None` if none of them weighs costs.

    It is measured anew, since a stored profile may come from a busy machine; on a busy machine a stored one is as good.

    Args:
        pair ([`Pair`]): The models.
        policies (`Sequence[str]`): Policies or schedules; `None` means the drafter's own.
        allow_busy (`bool`): Whether the machine may be busy.
    """
    drafter: Any = pair.drafter
    names = [policy or drafter.config.default_num_assistant_tokens_schedule for policy in policies]
    if not any(name.startswith("throughput") for name in names):
        return None
    if code_of(drafter, "target_packed").why_not_packable(pair.target):
        return None  # Transformers' own loop serves such a target, without costs
    return drafter.profile(pair.target, refresh=not allow_busy)


def settings_of(pair: Pair, policy: str) -> Any:
    """The drafter's settings for a policy: `plain`, `fixed3`, `confidence`, ..."""
    config = pair.drafter.config
    fixed = _FIXED.fullmatch(policy)
    cap = 0 if policy == PLAIN else int(fixed[1]) if fixed else config.block_size
    schedule = "fixed" if policy == PLAIN or fixed else policy
    generation_config = GenerationConfig(num_assistant_tokens=cap, num_assistant_tokens_schedule=schedule)
    return code_of(pair.drafter, "schedule_settings").resolve_settings(generation_config, config)


def make_engine(pair: Pair, policy: str, *, costs: Any = None, max_length: int | None = None) -> Any:
    """An engine that decodes greedily and drafts by `policy`: `plain`, `fixed3`, `confidence`, ...

    Args:
        pair ([`Pair`]): The models.
        policy (`str`): See `default_policies`.
        costs ([`CostProfile`], *optional*): For policies that weigh costs.
        max_length (`int`, *optional*): Length limit of a text.
    """
    return code_of(pair.drafter, "engine_loop").Engine(
        pair.drafter,
        pair.target,
        settings=settings_of(pair, policy),
        costs=costs,
        eos_token_ids=eos_token_ids(pair.target),
        max_length=max_length,
    )


__all__ = [
    "PLAIN",
    "SCHEDULED",
    "ClosedLoop",
    "Slice",
    "Workload",
    "check_policies",
    "counts_of",
    "default_policies",
    "fresh_costs",
    "make_engine",
    "settings_of",
]
