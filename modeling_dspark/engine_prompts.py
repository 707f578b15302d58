"""Checks prompts, and cuts them into the pieces of each forward."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .engine_request import Request


class Piece(NamedTuple):
    """`length` tokens of a request's prompt, from `start` on."""

    request: Request
    start: int
    length: int

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens `[length]`."""
        return self.request.prompt[self.start : self.start + self.length]

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.start + self.length == len(self.request.prompt)


def prompt_pieces(requests: list[Request], *, chunk_size: int, num_tokens: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each forward.

    Args:
        requests (`list[Request]`): Requests with new prompts, in the order of their rows.
        chunk_size (`int`): Maximum tokens of one request in a forward.
        num_tokens (`int`): Maximum tokens of all requests in a forward.
    """
    pieces: list[Piece] = []
    for request in requests:
        start = 0
        while start < len(request.prompt):
            space = num_tokens - sum(piece.length for piece in pieces)
            if space == 0 or (pieces and pieces[-1].request is request):
                yield pieces
                pieces, space = [], num_tokens
            length = min(len(request.prompt) - start, chunk_size, space)
            pieces.append(Piece(request, start, length))
            start += length
    yield pieces


def check_prompt(prompt: Any, max_new_tokens: Any, *, vocab_size: int) -> None:
    """Refuse a prompt that an engine cannot decode.

    Raises:
        TypeError: for a prompt other than a tensor of integers, or a length other than an integer.
        ValueError: for an empty prompt, or tokens the target does not have.
    """
    if not isinstance(prompt, torch.Tensor) or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise TypeError(f"`prompt` must be a tensor of token ids, got {getattr(prompt, 'dtype', type(prompt))}.")
    if prompt.dim() != 1 or len(prompt) == 0:
        raise ValueError(f"`prompt` must hold at least one token id in one dimension, got {tuple(prompt.shape)}.")
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"`prompt` holds ids from {lowest} to {highest}; the target's run from 0 to {vocab_size - 1}."
        )
    if max_new_tokens is not None and type(max_new_tokens) is not int:
        raise TypeError(f"`max_new_tokens` must be an integer, got {max_new_tokens!r}.")


def check_sizes(num_rows: Any, context: Any, num_draft_positions: Any, *, block_size: int) -> None:
    """Refuse what an engine cannot be filled with.

    Raises:
        ValueError: names the ranges and the values.
    """
    sizes = (num_rows, context, 0 if num_draft_positions is None else num_draft_positions)
    are_integers = all(type(size) is int for size in sizes)
    if not are_integers or sizes[0] < 1 or sizes[1] < 2 or not 0 <= sizes[2] <= block_size:
        raise ValueError(
            f"`fill` takes `num_rows` of at least 1, `context` of at least 2 and `num_draft_positions` from 0 to {block_size}, "
            f"got {num_rows!r}, {context!r} and {num_draft_positions!r}."
        )


__all__ = ["Piece", "check_prompt", "check_sizes", "prompt_pieces"]
