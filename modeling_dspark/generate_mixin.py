"""The interface of a drafter to `generate` and to programs around it: a mixin of the model."""

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .draft_binding import DraftBinding
from .draft_propose import Proposal, propose
from .draft_tokens import DraftSampling
from .engine_counts import RunStatistics
from .engine_observer import EngineObserver
from .engine_profile import profile
from .generate_assisted import AssistedRun
from .generate_call import AssistedCall, check_call, check_inputs, why_not_packed, with_fresh_cache
from .generate_packed import decode, report_quantized
from .model_cache import DSparkCache
from .model_protocol import Drafter
from .schedule_costs import CostProfile


logger = logging.get_logger(__name__)


class AssistantMixin:
    """Makes a drafter an assistant of `generate`.

    Attributes:
        last_run ([`RunStatistics`], *optional*): Counts of the last `generate` call this drafter assisted.
    """

    last_run: RunStatistics | None = None

    def bind(self, target: PreTrainedModel, *, fused_head: str | None = None) -> DraftBinding:
        """This drafter bound to a target: what it borrows, and how its heads run. Made once per `generate` call.

        Args:
            target ([`~transformers.PreTrainedModel`]): The target.
            fused_head (`str`, *optional*): What the heads run on; see [`DraftBinding`].

        Raises:
            ValueError: if the target does not fit the drafter.
        """
        return DraftBinding(cast(Drafter, self), target, fused_head=fused_head)

    def propose(
        self,
        binding: DraftBinding,
        features: torch.Tensor,
        *,
        anchor_tokens: torch.Tensor,
        cache: DSparkCache,
        context_lengths: list[int] | None = None,
        num_tokens: int | None = None,
        sampling: DraftSampling = DraftSampling(),  # noqa: B008 - frozen
    ) -> Proposal:
        """Draft one block for every row of `features`; arguments and result as in `draft_propose.propose`.

        Raises:
            ValueError: if `binding` is not of this drafter.
        """
        if getattr(binding, "drafter", None) is not self:
            raise ValueError("`binding` belongs to another drafter; pass `drafter.bind(target)`.")
        return propose(
            binding,
            features,
            anchor_tokens=anchor_tokens,
            cache=cache,
            context_lengths=context_lengths,
            num_tokens=num_tokens,
            sampling=sampling,
        )

    def profile(self, target: PreTrainedModel, *, refresh: bool = False, fused_head: str | None = None) -> CostProfile:
        """The cost of rounds with `target` on this machine: measured once (seconds, with a progress bar), then cached.

        Args:
            target ([`~transformers.PreTrainedModel`]): The target.
            refresh (`bool`, *optional*, defaults to `False`): Measure again.
            fused_head (`str`, *optional*): What the heads run on; see [`DraftBinding`].

        Returns:
            [`CostProfile`]: with `save` and `load` for JSON.

        Raises:
            ValueError: if the target cannot be packed, or does not fit the drafter.
        """
        return profile(cast(Drafter, self), target, refresh=refresh, fused_head=fused_head)

    def decode(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        generator: torch.Generator | None = None,
        fused_head: str | None = None,
        observer: EngineObserver | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """The packed loop as a decoding method: `target.generate(**inputs, custom_generate=drafter.decode)`.

        `generate` prepares the arguments; pass `generator`, `fused_head` and `observer` to `generate`.

        Raises:
            ValueError: for a call that the packed loop does not serve, with the reason.
        """
        mode = generation_config.get_generation_mode(self)  # type: ignore[arg-type]  # any assistant
        self.check_call(target, mode, generation_config)
        call = AssistedCall(
            target, input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs=model_kwargs
        )
        check_inputs(call)
        if reason := why_not_packed(call):
            raise ValueError(f"`custom_generate=drafter.decode` does not serve this call: {reason}.")
        return decode(cast(Drafter, self), call, generator=generator, fused_head=fused_head, observer=observer)

    def check_call(self, target: PreTrainedModel, mode: GenerationMode, generation_config: GenerationConfig) -> None:
        """Called by the dispatcher before a `generate` call runs; see `generate_call.check_call`."""
        check_call(cast(Drafter, self), target, mode, generation_config)

    def serve(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        arguments: dict[str, Any],
        keywords: dict[str, Any],
        assisted: Callable[[AssistedRun, dict[str, Any]], Any],
    ) -> Any:
        """Called by the dispatcher when decoding starts: the output of `generate`.

        The dispatcher may come from another release whose copy of the code was loaded first, so this signature must stay.

        Args:
            target ([`~transformers.PreTrainedModel`]): The target.
            input_ids (`torch.LongTensor` of shape `(R, T)`): Prompts.
            arguments (`dict`): Arguments of the decoding method, by name.
            keywords (`dict`): Its keyword arguments, unchanged.
            assisted (callable): Transformers' own loop with an [`AssistedRun`] and keyword arguments.
        """
        call = AssistedCall(
            target,
            input_ids,
            arguments["generation_config"],
            arguments["logits_processor"],
            arguments["stopping_criteria"],
            model_kwargs=arguments.get("model_kwargs", {}),
            streamer=arguments.get("streamer"),
            synced_gpus=bool(arguments.get("synced_gpus")),
        )
        drafter = cast(Drafter, self)
        check_inputs(call)
        reason = why_not_packed(call)
        if reason is None:
            return decode(drafter, call)
        if input_ids.shape[0] > 1:
            raise ValueError(
                f"This call cannot be decoded with a DSpark drafter as a batch of {input_ids.shape[0]}: {reason}. Call "
                "`generate` for each prompt, or leave out `assistant_model`."
            )
        logger.warning_once(f"Transformers' own assisted loop serves this call instead of the packed loop: {reason}.")
        run = AssistedRun(drafter, call)
        output = assisted(run, with_fresh_cache(call, keywords))
        report_quantized(target, run.candidate_generator.statistics)
        return output


__all__ = ["AssistantMixin"]
