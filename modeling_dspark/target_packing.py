"""One target forward over the tokens of many requests, without padding: plan, cache and attention function.

The target is called with `[1, N]` tokens and positions. Linear layers, norms, experts and the LM head thus cost `N`
tokens; only attention knows which row a token belongs to. Queries of one row and one key/value head are folded into
one matrix (`G` query heads times `Q` tokens), so keys and values are read once and never repeated.

Shapes: `N` packed tokens, `R` rows, `Q` most tokens of a row, `S` positions read, `H` key/value heads, `G` query heads
a key/value head, `d` head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from .model_backbone import fold_heads, unfold_heads
from .model_cache import RaggedCache


# Two copies of this code in one process must not share a name: each has its own plan.
_NAME = f"dspark_packed:{__name__}"
_MOST_PADDED_QUERIES = 32  # rows with more queries (prompts) are attended one by one: they are bound by compute
# Arguments that say nothing about what is attended to.
_NEUTRAL_ARGUMENTS = {
    "cache",
    "cache_position",
    "is_causal",
    "kwargs",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
_active_plan: ContextVar["PackedPlan | None"] = ContextVar("dspark_packed_plan", default=None)
_borrowed: dict[int, list[Any]] = {}  # by `id` of a config: packed forwards under way, and its implementation before
_borrowing = Lock()


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
        self.windows: list[int | None] = []  # one entry an attention call, to check the target by
        self.layers_asking_length: set[int] = set()  # likewise
        self._memory: dict[Any, Any] = {}

    @property
    def is_padded(self) -> bool:
        """Whether all rows are attended to in one padded call."""
        return max(self.counts) <= _MOST_PADDED_QUERIES

    def slots(self, capacity: int, device: torch.device) -> torch.Tensor:
        """Index `[N]` of each token in a cache buffer seen as `[slots * capacity, H, d]`."""
        key = ("slots", capacity, device)
        if key not in self._memory:
            starts = [row * capacity + start for row, start in enumerate(self.starts, self.first_row)]
            self._memory[key] = _ranges(starts, self.counts, device)
        return self._memory[key]

    def padding(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices between packed and padded layout: `[R, Q]` into `N` and `[N]` into `R * Q`; `None` where they agree."""
        most = max(self.counts)
        if min(self.counts) == most:
            return None
        key = ("padding", device)
        if key not in self._memory:
            offset = torch.arange(most, device=device)
            first = torch.tensor(self.offsets[:-1], device=device)[:, None]
            last = torch.tensor(self.counts, device=device)[:, None] - 1
            to_packed = _ranges([row * most for row in range(len(self.counts))], self.counts, device)
            self._memory[key] = (first + torch.minimum(offset, last), to_packed)
        return self._memory[key]

    def folding(self, num_heads: int, groups: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices between heads of packed queries `[N * G * H]` and folded, padded ones `[R * H * G * Q]`, both ways."""
        key = ("folding", num_heads, groups, device)
        if key not in self._memory:
            rows, most = len(self.counts), max(self.counts)
            packed = torch.arange(self.offsets[-1], device=device)
            heads = torch.arange(num_heads * groups, device=device)
            padded = self.unpack(packed)  # [R, Q]
            to_folded = padded[:, None] * len(heads) + heads[:, None]  # [R, H * G, Q]
            place = self.pack(torch.arange(rows * most, device=device).view(rows, most))[:, None]
            to_packed = (place // most * len(heads) + heads) * most + place % most  # [N, H * G]
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
            bias = _causal_bias(start, max(self.counts), self.stop, window=window, query=query)
            self._memory[key] = bias[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
        return self._memory[key]


class PackedCache(Cache):
    """The target's ragged cache: `update` scatters the packed keys and values and returns views of all rows.

    A rejected draft is not rolled back: the length of its row does not advance, and the next round writes over it.

    Args:
        max_length (`int`, *optional*): Longest row there can be, where it is known.
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
        plan: PackedPlan = _active_plan.get()  # type: ignore[assignment]  # set by `packed_forward`
        rows = slice(plan.first_row, plan.first_row + len(plan.counts))
        stored = []
        new = (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        for buffer, states in zip(self.rows.buffers(layer_idx, *new), new, strict=True):
            slots = plan.slots(self.rows.capacity, buffer.device)
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, slots, states.to(buffer.dtype))
            stored.append(buffer[rows, : plan.stop])
        return stored[0], stored[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row; positions are always given, so nothing had better be derived from it."""
        plan = _active_plan.get()
        if plan is not None:
            plan.layers_asking_length.add(layer_idx)
        return max(self.rows.lengths, default=0)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed queries `[1, G * H, N, d]` to the rows' keys and values `[R, S, H, d]`: `[1, N, G * H, d]`.

    Honours sliding windows, soft-capped scores and attention sinks (`s_aux`).

    Raises:
        NotPackableError: for an argument that would change what is attended to, and that is not one of these.
        RuntimeError: if the target is called plainly while another thread is in a packed forward of it.
    """
    plan = _active_plan.get()
    if plan is None:
        raise RuntimeError(
            "The target was called while another thread decodes with it and a drafter, which changes how it attends. Let "
            "both threads use the drafter, or one at a time use the target."
        )
    unknown = sorted(name for name, given in arguments.items() if given is not None and name not in _NEUTRAL_ARGUMENTS)
    if attention_mask is not None or unknown or dropout or arguments.get("is_causal") is False:
        raise NotPackableError(
            f"the attention of {type(module).__name__} uses {', '.join(unknown) or 'a mask, dropout or no causality'}"
        )
    plan.windows.append(sliding_window)
    options = _Options(scaling, softcap, s_aux, window=sliding_window)
    queries = query[0].transpose(0, 1)  # [N, G * H, d]
    if plan.is_padded:
        return _attend_padded(plan, queries, key, value, options).unsqueeze(0), None
    spans = zip(plan.offsets, plan.offsets[1:], strict=False)
    rows = [
        _attend_row(plan, row, queries[first:last], key, value, options) for row, (first, last) in enumerate(spans)
    ]
    return torch.cat(rows).unsqueeze(0), None


@contextmanager
def packed_forward(configs: list[Any], plan: PackedPlan) -> Iterator[None]:
    """Let a target attend by `plan`; its attention implementation is put back on every way out.

    Args:
        configs (`list`): The target's `attention_configs`.
        plan ([`PackedPlan`]): Rows and positions of the forward.
    """
    if _NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(_NAME, packed_attention)
    token = _active_plan.set(plan)
    taken: list[Any] = []
    try:
        for config in configs:
            taken.append(config)
            _borrow(config)
        yield
    finally:
        for config in taken:
            _give_back(config)
        _active_plan.reset(token)


def _borrow(config: Any) -> None:
    """Switch a config to packed attention; threads that decode with one target at once share it."""
    with _borrowing:
        entry = _borrowed.setdefault(id(config), [0, config._attn_implementation_internal])
        entry[0] += 1
        config._attn_implementation_internal = _NAME


def _give_back(config: Any) -> None:
    """Undo `_borrow`, once nobody is in a packed forward any more."""
    with _borrowing:
        entry = _borrowed.get(id(config), [1, config._attn_implementation_internal])  # absent: it was interrupted
        entry[0] -= 1
        if entry[0] <= 0:
            config._attn_implementation_internal = entry[1]
            _borrowed.pop(id(config), None)


def attention_configs(target: PreTrainedModel) -> list[Any]:
    """The distinct config objects that the target's modules read their attention implementation from."""
    found = {id(config): config for module in target.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


class _Options:
    """How the scores of one layer are made."""

    def __init__(
        self, scaling: float | None, softcap: float | None, sinks: torch.Tensor | None, *, window: int | None
    ):
        self.scaling, self.softcap, self.sinks, self.window = scaling, softcap, sinks, window

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def _attend_padded(
    plan: PackedPlan, queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> torch.Tensor:
    """All rows in one call, short rows padded to the longest of this forward."""
    num_heads, groups = key.shape[2], queries.shape[1] // key.shape[2]
    to_folded, to_packed = plan.folding(num_heads, groups, queries.device)
    folded = queries.reshape(-1, queries.shape[2]).index_select(0, to_folded)
    folded = folded.view(len(plan.counts), num_heads, -1, queries.shape[2])
    mask = plan.mask(folded, window=options.window, groups=groups)
    output = _attend(folded, key, value, mask, options)
    return output.reshape(-1, output.shape[3]).index_select(0, to_packed).view(*queries.shape[:2], output.shape[3])


def _attend_row(
    plan: PackedPlan, row: int, queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> torch.Tensor:
    """One row with many queries `[Q, G * H, d]`; a whole prompt needs no mask."""
    start, count = plan.starts[row], plan.counts[row]
    stop = start + count
    key, value = key[row : row + 1, :stop], value[row : row + 1, :stop]
    if options.is_plain and start == 0 and (options.window is None or stop <= options.window):
        output = nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=options.scaling,
            enable_gqa=queries.shape[1] != key.shape[2],
        )
        return output[0].transpose(0, 1)
    folded, groups = fold_heads(queries.unsqueeze(0), key.shape[2]), queries.shape[1] // key.shape[2]
    first = torch.full((1, 1, 1), start, device=queries.device)
    bias = _causal_bias(first, count, stop, window=options.window, query=queries)
    mask = bias[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    return unfold_heads(_attend(folded, key, value, mask, options), groups)[0]


def _attend(
    folded: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: _Options
) -> torch.Tensor:
    """Scores, softmax and values: `[R, H, G * Q, d]` in and out; keys and values `[R, S, H, d]`."""
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if options.is_plain:
        return nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=options.scaling)
    scaling = folded.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = torch.matmul(folded, key.transpose(2, 3)).float() * scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:  # a key per query head that takes weight and has no value
        groups = options.sinks.shape[0] // folded.shape[1]
        sinks = options.sinks.float().view(folded.shape[1], groups, 1)
        sinks = sinks.expand(-1, -1, folded.shape[2] // groups).flatten(1)
        scores = torch.cat([scores, sinks[None, :, :, None].expand(scores.shape[0], -1, -1, -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value)


def _causal_bias(
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


__all__ = [
    "NotPackableError",
    "PackedCache",
    "PackedPlan",
    "attention_configs",
    "packed_attention",
    "packed_forward",
]
