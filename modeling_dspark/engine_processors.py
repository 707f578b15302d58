"""The user's logits processors over many positions of many rows at once.

Every position has its own prefix: the row's text, drafts before the position included. Processors that ignore the
prefix run on all positions in one call; the others see each position's own prefix.

Shapes: `P` positions, `V` vocabulary, `n` prefix length.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process


# By name, because not every supported Transformers has all of them.
_PREFIX_FREE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# They read the prefix, and treat each row independently of its place in the batch.
_ROW_FREE = {
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}


class RowProcessors:
    """The logits processors of a call, in their order.

    Args:
        processors ([`~transformers.LogitsProcessorList`], *optional*): As `generate` prepared them.
        batch_size (`int`): Rows of the user's batch. A custom processor may depend on the row, so it is called with a
            batch of this size that has each prefix in its own row. Requests beyond this size take the rows in turn.
    """

    def __init__(self, processors: LogitsProcessorList | None, batch_size: int):
        self._processors = list(processors or ())
        self.batch_size = batch_size
        self.num_pads: dict[int, int] = {}  # padding on the left of the prefix, by row of the batch

    @property
    def known(self) -> LogitsProcessorList:
        """Transformers' own processors among them that keep no state, and so can be called at any time."""
        return LogitsProcessorList(p for p in self._processors if _is_known(p, _PREFIX_FREE | _ROW_FREE))

    @property
    def is_vocabulary_invariant(self) -> bool:
        """Whether all of them ignore the prefix, and which token a logit belongs to."""
        return all(_is_known(item, _PREFIX_FREE - {"SuppressTokensLogitsProcessor"}) for item in self._processors)

    @property
    def temperature(self) -> float | None:
        """The divisor of the logits, if the processors do nothing else; otherwise `None`.

        Also `None` if quotients could leave the range of fp32.
        """
        if not self._processors:
            return 1.0
        only = self._processors[0]
        alone = len(self._processors) == 1 and _is_known(only, {"TemperatureLogitsWarper"})
        return float(only.temperature) if alone and 1e-6 <= only.temperature <= 1e6 else None

    def __bool__(self) -> bool:
        return bool(self._processors)

    def __call__(
        self, logits: torch.Tensor, prefixes: Callable[[], list[torch.Tensor]], rows: list[int]
    ) -> torch.Tensor:
        """Processed logits `[P, V]`.

        Args:
            logits (`torch.Tensor` of shape `(P, V)`): In fp32; may be written to.
            prefixes (callable): Returns the prefix `[n]` of each position; called only if a processor reads them.
            rows (`list[int]`): The row of the user's batch that each position belongs to.
        """
        texts: list[torch.Tensor] | None = None
        for processor in self._processors:
            if _is_known(processor, _PREFIX_FREE):
                logits = processor(logits.new_empty((logits.shape[0], 0), dtype=torch.long), logits)
                continue
            texts = prefixes() if texts is None else texts
            if _is_known(processor, _ROW_FREE):
                logits = self._by_length(processor, logits, texts, rows)
            elif _is_known(processor, {"PrefixConstrainedLogitsProcessor"}):
                logits = _constrained(processor, logits, texts, rows)
            else:
                logits = self._in_own_row(processor, logits, texts, rows)
        return logits

    def _by_length(
        self, processor: Any, logits: torch.Tensor, prefixes: list[torch.Tensor], rows: list[int]
    ) -> torch.Tensor:
        """Positions whose prefixes are equally long share a call."""
        groups: dict[int, list[int]] = defaultdict(list)
        for position, prefix in enumerate(prefixes):
            groups[len(prefix)].append(position)
        processed = []
        for positions in groups.values():
            batch = torch.stack([prefixes[position] for position in positions])
            of_rows = self._for_rows(processor, [rows[position] for position in positions])
            processed.append(of_rows(batch, logits if len(groups) == 1 else logits[positions]))
        if len(groups) == 1:
            return processed[0]
        order = torch.tensor(
            [position for positions in groups.values() for position in positions], device=logits.device
        )
        return torch.cat(processed)[order.argsort()]

    def _for_rows(self, processor: Any, rows: list[int]) -> Any:
        """The repetition penalty stores the padding of each row; give it the padding of these rows."""
        ignored = getattr(processor, "prompt_ignore_length", None)
        if not isinstance(ignored, torch.Tensor):
            return processor
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored.new_tensor([self.num_pads[row] for row in rows])
        return processor

    def _in_own_row(
        self, processor: Any, logits: torch.Tensor, prefixes: list[torch.Tensor], rows: list[int]
    ) -> torch.Tensor:
        processed = []
        for position, (prefix, row) in enumerate(zip(prefixes, rows, strict=True)):
            batch = prefix.repeat(self.batch_size, 1)
            scores = logits[position].repeat(self.batch_size, 1)
            processed.append(processor(batch, scores)[row % self.batch_size])
        return torch.stack(processed)


def _constrained(processor: Any, logits: torch.Tensor, prefixes: list[torch.Tensor], rows: list[int]) -> torch.Tensor:
    """Call `prefix_allowed_tokens_fn` for each row, with the number of that row only."""
    allowed = processor._prefix_allowed_tokens_fn
    processed = []
    for position, (prefix, row) in enumerate(zip(prefixes, rows, strict=True)):
        of_row = copy.copy(processor)
        of_row._prefix_allowed_tokens_fn = lambda _, text, row=row: allowed(row, text)
        processed.append(of_row(prefix[None], logits[position : position + 1]))
    return torch.cat(processed)


def _is_known(processor: Any, names: set[str]) -> bool:
    """Whether a processor is Transformers' own and has one of these names; a subclass may do something else."""
    return type(processor).__module__ == logits_process.__name__ and type(processor).__name__ in names


__all__ = ["RowProcessors"]
