"""The packed loop: any number of requests, one target forward a round, no padding.

A round drafts a block for every request that is to draft, schedules how much of each block is verified, runs the target
over `[anchor, drafts]` of all requests at once, and keeps what the target confirms. Requests join and leave between
rounds. Greedy and sampling, one request and many, drafting and plain steps are the same path.

Shapes: `R` rows, `N = sum(1 + l_r)` packed tokens, `Q` most tokens of a row, `V` vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .engine_counts import RunStatistics
from .engine_drafts import BlockDrafter, Round
from .engine_processors import RowProcessors, StopConditions
from .engine_request import Request
from .engine_tokens import Scores, TokenSelector
from .schedule_costs import CostProfile
from .schedule_policies import DraftSettings, resolve_settings
from .target_packed import PackedOutput, PackedTarget, why_not_packable
from .target_packing import PackedPlan


_PREFILL_TOKENS = 2048  # prompt tokens in one forward: more saves nothing and costs memory


class Engine:
    """Decodes requests together: `add_request` at any time, `step` until no request is left.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): The target.
        settings ([`DraftSettings`], *optional*): How to draft; `None` means the drafter's defaults.
        costs ([`CostProfile`], *optional*): Needed by schedules that weigh costs (`drafter.profile(target)`).
        do_sample (`bool`, *optional*, defaults to `False`): Sample instead of taking the argmax.
        logits_processor ([`~transformers.LogitsProcessorList`], *optional*): Applied to target and draft logits.
        stopping_criteria ([`~transformers.StoppingCriteriaList`], *optional*): Checked at every new token.
        eos_token_ids (`list[int]`, *optional*): End-of-text tokens, besides those of the criteria.
        batch_size (`int`, *optional*, defaults to `1`):
            Rows of the batch that a user's own processors and criteria expect; requests take them in turn.
        max_length (`int`, *optional*): Longest text, prompt included: texts end there. Bounds the memory of the caches.
        prefill_chunk_size (`int`, *optional*): Most prompt tokens of a request in one forward.
        generator (`torch.Generator`, *optional*): Source of randomness.
        keep_scores, keep_logits (`bool`, *optional*): Keep processed or raw logits of every new token.
        record_confidence (`bool`, *optional*): Keep the confidence logits in the statistics.

    Raises:
        ValueError: if the target cannot be packed (with the reason), does not fit the drafter, or costs are missing.

    Example:

    ```python
    >>> import torch
    >>> from modeling_dspark import DSparkConfig, DSparkModel, Engine
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM

    >>> target = Qwen3ForCausalLM(Qwen3Config(vocab_size=199, hidden_size=64, intermediate_size=48, head_dim=16,
    ...     num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)).eval()
    >>> drafter = DSparkModel(DSparkConfig(vocab_size=199, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
    ...     num_attention_heads=4, target_layer_ids=[0, 2], num_target_layers=5, mask_token_id=198, markov_rank=8,
    ...     default_num_assistant_tokens_schedule="fixed")).eval()
    >>> engine = Engine(drafter, target)
    >>> requests = [engine.add_request(torch.tensor(prompt), max_new_tokens=4) for prompt in ([5, 6, 7], [8])]
    >>> while engine.requests:
    ...     finished = engine.step()
    >>> [len(request.tokens) for request in requests]
    [4, 4]

    ```
    """

    def __init__(
        self,
        drafter: Any,
        target: PreTrainedModel,
        *,
        settings: DraftSettings | None = None,
        costs: CostProfile | None = None,
        do_sample: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        eos_token_ids: list[int] | None = None,
        batch_size: int = 1,
        max_length: int | None = None,
        prefill_chunk_size: int | None = None,
        generator: torch.Generator | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        record_confidence: bool = False,
    ):
        if reason := why_not_packable(target):
            raise ValueError(f"{type(target).__name__} cannot be decoded in a packed batch: {reason}.")
        config = drafter.config
        room = None if max_length is None else max_length + config.num_block_positions + 1
        self.keep_scores, self.keep_logits, self.record_confidence = keep_scores, keep_logits, record_confidence
        self.processors = RowProcessors(logits_processor, batch_size)
        self.selector = TokenSelector(
            self.processors, do_sample=do_sample, generator=generator, keep_logits=keep_logits, keep_scores=keep_scores
        )
        self.conditions = StopConditions(stopping_criteria, batch_size, eos_token_ids=eos_token_ids)
        self.drafting = BlockDrafter(
            drafter,
            target,
            settings=settings or resolve_settings(GenerationConfig(), config),
            costs=costs,
            processors=self.processors,
            do_sample=do_sample,
            generator=generator,
            max_length=room,
        )
        self.packed = PackedTarget(target, config.target_layer_ids, max_length=room)
        self._block_size, self._max_length = config.block_size, max_length
        self._chunk_size = _PREFILL_TOKENS if prefill_chunk_size is None else prefill_chunk_size
        if type(self._chunk_size) is not int or self._chunk_size < 1:
            raise ValueError(f"`prefill_chunk_size` must be an integer of at least 1, got {prefill_chunk_size!r}.")
        self._vocabulary = len(target.get_input_embeddings().weight)  # type: ignore[arg-type]  # of an embedding
        self._is_settled = True  # whether texts, caches and features agree: not within a step
        self._waiting: list[Request] = []
        self._active: list[Request] = []  # in the order of the target's rows
        self._num_added = 0

    @property
    def requests(self) -> list[Request]:
        """Requests that have not finished."""
        return self._active + self._waiting

    def add_request(
        self,
        prompt: torch.Tensor,
        *,
        max_new_tokens: int | None = None,
        prefix: torch.Tensor | None = None,
        num_pads: int | None = None,
    ) -> Request:
        """Add a prompt; it joins at the next `step`.

        Args:
            prompt (`torch.LongTensor` of shape `(m,)`): Token ids without padding, at least one.
            max_new_tokens (`int`, *optional*): Most new tokens; by default the criteria alone decide.
            prefix (`torch.LongTensor` of shape `(n,)`, *optional*):
                The prompt as processors and criteria are to see it (with padding); by default the prompt.
            num_pads (`int`, *optional*): Padding at the left of `prefix`; by default what it has beyond the prompt.

        Returns:
            [`Request`]: its `tokens` grow with every step; `finished` says when it is done.

        Raises:
            TypeError: for a prompt that is no tensor of integers, or a length that is no integer.
            ValueError: for an empty prompt, tokens the target does not have, or without any bound on the length.
        """
        self._check(prompt, max_new_tokens)
        prefix = prompt if prefix is None else prefix
        criteria = self.conditions.max_length  # checked after a token, so there is always one
        bounds = [
            self._max_length,
            None if criteria is None else max(criteria, len(prefix) + 1),
            None if max_new_tokens is None else len(prefix) + max_new_tokens,
        ]
        bound = min((value for value in bounds if value is not None), default=0)
        if bound <= len(prefix):
            raise ValueError(
                f"There must be a bound on the text, with room for a token after the {len(prefix)} of the prompt: got "
                f"`max_new_tokens={max_new_tokens}`, and an engine with `max_length={self._max_length}`."
            )
        device = self.packed.device
        statistics = RunStatistics(self._block_size)
        request = Request(self._num_added, prefix.to(device), prompt.to(device), bound, statistics)
        self._num_added += 1
        self.processors.num_pads.append(len(prefix) - len(prompt) if num_pads is None else num_pads)
        self._waiting.append(request)
        return request

    def _check(self, prompt: Any, max_new_tokens: Any) -> None:
        if not isinstance(prompt, torch.Tensor) or prompt.is_floating_point() or prompt.dtype == torch.bool:
            raise TypeError(f"`prompt` must be a tensor of token ids, got {getattr(prompt, 'dtype', type(prompt))}.")
        if prompt.dim() != 1 or len(prompt) == 0:
            raise ValueError(f"`prompt` must hold at least one token id in one dimension, got {tuple(prompt.shape)}.")
        lowest, highest = int(prompt.min()), int(prompt.max())
        if lowest < 0 or highest >= self._vocabulary:
            raise ValueError(
                f"`prompt` holds ids from {lowest} to {highest}; the target's run from 0 to {self._vocabulary - 1}."
            )
        if max_new_tokens is not None and type(max_new_tokens) is not int:
            raise TypeError(f"`max_new_tokens` must be an integer, got {max_new_tokens!r}.")

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Prefill what has joined, then advance every request by one round; returns the requests that finished.

        Raises:
            RuntimeError: after an exception of a processor or criterion left an earlier step half done.
        """
        if not self._is_settled:
            raise RuntimeError(
                "An earlier step of this engine was left half done by an exception, so its texts and caches do not agree any "
                "more. Add the requests to a new engine."
            )
        finished = self._join() if self._waiting else []
        if self._active:
            lengths = self.packed.cache.rows.lengths
            drafts = self.drafting.draft(self._active, context=len(lengths) * max(lengths))
            plan, output = self.verify(drafts)
            done = self.accept(self._active, drafts, plan, output)
            self._leave(done)
            finished += done
        return finished

    def verify(self, drafts: Round) -> tuple[PackedPlan, PackedOutput]:
        """Run the target over anchors and drafts; lengths stay."""
        plan = self.packed.plan(drafts.counts)
        return plan, self.packed.forward(plan.pack(drafts.tokens), plan, features=self.drafting.is_active)

    def accept(self, active: list[Request], drafts: Round, plan: PackedPlan, output: PackedOutput) -> list[Request]:
        """Append what the target confirms, move lengths and features on, count; returns the requests that finished.

        Syncs once, since the host has to know the tokens.
        """
        owners = [request.index for request, count in zip(active, drafts.counts, strict=True) for _ in range(count)]
        scores = self.selector.process(output.logits, _prefixes(active, drafts), owners)
        verdict = self.selector.verdict(drafts, plan, scores.processed)
        outcome = torch.cat([verdict.num_accepted[:, None], verdict.next_tokens[:, None]], dim=1)
        table = torch.cat([outcome, drafts.tokens.to(outcome.device)], dim=1).tolist()
        kept = [[*drafted[:count], following] for count, following, _, *drafted in table]
        self._is_settled = False
        self.packed.advance(plan, [len(tokens) for tokens in kept])
        before = [request.length for request in active]
        finished = self._settle(active, kept, plan.offsets, scores=scores)
        drafting = {request.index: row for row, request in enumerate(drafts.drafting)}
        for row, request in enumerate(active):
            num_new = request.length - before[row]
            self._count(request, drafts, row, num_new, min(table[row][0], num_new), drafting.get(request.index))
            if output.features is not None and not request.finished:
                first = plan.offsets[row]
                request.pending.append(output.features[first : first + len(kept[row])])
        self._is_settled = True
        return finished

    def _join(self) -> list[Request]:
        """Prefill the waiting requests, packed; each gets its first token."""
        self._is_settled = False
        joining, self._waiting = self._waiting, []
        for request in joining:
            request.row = self.packed.cache.rows.add_row()
            self._active.append(request)
            self.drafting.join(request)
        finished: list[Request] = []
        for pieces in self._pieces(joining):
            finished += self._prefill(pieces)
        self._leave(finished)
        self._is_settled = True
        return finished

    def _pieces(self, joining: list[Request]) -> Iterator[list[tuple[Request, int, int]]]:
        """Prompts cut into pieces `(request, start, count)`, and as many pieces together as one forward takes."""
        pieces: list[tuple[Request, int, int]] = []
        for request in joining:
            start = 0
            while start < len(request.prompt):
                space = _PREFILL_TOKENS - sum(count for _, _, count in pieces)
                if space == 0 or (pieces and pieces[-1][0] is request):
                    yield pieces
                    pieces, space = [], _PREFILL_TOKENS
                count = min(len(request.prompt) - start, self._chunk_size, space)
                pieces.append((request, start, count))
                start += count
        yield pieces

    def _prefill(self, pieces: list[tuple[Request, int, int]]) -> list[Request]:
        """One forward over pieces of the prompts of consecutive rows; whose prompt is complete gets a token."""
        first_row: int = pieces[0][0].row  # type: ignore[assignment]  # it has joined
        plan = self.packed.plan([count for _, _, count in pieces], first_row=first_row)
        tokens = torch.cat([request.prompt[start : start + count] for request, start, count in pieces])
        last = [index for index, (request, start, count) in enumerate(pieces) if start + count == len(request.prompt)]
        keep = torch.tensor([plan.offsets[index + 1] - 1 for index in last or [0]], device=tokens.device)
        output = self.packed.forward(tokens, plan, keep=keep, features=self.drafting.is_active)
        self.packed.advance(plan, plan.counts)
        if output.features is not None:
            for index, (request, _, _) in enumerate(pieces):
                self.drafting.learn(request, output.features[plan.offsets[index] : plan.offsets[index + 1]])
        if not last:
            return []
        requests = [pieces[index][0] for index in last]
        owners = [request.index for request in requests]
        scores = self.selector.process(output.logits, lambda: [request.text for request in requests], owners)
        kept = [[token] for token in self.selector.choose(scores.processed).tolist()]
        return self._settle(requests, kept, range(len(requests)), scores=scores)

    def _count(
        self, request: Request, drafts: Round, row: int, num_new: int, num_accepted: int, draft_row: int | None
    ) -> None:
        verified = drafts.counts[row] - 1
        request.statistics.add_round(
            drafted=0 if draft_row is None else drafts.num_drafted,
            verified=verified,
            accepted=num_accepted,
            new_tokens=num_new,
            plain=request.index in drafts.plain,
        )
        if draft_row is None:
            return
        self.drafting.record(request, drafted=drafts.num_drafted, accepted=num_accepted, verified=verified)
        if self.record_confidence:
            logits: Any = drafts.proposal.confidence_logits  # type: ignore[union-attr]  # it drafted
            request.statistics.confidence_logits.append(logits[draft_row].tolist())

    def _settle(
        self,
        requests: list[Request],
        kept: list[list[int]],
        offsets: Sequence[int],
        *,
        scores: Scores,
    ) -> list[Request]:
        """Append tokens up to where each text ends; returns the requests that have finished."""
        if any(tokens[-1] >= scores.processed.shape[-1] for tokens in kept):
            raise ValueError(
                "No token can be drawn: the logits are not numbers, or the logits processors leave no token with a finite "
                "logit. Check the processors, or the target's dtype."
            )
        for request, tokens, offset in zip(requests, kept, offsets, strict=False):
            request.append(tokens)
            if self.keep_scores:
                request.scores += scores.processed[offset : offset + len(tokens)].clone().unbind()
            if self.keep_logits:
                request.logits += scores.raw[offset : offset + len(tokens)].clone().unbind()
        ends = self.conditions.cut(
            [(request.text, tokens) for request, tokens in zip(requests, kept, strict=True)],
            rows=[request.index for request in requests],
            scores=[request.scores if self.keep_scores else None for request in requests],
        )
        out_of_time = self.conditions.out_of_time()
        for request, end in zip(requests, ends, strict=True):
            if end is not None:
                request.truncate(end)
                num_new = len(request.tokens)
                del request.scores[num_new:], request.logits[num_new:]
            request.finished = end is not None or request.room <= 0 or out_of_time
        return [request for request in requests if request.finished]

    def _leave(self, finished: list[Request]) -> None:
        """Take finished requests out; the last row moves where a row has become free."""
        for request in finished:
            row: int = request.row  # type: ignore[assignment]  # it has joined
            self.packed.cache.rows.drop_row(row)
            last = self._active.pop()
            if last is not request:
                self._active[row], last.row = last, row
            request.row = None
            self.drafting.leave(request)


def _prefixes(active: list[Request], drafts: Round) -> Callable[[], list[torch.Tensor]]:
    """The prefix of every packed position: the text, then the drafts before the position."""
    return lambda: [
        torch.cat([request.text, drafts.tokens[row, 1 : 1 + position]])
        for row, request in enumerate(active)
        for position in range(drafts.counts[row])
    ]


__all__ = ["Engine"]
