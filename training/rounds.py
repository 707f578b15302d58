"""Record verification rounds of a drafter and its target: what calibration is fitted on.

Every block is verified at full length, whatever the drafter's own schedule: a schedule that looks at confidence would
leave out the very rounds that tell how well confidence is calibrated. `rounds.jsonl` has a first line of `settings`,
then one line a finished prompt: `prompt` (its line number, from 0), and for each round `new_tokens`, `accepted`,
`verified` and `logits`. Nothing is fitted here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from modeling_dspark import DSparkModel, RunStatistics
from modeling_dspark.engine_dspark import Engine
from modeling_dspark.scheduling_dspark import DraftSettings
from training.calibration import Rounds
from training.regenerate import read_jsonl, write_atomically


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered: its line in the prompts file, and its token ids."""

    index: int
    input_ids: tuple[int, ...]


Recorder = Callable[[Sequence[Prompt]], Iterator[tuple[int, RunStatistics]]]


def make_engine(drafter: DSparkModel, target: PreTrainedModel, temperature: float) -> Engine:
    """A decoding engine that verifies every block at full length and keeps the confidence logits."""
    eos = target.generation_config.eos_token_id
    sampling = temperature > 0
    return Engine(
        drafter,
        target,
        settings=DraftSettings(drafter.config.block_size, schedule="fixed", confidence_threshold=0.0),
        do_sample=sampling,
        logits_processor=LogitsProcessorList([TemperatureLogitsWarper(float(temperature))]) if sampling else None,
        eos_token_ids=[] if eos is None else list(eos) if isinstance(eos, list) else [eos],
        record_confidence=True,
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


def rounds_of(statistics: RunStatistics) -> dict[str, list]:
    """The rounds of one request that drafted, as plain lists.

    A round without a token after its drafts ended the text at a kept draft; what stood behind that was neither kept nor
    refused, and does not count as verified.
    """
    drafting = [number for number, drafted in enumerate(statistics.drafted) if drafted > 0]
    logits = [row for row in statistics.confidence_logits if row]
    if len(logits) != len(drafting):
        raise ValueError(f"{len(drafting)} rounds drafted, but confidence was recorded for {len(logits)}.")
    new_tokens = [statistics.new_tokens[number] for number in drafting]
    accepted = [min(statistics.accepted[number], statistics.new_tokens[number]) for number in drafting]
    verified = [statistics.verified[number] for number in drafting]
    verified = [
        kept if tokens <= kept else checked
        for tokens, kept, checked in zip(new_tokens, accepted, verified, strict=True)
    ]
    rounded = [[round(float(value), 4) for value in row] for row in logits]
    return {"new_tokens": new_tokens, "accepted": accepted, "verified": verified, "logits": rounded}


def record_to_file(
    path: Path, settings: dict[str, Any], prompts: Sequence[Prompt], recorder: Recorder
) -> list[dict[str, Any]]:
    """Record the prompts that are not in the file yet; the records of all `prompts`, in their order.

    A line is written as soon as its prompt is finished. At the end the lines are sorted, so that a run that was stopped
    and started again leaves the same file as one that was not.

    Raises:
        ValueError: if the file was made with other settings; names them.
    """
    records = _resume(path, settings)
    pending = [prompt for prompt in prompts if prompt.index not in records]
    _rewrite(path, settings, records)  # without half a line that a crash may have left
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(prompts), unit="prompt", desc="rounds") as bar:
        bar.update(len(prompts) - len(pending))
        for index, statistics in recorder(pending):
            records[index] = {"prompt": index} | rounds_of(statistics)
            file.write(json.dumps(records[index]) + "\n")
            file.flush()
            bar.update()
            bar.set_postfix(rounds=sum(len(each["accepted"]) for each in records.values()), refresh=False)
    _rewrite(path, settings, records)
    return [records[prompt.index] for prompt in prompts]


def join(records: Sequence[dict[str, Any]], num_slots: int) -> Rounds:
    """All rounds of some records; a block that was drafted shorter is filled up behind what was verified."""
    rows = [row[:num_slots] + [0.0] * (num_slots - len(row)) for each in records for row in each["logits"]]
    accepted = [value for each in records for value in each["accepted"]]
    verified = [value for each in records for value in each["verified"]]
    return Rounds.of(torch.tensor(rows, dtype=torch.float64).reshape(-1, num_slots), accepted, verified)


def _rewrite(path: Path, settings: dict[str, Any], records: dict[int, dict[str, Any]]) -> None:
    lines = [{"settings": settings}, *(records[index] for index in sorted(records))]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def _resume(path: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Records of an earlier run by prompt, after a check that it had the same settings."""
    lines: list[Any] = list(read_jsonl(path)) if path.is_file() else []
    if not lines:
        return {}
    if not isinstance(lines[0], dict) or not isinstance(lines[0].get("settings"), dict):
        raise ValueError(f"`{path}` does not begin with a line of settings; choose another `output`.")
    earlier = lines[0]["settings"]
    names = sorted(set(earlier) | set(settings))
    different = {name: (earlier.get(name), settings.get(name)) for name in names}
    different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
    if different:
        raise ValueError(
            f"`{path}` was recorded with other settings (then, now): {different}. Go on with the same ones, or choose "
            "another `output`."
        )
    fields = {"prompt", "new_tokens", "accepted", "verified", "logits"}
    for number, line in enumerate(lines[1:], start=2):
        if not isinstance(line, dict) or set(line) != fields:
            raise ValueError(f"`{path}` line {number} is not a record of this command; choose another `output`.")
    return {line["prompt"]: line for line in lines[1:]}


__all__ = ["Prompt", "join", "make_engine", "record", "record_to_file", "rounds_of"]
