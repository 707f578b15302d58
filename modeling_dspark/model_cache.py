"""The drafter's context cache, and the ragged buffers under it.

The cache holds keys and values of the *context* only (tokens that went through the target). Keys and values of a draft
block are written after the context so that attention reads one contiguous view, but the lengths never advance over
them: the next round overwrites them, and a rejected draft leaves nothing to roll back.

Shapes: `R` rows (requests), `C` new context positions, `K` block positions, `H` key/value heads, `d` head size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WritePlan:
    """Write positions of one forward, and the positions that its queries may read.

    Attributes:
        stop (`int`): Positions read by attention, over all rows.
        positions (`torch.LongTensor` of shape `(R, C + K)`, *optional*): Ragged rows only: where each key goes.
        mask (`torch.BoolTensor` of shape `(R, 1, 1, stop)`, *optional*): Ragged rows only: readable positions.
    """

    stop: int
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class RaggedCache:
    """Per-layer buffers `[row slots, capacity, H, d]` with one length per row; rows join, leave and trade places.

    The rows in use come first, so every read is a view. Buffers start at the size first needed and grow
    geometrically, never beyond `max_length`. They start as zeros, because masked positions are multiplied by zero and
    must be finite.

    Args:
        num_rows (`int`, *optional*, defaults to `0`): Rows to begin with.
        max_length (`int`, *optional*): Maximum length of a row, if known.
    """

    def __init__(self, num_rows: int = 0, max_length: int | None = None):
        self.lengths: list[int] = [0] * num_rows
        self.max_length = max_length
        self.capacity = 0
        self._num_row_slots = 0
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add_row(self) -> int:
        """Add an empty row after the others; returns its index."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    def swap_rows(self, first: int, second: int) -> None:
        """Let two rows trade places."""
        self.reserve(self.capacity)  # a new row may have no storage yet
        longest = max(self.lengths[first], self.lengths[second])
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[[first, second], :longest] = buffer[[second, first], :longest]
        self.lengths[first], self.lengths[second] = self.lengths[second], self.lengths[first]

    def drop_row(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            self.reserve(self.capacity)
            for buffers in self._buffers.values():
                for buffer in buffers:
                    buffer[row, :length] = buffer[last, :length]
            self.lengths[row] = length
        self.lengths.pop()

    def reserve(self, num_positions: int) -> None:
        """Make room for `num_positions` positions in every row; the contents stay."""
        num_rows = len(self.lengths)
        if num_rows <= self._num_row_slots and num_positions <= self.capacity:
            return
        if num_positions > self.capacity:
            spare = num_positions + num_positions // 4
            self.capacity = max(num_positions, spare if self.max_length is None else min(spare, self.max_length))
        if num_rows > self._num_row_slots:
            self._num_row_slots = max(num_rows, 2 * self._num_row_slots)
        for layer_idx, (keys, values) in self._buffers.items():
            self._buffers[layer_idx] = (self._grown(keys), self._grown(values))

    def buffers(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer, made on first use like `keys` and `values` `[..., H, d]`."""
        if layer_idx not in self._buffers:
            size = (self._num_row_slots, self.capacity)
            self._buffers[layer_idx] = (
                keys.new_zeros(*size, *keys.shape[-2:]),
                values.new_zeros(*size, *values.shape[-2:]),
            )
        return self._buffers[layer_idx]

    def _grown(self, buffer: torch.Tensor) -> torch.Tensor:
        grown = buffer.new_zeros(self._num_row_slots, self.capacity, *buffer.shape[2:])
        grown[: buffer.shape[0], : buffer.shape[1]] = buffer
        return grown


class DSparkCache(RaggedCache):
    """The drafter's context: rows `0..R-1` of a forward are its first `R` rows.

    Args:
        num_rows (`int`, *optional*, defaults to `1`): Requests decoded together.
        max_length (`int`, *optional*): Maximum length of a context, block included.
    """

    def __init__(self, num_rows: int = 1, max_length: int | None = None):
        super().__init__(num_rows, None if max_length is None else max_length + 1)
        self._plan: WritePlan | None = None

    def begin(
        self, context_lengths: list[int], num_context: int, *, num_block: int, device: torch.device
    ) -> WritePlan:
        """Plan a forward that appends `context_lengths[r] <= num_context` positions to row `r`, then `num_block` more."""
        lengths = self.lengths[: len(context_lengths)]
        ends = [length + new for length, new in zip(lengths, context_lengths, strict=True)]
        stop = max(ends) + num_block
        self.reserve(stop + 1)
        if len(set(lengths)) == 1 and all(new == num_context for new in context_lengths):
            self._plan = WritePlan(stop)
            return self._plan
        start = torch.tensor(lengths, device=device)[:, None]
        new = torch.tensor(context_lengths, device=device)[:, None]
        offset = torch.arange(num_context, device=device)
        # Padding of short rows goes to one spare position after everything that is read.
        context = torch.where(offset < new, start + offset, stop)
        block = start + new + torch.arange(num_block, device=device)
        readable = torch.arange(stop, device=device) < start + new + num_block
        self._plan = WritePlan(stop, torch.cat([context, block], dim=1), readable[:, None, None, :])
        return self._plan

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `keys`, `values` `[R, C + K, H, d]` as planned; return views `[R, stop, H, d]` of all that may be read."""
        plan: WritePlan = self._plan  # type: ignore[assignment]  # `begin` comes first
        start, (num_rows, num_new) = self.lengths[0], keys.shape[:2]
        stored = []
        for buffer, new in zip(self.buffers(layer_idx, keys, values), (keys, values), strict=True):
            if plan.positions is None:
                buffer[:num_rows, start : start + num_new] = new
            else:
                rows = torch.arange(num_rows, device=new.device)[:, None]
                buffer[rows, plan.positions] = new
            stored.append(buffer[:num_rows, : plan.stop])
        return stored[0], stored[1]

    def extend(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *, row: int) -> None:
        """Write context `keys`, `values` `[C, H, d]` after the contents of row `row`; room is reserved, lengths stay."""
        start = self.lengths[row]
        for buffer, new in zip(self.buffers(layer_idx, keys, values), (keys, values), strict=True):
            buffer[row, start : start + new.shape[0]] = new

    def advance(self, context_lengths: list[int]) -> None:
        """Keep the context written since `begin`; the block after it is forgotten."""
        for row, new in enumerate(context_lengths):
            self.lengths[row] += new
        self._plan = None


__all__ = ["DSparkCache", "RaggedCache", "WritePlan"]
