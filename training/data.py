"""Conversations as token ids: prompt through the chat template, then the target's own answer.

Reads what `training.regenerate` writes. No features and no model here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.regenerate import prompt_ids, read_jsonl


@dataclass(frozen=True)
class Conversation:
    """One training sequence; the response starts at `response_start`."""

    input_ids: tuple[int, ...]
    response_start: int
    temperature: float = 0.0

    @property
    def response_mask(self) -> torch.Tensor:
        """Which tokens are the answer: `[T]`."""
        return torch.arange(len(self.input_ids)) >= self.response_start


def load_conversations(
    prompts_file: str,
    answer_files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    min_response: int = 2,
) -> tuple[list[Conversation], dict[str, int]]:
    """Join prompts and answers; a longer conversation is cut, an answer below `min_response` tokens is skipped.

    Returns:
        `tuple`: the conversations, and counts of `short_answers`, `long_prompts` (no room for an answer) and `cut`.

    Raises:
        ValueError: if an answer names a prompt that is not there, or nothing is left to train on.
    """
    prompts = read_jsonl(prompts_file)
    prompt_cache: dict[int, list[int]] = {}
    conversations: list[Conversation] = []
    vocab_size = len(tokenizer)
    counts = {"short_answers": 0, "long_prompts": 0, "cut": 0}
    for path in answer_files:
        for record in read_jsonl(path):
            index, answer = _checked(record, path, vocab_size)
            if not 0 <= index < len(prompts):
                raise ValueError(f"`{path}` answers prompt {index}, but `{prompts_file}` has {len(prompts)} prompts.")
            ids = prompt_cache.setdefault(index, prompt_ids(tokenizer, prompts[index]))
            if len(answer) < min_response:
                counts["short_answers"] += 1
            elif len(ids) + min_response > max_length:
                counts["long_prompts"] += 1
            else:
                whole = (*ids, *answer)
                counts["cut"] += len(whole) > max_length
                conversations.append(Conversation(whole[:max_length], len(ids), record.get("temperature", 0.0)))
    if not conversations:
        raise ValueError(f"No conversation to train on in {list(answer_files)} ({counts}).")
    return conversations, counts


def _checked(record: Any, path: str, vocab_size: int) -> tuple[int, list[int]]:
    index, answer = (record.get(name) if isinstance(record, dict) else None for name in ("prompt", "answer_ids"))
    is_list = isinstance(answer, list) and all(isinstance(token, int) and 0 <= token < vocab_size for token in answer)
    if not isinstance(index, int) or not is_list:
        raise ValueError(
            f"`{path}`: an answer needs `prompt` (a line number) and `answer_ids` (token ids below {vocab_size}), got "
            f"{str(record)[:120]}."
        )
    return index, answer  # type: ignore[return-value]  # checked above


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
        ids = torch.tensor(conversation.input_ids[conversation.response_start :])
        counts += torch.bincount(ids, minlength=vocab_size)
    ranked = counts.clone()
    ranked[list(always)] = torch.inf
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


__all__ = ["Conversation", "check_tokens", "choose_draft_vocabulary", "load_conversations"]
