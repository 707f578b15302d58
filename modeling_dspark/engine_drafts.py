"""Drafting for the requests of a packed batch: who drafts, on which rows of the drafter's cache, and how much is verified.

The drafter's rows have an order of their own: those that draft in a round come first, so that the backbone reads views.

Shapes: `R` rows of the target, `Q` most tokens of a row, `K` draft positions, `L` tapped layers, `D` hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .draft_propose import LogitsProcessor, Proposal, propose
from .engine_processors import RowProcessors
from .engine_request import Request
from .model_cache import DSparkCache
from .schedule_costs import CostProfile
from .schedule_gate import BlockLength, DraftGate
from .schedule_policies import DraftSettings, RoundView, checked_lengths, make_schedule
from .target_binding import token_buckets


logger = logging.get_logger(__name__)

_LONGEST_PADDED_CONTEXT = 16  # new features of a row that may be padded to the longest row's


@dataclass(frozen=True)
class Round:
    """The drafts of one round.

    Attributes:
        drafting (`list[Request]`): Requests that drafted, in the order of the drafter's rows.
        plain (`set[int]`): Indices of the requests that could have drafted and stepped aside.
        num_drafted (`int`): Positions drafted for each.
        proposal ([`Proposal`], *optional*): Their drafts; `None` in a plain step.
        counts (`list[int]`): Tokens to verify in each row of the target, anchors included.
        tokens (`torch.LongTensor` of shape `(R, Q)`): Anchor and drafts of each row of the target.
    """

    drafting: list[Request]
    plain: set[int]
    num_drafted: int
    proposal: Proposal | None
    counts: list[int]
    tokens: torch.Tensor


class BlockDrafter:
    """The drafting side of an engine.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): The target it borrows from.
        settings ([`DraftSettings`]): How to draft.
        costs ([`CostProfile`], *optional*): For schedules that weigh costs.
        processors ([`RowProcessors`]): Applied to draft logits.
        do_sample (`bool`): Whether drafts are drawn.
        generator (`torch.Generator`, *optional*): Source of randomness.
        max_length (`int`, *optional*): Longest context there will be, block included.

    Raises:
        ValueError: if the target does not fit, or costs are missing.
    """

    def __init__(
        self,
        drafter: Any,
        target: PreTrainedModel,
        *,
        settings: DraftSettings,
        costs: CostProfile | None,
        processors: RowProcessors,
        do_sample: bool,
        generator: torch.Generator | None,
        max_length: int | None,
    ):
        self.drafter, self.binding = drafter, drafter.bind(target)
        self.settings, self.costs, self.processors = settings, costs, processors
        self.do_sample, self.generator = do_sample, generator
        self.schedule = make_schedule(settings)
        self._token_bucket = token_buckets(target)
        if self.schedule.needs_costs and costs is None:
            raise ValueError(
                f"The schedule {settings.schedule!r} needs `costs`: pass `costs=drafter.profile(target)`, or choose "
                "another schedule."
            )
        if self.schedule.needs_costs and costs is not None and costs.is_flat:
            logger.warning_once(
                f"By its cost profile, the target verifies {costs.verify.counts[-1]} tokens in the time of one, so the schedule "
                f"{settings.schedule!r} verifies every draft. If that is not so, measure again: "
                "`drafter.profile(target, refresh=True)`."
            )
        self.cache = DSparkCache(num_rows=0, max_length=max_length)
        self._gate = DraftGate() if self.schedule.needs_costs else None
        self._block_length = BlockLength(settings.num_assistant_tokens)
        self._last_positions = settings.num_assistant_tokens
        self._order: list[Request] = []  # of the cache's rows

    @property
    def is_active(self) -> bool:
        """Whether anything is ever drafted."""
        return self.settings.num_assistant_tokens > 0

    def join(self, request: Request) -> None:
        """Give a request a row."""
        request.draft_row = self.cache.add_row()
        self._order.append(request)

    def leave(self, request: Request) -> None:
        """Take a request's row away; the last row moves there."""
        row: int = request.draft_row  # type: ignore[assignment]  # it has joined
        self.cache.drop_row(row)
        last = self._order.pop()
        if last is not request:
            self._order[row], last.draft_row = last, row
        request.draft_row, request.pending = None, []

    def learn(self, request: Request, features: torch.Tensor) -> None:
        """Take in features of a prompt `[c, L * D]` at once; the last one waits for the first round."""
        request.pending.append(features)
        self._take_in(request)

    def draft(self, active: list[Request], *, context: int) -> Round:
        """Choose who drafts, draft, and schedule.

        Args:
            active (`list[Request]`): All requests, in the order of the target's rows.
            context (`int`): Context tokens that the target's attention will read, over all rows.
        """
        caps = {request.index: min(self.settings.num_assistant_tokens, request.room - 1) for request in active}
        device = active[0].text.device
        anchors = torch.tensor([request.anchor for request in active], device=device)[:, None]
        candidates = [request for request in active if caps[request.index] > 0]
        drafting = self._admitted(candidates, len(active), context)
        plain = {request.index for request in candidates} - {request.index for request in drafting}
        if not drafting:
            return Round([], plain, 0, None, [1] * len(active), anchors)
        num_draft_positions = self._num_positions(len(active), len(drafting), context)
        limits = [min(caps[request.index], num_draft_positions) for request in drafting]
        proposal = self._propose(drafting, max(limits))
        view = RoundView(
            self._confidence(proposal, limits),
            len(active),
            None
            if self.costs is None
            else lambda tokens: self._seconds(tokens, len(drafting), num_draft_positions, context),
            self._token_bucket,
        )
        lengths = checked_lengths(self.schedule, view)
        counts = [1] * len(active)
        for request, length in zip(drafting, lengths, strict=True):
            counts[request.row] += length  # type: ignore[index]  # it has joined
        tokens = anchors.repeat(1, 1 + max(lengths))
        rows = torch.tensor([request.row for request in drafting], device=device)
        tokens[rows, 1:] = proposal.tokens[:, : max(lengths)].to(device)
        return Round(drafting, plain, max(limits), proposal, counts, tokens)

    def record(self, request: Request, *, drafted: int, accepted: int, verified: int) -> None:
        """Count what a drafting round brought a request."""
        if self._gate is not None:
            self._block_length.record(num_draft_positions=drafted, accepted=accepted, verified=verified)
            self._gate.record(request.estimate, accepted=accepted, verified=verified)

    def _admitted(self, candidates: list[Request], num_rows: int, context: int) -> list[Request]:
        """The candidates that draft in this round, moved to the first rows of the cache."""
        if self._gate is not None and candidates:
            admitted = self._gate.admit(
                [request.estimate for request in candidates],
                num_rows=num_rows,
                seconds=lambda tokens, drafting: self._seconds(tokens, drafting, self._last_positions, context),
            )
            candidates = [candidates[index] for index in admitted]
        chosen = {request.index for request in candidates}
        outside = [row for row in range(len(chosen), len(self._order)) if self._order[row].index in chosen]
        for row in range(len(chosen)):
            if self._order[row].index not in chosen:
                self._swap(row, outside.pop())
        return self._order[: len(chosen)]

    def _num_positions(self, num_rows: int, num_drafting: int, context: int) -> int:
        """Positions to draft: all that are allowed, or where costs are weighed as many as have paid."""
        if self._gate is not None:
            self._last_positions = self._block_length.choose(
                num_rows=num_rows,
                num_drafting=num_drafting,
                seconds=lambda tokens, positions: self._seconds(tokens, num_drafting, positions, context),
            )
        return self._last_positions

    def _swap(self, one: int, other: int) -> None:
        self.cache.swap_rows(one, other)
        order = self._order
        order[one], order[other] = order[other], order[one]
        order[one].draft_row, order[other].draft_row = one, other

    def _take_in(self, request: Request) -> None:
        """Extend the context by all pending features but the last."""
        features = request.features()
        if len(features) > 1:
            row: int = request.draft_row  # type: ignore[assignment]  # it has joined
            self.drafter.extend_context(features[:-1], self.cache, row=row)
            request.pending = [features[-1:].clone()]

    def _propose(self, drafting: list[Request], num_tokens: int) -> Proposal:
        for request in drafting:
            if sum(map(len, request.pending)) > _LONGEST_PADDED_CONTEXT:
                self._take_in(request)
        features = [request.features() for request in drafting]
        proposal = propose(
            self.drafter,
            self.binding,
            torch.nn.utils.rnn.pad_sequence(features, batch_first=True),
            anchor_tokens=torch.tensor([request.anchor for request in drafting], device=self.drafter.device),
            cache=self.cache,
            context_lengths=[len(item) for item in features],
            num_tokens=num_tokens,
            do_sample=self.do_sample,
            logits_processor=self._processor(drafting) if self.processors else None,
            is_vocabulary_invariant=self.processors.is_vocabulary_invariant,
            temperature=self.processors.temperature,
            generator=self.generator,
        )
        for request in drafting:
            request.pending = []
        return proposal

    def _processor(self, drafting: list[Request]) -> LogitsProcessor:
        """The user's processors; a position's prefix is the text and the drafts before it."""
        rows, texts = [request.index for request in drafting], [request.text for request in drafting]

        def process(drafts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            pairs = zip(texts, drafts, strict=True)
            return self.processors(
                logits, lambda: [torch.cat([text, row.to(text.device)]) for text, row in pairs], rows
            )

        return process

    def _confidence(self, proposal: Proposal, limits: list[int]) -> list[list[float]]:
        """Confidences of the positions that may be verified; syncs where a schedule reads them."""
        if not self.schedule.needs_confidence:
            return [[1.0] * limit for limit in limits]
        values = proposal.confidence.tolist()  # type: ignore[union-attr]  # the settings refuse it without a head
        return [row[:limit] for row, limit in zip(values, limits, strict=True)]

    def _seconds(self, tokens: float, num_drafting: int, num_draft_positions: int, context: int) -> float:
        costs: CostProfile = self.costs  # type: ignore[assignment]  # checked at construction
        return costs.round_seconds(
            tokens,
            num_drafting=num_drafting,
            num_draft_positions=num_draft_positions,
            context=context,
            do_sample=self.do_sample,
        )


__all__ = ["BlockDrafter", "Round"]
