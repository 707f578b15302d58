"""One target forward over the tokens of many requests, without padding: plan, cache and attention function.

The target is called with `[1, N]` tokens and positions. Linear layers, norms, experts and the LM head thus cost `N`
tokens; only attention knows which row a token belongs to. Queries of one row and one key/value head are folded into
one matrix (`G` query heads times `Q` tokens), so keys and values are read once and never repeated.

Shapes: `N` packed tokens, `R` rows, `Q` maximum tokens of a row, `S` positions read, `H` key/value heads, `G` query heads
per key/value head, `d` head size.
"""

from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch
from transformers import Cache

from .model_cache import RaggedCache


_MAX_PADDED_QUERIES = 32  # rows with more queries (prompts) are attended one by one: they are bound by compute
active_plan: ContextVar["PackedPlan | None"] = ContextVar("dspark_packed_plan", default=None)


class NotPackableError(ValueError):
    """The target's attention asks for something that the packed attention function does not do."""


class PackedPlan:
    """Which row and position each of the `N` tokens of one forward has.

    Args:
        starts (`list[int]`): Tokens each row has in the cache already.
        counts (`list[int]`): Tokens of each row in this forward, at least one.
        device (`torch.device`): Where the tokens are.
        first_row (`int`, *optional*, defaults to `0`): Cache row of the first of these `R` consecutive rows.
    """

    def __init__(self, starts: list[int], counts: list[int], device: torch.device, *, first_row: int = 0):
        self.starts, self.counts, self.first_row = starts, counts, first_row
        self.stop = max(start + count for start, count in zip(starts, counts, strict=True))
        self.offsets = [0, *accumulate(counts)]
        self.positions = _ranges(starts, counts, device)
        self.windows: list[int | None] = []  # one entry per attention call, to check the target
        self.layers_asking_length: set[int] = set()  # likewise
        self._memory: dict[Any, Any] = {}

    @property
    def is_padded(self) -> bool:
        """Whether all rows are attended to in one padded call."""
        return max(self.counts) <= _MAX_PADDED_QUERIES

    def slot_mapping(self, capacity: int, device: torch.device) -> torch.Tensor:
        """Index `[N]` of each token in a cache buffer seen as `[slots * capacity, H, d]`."""
        key = ("slot_mapping", capacity, device)
        if key not in self._memory:
            starts = [row * capacity + start for row, start in enumerate(self.starts, self.first_row)]
            self._memory[key] = _ranges(starts, self.counts, device)
        return self._memory[key]

    def padding(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices between packed and padded layout: `[R, Q]` into `N` and `[N]` into `R * Q`; `None` where they agree."""
        longest = max(self.counts)
        if min(self.counts) == longest:
            return None
        key = ("padding", device)
        if key not in self._memory:
            offset = torch.arange(longest, device=device)
            first = torch.tensor(self.offsets[:-1], device=device)[:, None]
            last = torch.tensor(self.counts, device=device)[:, None] - 1
            to_packed = _ranges([row * longest for row in range(len(self.counts))], self.counts, device)
            self._memory[key] = (first + torch.minimum(offset, last), to_packed)
        return self._memory[key]

    def folding(self, num_heads: int, groups: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices between heads of packed queries `[N * G * H]` and folded, padded ones `[R * H * G * Q]`, both ways."""
        key = ("folding", num_heads, groups, device)
        if key not in self._memory:
            num_rows, longest = len(self.counts), max(self.counts)
            packed = torch.arange(self.offsets[-1], device=device)
            heads = torch.arange(num_heads * groups, device=device)
            padded = self.unpack(packed)  # [R, Q]
            to_folded = padded[:, None] * len(heads) + heads[:, None]  # [R, H * G, Q]
            place = self.pack(torch.arange(num_rows * longest, device=device).view(num_rows, longest))[:, None]
            to_packed = (place // longest * len(heads) + heads) * longest + place % longest  # [N, H * G]
            self._memory[key] = (to_folded.flatten(), to_packed.flatten())
        return self._memory[key]

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """`[R, Q, ...]` to packed `[N, ...]`."""
        padding = self.padding(padded.device)
        return padded.flatten(0, 1) if padding is None else padded.flatten(0, 1)[padding[1]]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed `[N, ...]` to `[R, Q, ...]`; short rows repeat their last entry."""
        padding = self.padding(packed.device)
        return packed.unflatten(0, (len(self.counts), -1)) if padding is None else packed[padding[0]]

    def mask(self, query: torch.Tensor, *, window: int | None, groups: int) -> torch.Tensor | None:
        """Additive mask `[R, 1, G * Q, S]` in the dtype of `query`; `None` where every query reads everything."""
        if max(self.counts) == 1 and len(set(self.starts)) == 1 and (window is None or self.stop <= window):
            return None
        key = ("mask", query.device, query.dtype, window, groups)
        if key not in self._memory:
            start = torch.tensor(self.starts, device=query.device)[:, None, None]
            bias = causal_bias(start, max(self.counts), self.stop, window=window, query=query)
            self._memory[key] = bias[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
        return self._memory[key]


class PackedCache(Cache):
    """The target's ragged cache: `update` scatters the packed keys and values and returns views of all rows.

    A rejected draft is not rolled back: the length of its row does not advance, and the next round writes over it.

    Args:
        max_length (`int`, *optional*): Maximum length of a row, if known.
    """

    is_compileable = False

    def __init__(self, max_length: int | None = None):
        super().__init__(layers=[])
        self.rows = RaggedCache(max_length=max_length)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, H, N, d]` as planned; return views `[R, S, H, d]`."""
        plan: PackedPlan = active_plan.get()  # type: ignore[assignment]  # set by `packed_forward`
        rows = slice(plan.first_row, plan.first_row + len(plan.counts))
        stored = []
        new = (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        for buffer, states in zip(self.rows.buffers(layer_idx, *new), new, strict=True):
            slots = plan.slot_mapping(self.rows.capacity, buffer.device)
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, slots, states.to(buffer.dtype))
            stored.append(buffer[rows, : plan.stop])
        return stored[0], stored[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row. Rows do not share a length, and positions are always passed, so a layer that asks is recorded."""
        plan = active_plan.get()
        if plan is not None:
            plan.layers_asking_length.add(layer_idx)
        return max(self.rows.lengths, default=0)


def causal_bias(
    start: torch.Tensor, num_queries: int, stop: int, *, window: int | None, query: torch.Tensor
) -> torch.Tensor:
    """`[R, Q, S]`: 0 where the query at `start + q` reads the position, the lowest finite number elsewhere."""
    position = start + torch.arange(num_queries, device=query.device)[:, None]
    source = torch.arange(stop, device=query.device)
    visible = source <= position
    if window is not None:
        visible = visible & (source > position - window)
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    return bias.masked_fill(~visible, torch.finfo(query.dtype).min)


def _ranges(starts: list[int], counts: list[int], device: torch.device) -> torch.Tensor:
    """`[start, start + count)` of every row, one after the other."""
    flat = [position for start, count in zip(starts, counts, strict=True) for position in range(start, start + count)]
    return torch.tensor(flat, device=device)


__all__ = ["NotPackableError", "PackedCache", "PackedPlan", "active_plan", "causal_bias"]
