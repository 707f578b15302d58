"""Which `generate` calls with a DSpark drafter are refused, and which loop serves the others.

The packed loop is the default. Transformers' own assisted loop serves single prompts that it does not cover; batches that
it does not cover are refused, with the reason.

Shapes: `R` rows of the batch, `T` prompt length with padding.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .compat_transformers import cache_keyword, loop_takes_embeddings, target_cache
from .model_protocol import Drafter
from .schedule_settings import resolve_settings
from .target_binding import check_target
from .target_packed import why_not_packable


logger = logging.get_logger(__name__)

_STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
_STATEFUL_ARGUMENTS = "`guidance_scale` or a SynthID `watermarking_config`"
_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}


@dataclass(frozen=True)
class AssistedCall:
    """The arguments that `generate` prepared for its decoding method; read only.

    Attributes:
        target ([`~transformers.PreTrainedModel`]): The target.
        input_ids (`torch.LongTensor` of shape `(R, T)`): Prompts, padded left or right.
        generation_config ([`~transformers.GenerationConfig`]): Prepared settings.
        logits_processor ([`~transformers.LogitsProcessorList`]): Applied to the logits of drafter and target.
        stopping_criteria ([`~transformers.StoppingCriteriaList`]): Where texts end.
        model_kwargs (`dict`): Keyword arguments for the target.
        streamer (`BaseStreamer`, *optional*): Gets every token as soon as it is certain.
        synced_gpus (`bool`): Whether ranks must run equally many forwards.
    """

    target: PreTrainedModel
    input_ids: torch.Tensor
    generation_config: GenerationConfig
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    streamer: Any = None
    synced_gpus: bool = False


def check_call(
    drafter: Drafter, target: PreTrainedModel, mode: GenerationMode, generation_config: GenerationConfig
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
    if generation_config.num_return_sequences not in (None, 1):
        raise ValueError(
            f"A DSpark drafter makes one text per prompt, got `num_return_sequences={generation_config.num_return_sequences}`. "
            "Repeat the prompt in the batch instead."
        )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight", "use_mtp"):
        if getattr(generation_config, name, None) not in (None, False):
            raise ValueError(
                f"`{name}={getattr(generation_config, name)}` cannot be combined with a DSpark drafter; leave one out."
            )
    resolve_settings(generation_config, drafter.config)


def check_inputs(call: AssistedCall) -> None:
    """Refuse inputs that no loop can take.

    Raises:
        ValueError: for an empty batch or prompt, a target without a cache, a stateful logits processor, or `synced_gpus`.
    """
    input_ids, embeddings = call.input_ids, call.model_kwargs.get("inputs_embeds")
    if call.synced_gpus:
        raise ValueError(
            "`synced_gpus=True` (ZeRO stage 3, FSDP) makes every rank run as many target forwards as the slowest one, "
            "which a loop that accepts several tokens per forward does not do. Leave out `assistant_model`."
        )
    if input_ids.shape[0] == 0:
        raise ValueError(
            f"The batch is empty: `input_ids` has shape {list(input_ids.shape)}. Pass at least one prompt."
        )
    if input_ids.shape[1] == 0 and embeddings is None:
        raise ValueError(
            f"The prompt is empty: `input_ids` has shape {list(input_ids.shape)}. Pass at least one token."
        )
    if embeddings is not None and not loop_takes_embeddings():
        raise ValueError(
            f"With `inputs_embeds`, the assisted loop of Transformers {transformers.__version__} gives wrong text with "
            "any assistant. Pass `input_ids`, or install Transformers 5.24 or newer."
        )
    if target_cache(call.model_kwargs) is None:
        raise ValueError(
            "A DSpark drafter needs a target that makes its own cache: pass `use_cache=True` (the default), and a "
            "model whose forward returns a cache."
        )
    for processor in call.logits_processor:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} ({_STATEFUL_ARGUMENTS}) keeps a state that advances with every call, so it "
                "cannot be asked about draft tokens. Leave it out, or leave out `assistant_model`."
            )


def why_not_packed(call: AssistedCall) -> str | None:
    """Why the packed loop does not serve this call, or `None`."""
    target, input_ids, model_kwargs = call.target, call.input_ids, call.model_kwargs
    generation_config = call.generation_config
    cache = target_cache(model_kwargs)
    # Multimodal targets are passed an empty `mm_encoder_outputs` for text alone.
    passed = {name for name, value in model_kwargs.items() if value is not None and not _is_empty(value)}
    if unknown := sorted(passed - _KNOWN - {cache_keyword()}):
        return f"it passes {', '.join(f'`{name}`' for name in unknown)} to the target"
    is_own = getattr(cache, "_is_user_defined", False) or getattr(cache, "offloading", False)
    if type(cache) is not DynamicCache or is_own or cache.get_seq_length():
        return f"it passes its own cache ({type(cache).__name__})"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                return f"`{name}=True` asks for tensors that the packed target does not return per token"
    if target.training and _drops(target):
        return "the target is in training mode, in which dropout makes each forward differ; call `target.eval()`"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (reason := _why_not_masked(mask, input_ids)):
        return reason
    positions = model_kwargs.get("position_ids")
    if positions is not None and not _are_usual(positions, mask, input_ids):
        return "it passes its own `position_ids`"
    rope = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in ("longrope", "dynamic") and generation_config.max_length > (original or 0):
        return f"the rotary embedding ({rope['rope_type']}) changes with the length of the longest text"
    return why_not_packable(target)


def with_fresh_cache(call: AssistedCall, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with an empty target cache instead of one that already holds tokens.

    The drafter needs the hidden states of all tokens, and Transformers' assisted loop runs the whole prompt whatever the
    cache holds, so the prompt is computed again. The user's cache object is left alone.

    Raises:
        ValueError: if the cached tokens are not part of `input_ids`.
    """
    target, input_ids, keyword = call.target, call.input_ids, cache_keyword()
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


def _are_usual(positions: torch.Tensor, mask: torch.Tensor | None, input_ids: torch.Tensor) -> bool:
    """Whether positions are those that `generate` makes from the mask (at padding, any position is fine)."""
    if positions.shape[-1] != input_ids.shape[1] or positions.dim() != 2:
        return False
    ones = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    usual = (ones.cumsum(dim=1) - 1).clamp(min=0)
    return bool(((positions == usual) | (ones == 0)).all())


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _why_not_masked(mask: torch.Tensor, input_ids: torch.Tensor) -> str | None:
    if mask.shape != input_ids.shape:
        return f"its `attention_mask` has shape {tuple(mask.shape)} instead of that of `input_ids`"
    if not bool(((mask == 0) | (mask == 1)).all()):
        return "its `attention_mask` holds values other than 0 and 1"
    return None


def _drops(target: PreTrainedModel) -> bool:
    """Whether a target has dropout."""
    fields = target.config.get_text_config(decoder=True).to_dict().items()
    rates = [value for name, value in fields if "dropout" in name or name.endswith("pdrop")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


__all__ = ["AssistedCall", "check_call", "check_inputs", "why_not_packed", "with_fresh_cache"]
