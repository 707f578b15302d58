"""Drafts for Transformers' own assisted-decoding loop (batch size 1).

Each round the loop hands over the target's outputs; the generator turns them into context features, drafts a block,
schedules how much of it is verified and cuts it where the text could end. `AssistedRun.accept` verifies samples.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from .draft_accept import accept_sampled
from .draft_binding import DraftBinding
from .draft_propose import propose
from .draft_tokens import DraftSampling, LogitsProcessor
from .engine_counts import RunStatistics
from .engine_processors import RowProcessors
from .engine_round import schedule_lengths
from .engine_stopping import StopConditions
from .generate_call import AssistedCall
from .model_cache import DSparkCache
from .model_protocol import Drafter
from .schedule_settings import fallback_settings, make_schedule, resolve_settings
from .target_binding import hidden_states_argument, tapped_features


logger = logging.get_logger(__name__)


class DSparkCandidateGenerator(CandidateGenerator):
    """Candidate generator for `GenerationMixin._assisted_decoding`.

    Args:
        drafter ([`Drafter`]): The drafter.
        call ([`AssistedCall`]): The call it serves. Processors see each draft position with its own prefix; drafts never
            run past the first token at which a criterion fires.
    """

    requires_model_outputs = True

    def __init__(self, drafter: Drafter, call: AssistedCall):
        config = call.generation_config
        self.drafter, self.binding = drafter, DraftBinding(drafter, call.target)
        self.settings = fallback_settings(resolve_settings(config, drafter.config), drafter.config)
        self.schedule = make_schedule(self.settings)
        self.statistics = RunStatistics(drafter.config.block_size)
        self.statistics.requests = [self.statistics]
        self.ends_with_draft = False
        self._is_prefill = True
        self._conditions = _DraftConditions(call.stopping_criteria, batch_size=1)
        self._max_length = min(config.max_length, self._conditions.max_length or config.max_length)
        self._logits_processor = call.logits_processor or None
        self._sampling = DraftSampling(
            config.do_sample, temperature=RowProcessors(call.logits_processor, batch_size=1).temperature
        )
        self._cache: DSparkCache | None = None  # made at the first round
        self._length = 0
        self._counts = (0, 0)
        # The user may want all hidden states; otherwise only the tapped ones are kept.
        wants_all = config.output_hidden_states and config.return_dict_in_generate
        tapped = hidden_states_argument(drafter.config.target_layer_ids)  # type: ignore[arg-type]
        self.model_kwargs_overrides = {"output_hidden_states": True if wants_all else tapped}

    def get_candidates(  # type: ignore[override]  # named arguments; `None` where nothing was drawn
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts after `input_ids` `[1, n]`: the extended ids and, when sampling, the logits `[1, l, V]` they came from.

        Without drafts the logits are `None`, so that the loop never takes a slice `[-0:]`. Syncs once, because the loop
        needs the number of drafts.
        """
        num_new, self._length = input_ids.shape[1] - self._length, input_ids.shape[1]
        self._counts, self.ends_with_draft = (0, 0), False
        cap = min(self.settings.num_assistant_tokens, self._max_length - input_ids.shape[1] - 1)
        if is_first_iteration or cap <= 0:
            return input_ids, None
        features = self._new_features(model_kwargs or {}, model_outputs, num_new)
        proposal = propose(
            self.binding,
            features,
            anchor_tokens=input_ids[:, -1],
            cache=self._cache,  # type: ignore[arg-type]  # made by `_new_features`
            num_tokens=cap,
            sampling=replace(self._sampling, processor=self._processor(input_ids)),
        )
        length = schedule_lengths(self.schedule, proposal, [cap], num_rows=1)[0]
        drafts = proposal.tokens[:, :length].to(input_ids.device)
        length = self._cut_at_stop(input_ids, drafts)
        self._counts = (cap, length)
        if length == 0:
            return input_ids, None
        logits = proposal.full_logits(self.drafter.config.vocab_size)
        logits = None if logits is None else logits[:, :length]
        return torch.cat([input_ids, drafts[:, :length]], dim=1), logits

    def update_candidate_strategy(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # noqa: ARG002 - Transformers passes it
        num_matches: Any,  # noqa: ARG002 - Transformers passes it
    ) -> None:
        """Count a finished round, from lengths alone (`num_matches` may sit on a device)."""
        num_new = input_ids.shape[1] - self._length
        drafted, verified = self._counts
        self._counts = (0, 0)
        if self._is_prefill:
            self._is_prefill = False
            return
        ended = self.ends_with_draft and num_new == verified
        accepted = num_new if ended else num_new - 1
        self.statistics.add_round(drafted=drafted, verified=verified, accepted=accepted, new_tokens=num_new)

    def _processor(self, input_ids: torch.Tensor) -> LogitsProcessor | None:
        """The user's processors, given each position's own prefix."""
        processors = self._logits_processor
        if processors is None:
            return None
        return lambda drafts, logits: processors(_joined(input_ids, drafts), logits)

    def _new_features(self, model_kwargs: dict[str, Any], outputs: Any, num_new: int) -> torch.Tensor:
        """Features `[1, C, L * D]` of the tokens that went through the target since the last round."""
        layer_ids: list[int] = self.drafter.config.target_layer_ids  # type: ignore[assignment]  # filled in by the config
        features = tapped_features(outputs.hidden_states, layer_ids)
        if self._cache is not None:
            return features[:, :num_new]
        attention_mask = model_kwargs.get("attention_mask")  # `None` when all ones
        if attention_mask is not None:
            features = features[:, attention_mask[0, : features.shape[1]].bool()]
        self._cache = DSparkCache()
        return features

    def _cut_at_stop(self, input_ids: torch.Tensor, drafts: torch.Tensor) -> int:
        """Number of drafts to verify so that the text cannot run past the token where it must end.

        Greedy: the drafts before the first token at which a criterion fires; if they are all right, the target's own
        next token is that token. Sampling: that token included, since whether a position is verified must not depend on the
        token drawn for it; verification then leaves out the bonus token (`ends_with_draft`).

        Criteria see texts that may never be produced, so they must depend on `input_ids` alone. One that
        cannot be asked (it reads the scores, say) leaves no drafts: the loop then asks it token by token.
        """
        candidate = torch.cat([input_ids, drafts], dim=1)[0]
        try:
            end = self._conditions.cut([(candidate, drafts[0].tolist())], rows=[0], scores=[None])[0]
        except _NeedsScoresError as error:
            logger.warning_once(
                f"The stopping criterion {error} cannot be asked about draft tokens without their scores, so this call decodes "
                "without drafts."
            )
            self.settings = replace(self.settings, num_assistant_tokens=0)
            return 0
        if end is None:
            return drafts.shape[1]
        self.ends_with_draft = self._sampling.do_sample
        return end - input_ids.shape[1] - (not self._sampling.do_sample)


class _NeedsScoresError(Exception):
    """A criterion failed without scores; names it."""


class _DraftConditions(StopConditions):
    """Stopping criteria asked about drafts, which have no scores yet."""

    def ask(self, criterion: Any, texts: torch.Tensor, scores: Any) -> Any:
        try:
            return super().ask(criterion, texts, scores)
        except (TypeError, IndexError, AttributeError) as error:
            raise _NeedsScoresError(type(criterion).__name__) from error


def _joined(input_ids: torch.Tensor, drafts: torch.Tensor) -> Any:
    return torch.cat([input_ids, drafts.to(input_ids.device)], dim=1)


class AssistedRun:
    """One `generate` call with a DSpark drafter, in Transformers' own loop.

    Args:
        drafter ([`Drafter`]): The drafter; its `last_run` is set.
        call ([`AssistedCall`]): The call.
    """

    def __init__(self, drafter: Drafter, call: AssistedCall):
        self.candidate_generator = DSparkCandidateGenerator(drafter, call)
        drafter.last_run = self.candidate_generator.statistics

    def accept(
        self, candidate_ids: torch.Tensor, candidate_logits: torch.Tensor, target_logits: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Rejection sampling of one round: the tokens `[1, m + 1]` to append, and `m`.

        If the last draft ends the text and is kept, no bonus token follows it.
        """
        length = candidate_logits.shape[1]
        drafts = candidate_ids[:, -length:]
        lengths = torch.full((1,), length, device=drafts.device)
        acceptance = accept_sampled(drafts, candidate_logits, target_logits, lengths)
        num_accepted = int(acceptance.num_accepted)
        if self.candidate_generator.ends_with_draft and num_accepted == length:
            return drafts, length - 1
        return torch.cat([drafts[:, :num_accepted], acceptance.next_tokens[:, None]], dim=1), num_accepted


__all__ = ["AssistedRun", "DSparkCandidateGenerator"]
