"""Measure what rounds cost: the phases of the packed loop itself, over a grid of rows and verified tokens.

Timing lives here and not in the loop. Repeats are interleaved over the grid and the fastest of each point counts, since
other programs only ever add time; the curves are then made to rise, that of verification is smoothed as well (`Curve.local`).
"""

import hashlib
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

from .engine_loop import Engine
from .engine_processors import RowProcessors
from .engine_request import Request
from .fused_build import cache_folder
from .fused_head import fusable_heads
from .schedule_costs import CostProfile, Curve
from .schedule_policies import DraftSettings, RoundView, Schedule
from .target_binding import input_device


logger = logging.get_logger(__name__)

_ROWS = (1, 2, 4, 8, 16, 32)
_SAMPLED_ROWS = (1, 8, 32)
_CONTEXT, _LONG_CONTEXT = 128, 1024  # tokens a row
_LONG_CONTEXT_ROWS = 8
_SECONDS = 12.0  # after the fewest repeats, none is begun that would take longer
_REPEATS = 5
_FEWEST_REPEATS = 2
_TRIAL_ROWS = 4
_LOOP_VERSION = 4  # raised when a round of this code costs something else
_known: "WeakKeyDictionary[PreTrainedModel, dict[str, CostProfile]]" = WeakKeyDictionary()


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


def profile(drafter: Any, target: PreTrainedModel, *, refresh: bool = False) -> CostProfile:
    """The costs of `drafter` and `target` on this machine, from memory, from the user's cache folder, or measured.

    The folder is `$DSPARK_CACHE/costs`, by default `~/.cache/dspark/costs`. A file that is damaged, or was made for
    something else, is measured again and replaced.

    Raises:
        ValueError: if the target cannot be packed, or does not fit the drafter.
    """
    key = profile_key(drafter, target)
    digest = _name_of(key)
    known = _known.setdefault(target, {})
    if digest not in known or refresh:
        found = None if refresh else _stored(digest, key)
        if found is None:
            with torch.random.fork_rng(_accelerators(target)):  # a measurement draws tokens; the caller's seed stays
                found = measure(drafter, target)
            _store(found, digest)
        known[digest] = found
    return known[digest]


def profile_of_call(
    drafter: Any, target: PreTrainedModel, processors: RowProcessors, prompt: torch.Tensor
) -> CostProfile:
    """The costs of a call with logits processors, which are measured once for each set of them and kept with the rest.

    A user's own processors are not called for it, and count as free.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): The target.
        processors ([`RowProcessors`]): Of the call.
        prompt (`torch.LongTensor` of shape `(n,)`): Tokens to try them on.
    """
    costs = profile(drafter, target)
    name = " ".join(type(processor).__name__ for processor in processors.known)
    if not name:
        return costs
    if name not in costs.processing:
        seconds = processing_seconds(processors, prompt, drafter.config.vocab_size)
        costs = replace(costs, processing=costs.processing | {name: seconds})
        digest = _name_of(profile_key(drafter, target))
        _known[target][digest] = costs
        _store(costs, digest)
    return replace(costs, seconds_per_logits=costs.processing[name])


def processing_seconds(processors: RowProcessors, prompt: torch.Tensor, vocab_size: int) -> float:
    """Measure what Transformers' own among the processors cost for one row of logits."""
    trial = RowProcessors(processors.known, processors.batch_size)
    trial.num_pads = [0]
    logits = torch.linspace(-1.0, 1.0, vocab_size, device=prompt.device).repeat(_TRIAL_ROWS, 1)
    fastest = float("inf")
    for _ in range(2):
        begun = time.perf_counter()
        trial(logits.clone(), lambda: [prompt] * _TRIAL_ROWS, [0] * _TRIAL_ROWS)
        if prompt.device.type == "cuda":
            torch.cuda.synchronize(prompt.device)
        fastest = min(fastest, time.perf_counter() - begun)
    return fastest / _TRIAL_ROWS


def costs_folder() -> Path:
    """Where profiles are kept."""
    return cache_folder() / "costs"


def profile_key(drafter: Any, target: PreTrainedModel) -> dict[str, Any]:
    """What a measurement holds for."""
    device = input_device(target)
    accelerator = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if accelerator else f"{_cpu_name()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype),
        "drafter_dtype": str(drafter.dtype),
        "attention": target.config._attn_implementation,
        "target": _digest(target),
        "drafter": _digest(drafter),
        "loop": _LOOP_VERSION,
        "fused_head": fusable_heads(drafter, torch.empty(0, dtype=target.dtype, device=drafter.device)) is not None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure(drafter: Any, target: PreTrainedModel) -> CostProfile:
    """Measure a [`CostProfile`]; shows a progress bar.

    Raises:
        ValueError: if the target cannot be packed, or does not fit the drafter.
    """
    benches = {
        "greedy": _Bench(drafter, target, do_sample=False),
        "sampled": _Bench(drafter, target, do_sample=True),
        "long": _Bench(drafter, target, do_sample=False),
        "ragged": _Bench(drafter, target, do_sample=False),
    }
    tasks = _tasks(drafter.config.block_size, *_contexts(target, drafter.config.block_size))
    fastest: dict[_Task, tuple[float, ...]] = {}
    most_rows = max(_ROWS)
    left = len(tasks) * _REPEATS  # counted here, since the bar counts nothing where progress bars are off
    with logging.tqdm(total=left, desc="Measuring what a round costs here (once)") as bar:
        for repeat, task in _repeats(tasks):
            bar.update()
            left -= 1
            if task.rows > most_rows:
                continue
            try:
                if repeat == 0:
                    benches[task.kind].run(task)  # the first run of a shape prepares its kernels
                seconds = benches[task.kind].run(task)
            except torch.OutOfMemoryError:
                most_rows = task.rows - 1
                continue
            fastest[task] = tuple(map(min, zip(seconds, fastest.get(task, seconds), strict=True)))
        bar.update(left)
    if most_rows < 1:
        raise ValueError("There is not enough memory for a round of one request, so costs cannot be measured.")
    return _fitted(
        {task: seconds for task, seconds in fastest.items() if task.rows <= most_rows},
        profile_key(drafter, target),
    )


def _contexts(target: PreTrainedModel, block_size: int) -> tuple[int, int]:
    """The usual and the long context of the grid, no longer than the target's positions."""
    most = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = min(_LONG_CONTEXT, (most or 2 * _LONG_CONTEXT) - block_size - 1)
    if longest < 4:
        raise ValueError(f"The target has {most} positions, too few for blocks of {block_size} drafts.")
    return min(_CONTEXT, longest // 2), longest


def _tasks(block_size: int, context: int = _CONTEXT, long_context: int = _LONG_CONTEXT) -> list[_Task]:
    """The grid: rows by drafts verified, a few of them with sampling, and one long context to tell its cost."""
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
        if repeat >= _FEWEST_REPEATS and (time.perf_counter() - begun) * (repeat + 1) / repeat > _SECONDS:
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
    """What a token of context adds to the target's forward."""
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
    """By rows: what a position costs beyond its token, since attention pads short rows to the longest one."""
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

    needs_confidence = True  # as the schedules that a profile is for
    length = 0
    ragged = False  # in the first row alone

    def lengths(self, view: RoundView) -> list[int]:
        return [
            0 if self.ragged and row else min(self.length, len(positions))
            for row, positions in enumerate(view.confidence)
        ]


class _Bench:
    """An engine of requests that hold no text worth having: what a phase costs does not depend on the values."""

    def __init__(self, drafter: Any, target: PreTrainedModel, *, do_sample: bool):
        self._schedule = _Given()
        self._schedule.needs_confidence = drafter.config.enable_confidence_head
        settings = DraftSettings(drafter.config.block_size, self._schedule, 0.0)
        self._engine = Engine(drafter, target, settings=settings, do_sample=do_sample)
        self._features = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
        self._requests: list[Request] = []

    def run(self, task: _Task) -> tuple[float, float, float]:
        """Seconds of drafting, of the target's forward, and of the rest of one round."""
        self._schedule.length = task.length
        self._schedule.ragged = task.kind == "ragged"
        self._prepare(task.rows, task.context)
        settings = DraftSettings(task.num_draft_positions, self._schedule, 0.0)
        self._engine.drafting.settings = settings
        engine, active = self._engine, self._requests[: task.rows]
        begun = self._now()
        drafts = engine.drafting.draft(active, context=0)
        drafted = self._now()
        plan, output = engine.verify(drafts)
        verified = self._now()
        engine.accept(active, drafts, plan, output)
        return drafted - begun, verified - drafted, self._now() - verified

    def _prepare(self, rows: int, context: int) -> None:
        engine = self._engine
        while len(self._requests) < rows:
            prompt = torch.arange(8) % engine.drafting.drafter.config.vocab_size
            request = engine.add_request(prompt, max_new_tokens=2**30)
            request.row = engine.packed.cache.rows.add_row()
            engine.drafting.join(request)
            self._requests.append(request)
        engine.packed.cache.rows.lengths = [context] * len(self._requests)
        engine.drafting.cache.lengths = [context - 2] * len(self._requests)
        device = engine.packed.device
        for request in self._requests:
            request.truncate(len(request.prefix))
            request.pending = [torch.zeros(2, self._features, device=device, dtype=engine.packed.target.dtype)]

    def _now(self) -> float:
        if self._engine.packed.device.type == "cuda":
            torch.cuda.synchronize(self._engine.packed.device)
        return time.perf_counter()


def _stored(digest: str, key: dict[str, Any]) -> CostProfile | None:
    """The profile of that name, if there is one and it was made for `key`."""
    try:
        path = costs_folder() / f"{digest}.json"
        if not path.exists():
            return None
        found = CostProfile.load(path)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.warning(f"The stored cost profile is measured again: {error}")
        return None
    return found if found.key == key else None


def _name_of(key: dict[str, Any]) -> str:
    """The name of the file for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def _store(costs: CostProfile, digest: str) -> None:
    try:
        costs.save(costs_folder() / f"{digest}.json")
    except (OSError, RuntimeError) as error:
        logger.warning_once(f"The cost profile could not be stored, so the next program measures again: {error}.")


def _accelerators(target: PreTrainedModel) -> list[torch.device]:
    device = input_device(target)
    return [device] if device.type == "cuda" else []


def _cpu_name() -> str:
    """The model of the CPU, where the system tells."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(errors="replace").splitlines() if facts.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _digest(model: PreTrainedModel) -> str:
    """A model's shape and name; weights do not change what a round costs."""
    return hashlib.sha256(model.config.to_json_string(use_diff=False).encode()).hexdigest()[:16]


__all__ = ["measure", "processing_seconds", "profile", "profile_key", "profile_of_call"]
