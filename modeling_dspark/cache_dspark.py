"""The drafter's context cache, and the one keyword that Transformers renamed.

The cache holds keys and values of the *context* only (tokens that went through the target). Keys and values of a draft
block are written behind the context so that attention reads one contiguous view, but the lengths never advance over
them: the next round overwrites them, and a rejected draft leaves nothing to roll back.

Shapes: `R` rows (requests), `C` new context positions, `K` block positions, `H` key/value heads, `d` head size.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class WritePlan:
    """Where one forward writes, and what its queries may read.

    Attributes:
        stop (`int`): Positions read by attention, over all rows.
        positions (`torch.LongTensor` of shape `(R, C + K)`, *optional*): Ragged rows only: where each key goes.
        mask (`torch.BoolTensor` of shape `(R, 1, 1, stop)`, *optional*): Ragged rows only: readable positions.
    """

    stop: int
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class DSparkCache:
    """Growing per-layer buffers `[R, capacity, H, d]` with one length a row.

    Args:
        num_rows (`int`, *optional*, defaults to `1`): Requests decoded together.
    """

    def __init__(self, num_rows: int = 1):
        self.lengths: list[int] = [0] * num_rows
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._plan: WritePlan | None = None

    def begin(
        self, context_lengths: list[int], num_context: int, *, num_block: int, device: torch.device
    ) -> WritePlan:
        """Plan a forward that appends `context_lengths[r] <= num_context` positions to row `r`, then `num_block` more."""
        ends = [length + new for length, new in zip(self.lengths, context_lengths, strict=True)]
        stop = max(ends) + num_block
        if len(set(self.lengths)) == 1 and all(new == num_context for new in context_lengths):
            self._plan = WritePlan(stop)
            return self._plan
        start = torch.tensor(self.lengths, device=device)[:, None]
        new = torch.tensor(context_lengths, device=device)[:, None]
        offset = torch.arange(num_context, device=device)
        # Padding of short rows goes to one spare position behind everything that is read.
        context = torch.where(offset < new, start + offset, stop)
        block = start + new + torch.arange(num_block, device=device)
        readable = torch.arange(stop, device=device) < start + new + num_block
        self._plan = WritePlan(stop, torch.cat([context, block], dim=1), readable[:, None, None, :])
        return self._plan

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `keys`, `values` `[R, C + K, H, d]` as planned; return views `[R, stop, H, d]` of all that may be read."""
        plan: WritePlan = self._plan  # type: ignore[assignment]  # `begin` comes first
        start = self.lengths[0]
        stored = []
        for buffers, new in ((self._keys, keys), (self._values, values)):
            buffer = buffers[layer_idx] = self._grown(buffers.get(layer_idx), new, plan.stop + 1)
            if plan.positions is None:
                buffer[:, start : start + new.shape[1]] = new
            else:
                rows = torch.arange(new.shape[0], device=new.device)[:, None]
                buffer[rows, plan.positions] = new
            stored.append(buffer[:, : plan.stop])
        return stored[0], stored[1]

    def advance(self, context_lengths: list[int]) -> None:
        """Keep the context written since `begin`; the block behind it is forgotten."""
        self.lengths = [length + new for length, new in zip(self.lengths, context_lengths, strict=True)]
        self._plan = None

    def _grown(self, buffer: torch.Tensor | None, new: torch.Tensor, needed: int) -> torch.Tensor:
        if buffer is not None and buffer.shape[1] >= needed:
            return buffer
        grown = new.new_zeros(new.shape[0], 2 * needed, *new.shape[2:])  # geometric growth
        if buffer is not None:
            grown[:, : buffer.shape[1]] = buffer
        return grown


def fresh_target_cache(target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict) -> dict:
    """Keyword arguments in which a target cache that already holds tokens is replaced by an empty one.

    The drafter needs the hidden states of all tokens, and Transformers' assisted loop runs the whole prompt whatever the
    cache holds, so the prompt is computed again. The user's cache object is left as it is.

    Raises:
        ValueError: if the cached tokens are not part of `input_ids`.
    """
    keyword = _cache_keyword()
    cache = model_kwargs.get(keyword)
    num_cached = 0 if cache is None else int(cache.get_seq_length())
    if num_cached == 0:
        return model_kwargs
    attention_mask = model_kwargs.get("attention_mask")
    longer_mask = attention_mask is not None and attention_mask.shape[1] > input_ids.shape[1]
    if num_cached >= input_ids.shape[1] or longer_mask:
        raise ValueError(
            f"`{keyword}` holds {num_cached} tokens that are not in `input_ids` (shape {tuple(input_ids.shape)}), so a "
            "DSpark drafter has no hidden states for them. Pass the whole sequence as `input_ids`."
        )
    logger.warning_once(
        f"`{keyword}` holds a prefix of the prompt. A DSpark drafter needs the hidden states of that prefix, so the prompt "
        "is computed again and the cache is left unused."
    )
    return model_kwargs | {keyword: DynamicCache(config=target.config.get_text_config(decoder=True))}


def target_cache(model_kwargs: dict) -> object | None:
    """The target's cache among the keyword arguments of a decoding method."""
    return model_kwargs.get(_cache_keyword())


def loop_takes_embeddings() -> bool:
    """Whether Transformers' assisted loop is right with `inputs_embeds` (it was not when the keyword had its old name)."""
    return _cache_keyword() == "cache"


def _cache_keyword() -> str:
    """`cache` from Transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


__all__ = ["DSparkCache", "WritePlan", "fresh_target_cache", "loop_takes_embeddings", "target_cache"]
