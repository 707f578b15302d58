"""Attention of one packed target forward: registered with Transformers, and lent to a target for one call.

Queries of one row and one key/value head are folded into one matrix (`G` query heads times `Q` tokens), so keys and values
are read once and never repeated.

Shapes: `N` packed tokens, `R` rows, `Q` maximum tokens of a row, `S` positions read, `H` key/value heads, `G` query heads
per key/value head, `d` head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from .model_backbone import fold_heads, unfold_heads
from .target_packing import NotPackableError, PackedPlan, active_plan, causal_bias


# Two copies of this code in one process must not share a name: each has its own plan.
_NAME = f"dspark_packed:{__name__}"
# Arguments that do not affect the scores.
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
_borrowed: dict[int, list[Any]] = {}  # by `id` of a config: packed forwards under way, and its implementation before
_borrowing = Lock()


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
        NotPackableError: for any other argument that affects the scores.
        RuntimeError: if the target is called plainly while another thread is in a packed forward of it.
    """
    plan = active_plan.get()
    if plan is None:
        raise RuntimeError(
            "The target was called while another thread decodes with it and a drafter, which changes how it attends. Let "
            "both threads use the drafter, or one at a time use the target."
        )
    unknown = sorted(
        name for name, argument in arguments.items() if argument is not None and name not in _NEUTRAL_ARGUMENTS
    )
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
    token = active_plan.set(plan)
    taken: list[Any] = []
    try:
        for config in configs:
            taken.append(config)
            _borrow(config)
        yield
    finally:
        for config in taken:
            _give_back(config)
        active_plan.reset(token)


def _borrow(config: Any) -> None:
    """Switch a config to packed attention; threads that decode with one target at once share it."""
    with _borrowing:
        entry = _borrowed.setdefault(id(config), [0, config._attn_implementation_internal])
        entry[0] += 1
        config._attn_implementation_internal = _NAME


def _give_back(config: Any) -> None:
    """Undo `_borrow`, once no packed forward is under way."""
    with _borrowing:
        entry = _borrowed.get(id(config), [1, config._attn_implementation_internal])  # absent: it was interrupted
        entry[0] -= 1
        if entry[0] <= 0:
            config._attn_implementation_internal = entry[1]
            _borrowed.pop(id(config), None)


def attention_configs(target: PreTrainedModel) -> list[Any]:
    """The distinct config objects that the target's modules read their attention implementation from."""
    configs = {id(config): config for module in target.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


class _Options:
    """Options of the scores of one layer."""

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
    bias = causal_bias(first, count, stop, window=options.window, query=queries)
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


__all__ = ["attention_configs", "packed_attention", "packed_forward"]
