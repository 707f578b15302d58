"""Record verification rounds of a drafter and its target: what calibration is fitted on.

Every block is verified at full length, whatever the drafter's own schedule: a schedule that looks at confidence would
leave out the very rounds that show how well confidence is calibrated. A record of `rounds.jsonl` has `prompt` (its line
number, from 0), and for each round `new_tokens`, `accepted`, `verified` and `logits`. Nothing is fitted here.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from modeling_dspark import DSparkModel, EngineObserver, RunStatistics
from modeling_dspark.engine_loop import Engine
from modeling_dspark.schedule_settings import DraftSettings
from training.common.files import write_atomically
from training.confidence.scaling import Rounds


@dataclass(frozen=True)
class Prompt:
    """A prompt: its line in the prompts file (from 0), and its token ids."""

    index: int
    input_ids: tuple[int, ...]


def make_engine(
    drafter: DSparkModel, target: PreTrainedModel, temperature: float, *, observer: EngineObserver | None = None
) -> Engine:
    """A decoding engine that verifies every block at full length and keeps the confidence logits, if there are any."""
    eos = target.generation_config.eos_token_id
    sampling = temperature > 0
    return Engine(
        drafter,
        target,
        settings=DraftSettings(drafter.config.block_size, schedule="fixed", confidence_threshold=0.0),
        do_sample=sampling,
        logits_processor=LogitsProcessorList([TemperatureLogitsWarper(float(temperature))]) if sampling else None,
        eos_token_ids=[] if eos is None else list(eos) if isinstance(eos, list) else [eos],
        record_confidence=drafter.confidence_head is not None,
        observer=observer,
    )


def record(
    engine: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, RunStatistics]]:
    """Answer prompts, `batch_size` at a time; a finished one makes room for the next. Yields them as they finish."""
    waiting = iter(prompts)
    running: dict[int, tuple[int, Any]] = {}  # by identity; holding the request keeps its id from being used again
    while True:
        for prompt in islice(waiting, batch_size - len(running)):
            input_ids = torch.tensor(prompt.input_ids, device=device)
            request = engine.add_request(input_ids, max_new_tokens=max_new_tokens)
            running[id(request)] = prompt.index, request
        if not running:
            return
        for request in engine.step():
            index, _ = running.pop(id(request))
            yield index, request.statistics


def without_tail(*, verified: int, accepted: int, new_tokens: int) -> tuple[int, int]:
    """Drafts of a round that were verified and accepted, without the tail behind the end of the text.

    A round without a token after its drafts ended the text at an accepted draft; drafts behind that one were neither
    accepted nor rejected, and do not count as verified.
    """
    accepted = min(accepted, new_tokens)
    return accepted if new_tokens <= accepted else verified, accepted


def rounds_of(statistics: RunStatistics, *, all_rounds: bool = False, with_confidence: bool = True) -> dict[str, list]:
    """The rounds of one request that drafted (or all of them), as plain lists, counted `without_tail`.

    Args:
        statistics (`RunStatistics`): What the engine counted.
        all_rounds (`bool`, *optional*): Keep rounds without drafts too; they have no logits and verify nothing.
        with_confidence (`bool`, *optional*): `False` for a drafter without a confidence head: no round has logits.

    Raises:
        ValueError: if there are not as many rows of logits as rounds that drafted.
    """
    num_drafting = sum(drafted > 0 for drafted in statistics.drafted)
    rows = [row for row in statistics.confidence_logits if row] if with_confidence else [[]] * num_drafting
    if len(rows) != num_drafting:
        raise ValueError(f"{num_drafting} rounds drafted, but confidence was recorded for {len(rows)}.")
    remaining = iter(rows)
    recorded: dict[str, list] = {"new_tokens": [], "accepted": [], "verified": [], "logits": []}
    for number, drafted in enumerate(statistics.drafted):
        row = next(remaining) if drafted > 0 else []
        if drafted == 0 and not all_rounds:
            continue
        new_tokens = statistics.new_tokens[number]
        verified, accepted = without_tail(
            verified=statistics.verified[number], accepted=statistics.accepted[number], new_tokens=new_tokens
        )
        for name, value in (("new_tokens", new_tokens), ("accepted", accepted), ("verified", verified)):
            recorded[name].append(value)
        recorded["logits"].append([round(float(value), 4) for value in row])
    return recorded


def batch_seed(seed: int, number: int) -> int:
    """Seed of the answers that begin with prompt `number`."""
    return (seed * 1_000_003 + number) % 2**32


def write_records(path: Path, settings: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file: a line of settings, then a line per record."""
    lines = [{"settings": settings}, *records]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def pad_logits(rows: Iterable[Sequence[float]], num_draft_positions: int) -> torch.Tensor:
    """Rows of logits as one fp64 tensor `[n, num_draft_positions]`; shorter blocks are padded with zeros."""
    padded = [list(row[:num_draft_positions]) + [0.0] * (num_draft_positions - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float64).reshape(-1, num_draft_positions)


def join(records: Sequence[dict[str, Any]], num_draft_positions: int) -> Rounds:
    """All rounds of some records; shorter blocks are padded behind their verified drafts."""
    columns = {
        name: [value for record in records for value in record[name]] for name in ("accepted", "verified", "logits")
    }
    return Rounds.of(pad_logits(columns["logits"], num_draft_positions), columns["accepted"], columns["verified"])


__all__ = [
    *("Prompt", "batch_seed", "join", "make_engine", "pad_logits", "record", "rounds_of", "without_tail"),
    "write_records",
]
