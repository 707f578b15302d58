"""The packed loop: any number of requests, one target forward per round, no padding.

A round drafts a block for every request that takes part in drafting, schedules how much of each block is verified, runs
the target over `[anchor, drafts]` of all requests at once, and keeps the drafts that the target confirms. Requests join
and leave between rounds. Greedy and sampling, one request and many, drafting and plain steps are the same path.

Shapes: `R` rows, `N = sum(1 + l_r)` packed tokens, `Q` maximum tokens of a row, `V` vocabulary.
"""

from dataclasses import replace

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .draft_binding import DraftBinding
from .draft_tokens import DraftSampling
from .engine_counts import RunStatistics
from .engine_drafts import BlockDrafter
from .engine_observer import EngineObserver, checked_observer
from .engine_processors import RowProcessors
from .engine_prompts import Piece, check_prompt, check_sizes, prompt_pieces
from .engine_request import Request
from .engine_round import ScheduledDrafts
from .engine_rows import RowTable
from .engine_stopping import StopConditions
from .engine_tokens import TextWriter, TokenSelector
from .model_protocol import Drafter
from .schedule_costs import CostProfile
from .schedule_settings import DraftSettings, resolve_settings
from .target_packed import PackedOutput, PackedTarget, why_not_packable
from .target_packing import PackedPlan


_PREFILL_TOKENS = 2048  # maximum prompt tokens per forward: more cost memory and save no time


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
            Rows of the batch that custom processors and criteria expect; requests take them in turn.
        max_length (`int`, *optional*): Maximum length of a text, prompt included; bounds the memory of the caches.
        prefill_chunk_size (`int`, *optional*): Maximum prompt tokens of a request in one forward.
        generator (`torch.Generator`, *optional*): Source of randomness.
        keep_scores, keep_logits (`bool`, *optional*): Keep processed or raw logits of every new token.
        record_confidence (`bool`, *optional*): Keep the confidence logits in the statistics.
        fused_head (`str`, *optional*): What the drafter's heads run on; see [`DraftBinding`].
        observer ([`EngineObserver`], *optional*): Called at each stage of each round.

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
        drafter: Drafter,
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
        fused_head: str | None = None,
        observer: EngineObserver | None = None,
    ):
        if reason := why_not_packable(target):
            raise ValueError(f"{type(target).__name__} cannot be decoded in a packed batch: {reason}.")
        config = drafter.config
        cache_length = None if max_length is None else max_length + config.num_block_positions + 1
        self.record_confidence = record_confidence
        self.observer = checked_observer(observer)
        self.processors = RowProcessors(logits_processor, batch_size)
        self.selector = TokenSelector(
            self.processors, do_sample=do_sample, generator=generator, keep_logits=keep_logits, keep_scores=keep_scores
        )
        self.conditions = StopConditions(stopping_criteria, batch_size, eos_token_ids=eos_token_ids)
        self.texts = TextWriter(self.conditions, keep_logits=keep_logits, keep_scores=keep_scores)
        self.drafting = BlockDrafter(
            DraftBinding(drafter, target, fused_head=fused_head),
            settings=settings or resolve_settings(GenerationConfig(), config),
            costs=costs,
            processors=self.processors,
            sampling=DraftSampling(
                do_sample,
                is_vocabulary_invariant=self.processors.is_vocabulary_invariant,
                temperature=self.processors.temperature,
                generator=generator,
            ),
            observer=self.observer,
            max_length=cache_length,
        )
        self.packed = PackedTarget(target, config.target_layer_ids, max_length=cache_length)  # type: ignore[arg-type]
        self.rows = RowTable(self.packed.cache.rows)
        self._block_size, self._max_length = config.block_size, max_length
        self._chunk_size = _PREFILL_TOKENS if prefill_chunk_size is None else prefill_chunk_size
        if type(self._chunk_size) is not int or self._chunk_size < 1:
            raise ValueError(f"`prefill_chunk_size` must be an integer of at least 1, got {prefill_chunk_size!r}.")
        self._vocabulary = len(target.get_input_embeddings().weight)  # type: ignore[arg-type]  # of an embedding
        self._is_settled = True  # whether texts, caches and features agree; false during a step
        self._waiting: list[Request] = []
        self._num_added = 0

    @property
    def requests(self) -> list[Request]:
        """Requests that have not finished."""
        return self.rows.requests + self._waiting

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
            max_new_tokens (`int`, *optional*): Maximum new tokens; by default the criteria alone decide.
            prefix (`torch.LongTensor` of shape `(n,)`, *optional*):
                The prompt as processors and criteria see it (with padding); by default the prompt.
            num_pads (`int`, *optional*): Padding on the left of `prefix`; by default its length beyond the prompt's.

        Returns:
            [`Request`]: its `tokens` grow with every step; `finished` says when it is done.

        Raises:
            TypeError: for a prompt other than a tensor of integers, or a length other than an integer.
            ValueError: for an empty prompt, tokens the target does not have, or without any bound on the length.
        """
        check_prompt(prompt, max_new_tokens, vocab_size=self._vocabulary)
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
        self.processors.num_pads[request.index] = len(prefix) - len(prompt) if num_pads is None else num_pads
        self._waiting.append(request)
        return request

    def fill(self, num_rows: int, *, context: int, num_draft_positions: int | None = None) -> None:
        """Hold exactly `num_rows` requests of `context` arbitrary tokens each, for measurements.

        Args:
            num_rows (`int`): Number of requests; existing ones start over.
            context (`int`): Tokens of context per request.
            num_draft_positions (`int`, *optional*): Positions to draft per round from now on.

        Raises:
            ValueError: if requests wait for their prefill, or a size is out of its range.
        """
        check_sizes(num_rows, context, num_draft_positions, block_size=self._block_size)
        if self._waiting:
            raise ValueError("`fill` needs an engine without waiting requests; call `step` first.")
        drafting = self.drafting
        if num_draft_positions is not None:
            drafting.settings = replace(drafting.settings, num_assistant_tokens=num_draft_positions)
        while len(self.rows) > num_rows:
            self._remove([self.rows.requests[-1]])
        while len(self.rows) < num_rows:
            self._add([self.add_request(torch.zeros(1, dtype=torch.long), max_new_tokens=2**30)])
            self._waiting.pop()
        self.packed.cache.rows.lengths = [context] * num_rows
        drafting.cache.lengths = [context - 2] * num_rows
        config = drafting.binding.drafter.config
        size = len(config.target_layer_ids) * config.hidden_size  # type: ignore[arg-type]  # filled in by the config
        for request in self.rows.requests:
            request.truncate(len(request.prefix))
            request.pending = [torch.zeros(2, size, device=self.packed.device, dtype=self.packed.target.dtype)]
        self._is_settled = True

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Prefill the new requests, then advance every request by one round; returns the requests that finished.

        Raises:
            RuntimeError: if an exception (of a processor, a schedule, an observer, ...) has interrupted an earlier step.
        """
        if not self._is_settled:
            raise RuntimeError(
                "An exception interrupted an earlier step of this engine, so its texts and caches no longer agree. Add the "
                "requests to a new engine."
            )
        finished = self._prefill_waiting() if self._waiting else []
        if self.rows.requests:
            self.observer.begun(list(self.rows.requests))
            self._is_settled = False
            lengths = self.packed.cache.rows.lengths
            drafts = self.drafting.draft(self.rows, context=len(lengths) * max(lengths))
            self.observer.drafted(drafts)
            plan, output = self._verify(drafts)
            self.observer.verified(drafts)
            ended = self._accept(drafts, plan, output)
            self._remove(ended)
            self._is_settled = True
            self.observer.settled(drafts)
            finished += ended
        return finished

    def _verify(self, drafts: ScheduledDrafts) -> tuple[PackedPlan, PackedOutput]:
        """Run the target over anchors and drafts; lengths stay."""
        plan = self.packed.plan(drafts.counts)
        return plan, self.packed.forward(plan.pack(drafts.tokens), plan, features=self.drafting.is_active)

    def _accept(self, drafts: ScheduledDrafts, plan: PackedPlan, output: PackedOutput) -> list[Request]:
        """Append what the target confirms, move lengths and features on, count; returns the requests that finished.

        Syncs once, since the host has to know the tokens.
        """
        active = self.rows.requests
        owners = [request.index for request, count in zip(active, drafts.counts, strict=True) for _ in range(count)]
        scores = self.selector.process(output.logits, lambda: drafts.prefixes(active), owners)
        acceptance = self.selector.accept(drafts, plan, scores.processed)
        outcome = torch.cat([acceptance.num_accepted[:, None], acceptance.next_tokens[:, None]], dim=1)
        table = torch.cat([outcome, drafts.tokens.to(outcome.device)], dim=1).tolist()
        kept = [[*drafted[:count], following] for count, following, _, *drafted in table]
        self.packed.advance(plan, [len(tokens) for tokens in kept])
        before = [request.length for request in active]
        finished = self.texts.append(active, kept, plan.offsets, scores=scores)
        draft_row_of = {row: draft_row for draft_row, row in enumerate(drafts.rows)}
        for row, request in enumerate(active):
            num_new = request.length - before[row]
            self._count(drafts, row, num_new, min(table[row][0], num_new), draft_row_of.get(row))
            if output.features is not None and not request.finished:
                first = plan.offsets[row]
                request.pending.append(output.features[first : first + len(kept[row])])
        return finished

    def _prefill_waiting(self) -> list[Request]:
        """Prefill the waiting requests, packed; each gets its first token. Returns those that it finishes."""
        self._is_settled = False
        joining, self._waiting = self._waiting, []
        self._add(joining)
        finished: list[Request] = []
        for pieces in prompt_pieces(joining, chunk_size=self._chunk_size, num_tokens=_PREFILL_TOKENS):
            finished += self._prefill(pieces)
        self._remove(finished)
        self._is_settled = True
        return finished

    def _prefill(self, pieces: list[Piece]) -> list[Request]:
        """One forward over pieces of the prompts of consecutive rows; each request whose prompt is complete gets a token."""
        plan = self.packed.plan([piece.length for piece in pieces], first_row=self.rows.row_of(pieces[0].request))
        tokens = torch.cat([piece.tokens for piece in pieces])
        last = [index for index, piece in enumerate(pieces) if piece.is_last]
        keep = torch.tensor([plan.offsets[index + 1] - 1 for index in last or [0]], device=tokens.device)
        output = self.packed.forward(tokens, plan, keep=keep, features=self.drafting.is_active)
        self.packed.advance(plan, plan.counts)
        if output.features is not None:
            for index, piece in enumerate(pieces):
                features = output.features[plan.offsets[index] : plan.offsets[index + 1]]
                self.drafting.append_context(piece.request, features)
        if not last:
            return []
        requests = [pieces[index].request for index in last]
        owners = [request.index for request in requests]
        scores = self.selector.process(output.logits, lambda: [request.text for request in requests], owners)
        kept = [[token] for token in self.selector.choose(scores.processed).tolist()]
        return self.texts.append(requests, kept, range(len(requests)), scores=scores)

    def _count(
        self, drafts: ScheduledDrafts, row: int, num_new: int, num_accepted: int, draft_row: int | None
    ) -> None:
        """Count a round of the request in a row, which drafted in row `draft_row` of the proposal, if at all."""
        request, verified = self.rows.requests[row], drafts.counts[row] - 1
        request.statistics.add_round(
            drafted=0 if draft_row is None else drafts.num_drafted,
            verified=verified,
            accepted=num_accepted,
            new_tokens=num_new,
            plain=request.index in drafts.plain,
        )
        if draft_row is None or drafts.proposal is None:
            return
        self.drafting.record(request, drafted=drafts.num_drafted, accepted=num_accepted, verified=verified)
        if self.record_confidence and drafts.proposal.confidence_logits is not None:
            request.statistics.confidence_logits.append(drafts.proposal.confidence_logits[draft_row].tolist())

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            self.rows.add(request)
            self.drafting.add(request)

    def _remove(self, requests: list[Request]) -> None:
        for request in requests:
            self.rows.remove(request)
            self.drafting.remove(request)
            del self.processors.num_pads[request.index]


__all__ = ["Engine"]
