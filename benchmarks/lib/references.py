"""Transformers' own ways to decode the requests of a closed loop, as columns to compare with.

`generate` takes a batch that is fixed from beginning to end, so requests do not join and leave, and a batch lasts as long
as its longest text. A row's tokens count up to its own limit or end of text; the batch ends when all rows have ended.
"""

import time
from collections import Counter
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.lib.closed_loop import Slice, Workload, counts_of
from benchmarks.lib.measure import left_padded
from benchmarks.lib.pair import Pair, code_of, eos_token_ids


TRANSFORMERS, TRANSFORMERS_LOOP = "transformers", "transformers_loop"


class BatchedGenerate:
    """Plain `generate` on batches of the workload, `concurrency` requests each, padded on the left.

    Args:
        pair ([`Pair`]): The models; the target alone is used.
        workload ([`Workload`]): The requests.
        concurrency (`int`): Rows of a batch.
        num_tokens (`int`, *optional*, defaults to `0`): Where counting starts, to keep step with loops that began earlier.
    """

    def __init__(self, pair: Pair, workload: Workload, concurrency: int, *, num_tokens: int = 0):
        self.pair, self.workload, self.concurrency = pair, workload, concurrency
        self.num_tokens = num_tokens
        self.texts: dict[int, list[int]] = {}
        self._num_added = 0

    def warm_up(self) -> None:
        """Decode a few tokens of a first batch, and forget them."""
        self._generate([(prompt, 4) for prompt, _ in self._requests()])

    def run_until(self, num_tokens: int) -> Slice:
        """Whole batches until there are `num_tokens` new tokens since the beginning: often none, since a batch is long."""
        first, seconds, counts = self.num_tokens, 0.0, Counter[str]()
        while self.num_tokens < num_tokens:
            requests = self._requests()
            begun = time.perf_counter()
            texts = self._generate(requests)
            seconds += time.perf_counter() - begun
            self.texts |= dict(enumerate(texts, self._num_added))
            self._num_added += len(texts)
            self.num_tokens += sum(map(len, texts))
            counts += self._counts()
        return Slice(self.num_tokens - first, seconds, counts=counts)

    def _requests(self) -> list[tuple[torch.Tensor, int]]:
        return [self.workload.request(self._num_added + row) for row in range(self.concurrency)]

    def _generate(self, requests: list[tuple[torch.Tensor, int]]) -> list[list[int]]:
        """New tokens of each request, up to its limit or end."""
        target: Any = self.pair.target
        limits = [limit for _, limit in requests]
        batch = left_padded(target, [prompt.tolist() for prompt, _ in requests])
        width = batch["input_ids"].shape[1]
        output = target.generate(
            **batch,
            max_new_tokens=max(limits),
            stopping_criteria=StoppingCriteriaList([_RowLimits(width, limits)]),
            do_sample=False,
            **self._arguments(),
        )
        ends = set(eos_token_ids(target))
        return [_counted(row, limit, ends) for row, limit in zip(output[:, width:].tolist(), limits, strict=True)]

    def _arguments(self) -> dict[str, Any]:
        return {}

    def _counts(self) -> Counter:
        return Counter()


class AssistedLoop(BatchedGenerate):
    """Transformers' own assisted loop with the drafter, one request after the other, by the confidence schedule."""

    def __init__(self, pair: Pair, workload: Workload, *, num_tokens: int = 0):
        super().__init__(pair, workload, 1, num_tokens=num_tokens)

    def _arguments(self) -> dict[str, Any]:
        config: Any = self.pair.target.config
        keyword = code_of(self.pair.drafter, "compat_transformers").cache_keyword()
        return {
            "assistant_model": self.pair.drafter,
            "num_assistant_tokens_schedule": "confidence",
            # The cache that `generate` would make itself; the packed loop leaves calls with a cache to Transformers' loop.
            keyword: DynamicCache(config=config.get_text_config(decoder=True)),
        }

    def _counts(self) -> Counter:
        return counts_of(self.pair.drafter.last_run)


def start_references(
    pair: Pair, workload: Workload, concurrency: int, *, num_tokens: int = 0
) -> dict[str, BatchedGenerate]:
    """The references for this concurrency, warmed up, by name."""
    loops: dict[str, BatchedGenerate] = {
        TRANSFORMERS: BatchedGenerate(pair, workload, concurrency, num_tokens=num_tokens)
    }
    if concurrency == 1:
        loops[TRANSFORMERS_LOOP] = AssistedLoop(pair, workload, num_tokens=num_tokens)
    for loop in loops.values():
        loop.warm_up()
    return loops


class _RowLimits(StoppingCriteria):
    """Each row ends at its own number of new tokens."""

    def __init__(self, width: int, limits: list[int]):
        self._lengths = torch.tensor([width + limit for limit in limits])

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        return (input_ids.shape[1] >= self._lengths).to(input_ids.device)


def _counted(tokens: list[int], limit: int, ends: set[int]) -> list[int]:
    """A row's tokens up to its limit or its end of text."""
    tokens = tokens[:limit]
    end = next((index for index, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:end]


__all__ = ["TRANSFORMERS", "TRANSFORMERS_LOOP", "AssistedLoop", "BatchedGenerate", "start_references"]
