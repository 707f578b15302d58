"""The runs behind an evaluation: sets of prompts, their rounds at full length, and timings.

Batches are planned beforehand, so a prompt is always answered in the same company, and equal arguments give equal rounds.
(Sums of other shapes round differently, and in bf16 two nearly equal logits can then change places.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from modeling_dspark import DSparkModel
from training.common.files import read_jsonl
from training.confidence.rounds import Prompt, batch_seed, make_engine, record, rounds_of
from training.data.prompts import prompt_ids
from training.evaluation.report import POOLED
from training.evaluation.timing import ASSISTED, PLAIN, measure, warm_up


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a set to answer, and the number of those that are too long."""

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
            name for name in ("source", "category") if any(isinstance(line, dict) and name in line for line in records)
        ]
        field = named[0] if named else None
    sets: dict[str, list[int]] = {}
    for index, line in enumerate(records):
        name = Path(path).stem if field is None else line.get(field) if isinstance(line, dict) else None
        if not isinstance(name, str) or not name.strip():
            raise ValueError(
                f"`group_by`: line {index + 1} of `{path}` has no text in its field `{field}`, which names its set; add it, "
                "or pass another field."
            )
        if name == POOLED:
            raise ValueError(f"`group_by`: a set must not be called `{POOLED}`, the name of all sets together.")
        sets.setdefault(name, []).append(index)
    return field, {name: indices[:limit] for name, indices in sets.items()}, records


def plan_sets(
    sets: dict[str, list[int]], records: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> dict[str, PromptSet]:
    """Turn records into prompts; prompts of more than `max_length` tokens are left out and counted.

    Raises:
        ValueError: if a set has no prompt left.
    """
    planned = {}
    for name, indices in sets.items():
        prompts = [Prompt(index, tuple(prompt_ids(tokenizer, records[index]))) for index in indices]
        chosen = tuple(prompt for prompt in prompts if len(prompt.input_ids) <= max_length)
        if not chosen:
            raise ValueError(
                f"`prompts`: the set `{name}` is empty: none of its {len(prompts)} prompts has at most {max_length} tokens. "
                "Raise `max_prompt_tokens`, lower `max_new_tokens`, or leave the set out of the file."
            )
        planned[name] = PromptSet(chosen, len(prompts) - len(chosen))
    return planned


def plan_batches(sets: dict[str, PromptSet], batch_size: int) -> list[tuple[Prompt, ...]]:
    """Batches of one set each, in the order of the file."""
    return [
        prompt_set.prompts[start : start + batch_size]
        for prompt_set in sets.values()
        for start in range(0, len(prompt_set.prompts), batch_size)
    ]


def record_rounds(
    batches: Sequence[Sequence[Prompt]],
    *,
    drafter: DSparkModel,
    target: PreTrainedModel,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[int, dict[str, Any]]:
    """Rounds of every prompt, by prompt.

    Each batch begins with an engine of its own; when sampling, its random numbers depend on `seed` and its first prompt only.

    Args:
        batches (`Sequence[Sequence[Prompt]]`): The prompts that are answered together.
        drafter ([`DSparkModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): Its target.
        max_new_tokens (`int`): Longest answer.
        temperature (`float`): Of the answers; 0 is greedy.
        seed (`int`): Of the answers when sampling.
    """
    with_confidence = drafter.confidence_head is not None
    records = {}
    with tqdm(total=sum(map(len, batches)), unit="prompt", desc="rounds") as bar:
        for batch in batches:
            set_seed(batch_seed(seed, batch[0].index))
            engine = make_engine(drafter, target, temperature)
            sizes = {"max_new_tokens": max_new_tokens, "batch_size": len(batch)}
            for index, statistics in record(engine, batch, device=target.device, **sizes):
                rounds = rounds_of(statistics, all_rounds=True, with_confidence=with_confidence)
                records[index] = {"prompt": index} | rounds
                bar.update()
    return records


def record_speed(
    prompts: Sequence[Prompt],
    *,
    drafter: DSparkModel,
    target: PreTrainedModel,
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> dict[int, dict[str, Any]]:
    """Tokens and seconds of plain and assisted decoding by prompt: one prompt at a time, both methods in turns.

    Args:
        prompts (`Sequence[Prompt]`): What to answer.
        drafter ([`DSparkModel`]): The drafter, which assists with its own defaults.
        target ([`~transformers.PreTrainedModel`]): The target, as a user loads it: one object for both methods.
        max_new_tokens (`int`): Longest answer.
        sampling (`dict`): Further arguments of `generate` for both, e.g. `do_sample`.
    """
    methods = {PLAIN: sampling, ASSISTED: sampling | {"assistant_model": drafter}}
    warm_up(target, prompts[0].input_ids, methods)
    records = {}
    for number, prompt in enumerate(tqdm(prompts, unit="prompt", desc="speed")):
        timed = measure(target, prompt.input_ids, methods, max_new_tokens=max_new_tokens, first=number)
        records[prompt.index] = {"prompt": prompt.index} | {
            name: {"tokens": len(timed.tokens(name)), "seconds": timed.seconds(name)} for name in methods
        }
    return records


__all__ = ["PromptSet", "plan_batches", "plan_sets", "read_sets", "record_rounds", "record_speed"]
