"""Where a text ends: the user's stopping criteria, applied to the tokens of many texts at once.

Shapes: `V` vocabulary, `n` length of a text.
"""

from collections import defaultdict
from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria


class StopConditions:
    """Where a text ends: length, time, end-of-text tokens, and criteria on its content.

    Args:
        criteria ([`~transformers.StoppingCriteriaList`], *optional*): As `generate` prepared them.
        batch_size (`int`): Rows of the user's batch; criteria on content find a text in its own row.
        eos_token_ids (`list[int]`, *optional*): More end-of-text tokens.
    """

    def __init__(
        self, criteria: StoppingCriteriaList | None, batch_size: int, *, eos_token_ids: list[int] | None = None
    ):
        self.eos_token_ids = set(eos_token_ids or ())
        self.max_length: int | None = None
        self._batch_size = batch_size
        self._clocks: list[Any] = []
        self._content: list[Any] = []
        for criterion in criteria or ():
            if type(criterion) is MaxLengthCriteria:  # a subclass may do something else
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos_token_ids |= set(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
            elif type(criterion) is MaxTimeCriteria:
                self._clocks.append(criterion)
            else:
                self._content.append(criterion)

    def out_of_time(self) -> bool:
        """Whether `max_time` has passed."""
        nothing = torch.zeros(1, 0, dtype=torch.long)
        return any(bool(torch.as_tensor(clock(nothing, None)).any()) for clock in self._clocks)

    def cut(self, texts: list[tuple[torch.Tensor, list[int]]], rows: list[int], scores: list[Any]) -> list[int | None]:
        """Length at which each text ends, or `None` where it continues.

        Args:
            texts (`list[tuple]`): The text `[n]` of each row, new tokens included, and the new tokens on the host.
            rows (`list[int]`): The row of the user's batch that each text belongs to.
            scores (`list`): Scores `[V]` of all tokens of each text, where they are kept, else `None`.
        """
        ends = [self._by_token(len(text) - len(new), new) for text, new in texts]
        for criterion in self._content:
            if type(criterion) is StopStringCriteria:
                stops = _first_stops(criterion, texts)
            else:
                stops = [self._asked(criterion, *item) for item in zip(texts, ends, rows, scores, strict=True)]
            ends = [
                min((end for end in pair if end is not None), default=None) for pair in zip(ends, stops, strict=True)
            ]
        return ends

    def ask(self, criterion: Any, texts: torch.Tensor, scores: Any) -> Any:
        """Apply a criterion to texts `[B, n]`."""
        return criterion(texts, scores)

    def _by_token(self, before: int, new: list[int]) -> int | None:
        for length, token in enumerate(new, before + 1):
            if token in self.eos_token_ids or (self.max_length is not None and length >= self.max_length):
                return length
        return None

    def _asked(
        self, criterion: Any, text: tuple[torch.Tensor, list[int]], end: int | None, row: int, scores: Any
    ) -> int | None:
        """Ask a criterion about each new token in turn, with the text up to it, as plain decoding does."""
        tokens, new = text
        for length in range(len(tokens) - len(new) + 1, (end or len(tokens)) + 1):
            batch_scores = None
            if scores is not None:
                before = scores[: len(scores) - (len(tokens) - length)]
                batch_scores = tuple(item.expand(self._batch_size, -1) for item in before)
            answer = torch.as_tensor(self.ask(criterion, tokens[:length].repeat(self._batch_size, 1), batch_scores))
            if bool(answer if answer.numel() == 1 else answer[row % self._batch_size]):
                return length
        return None


def _first_stops(criterion: Any, texts: list[tuple[torch.Tensor, list[int]]]) -> list[int | None]:
    """Stop strings: one call per length of the tail that the criterion reads, for all new tokens of all texts."""
    groups: dict[int, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    for index, (text, new) in enumerate(texts):
        for length in range(len(text) - len(new) + 1, len(text) + 1):
            tail = text[max(length - criterion.maximum_token_len, 0) : length]
            groups[len(tail)].append((index, length, tail))
    ends: list[int | None] = [None] * len(texts)
    for group in groups.values():
        stops = criterion(torch.stack([tail for _, _, tail in group]), None).tolist()
        for (index, length, _), stop in zip(group, stops, strict=True):
            if stop:
                ends[index] = min(length, ends[index] or length)
    return ends


__all__ = ["StopConditions"]
