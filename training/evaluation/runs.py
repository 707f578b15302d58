"""The runs behind an evaluation: sets of prompts, their rounds at full length, and timings. All of them resume.

Prompts are answered in batches that are planned beforehand, and each batch begins with an engine of its own. So a prompt
always has the same company, and a run that was stopped and started again gives the same rounds, to the last bit, as one
that was not. (Sums of other shapes round differently, and in bf16 two nearly equal logits can then change places.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from modeling_dspark import DSparkModel, RunStatistics
from training.common.records import RecordFile
from training.confidence.rounds import Prompt, make_engine, record, rounds_of
from training.evaluation.report import POOLED
from training.evaluation.timing import ASSISTED, PLAIN, measure, warm_up
from training.regenerate import prompt_ids, read_jsonl


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a set that are answered, and the number of those that are too long."""

    prompts: tuple[Prompt, ...]
    skipped: int


def read_sets(path: str, *, group_by: str | None, limit: int | None) -> tuple[str | None, dict[str, list[int]], list]:
    """Group the records of a prompts file.

    Args:
        path (`str`): JSONL file.
        group_by (`str`, *optional*): The field whose value names a record's set. By default `source` or `category`,
            whichever records have; where none has either, all are one set with the file's name.
        limit (`int`, *optional*): Keep the first so many records of each set.

    Returns:
        The field, line numbers (from 0) by set in the order of the file, and all records.

    Raises:
        ValueError: if the file is missing, broken or empty, or records lack the field.
    """
    records: list[Any] = read_jsonl(path)
    if not records:
        raise ValueError(f'`prompts`: `{path}` holds no prompts; a line is `{{"turns": ["a question"]}}`.')
    field = group_by
    if field is None:
        named = [
            name for name in ("source", "category") if any(isinstance(each, dict) and name in each for each in records)
        ]
        field = named[0] if named else None
    sets: dict[str, list[int]] = {}
    for index, each in enumerate(records):
        name = Path(path).stem if field is None else each.get(field) if isinstance(each, dict) else None
        if not isinstance(name, str) or not name.strip():
            raise ValueError(
                f"`group_by`: line {index + 1} of `{path}` has no text in its field `{field}`, which names its set; add it, "
                "or pass another field."
            )
        if name == POOLED:
            raise ValueError(f"`group_by`: a set must not be called `{POOLED}`, which all sets together are called.")
        sets.setdefault(name, []).append(index)
    return field, {name: indices[:limit] for name, indices in sets.items()}, records


def plan_sets(
    sets: dict[str, list[int]], records: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, longest: int
) -> dict[str, PromptSet]:
    """Turn records into prompts; those of more than `longest` tokens are left out and counted.

    Raises:
        ValueError: if nothing is left of a set.
    """
    planned = {}
    for name, indices in sets.items():
        prompts = [Prompt(index, tuple(prompt_ids(tokenizer, records[index]))) for index in indices]
        chosen = tuple(prompt for prompt in prompts if len(prompt.input_ids) <= longest)
        if not chosen:
            raise ValueError(
                f"`prompts`: the set `{name}` is empty: none of its {len(prompts)} prompts has at most {longest} tokens. "
                "Raise `max_prompt_tokens`, lower `max_new_tokens`, or leave the set out of the file."
            )
        planned[name] = PromptSet(chosen, len(prompts) - len(chosen))
    return planned


def plan_batches(sets: dict[str, PromptSet], batch_size: int) -> list[tuple[Prompt, ...]]:
    """Batches of one set each, in the order of the file."""
    return [
        part.prompts[start : start + batch_size]
        for part in sets.values()
        for start in range(0, len(part.prompts), batch_size)
    ]


Answer = Callable[[Sequence[Prompt]], Iterator[tuple[int, RunStatistics]]]


def answer_with(
    drafter: DSparkModel, target: PreTrainedModel, *, max_new_tokens: int, temperature: float, seed: int
) -> Answer:
    """What answers a batch; when sampling, the random numbers of a batch depend on `seed` and its first prompt only."""

    def answer(batch: Sequence[Prompt]) -> Iterator[tuple[int, RunStatistics]]:
        set_seed((seed * 1_000_003 + batch[0].index) % 2**32)
        engine = make_engine(drafter, target, temperature)
        return record(engine, batch, max_new_tokens=max_new_tokens, batch_size=len(batch), device=target.device)

    return answer


def record_rounds(
    path: Path,
    settings: dict[str, Any],
    batches: Sequence[Sequence[Prompt]],
    *,
    answer: Answer,
    with_confidence: bool,
) -> dict[int, dict[str, Any]]:
    """Rounds of every prompt, by prompt; a batch of which a record is missing is answered anew as a whole.

    Raises:
        ValueError: if the file was made with other settings; names them.
    """
    file = RecordFile(path, settings, ("batch", "new_tokens", "accepted", "verified", "logits"))
    with file, tqdm(total=sum(map(len, batches)), unit="prompt", desc="rounds") as bar:
        for batch in batches:
            names = [prompt.index for prompt in batch]
            if all(file.records.get(name, {}).get("batch") == names for name in names):
                bar.update(len(batch))
                continue
            for index, statistics in answer(batch):
                rounds = rounds_of(statistics, all_rounds=True, with_confidence=with_confidence)
                file.add({"prompt": index, "batch": names} | rounds)
                bar.update()
    return {prompt.index: file.records[prompt.index] for batch in batches for prompt in batch}


def record_speed(
    path: Path,
    settings: dict[str, Any],
    prompts: Sequence[Prompt],
    *,
    drafter: DSparkModel,
    target: PreTrainedModel,
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> dict[int, dict[str, Any]]:
    """Tokens and seconds of `plain` and `assisted` decoding by prompt, one prompt at a time, in turns.

    Args:
        path (`Path`): The file of timings.
        settings (`dict`): What they depend on.
        prompts (`Sequence[Prompt]`): What to answer.
        drafter ([`DSparkModel`]): The drafter, which assists with its own defaults.
        target ([`~transformers.PreTrainedModel`]): The target.
        max_new_tokens (`int`): Longest answer.
        sampling (`dict`): Further arguments of `generate` for both, e.g. `do_sample`.

    Raises:
        ValueError: if the file was made with other settings; names them.
    """
    file = RecordFile(path, settings, (PLAIN, ASSISTED))
    methods = {PLAIN: sampling, ASSISTED: sampling | {"assistant_model": drafter}}
    pending = [prompt for prompt in prompts if prompt.index not in file.records]
    with file, tqdm(total=len(prompts), unit="prompt", desc="speed") as bar:
        if pending:
            warm_up(target, pending[0].input_ids, methods)
        for number, prompt in enumerate(prompts):
            if prompt.index not in file.records:
                timed = measure(target, prompt.input_ids, methods, max_new_tokens=max_new_tokens, first=number)
                figures = {
                    name: {"tokens": len(timed.tokens(name)), "seconds": timed.seconds(name)} for name in methods
                }
                file.add({"prompt": prompt.index} | figures)
            bar.update()
    return {prompt.index: file.records[prompt.index] for prompt in prompts}


__all__ = [
    *("PromptSet", "answer_with", "plan_batches", "plan_sets", "read_sets", "record_rounds", "record_speed"),
]
