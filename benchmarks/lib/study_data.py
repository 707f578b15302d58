"""The answers behind a study: checked, made once by the target, and replayed for a drafter."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines.replay import replay, replay_prompt_lookup
from modeling_dspark import RunStatistics
from training.answers.arguments import RegenerateArguments
from training.answers.regeneration import regenerate
from training.common.files import read_jsonl, write_atomically
from training.common.targets import load_tokenizer
from training.data.conversations import Conversation
from training.data.prompts import prompt_ids
from training.evaluation.runs import read_sets


def num_answers(prompts: str, answers: Sequence[str]) -> int:
    """The number of answers in all files.

    Raises:
        ValueError: if an answer is to a prompt that is not in `prompts`.
    """
    num_prompts = len(read_jsonl(prompts))
    records: list[tuple[str, Any]] = [(path, record) for path in answers for record in read_jsonl(path)]
    places = [(path, record.get("prompt") if isinstance(record, dict) else None) for path, record in records]
    for path, place in places:
        if not isinstance(place, int):
            raise ValueError(f"`{path}` holds something other than answers of `dspark regenerate`.")
        if not 0 <= place < num_prompts:
            raise ValueError(
                f"`{path}` answers prompt {place}, but `{prompts}` has {num_prompts}: pass its own prompts."
            )
    return len(places)


def evaluation_sets(options: argparse.Namespace) -> dict[str, list[Conversation]]:
    """Greedy answers of the target by source, made once."""
    work = Path(options.work)
    _, indices_of, records = read_sets(options.eval_prompts, group_by="source", limit=options.limit)
    kept = [records[index] for index in sorted(index for indices in indices_of.values() for index in indices)]
    prompts = work / "eval_prompts.jsonl"
    text = "".join(json.dumps(record) + "\n" for record in kept)
    if prompts.is_file() and prompts.read_text(encoding="utf-8") != text:
        raise ValueError(f"`{work}` holds a study of other evaluation prompts; choose another `--work`.")
    write_atomically(prompts, text)
    arguments = RegenerateArguments(
        prompts=str(prompts),
        output=str(work / "eval_answers.jsonl"),
        target=options.target,
        temperatures=[0.0],
        max_new_tokens=options.max_new_tokens,
        batch_size=16,
        max_turns=1,
    )
    tokenizer = load_tokenizer(options.target)
    sets: dict[str, list[Conversation]] = {}
    for answer in sorted(read_jsonl(regenerate(arguments)), key=lambda answer: answer["prompt"]):
        record = kept[answer["prompt"]]
        ids = prompt_ids(tokenizer, record)
        conversation = Conversation((*ids, *answer["answer_ids"]), len(ids), 0.0)
        sets.setdefault(record["source"], []).append(conversation)
    return sets


def measure(drafter: Any, target: Any, sets: dict[str, list[Conversation]]) -> dict[str, Any]:
    """Replay one drafter over all sets."""
    runs = {name: replay(drafter, target, conversations) for name, conversations in sets.items()}
    return {**summary(runs), "parameters": sum(parameter.numel() for parameter in drafter.parameters())}


def summary(runs: dict[str, RunStatistics]) -> dict[str, Any]:
    """Figures of the rounds of all sets."""
    pooled = RunStatistics.pooled(next(iter(runs.values())).block_size, list(runs.values()))
    tau = {name: round(run.acceptance_length, 4) for name, run in (runs | {"all": pooled}).items()}
    shares = zip(pooled.acceptance_rate_by_position, pooled.tried_by_position, strict=True)
    return {
        "tau": tau,
        "acceptance": [round(share, 4) if tried else None for share, tried in shares],
        "tried": pooled.tried_by_position,
        "rounds": {name: [answer.rounds for answer in run.requests] for name, run in runs.items()},
    }


def references(sets: dict[str, list[Conversation]], *, num_tokens: int) -> list[dict[str, Any]]:
    """Drafters without training: the plain target, which gives one token per round, and prompt lookup."""
    runs = {name: replay_prompt_lookup(answers, num_tokens=num_tokens) for name, answers in sets.items()}
    plain = {name: [sum(answer.new_tokens) for answer in run.requests] for name, run in runs.items()}
    tau = dict.fromkeys([*runs, "all"], 1.0)
    return [
        {"group": "references", "drafter": "plain target", "tau": tau, "rounds": plain},
        {"group": "references", "drafter": "prompt lookup", **summary(runs)},
    ]


__all__ = ["evaluation_sets", "measure", "num_answers", "references"]
