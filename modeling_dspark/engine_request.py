"""One request of the packed loop: its text, its features that the drafter has not seen, and its counts."""

from dataclasses import dataclass, field

import torch

from .engine_counts import RunStatistics
from .schedule_gate import RequestEstimate


@dataclass(eq=False)
class Request:
    """A prompt and the text after it.

    Attributes:
        index (`int`): Order in which it was added; the row of the user's batch.
        prefix (`torch.LongTensor` of shape `(n,)`):
            The prompt as logits processors and criteria see it: with its padding on the left.
        prompt (`torch.LongTensor` of shape `(m,)`): The prompt without padding.
        max_length (`int`): Maximum tokens of `prefix` and text together.
        statistics ([`RunStatistics`]): Its rounds.
        pending (`list[torch.Tensor]`): Features `[c, L * D]` that the drafter has not seen yet.
        finished (`bool`): Whether its text has ended.
        scores, logits (`list[torch.Tensor]`): Processed and raw logits `[V]` of each new token, where asked for.
    """

    index: int
    prefix: torch.Tensor
    prompt: torch.Tensor
    max_length: int
    statistics: RunStatistics
    pending: list[torch.Tensor] = field(default_factory=list)
    finished: bool = False
    estimate: RequestEstimate = field(default_factory=RequestEstimate)
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._length = len(self.prefix)
        self._text = self.prefix.new_empty(self._length + 64)
        self._text[: self._length] = self.prefix
        self.anchor = int(self.prompt[-1])

    @property
    def length(self) -> int:
        """Tokens of `prefix` and text."""
        return self._length

    @property
    def text(self) -> torch.Tensor:
        """`prefix` and the tokens after it, a view `[length]`."""
        return self._text[: self._length]

    @property
    def tokens(self) -> torch.Tensor:
        """The new tokens, a view."""
        return self._text[len(self.prefix) : self._length]

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.max_length - self._length

    def append(self, tokens: list[int]) -> None:
        """Add tokens to the text."""
        end = self._length + len(tokens)
        if end > len(self._text):
            grown = self._text.new_empty(2 * end)
            grown[: self._length] = self.text
            self._text = grown
        self._text[self._length : end] = torch.tensor(tokens, device=self._text.device)
        self._length = end
        self.anchor = tokens[-1]

    def truncate(self, length: int) -> None:
        """Forget the tokens after the first `length`, prefix included."""
        self._length = length

    def features(self) -> torch.Tensor:
        """The pending features `[c, L * D]`, in one tensor."""
        if len(self.pending) > 1:
            self.pending = [torch.cat(self.pending)]
        return self.pending[0]


__all__ = ["Request"]
