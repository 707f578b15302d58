"""The tokens of a rendered conversation that the assistant wrote.

The chat template marks them (`{% generation %}`); without marks, the conversation is rendered turn by turn.
"""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.data.prompts import apply_template


_GENERATION = re.compile(r"\{%-?\s*generation\b")


def assistant_tokens(tokenizer: PreTrainedTokenizerBase, messages: Any) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them are the assistant's, end of turn included.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Of the target, with a chat template.
        messages (`list[dict]`): The conversation: `role` and `content` of each message.

    Raises:
        ValueError: if there is no chat template, the messages are malformed, the tokenizer does not know where in the text its
            tokens are, or the template renders a turn differently in a longer conversation.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError("Conversations given as `messages` need a target with a chat template.")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise ValueError(f"`messages` must be a list of objects with `role` and `content`, got {str(messages)[:120]}.")
    if not tokenizer.is_fast:
        raise ValueError(
            f"`messages` need a fast tokenizer, which knows offsets; {type(tokenizer).__name__} is not one."
        )
    if _GENERATION.search(template):
        encoded = apply_template(tokenizer, messages, return_assistant_tokens_mask=True, return_dict=True)
        return encoded["input_ids"], [bool(value) for value in encoded["assistant_masks"]]
    return _by_prefixes(tokenizer, messages)


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    text = _render(tokenizer, messages, answer_next=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(tokenizer, messages[:index], answer_next=True)
            # Line breaks after the end of a turn belong to the template: the target stops before them.
            through = _render(tokenizer, messages[: index + 1], answer_next=False).rstrip()
            if not through.startswith(before) or not text.startswith(through):
                raise ValueError(
                    f"The chat template renders message {index} differently in a longer conversation, so the place of the "
                    "answer is unknown. Mark the answers in the template with `{% generation %}`, or let "
                    "`training.regenerate` answer the prompts: its records hold what the target saw."
                )
            spans.append((len(before), len(through)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(start < last and first < end for start, end in spans) for first, last in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, answer_next: bool) -> str:
    if not messages:
        return ""
    return apply_template(tokenizer, messages, add_generation_prompt=answer_next, tokenize=False)


__all__ = ["assistant_tokens"]
