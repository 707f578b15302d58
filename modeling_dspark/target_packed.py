"""The target as the packed loop sees it: packed tokens in, logits and features out; and whether a target can be packed.

Shapes: `N` packed tokens, `P` positions with logits, `L` tapped layers, `D` hidden size, `V` vocabulary.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .compat_transformers import cache_keyword
from .target_attention import attention_configs, packed_forward
from .target_binding import hidden_states_argument, input_device, tapped_features
from .target_packing import NotPackableError, PackedCache, PackedPlan


_PROBE_ROWS = ([5, 7, 11, 13, 17], [19, 5, 3])  # token ids, taken modulo the vocabulary
_PROBE_DRAFTS = ([7, 5], [11, 13, 2])
_PROBE_TOLERANCE = 0.1  # of the spread of the logits; rounding in bf16 is below 0.03, other attention is above 0.5
_reasons: "WeakKeyDictionary[PreTrainedModel, str | None]" = WeakKeyDictionary()
_probing = Lock()


class PackedOutput(NamedTuple):
    """`logits` `[P, V]` in the target's dtype, `features` `[N, L * D]` or `None`."""

    logits: torch.Tensor
    features: torch.Tensor | None


class PackedTarget:
    """One target with its own ragged cache.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target; unchanged between calls.
        target_layer_ids (`list[int]`): Layers whose states are the features.
        max_length (`int`, *optional*): Maximum length of a row, if known.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: list[int], *, max_length: int | None = None):
        self.target, self.target_layer_ids = target, target_layer_ids
        self.cache = PackedCache(max_length)
        self.device = input_device(target)
        self._configs = attention_configs(target)
        self._keeps = "logits_to_keep" in inspect.signature(target.forward).parameters

    def plan(self, counts: list[int], *, first_row: int = 0) -> PackedPlan:
        """A plan for the next `counts[r]` tokens of rows `first_row + r`, with room made for them."""
        starts = self.cache.rows.lengths[first_row : first_row + len(counts)]
        plan = PackedPlan(starts, counts, self.device, first_row=first_row)
        self.cache.rows.reserve(plan.stop)
        return plan

    def advance(self, plan: PackedPlan, counts: list[int]) -> None:
        """Keep the first `counts[r]` tokens of each row of the last forward; the others were rejected."""
        for row, count in enumerate(counts, plan.first_row):
            self.cache.rows.lengths[row] += count

    @torch.no_grad()
    def forward(
        self, tokens: torch.Tensor, plan: PackedPlan, *, keep: torch.Tensor | None = None, features: bool = True
    ) -> PackedOutput:
        """Run the target over packed `tokens` `[N]`; lengths of the cache stay.

        Args:
            tokens (`torch.LongTensor` of shape `(N,)`): Tokens of all rows, one row after the other.
            plan ([`PackedPlan`]): Made by `plan`.
            keep (`torch.LongTensor` of shape `(P,)`, *optional*): Positions in `N` to give logits for (default: all).
            features (`bool`, *optional*, defaults to `True`): Whether to return features.
        """
        arguments: dict[str, Any] = {cache_keyword(): self.cache, "use_cache": True, "return_dict": True}
        if features:
            arguments["output_hidden_states"] = hidden_states_argument(self.target_layer_ids)
        if keep is not None and self._keeps:
            arguments["logits_to_keep"] = keep
        with packed_forward(self._configs, plan):
            output = self.target(input_ids=tokens[None], position_ids=plan.positions[None], **arguments)
        logits = output.logits[0]
        if keep is not None and not self._keeps:
            logits = logits[keep]
        tapped = tapped_features(output.hidden_states, self.target_layer_ids)[0] if features else None
        return PackedOutput(logits, tapped)


def why_not_packable(target: PreTrainedModel) -> str | None:
    """Why the packed loop cannot serve `target`, or `None`; determined once per target, by a small comparison.

    What the configuration says is checked first; then the logits of two short rows, run packed and plainly, are
    compared, which also detects attention that is unknown to this code.
    """
    with _probing:  # a second thread waits: its packed forwards would be in the way of the plain ones here
        if target not in _reasons:
            try:
                _reasons[target] = _from_config(target) or _from_probe(target)
            except NotPackableError as refusal:  # may be temporary, so the next call checks again
                return str(refusal)
        return _reasons[target]


def _from_config(target: PreTrainedModel) -> str | None:
    text = target.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of type {', '.join(map(repr, unknown))}, whose state cannot be kept row by row"
    if getattr(text, "attention_chunk_size", None):
        return "it attends in chunks (`attention_chunk_size`)"
    if getattr(target, "_is_stateful", False):
        return "it is a stateful model"
    prepares: Any = type(target).prepare_inputs_for_generation  # type: ignore[attr-defined]  # of a generating model
    if "prepare_inputs_for_generation" in vars(target) or not prepares.__module__.startswith("transformers."):
        return "its `prepare_inputs_for_generation` is custom (prompt tuning, remote code), and may change the inputs"
    if "position_ids" not in inspect.signature(target.forward).parameters:
        return "its forward takes no `position_ids`"
    return None


@torch.no_grad()
def _from_probe(target: PreTrainedModel) -> str | None:
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    packed = PackedTarget(target, [-1])
    texts = [torch.tensor(row + drafts) % vocabulary for row, drafts in zip(_PROBE_ROWS, _PROBE_DRAFTS, strict=True)]
    counts = [len(row) for row in _PROBE_ROWS]
    try:
        with _evaluating(target):
            logits, plan = _probe_logits(packed, texts, counts)
            plain = [target(input_ids=text[None].to(packed.device), use_cache=False).logits[0] for text in texts]
    except NotPackableError as refusal:
        return str(refusal)
    except torch.OutOfMemoryError:  # not a property of the target
        raise
    except Exception as failure:  # whatever a target of an unknown kind raises is the reason
        raise NotPackableError(f"a packed forward failed with {failure!r}") from failure
    if reason := _missing_windows(target, plan.windows):
        return reason
    if layers := sorted(plan.layers_asking_length - {0}):  # models that ignore the answer ask for 0
        return f"attention in layer {layers[0]} takes positions from the length of the cache, which rows do not share"
    for actual, expected in zip(logits, plain, strict=True):
        error = (actual.float() - expected.float()).abs().mean() / expected.float().std().clamp(min=1e-6)
        if not error < _PROBE_TOLERANCE:
            return f"packed and plain forwards of two short texts differ (by {error:.2f} of the logits' spread)"
    return None


def _probe_logits(
    packed: PackedTarget, texts: list[torch.Tensor], counts: list[int]
) -> tuple[list[torch.Tensor], PackedPlan]:
    """Logits of each text, in two packed forwards: its beginning, then its end; and the plan of the first."""
    rows = packed.cache.rows
    for _ in texts:
        rows.add_row()
    plan = packed.plan(counts)
    beginning = [text[:count] for text, count in zip(texts, counts, strict=True)]
    first = packed.forward(torch.cat(beginning).to(packed.device), plan, features=False).logits.split(counts)
    if not plan.windows:
        raise NotPackableError("its attention does not go through Transformers' attention interface")
    rows.lengths = list(counts)
    rest = [text[count:] for text, count in zip(texts, counts, strict=True)]
    lengths = [len(text) for text in rest]
    second = packed.forward(torch.cat(rest).to(packed.device), packed.plan(lengths), features=False).logits
    pairs = zip(first, second.split(lengths), strict=True)
    return [torch.cat(pair) for pair in pairs], plan


def _missing_windows(target: PreTrainedModel, windows: list[int | None]) -> str | None:
    """A sliding window that exists only in the mask would be ignored: the attention function must get it."""
    text = target.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        expected = [bool(slides)] * text.num_hidden_layers
    else:
        expected = [kind == "sliding_attention" for kind in kinds]
    if len(windows) != len(expected):
        return f"{len(windows)} of its {len(expected)} layers attend through Transformers' attention interface"
    if any(want and not got for want, got in zip(expected, windows, strict=True)):
        return "its attention function does not get the sliding window of every layer"
    return None


@contextmanager
def _evaluating(target: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for a moment: dropout would make the comparison meaningless."""
    modules = [module for module in target.modules() if module.training]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True


__all__ = ["PackedOutput", "PackedTarget", "why_not_packable"]
