"""Drafting for the requests of a packed batch: who drafts, on which rows of the drafter's cache, and how much is verified.

The drafter's cache orders its rows independently: requests that draft in a round come first, so that the backbone reads
views.

Shapes: `R` rows of the target, `L` tapped layers, `D` hidden size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers.utils import logging

from .draft_binding import DraftBinding
from .draft_propose import Proposal, draft_tokens, encode_block, score_block
from .draft_tokens import DraftSampling, LogitsProcessor
from .engine_observer import EngineObserver
from .engine_processors import RowProcessors
from .engine_request import Request
from .engine_round import ScheduledDrafts, schedule_lengths
from .engine_rows import RowTable
from .model_cache import DSparkCache
from .schedule_costs import CostProfile
from .schedule_gate import BlockLength, DraftGate
from .schedule_settings import DraftSettings, make_schedule
from .target_binding import token_buckets


logger = logging.get_logger(__name__)

_LONGEST_PADDED_CONTEXT = 16  # new features of a row that may be padded to the longest row's
RoundSeconds = Callable[[float, int, int], float]  # verified tokens, drafting rows, draft positions


class BlockDrafter:
    """The drafting side of an engine.

    Args:
        binding ([`DraftBinding`]): Drafter and target.
        settings ([`DraftSettings`]): How to draft.
        costs ([`CostProfile`], *optional*): For schedules that weigh costs.
        processors ([`RowProcessors`]): Applied to draft logits.
        sampling ([`DraftSampling`]): How draft tokens are chosen; the processors are added here, request by request.
        observer ([`EngineObserver`]): Called at each stage.
        max_length (`int`, *optional*): Maximum length of a context, block included.

    Raises:
        ValueError: if costs are missing.
    """

    def __init__(
        self,
        binding: DraftBinding,
        *,
        settings: DraftSettings,
        costs: CostProfile | None,
        processors: RowProcessors,
        sampling: DraftSampling,
        observer: EngineObserver,
        max_length: int | None,
    ):
        self.binding, self.settings, self.costs = binding, settings, costs
        self.processors, self.sampling, self.observer = processors, sampling, observer
        self.schedule = make_schedule(settings)
        self._token_bucket = token_buckets(binding.target)
        if self.schedule.needs_costs and costs is None:
            raise ValueError(
                f"The schedule {settings.schedule!r} needs `costs`: pass `costs=drafter.profile(target)`, or choose "
                "another schedule."
            )
        if self.schedule.needs_costs and costs is not None and costs.is_flat:
            logger.warning_once(
                f"According to its cost profile, the target verifies {costs.verify.counts[-1]} tokens in the time of one, so the schedule "
                f"{settings.schedule!r} verifies every draft. If that is wrong, measure again: "
                "`drafter.profile(target, refresh=True)`."
            )
        self.cache = DSparkCache(num_rows=0, max_length=max_length)
        self.rows = RowTable(self.cache)
        self._gate = DraftGate() if self.schedule.needs_costs else None
        self._block_length = BlockLength(settings.num_assistant_tokens)
        self._last_num_positions = settings.num_assistant_tokens

    @property
    def is_active(self) -> bool:
        """Whether anything is ever drafted."""
        return self.settings.num_assistant_tokens > 0

    def add(self, request: Request) -> None:
        """Give a request a row."""
        self.rows.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        self.rows.remove(request)
        request.pending = []

    def append_context(self, request: Request, features: torch.Tensor) -> None:
        """Add features of a prompt `[c, L * D]` to the context at once; the last one waits for the first round."""
        request.pending.append(features)
        self._append_pending(request)

    def draft(self, target_rows: RowTable, *, context: int) -> ScheduledDrafts:
        """Choose who drafts, draft, and schedule.

        Args:
            target_rows ([`RowTable`]): All requests, in the order of the target's rows.
            context (`int`): Context tokens that the target's attention will read, over all rows.
        """
        active = target_rows.requests
        caps = {request.index: min(self.settings.num_assistant_tokens, request.room - 1) for request in active}
        device = active[0].text.device
        anchors = torch.tensor([request.anchor for request in active], device=device)[:, None]
        candidates = [request for request in active if caps[request.index] > 0]
        seconds = self._round_seconds(context)
        drafting = self._admitted(candidates, len(active), seconds)
        plain = {request.index for request in candidates} - {request.index for request in drafting}
        if not drafting:
            return ScheduledDrafts([], [], plain, 0, None, [1] * len(active), anchors)
        num_positions = self._num_draft_positions(len(active), len(drafting), seconds)
        limits = [min(caps[request.index], num_positions) for request in drafting]
        proposal = self._propose(drafting, max(limits))
        lengths = schedule_lengths(
            self.schedule,
            proposal,
            limits,
            num_rows=len(active),
            seconds=None if seconds is None else lambda tokens: seconds(tokens, len(drafting), num_positions),
            token_bucket=self._token_bucket,
        )
        rows = [target_rows.row_of(request) for request in drafting]
        counts = [1] * len(active)
        for row, length in zip(rows, lengths, strict=True):
            counts[row] += length
        tokens = anchors.repeat(1, 1 + max(lengths))
        tokens[torch.tensor(rows, device=device), 1:] = proposal.tokens[:, : max(lengths)].to(device)
        return ScheduledDrafts(drafting, rows, plain, max(limits), proposal, counts, tokens)

    def record(self, request: Request, *, drafted: int, accepted: int, verified: int) -> None:
        """Count a drafting round of a request."""
        if self._gate is not None:
            self._block_length.record(num_draft_positions=drafted, accepted=accepted, verified=verified)
            self._gate.record(request.estimate, accepted=accepted, verified=verified)

    def _round_seconds(self, context: int) -> RoundSeconds | None:
        return None if self.costs is None else self.costs.of_round(context=context, do_sample=self.sampling.do_sample)

    def _admitted(self, candidates: list[Request], num_rows: int, seconds: RoundSeconds | None) -> list[Request]:
        """The candidates that draft in this round, moved to the first rows of the cache."""
        if self._gate is not None and seconds is not None and candidates:
            admitted = self._gate.admit(
                [request.estimate for request in candidates],
                num_rows=num_rows,
                seconds=lambda tokens, drafting: seconds(tokens, drafting, self._last_num_positions),
            )
            candidates = [candidates[index] for index in admitted]
        return self.rows.move_to_front(candidates)

    def _num_draft_positions(self, num_rows: int, num_drafting: int, seconds: RoundSeconds | None) -> int:
        """Positions to draft: all that are allowed, or with costs the number that pays."""
        if self._gate is None or seconds is None:
            return self.settings.num_assistant_tokens
        self._last_num_positions = self._block_length.choose(
            num_rows=num_rows,
            num_drafting=num_drafting,
            seconds=lambda tokens, positions: seconds(tokens, num_drafting, positions),
        )
        return self._last_num_positions

    def _append_pending(self, request: Request) -> None:
        """Extend the context by all pending features but the last."""
        features = request.features()
        if len(features) > 1:
            self.binding.drafter.extend_context(features[:-1], self.cache, row=self.rows.row_of(request))
            request.pending = [features[-1:].clone()]

    def _propose(self, drafting: list[Request], num_tokens: int) -> Proposal:
        for request in drafting:
            if sum(map(len, request.pending)) > _LONGEST_PADDED_CONTEXT:
                self._append_pending(request)
        features = [request.features() for request in drafting]
        anchors = torch.tensor([request.anchor for request in drafting], device=self.binding.drafter.device)
        with torch.no_grad():
            hidden = encode_block(
                self.binding,
                torch.nn.utils.rnn.pad_sequence(features, batch_first=True),
                anchor_tokens=anchors,
                cache=self.cache,
                context_lengths=[len(item) for item in features],
            )
            self.observer.encoded(hidden)
            block = score_block(self.binding, hidden, anchors, num_tokens)
            self.observer.scored(block)
            proposal = draft_tokens(self.binding, block, self._sampling_of(drafting))
        for request in drafting:
            request.pending = []
        return proposal

    def _sampling_of(self, drafting: list[Request]) -> DraftSampling:
        return replace(self.sampling, processor=self._processor(drafting)) if self.processors else self.sampling

    def _processor(self, drafting: list[Request]) -> LogitsProcessor:
        """The user's processors; a draft position's prefix is the text and the drafts before it."""
        rows, texts = [request.index for request in drafting], [request.text for request in drafting]

        def process(drafts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            pairs = zip(texts, drafts, strict=True)
            return self.processors(
                logits, lambda: [torch.cat([text, row.to(text.device)]) for text, row in pairs], rows
            )

        return process


__all__ = ["BlockDrafter"]
