"""The requests that follow from prompts and arguments. Nothing is answered here.

A request is one turn of one conversation. The requests depend on the prompts, the arguments and the answers so far, and on
nothing else, so a run that was stopped finds its place again.
"""

import random
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.answers.arguments import RegenerateArguments, valid_sampling
from training.common.files import read_jsonl
from training.data.prompts import chat, prompt_ids, read_prompts, render_chat, text_ids, user_turns


@dataclass(frozen=True)
class Request:
    """One answer to make: a turn of a conversation.

    Attributes:
        prompt (`int`): Index of the prompt.
        sample (`int`): Index of the conversation among those that start from this prompt.
        turns (`tuple[str, ...]`): All user turns to answer.
        answers (`tuple[str, ...]`): Answers to the turns before this one.
        input_ids (`tuple[int, ...]`): What the target sees.
        temperature, top_p, max_new_tokens: How the answer is sampled.
        seed (`int`, *optional*): The prompt's own seed.
    """

    prompt: int
    sample: int
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    input_ids: tuple[int, ...]
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int | None

    @property
    def turn(self) -> int:
        return len(self.answers)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.prompt, self.sample, self.turn

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation, up to the turn to answer."""
        return chat(self.turns[: self.turn + 1], self.answers)

    def record(self, answer_ids: list[int], *, seed: int, finish_reason: str) -> dict[str, Any]:
        """The answer as a line of the output."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": self.max_new_tokens}
        place = {"prompt": self.prompt, "sample": self.sample, "turn": self.turn}
        ids = {"prompt_ids": list(self.input_ids), "answer_ids": answer_ids}
        return place | sampling | {"seed": seed, "finish_reason": finish_reason} | ids


@dataclass(frozen=True)
class Answer:
    """An answer that is in the file, kept compact since all answers are kept."""

    ids: array
    seed: int | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Answer":
        return cls(array("i", record["answer_ids"]), record.get("seed"))


Answers = dict[tuple[int, int, int], Answer]


def answers_in(path: Path) -> Answers:
    """The answers of a file.

    Raises:
        ValueError: if it holds anything else; shows it.
    """
    answers = {}
    records: list[Any] = read_jsonl(path)
    for record in records:
        fields: Any = record if isinstance(record, dict) else {}
        ids = fields.get("answer_ids")
        place = [fields.get("prompt"), fields.get("sample", 0), fields.get("turn", 0)]
        if not isinstance(ids, list) or not all(isinstance(number, int) for number in (*place, *ids)):
            raise ValueError(f"`{path}` holds more than answers, {str(record)[:80]}; name another file.")
        answers[key_of(fields)] = Answer.of(fields)
    return answers


def key_of(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """The key of the request that a record answers."""
    return record["prompt"], record.get("sample", 0), record.get("turn", 0)


def own_sampling(record: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The prompt's own sampling parameters.

    Raises:
        ValueError: if one of them is out of range.
    """
    fields = ("temperature", "top_p", "max_new_tokens", "seed")
    given = {name: record[name] for name in fields if record.get(name) is not None}
    for name, value in given.items():
        if not valid_sampling(name, value):
            raise ValueError(f"Prompt {place} (from 0) asks for `{name}={value!r}`, which is out of range.")
    return given


def plan_requests(
    arguments: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, records: list[dict] | None = None
) -> tuple[list[Request], int]:
    """First turns of all conversations, with temperatures dealt in turn, and the number of prompts left out."""
    if records is None:
        records = read_prompts(arguments.prompts, split=arguments.prompts_split, column=arguments.prompts_column)
    answered = set()
    if arguments.skip_answered_in:
        answered = _answered_in(arguments.skip_answered_in)
    requests, too_long = [], 0
    for prompt in range(arguments.skip, min(len(records), arguments.limit or len(records))):
        if prompt in answered:
            continue
        turns = tuple(user_turns(records[prompt])[: arguments.max_turns])
        ids = tuple(prompt_ids(tokenizer, records[prompt], arguments.thinking))
        if len(ids) > arguments.max_prompt_tokens:
            too_long += 1
            continue
        own = own_sampling(records[prompt], prompt)
        for sample in range(arguments.samples_per_prompt):
            dealt = arguments.temperatures[(prompt + sample) % len(arguments.temperatures)]
            sampling = {
                "temperature": own.get("temperature", dealt),
                "top_p": own.get("top_p", arguments.top_p),
                "max_new_tokens": own.get("max_new_tokens", arguments.max_new_tokens),
                "seed": own["seed"] + sample if "seed" in own else None,
            }
            requests.append(Request(prompt, sample, turns, (), ids, **sampling))
    return requests, too_long


def _answered_in(path: str) -> set[int]:
    records: list[Any] = read_jsonl(path)
    places: set[Any] = {record.get("prompt") if isinstance(record, dict) else None for record in records}
    if not all(isinstance(place, int) for place in places):
        raise ValueError(f"`skip_answered_in`: not every line of `{path}` has the number of a `prompt`.")
    return places


def follow_up(
    request: Request, answer_ids: list[int], tokenizer: PreTrainedTokenizerBase, arguments: RegenerateArguments
) -> Request | None:
    """The next turn of a conversation, or `None` if it ends here (no turn left, or longer than `max_prompt_tokens`)."""
    if request.turn + 1 == len(request.turns):
        return None
    answer = str(tokenizer.decode(answer_ids, skip_special_tokens=True))
    longer = replace(request, answers=(*request.answers, answer))
    text = render_chat(tokenizer, longer.messages, arguments.thinking)
    before = render_chat(tokenizer, request.messages, arguments.thinking) + answer
    if text.startswith(before):
        # The tokens that were sampled, not those the same text might be split into: training sees what the target saw.
        rest = text_ids(tokenizer, text[len(before) :])
        ids = (*request.input_ids, *answer_ids, *(rest[1:] if rest[:1] == answer_ids[-1:] else rest))
    else:  # a template that renders past turns differently, e.g. without their reasoning
        ids = tuple(text_ids(tokenizer, text))
    return replace(longer, input_ids=ids) if len(ids) <= arguments.max_prompt_tokens else None


def follow_ups(
    requests: Iterable[Request], answers: Answers, tokenizer: PreTrainedTokenizerBase, arguments: RegenerateArguments
) -> list[Request]:
    """The next turns of all conversations whose turn is answered."""
    answered = [request for request in requests if request.key in answers]
    following = [follow_up(r, list(answers[r.key].ids), tokenizer, arguments) for r in answered]
    return [request for request in following if request is not None]


def plan_batches(requests: list[Request], batch_size: int, seed: int) -> list[list[Request]]:
    """Group requests that are sampled alike and have similar lengths; the batches come in a seeded random order.

    A request with a seed of its own is alone in its batch, so that its answer depends on nothing else.
    """
    ordered = sorted(
        requests,
        key=lambda r: (r.temperature, r.top_p, r.max_new_tokens, r.seed is not None, len(r.input_ids), r.key),
    )
    batches: list[list[Request]] = []
    current: list[Request] = []
    for request in ordered:
        if current and (len(current) == batch_size or not _together(current[0], request)):
            batches.append(current)
            current = []
        current.append(request)
    if current:
        batches.append(current)
    random.Random(seed).shuffle(batches)
    return batches


def _together(*requests: Request) -> bool:
    sampling = {(request.temperature, request.top_p, request.max_new_tokens) for request in requests}
    return len(sampling) == 1 and all(request.seed is None for request in requests)


__all__ = [
    *("Answer", "Answers", "Request", "answers_in", "follow_up", "follow_ups", "key_of", "own_sampling"),
    *("plan_batches", "plan_requests"),
]
