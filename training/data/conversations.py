"""Conversations as token ids: the target's view through its chat template, with the spans of its own answers.

Reads what `training.regenerate` writes, and conversations given as `messages`. No features and no model here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.common.files import read_jsonl
from training.data.masks import assistant_tokens
from training.data.prompts import prompt_ids, read_prompts


Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Conversation:
    """One training sequence.

    Attributes:
        input_ids (`tuple[int, ...]`): The whole conversation.
        response_start (`int`): Where the first answer starts.
        temperature (`float`): At which the answers were drawn.
        response_spans (`tuple[tuple[int, int], ...]`): Start and end of each answer; none means one answer that runs from
            `response_start` to the end.
    """

    input_ids: tuple[int, ...]
    response_start: int
    temperature: float = 0.0
    response_spans: Spans = ()

    @property
    def response_mask(self) -> torch.Tensor:
        """Which tokens are answers: `[T]`."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.response_spans or ((self.response_start, len(self.input_ids)),):
            mask[start:end] = True
        return mask

    @property
    def content(self) -> bytes:
        """The content that training sees, for hashes."""
        spans = [self.response_spans] if self.response_spans else []
        return str((self.input_ids, self.response_start, *spans)).encode()


@dataclass
class _Sequence:
    """The tokens that the target saw and wrote, with the spans that it wrote, before anything is left out."""

    input_ids: tuple[int, ...]
    spans: Spans
    temperature: float


def load_conversations(
    prompts_file: str,
    answer_files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    min_response: int = 2,
) -> tuple[list[Conversation], dict[str, int]]:
    """Conversations of answer files; long ones are cut, answers below `min_response` tokens are not trained on.

    The turns of a conversation are one sequence where each continues the tokens of the turn before. Where the chat template
    renders past turns differently, e.g. without their reasoning, each turn is a sequence: training sees what the target saw.

    Args:
        prompts_file (`str`): The prompts; read only for answers that do not hold their `prompt_ids`.
        answer_files (`Sequence[str]`): Files of `training.regenerate`, or of conversations as `messages`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Of the target.
        max_length (`int`): Longest sequence, in tokens.
        min_response (`int`, *optional*, defaults to `2`): Shortest answer to train on.

    Returns:
        `tuple`: the conversations, and counts of `short_answers`, `long_prompts` (no room for an answer) and `cut`.

    Raises:
        ValueError: if an answer names a prompt that does not exist, or nothing is left to train on.
    """
    conversations: list[Conversation] = []
    counts = {"short_answers": 0, "long_prompts": 0, "cut": 0}
    first_turn = _first_turns(prompts_file, tokenizer)
    for path in answer_files:
        for sequence in _sequences(path, tokenizer, first_turn):
            spans = tuple(
                (start, min(end, max_length)) for start, end in sequence.spans if end - start >= min_response
            )
            counts["short_answers"] += len(sequence.spans) - len(spans)
            inside = tuple(span for span in spans if span[0] + min_response <= max_length)
            counts["long_prompts"] += len(spans) - len(inside)
            if inside:
                ids = sequence.input_ids[:max_length]
                counts["cut"] += len(sequence.input_ids) > max_length
                only = len(inside) == 1 and inside[0][1] == len(ids)
                conversations.append(Conversation(ids, inside[0][0], sequence.temperature, () if only else inside))
    if not conversations:
        raise ValueError(f"No conversation to train on in {list(answer_files)} ({counts}).")
    return conversations, counts


def _first_turns(prompts_file: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], list[int]]:
    """Token ids of prompts, for answers that only name their prompt; prompts are read on the first call."""
    prompts: list[dict] = []
    rendered: dict[int, list[int]] = {}

    def first_turn(index: int, path: str) -> list[int]:
        if not prompts_file:
            raise ValueError(
                f"`{path}`: its answers do not hold `prompt_ids`; pass the file of the prompts that they answer as `prompts`."
            )
        if not prompts:
            prompts.extend(read_prompts(prompts_file))
        if not 0 <= index < len(prompts):
            raise ValueError(f"`{path}` answers prompt {index}, but `{prompts_file}` has {len(prompts)} prompts.")
        if index not in rendered:
            rendered[index] = prompt_ids(tokenizer, prompts[index])
        return rendered[index]

    return first_turn


def _sequences(
    path: str, tokenizer: PreTrainedTokenizerBase, first_turn: Callable[[int, str], list[int]]
) -> list[_Sequence]:
    vocab_size = len(tokenizer)
    sequences: list[_Sequence] = []
    latest: dict[tuple[int, int], _Sequence] = {}
    records: list[Any] = list(read_jsonl(path))
    for record in records:
        if isinstance(record, dict) and "messages" in record:
            ids, mask = assistant_tokens(tokenizer, record["messages"])
            sequences.append(_Sequence(tuple(ids), _spans(mask), record.get("temperature", 0.0)))
            continue
        index, given, answer = _checked(record, path, vocab_size)
        ids = first_turn(index, path) if given is None else given
        key, turn = (index, record.get("sample", 0)), record.get("turn", 0)
        before = latest.get(key) if turn > 0 else None
        whole, span = (*ids, *answer), (len(ids), len(ids) + len(answer))
        if before is not None and whole[: len(before.input_ids)] == before.input_ids:
            before.input_ids, before.spans = whole, (*before.spans, span)
        else:
            latest[key] = _Sequence(whole, (span,), record.get("temperature", 0.0))
            sequences.append(latest[key])
    return sequences


def _spans(mask: Sequence[bool]) -> Spans:
    padded = [False, *mask, False]
    edges = [place for place in range(len(mask) + 1) if padded[place] != padded[place + 1]]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _checked(record: Any, path: str, vocab_size: int) -> tuple[int, list[int] | None, list[int]]:
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    index, prompt, answer = (fields.get(name) for name in ("prompt", "prompt_ids", "answer_ids"))
    numbers = (index, fields.get("sample", 0), fields.get("turn", 0))

    def are_ids(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(token, int) and 0 <= token < vocab_size for token in value)

    whole = all(isinstance(number, int) for number in numbers)
    if not whole or not are_ids(answer) or not (prompt is None or are_ids(prompt)):
        raise ValueError(
            f"`{path}`: an answer needs `prompt` (a line number) and `answer_ids` (token ids below {vocab_size}), and may "
            f"have `prompt_ids` and the numbers `sample` and `turn`; or a conversation as `messages`. Got {str(record)[:120]}."
        )
    if prompt is None and fields.get("turn", 0) > 0:
        raise ValueError(f"`{path}`: an answer to a later turn needs `prompt_ids`, got {str(record)[:120]}.")
    return fields["prompt"], prompt, fields["answer_ids"]


def check_tokens(conversations: Sequence[Conversation], target: PreTrainedModel) -> None:
    """Refuse conversations of another tokenizer.

    Raises:
        ValueError: for a token that the target does not have.
    """
    vocab_size = target.config.get_text_config().vocab_size
    highest = max(max(conversation.input_ids) for conversation in conversations)
    if highest >= vocab_size:
        raise ValueError(
            f"The conversations hold token {highest}, but `target` has {vocab_size} tokens: the tokenizer in its folder is "
            "another model's. Answer the prompts again with the right one."
        )


def num_answers_with(token: int, conversations: Sequence[Conversation]) -> int:
    """The number of conversations in which an answer holds `token`."""
    return sum(
        bool((torch.tensor(conversation.input_ids)[conversation.response_mask] == token).any())
        for conversation in conversations
    )


def choose_draft_vocabulary(
    conversations: Sequence[Conversation], size: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[torch.Tensor, float]:
    """The `size` tokens most frequent in the answers, sorted, and the share of answer tokens they cover.

    Args:
        conversations (`Sequence[Conversation]`): Training data.
        size (`int`): Size of the draft vocabulary.
        vocab_size (`int`): Size of the target's vocabulary.
        always (`Sequence[int]`, *optional*): Tokens kept whatever their frequency (end of text).
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"`draft_vocab_size` must lie in [1, {vocab_size}], got {size}.")
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for conversation in conversations:
        ids = torch.tensor(conversation.input_ids)[conversation.response_mask]
        counts += torch.bincount(ids, minlength=vocab_size)
    ranked = counts.clone()
    ranked[list(always)] = torch.inf
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


__all__ = ["Conversation", "check_tokens", "choose_draft_vocabulary", "load_conversations", "num_answers_with"]
