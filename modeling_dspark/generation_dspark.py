"""How `target.generate(assistant_model=drafter)` reaches a DSpark drafter.

Transformers picks candidate generators in a closed chain, so loading a drafter installs, once, a thin dispatcher around
four functions of its generation code. It acts only for assistants whose `config.model_type` is `"dspark"`, hands every
decision to the code that came with that drafter, and passes everything else through untouched. `remove_dispatcher`
takes it out again.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import utils as generation_utils
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .cache_dspark import loop_takes_embeddings, target_cache
from .candidate_generator_dspark import DSparkCandidateGenerator, RunStatistics
from .scheduling_dspark import resolve_settings
from .target_dspark import check_target
from .verification_dspark import accept_sampled


logger = logging.get_logger(__name__)

SUPPORTED_TRANSFORMERS = "5.17 to 5.24"
_MARK = "_dspark_original"
_STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
_STATEFUL_ARGUMENTS = "`guidance_scale` or a SynthID `watermarking_config`"
_active_run: ContextVar["AssistedRun | None"] = ContextVar("dspark_active_run", default=None)


class AssistedRun:
    """One `generate` call with a DSpark drafter, in Transformers' own loop.

    Args:
        drafter ([`DSparkModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): The target.
        generation_config ([`~transformers.GenerationConfig`]): Prepared settings of the call; read only.
        logits_processor, stopping_criteria: Of the call.
    """

    def __init__(
        self,
        drafter: Any,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
    ):
        self.candidate_generator = DSparkCandidateGenerator(
            drafter,
            target,
            generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        drafter.last_run = self.candidate_generator.statistics
        self._target = target

    def accept(
        self, candidate_ids: torch.Tensor, candidate_logits: torch.Tensor, target_logits: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Rejection sampling of one round: the tokens `[1, m + 1]` to append, and `m`.

        Where the last draft ends the text and is kept, no bonus token follows it.
        """
        length = candidate_logits.shape[1]
        drafts = candidate_ids[:, -length:]
        missing = target_logits.shape[-1] - candidate_logits.shape[-1]
        if missing:  # LM head rows beyond the vocabulary: never drafted
            candidate_logits = torch.nn.functional.pad(candidate_logits, (0, missing), value=-torch.inf)
        lengths = torch.full((1,), length, device=drafts.device)
        verdict = accept_sampled(drafts, candidate_logits, target_logits, lengths)
        num_accepted = int(verdict.num_accepted)
        if self.candidate_generator.ends_with_draft and num_accepted == length:
            return drafts, length - 1
        return torch.cat([drafts[:, :num_accepted], verdict.next_tokens[:, None]], dim=1), num_accepted

    def report(self) -> None:
        """Say once how a quantised target fares: its features drift from those the drafter was trained on."""
        statistics: RunStatistics = self.candidate_generator.statistics
        if getattr(self._target, "is_quantized", False) and statistics.rounds:
            logger.warning_once(
                "The target is quantised, so its hidden states differ from those the drafter was trained on; accepted "
                f"length of this call: {statistics.accepted_length:.2f} tokens a target forward."
            )


def check_call(
    drafter: Any, target: PreTrainedModel, mode: GenerationMode, generation_config: GenerationConfig
) -> None:
    """Refuse a `generate` call that a DSpark drafter cannot assist, before anything runs.

    Raises:
        ValueError: names the argument, the value and the way out.
    """
    check_target(target, drafter.config)
    if generation_config.num_beams != 1 or mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A DSpark drafter assists greedy decoding and sampling, got `num_beams={generation_config.num_beams}` "
            f"(generation mode {mode.value!r}). Pass `num_beams=1`, or leave out `assistant_model`."
        )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight"):
        if getattr(generation_config, name, None) is not None:
            raise ValueError(
                f"`{name}={getattr(generation_config, name)}` cannot be combined with a DSpark drafter; leave one out."
            )
    resolve_settings(generation_config, drafter.config)


def check_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any], logits_processor: LogitsProcessorList) -> None:
    """Refuse inputs that the loop cannot take.

    Raises:
        ValueError: for more than one row, an empty prompt, a target without a cache, or a stateful logits processor.
    """
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"`generate(assistant_model=<DSpark drafter>)` takes one prompt at a time, got a batch of "
            f"{input_ids.shape[0]}. Call `generate` for each prompt, or leave out `assistant_model` for this batch."
        )
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("The prompt is empty: `input_ids` has shape [1, 0]. Pass at least one token.")
    if model_kwargs.get("inputs_embeds") is not None and not loop_takes_embeddings():
        raise ValueError(
            f"With `inputs_embeds`, the assisted loop of Transformers {transformers.__version__} gives wrong text whatever "
            "assists. Pass `input_ids`, or install Transformers 5.24 or newer."
        )
    if target_cache(model_kwargs) is None:
        raise ValueError(
            "A DSpark drafter needs a target with a cache of its own making: pass `use_cache=True` (the default), and a "
            "model whose forward returns a cache."
        )
    for processor in logits_processor:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} ({_STATEFUL_ARGUMENTS}) keeps a state that advances with every call, so it "
                "cannot be asked about draft tokens. Leave it out, or leave out `assistant_model`."
            )


def install_dispatcher() -> None:
    """Install the dispatcher unless it is there already (from this or another copy of the code).

    Raises:
        RuntimeError: if the installed Transformers has other signatures than the supported versions.
    """
    for owner, name, wrap, parameters in _PATCHES:
        original: Any = getattr(owner, name, None)
        if hasattr(original, _MARK):
            continue
        found = [] if original is None else list(inspect.signature(original).parameters)
        if not set(parameters) <= set(found):
            raise RuntimeError(
                f"This DSpark code supports Transformers {SUPPORTED_TRANSFORMERS}; version {transformers.__version__} "
                f"has another `{name}` (parameters {found}). Install a supported version."
            )
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _MARK, original)
        setattr(owner, name, wrapper)


def remove_dispatcher() -> None:
    """Restore Transformers' own functions; loading a drafter installs the dispatcher again."""
    for owner, name, _, _ in _PATCHES:
        original = getattr(getattr(owner, name), _MARK, None)
        if original is not None:
            setattr(owner, name, original)


def _is_dspark(model: Any) -> bool:
    # Not `isinstance`: remote code may have loaded another copy of the class.
    return getattr(getattr(model, "config", None), "model_type", None) == "dspark"


def _wrap_validation(original: Callable) -> Callable:
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> Any:
        assistant = generation_mode_kwargs.get("assistant_model")
        if _is_dspark(assistant):
            assistant.check_call(self, generation_mode, generation_config)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_decoding(original: Callable) -> Callable:
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind_partial(self, input_ids, *args, **kwargs).arguments
        run = None
        if _is_dspark(assistant_model):
            run, kwargs = assistant_model.start_run(self, input_ids, bound, kwargs)
        token = _active_run.set(run)  # `None` shields a plain assistant that is called inside ours
        try:
            output = original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        finally:
            _active_run.reset(token)
        if run is not None:
            run.report()
        return output

    return _assisted_decoding


def _wrap_candidates(original: Callable) -> Callable:
    def _get_candidate_generator(self: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        run = _active_run.get()
        if run is not None and _is_dspark(assistant_model):
            return run.candidate_generator
        return original(self, *args, assistant_model=assistant_model, **kwargs)

    return _get_candidate_generator


def _wrap_sampling(original: Callable) -> Callable:
    # Transformers' version accepts on `<=` and divides by a residual mass that may be zero.
    def _speculative_sampling(
        candidate_input_ids: Any,
        candidate_logits: Any,
        candidate_length: Any,
        new_logits: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        run = _active_run.get()
        if run is None:
            return original(candidate_input_ids, candidate_logits, candidate_length, new_logits, *args, **kwargs)
        return run.accept(candidate_input_ids, candidate_logits, new_logits)

    return _speculative_sampling


_PATCHES: list[tuple[Any, str, Callable[[Callable], Callable], tuple[str, ...]]] = [
    (
        GenerationMixin,
        "_validate_generation_mode",
        _wrap_validation,
        ("generation_mode", "generation_config", "generation_mode_kwargs"),
    ),
    (
        GenerationMixin,
        "_assisted_decoding",
        _wrap_decoding,
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "assistant_model"),
    ),
    (
        GenerationMixin,
        "_get_candidate_generator",
        _wrap_candidates,
        ("generation_config", "input_ids", "logits_processor", "model_kwargs", "assistant_model"),
    ),
    (
        generation_utils,
        "_speculative_sampling",
        _wrap_sampling,
        ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits"),
    ),
]

__all__ = ["AssistedRun", "check_call", "check_inputs", "install_dispatcher", "remove_dispatcher"]
