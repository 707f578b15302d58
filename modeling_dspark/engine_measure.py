"""Measures the cost of rounds: times the stages of the packed loop itself, over a grid of rows and verified tokens.

Timing lives here and not in the loop. Repeats are interleaved over the grid and the fastest of each point counts, because
other programs only add time. The curves are then made monotonic, and the curve of verification is smoothed (`Curve.local`).
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .engine_loop import Engine
from .engine_observer import EngineObserver
from .engine_request import Request
from .engine_round import ScheduledDrafts
from .model_protocol import Drafter
from .schedule_costs import CostProfile, Curve
from .schedule_policies import RoundView, Schedule
from .schedule_settings import DraftSettings
from .target_binding import input_device


_ROWS = (1, 2, 4, 8, 16, 32)
_SAMPLED_ROWS = (1, 8, 32)
_CONTEXT, _LONG_CONTEXT = 128, 1024  # tokens per row
_LONG_CONTEXT_ROWS = 8
_SECONDS = 12.0  # after the minimum of repeats, no repeat starts that would take longer
_REPEATS = 5
_MIN_REPEATS = 2


class _Task(NamedTuple):
    """One point of the grid."""

    kind: str
    rows: int
    length: int
    num_draft_positions: int
    context: int = _CONTEXT

    @property
    def num_tokens(self) -> int:
        return self.rows + (self.length if self.kind == "ragged" else self.rows * self.length)


def measure(
    drafter: Drafter, target: PreTrainedModel, key: dict[str, Any], *, fused_head: str | None = None
) -> CostProfile:
    """Measure a [`CostProfile`] for `key`; shows a progress bar.

    Raises:
        ValueError: if the target cannot be packed, or does not fit the drafter.
    """
    benches = {
        kind: _Bench(drafter, target, do_sample=kind == "sampled", fused_head=fused_head)
        for kind in ("greedy", "sampled", "long", "ragged")
    }
    tasks = _tasks(drafter.config.block_size, *_contexts(target, drafter.config.block_size))
    fastest: dict[_Task, tuple[float, ...]] = {}
    max_rows = max(_ROWS)
    left = len(tasks) * _REPEATS  # counted here, because a disabled bar counts nothing
    with logging.tqdm(total=left, desc="Measuring what a round costs here (once)") as bar:
        for repeat, task in _repeats(tasks):
            bar.update()
            left -= 1
            if task.rows > max_rows:
                continue
            try:
                if repeat == 0:
                    benches[task.kind].run(task)  # the first run of a shape prepares its kernels
                seconds = benches[task.kind].run(task)
            except torch.OutOfMemoryError:
                max_rows = task.rows - 1
                continue
            fastest[task] = tuple(map(min, zip(seconds, fastest.get(task, seconds), strict=True)))
        bar.update(left)
    if max_rows < 1:
        raise ValueError("There is not enough memory for a round of one request, so costs cannot be measured.")
    return _fitted(
        {task: seconds for task, seconds in fastest.items() if task.rows <= max_rows},
        key,
    )


def _contexts(target: PreTrainedModel, block_size: int) -> tuple[int, int]:
    """The usual and the long context of the grid, no longer than the target's positions."""
    max_positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = min(_LONG_CONTEXT, (max_positions or 2 * _LONG_CONTEXT) - block_size - 1)
    if longest < 4:
        raise ValueError(f"The target has {max_positions} positions, too few for blocks of {block_size} drafts.")
    return min(_CONTEXT, longest // 2), longest


def _tasks(block_size: int, context: int = _CONTEXT, long_context: int = _LONG_CONTEXT) -> list[_Task]:
    """The grid: rows by drafts verified, a few of them with sampling, and one long context to measure its cost."""
    lengths = {rows: {0, 1, block_size} for rows in _ROWS} | {1: {0, 1, 2, 3, block_size}, 8: {0, 1, 2, block_size}}
    tasks = [
        _Task("greedy", rows, min(length, block_size), 1 if length == 1 else block_size, context)
        for rows in _ROWS
        for length in sorted(lengths[rows])
    ]
    tasks += [_Task("sampled", rows, length, length, context) for rows in _SAMPLED_ROWS for length in (1, block_size)]
    tasks += [_Task("ragged", rows, block_size, block_size, context) for rows in _ROWS if rows > 1]
    tasks += [_Task("long", rows, 0, block_size, long_context) for rows in (1, _LONG_CONTEXT_ROWS)]
    return list(dict.fromkeys(tasks))


def _repeats(tasks: list[_Task]) -> Iterator[tuple[int, _Task]]:
    begun = time.perf_counter()
    for repeat in range(_REPEATS):
        if repeat >= _MIN_REPEATS and (time.perf_counter() - begun) * (repeat + 1) / repeat > _SECONDS:
            return
        yield from ((repeat, task) for task in tasks)


def _fitted(fastest: dict[_Task, tuple[float, ...]], key: dict[str, Any]) -> CostProfile:
    """Curves from the fastest seconds of drafting, verifying and the rest of each task."""
    per_context = _seconds_per_context(fastest)
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for task, (_, verifying, accepting) in fastest.items():
        if task.kind != "ragged":
            points["accept_sampled" if task.kind == "sampled" else "accept"][task.num_tokens].append(accepting)
        if task.kind == "greedy":
            without_context = verifying - per_context * task.rows * task.context
            points["verify"][task.num_tokens].append(max(without_context, 0.1 * verifying))
    verify = _curve(points.pop("verify"), local=True)
    padding = _padding(fastest, verify, per_context)
    for suffix, by_rows in _drafting(fastest).items():
        for rows, seconds in by_rows.items():
            few, many = min(seconds), max(seconds)
            position = max((seconds[many] - seconds[few]) / max(many - few, 1), 1e-9)
            points[f"draft{suffix}"][rows] = [max(seconds[few] - few * position, 0.1 * seconds[few])]
            points[f"position{suffix}"][rows] = [position + padding.get(rows, 0.0)]
    curves: dict[str, Any] = {name: _curve(points[name], local=False) for name in points}
    return CostProfile(verify=verify, seconds_per_context=per_context, key=key, **curves)


def _seconds_per_context(fastest: dict[_Task, tuple[float, ...]]) -> float:
    """Seconds that a token of context adds to the target's forward."""
    long = max((task for task in fastest if task.kind == "long"), key=lambda task: task.rows)
    short = next(task for task in fastest if task[:4] == ("greedy", long.rows, 0, long.num_draft_positions))
    return max(fastest[long][1] - fastest[short][1], 0.0) / (long.rows * (long.context - short.context))


def _drafting(fastest: dict[_Task, tuple[float, ...]]) -> dict[str, dict[int, dict[int, float]]]:
    """Seconds of drafting, by way of decoding, rows and positions."""
    seconds: dict[str, dict[int, dict[int, float]]] = {"": defaultdict(dict), "_sampled": defaultdict(dict)}
    for task, (drafting, _, _) in fastest.items():
        by_positions = seconds["_sampled" if task.kind == "sampled" else ""][task.rows]
        by_positions[task.num_draft_positions] = min(drafting, by_positions.get(task.num_draft_positions, drafting))
    return seconds


def _padding(fastest: dict[_Task, tuple[float, ...]], verify: Curve, per_context: float) -> dict[int, float]:
    """By rows: cost of a position beyond its token's, because attention pads short rows to the longest one."""
    padding = {}
    for task, (_, verifying, _) in fastest.items():
        if task.kind == "ragged":
            even = verify(task.num_tokens) + per_context * task.rows * task.context
            padding[task.rows] = max(verifying - even, 0.0) / task.length
    return padding


def _curve(points: dict[int, list[float]], *, local: bool) -> Curve:
    counts = sorted(points)
    means = [sum(points[count]) / len(points[count]) for count in counts]
    return Curve.local(counts, means) if local else Curve.smoothed(counts, means)


class _Given(Schedule):
    """Verify a given number of drafts in every row."""

    needs_confidence = True  # like the schedules that use a profile
    length = 0
    ragged = False  # if true, in the first row only

    def lengths(self, view: RoundView) -> list[int]:
        return [
            0 if self.ragged and row else min(self.length, len(positions))
            for row, positions in enumerate(view.confidence)
        ]


class _Stopwatch(EngineObserver):
    """End times of the stages of a round, each taken with the device idle."""

    def __init__(self, device: torch.device):
        self._device = device
        self.times: list[float] = []

    def begun(self, requests: list[Request]) -> None:  # noqa: ARG002
        self.times = [self._now()]

    def drafted(self, drafts: ScheduledDrafts) -> None:  # noqa: ARG002
        self.times.append(self._now())

    verified = settled = drafted

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Bench:
    """An engine of requests with arbitrary text: the cost of a stage does not depend on the values."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel, *, do_sample: bool, fused_head: str | None):
        self._schedule = _Given()
        self._schedule.needs_confidence = drafter.config.enable_confidence_head
        self._watch = _Stopwatch(input_device(target))
        settings = DraftSettings(drafter.config.block_size, self._schedule, 0.0)
        self._engine = Engine(
            drafter, target, settings=settings, do_sample=do_sample, fused_head=fused_head, observer=self._watch
        )

    def run(self, task: _Task) -> tuple[float, float, float]:
        """Seconds of drafting, of the target's forward, and of the rest of one round."""
        self._schedule.length = task.length
        self._schedule.ragged = task.kind == "ragged"
        self._engine.fill(task.rows, context=task.context, num_draft_positions=task.num_draft_positions)
        self._engine.step()
        begun, drafted, verified, settled = self._watch.times
        return drafted - begun, verified - drafted, settled - verified


__all__ = ["measure"]
