"""One `generate` call with a DSpark drafter: what is refused, which loop serves it, and the packed loop's output.

The packed loop is the default. What it does not cover goes to Transformers' own assisted loop where one prompt is
decoded, and is refused, with the reason, where there are several.

Shapes: `R` rows of the batch, `T` prompt length with padding, `V` vocabulary.
"""

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
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .engine_counts import RunStatistics
from .engine_loop import Engine
from .engine_measure import profile_of_call
from .engine_processors import RowProcessors
from .engine_request import Request
from .model_cache import cache_keyword, loop_takes_embeddings, target_cache
from .schedule_policies import make_schedule, resolve_settings
from .target_binding import check_target
from .target_packed import why_not_packable


logger = logging.get_logger(__name__)

_STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
_STATEFUL_ARGUMENTS = "`guidance_scale` or a SynthID `watermarking_config`"


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
    if generation_config.num_return_sequences not in (None, 1):
        raise ValueError(
            f"A DSpark drafter makes one text of a prompt, got `num_return_sequences={generation_config.num_return_sequences}`. "
            "Repeat the prompt in the batch instead."
        )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight", "use_mtp"):
        if getattr(generation_config, name, None) not in (None, False):
            raise ValueError(
                f"`{name}={getattr(generation_config, name)}` cannot be combined with a DSpark drafter; leave one out."
            )
    resolve_settings(generation_config, drafter.config)


def check_inputs(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], logits_processor: LogitsProcessorList, *, synced_gpus: bool
) -> None:
    """Refuse inputs that no loop can take.

    Raises:
        ValueError: for an empty batch or prompt, a target without a cache, a stateful logits processor, or `synced_gpus`.
    """
    embeddings = model_kwargs.get("inputs_embeds")
    if synced_gpus:
        raise ValueError(
            "`synced_gpus=True` (ZeRO stage 3, FSDP) makes every rank run as many target forwards as the slowest one, "
            "which a loop that accepts several tokens a forward does not do. Leave out `assistant_model`."
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


def why_not_packed(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the packed loop does not serve this call, or `None`."""
    cache = target_cache(model_kwargs)
    known = {*_KNOWN, cache_keyword()}
    # Multimodal targets are passed an empty `mm_encoder_outputs` for text alone.
    given = (name for name, value in model_kwargs.items() if value is not None and not _is_empty(value))
    others = sorted(set(given) - known)
    if others:
        return f"it passes {', '.join(f'`{name}`' for name in others)} to the target"
    is_own = getattr(cache, "_is_user_defined", False) or getattr(cache, "offloading", False)
    if type(cache) is not DynamicCache or is_own or cache.get_seq_length():
        return f"it brings a cache of its own ({type(cache).__name__})"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                return f"`{name}=True` asks for what the packed target does not return by token"
    if target.training and _drops(target):
        return "the target is in training mode, in which dropout makes every forward another one; call `target.eval()`"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (reason := _why_not_masked(mask, input_ids)):
        return reason
    positions = model_kwargs.get("position_ids")
    if positions is not None and not _are_usual(positions, mask, input_ids):
        return "it brings `position_ids` of its own"
    rope = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in ("longrope", "dynamic") and generation_config.max_length > (original or 0):
        return f"the rotary embedding ({rope['rope_type']}) changes with the length of the longest text"
    return why_not_packable(target)


def decode(  # noqa: D417 - three arguments share a line
    drafter: Any,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    attention_mask: torch.Tensor | None = None,
    streamer: Any = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The packed loop behind `generate`, for any batch size.

    Args:
        drafter ([`DSparkModel`]): The drafter; its `last_run` is set.
        target ([`~transformers.PreTrainedModel`]): The target.
        input_ids (`torch.LongTensor` of shape `(R, T)`): Prompts, padded left or right.
        logits_processor, stopping_criteria, generation_config: As `generate` prepared them; read only.
        attention_mask (`torch.Tensor` of shape `(R, T)`, *optional*): 0 at padding; `None` means no padding.
        streamer (`BaseStreamer`, *optional*): Gets every token as soon as it is certain; one prompt only.
        generator (`torch.Generator`, *optional*): Source of randomness; the global one by default.

    Returns:
        `torch.LongTensor` of shape `(R, T + new)`, or [`~transformers.generation.GenerateDecoderOnlyOutput`].

    Raises:
        ValueError: for a prompt that is all padding, or a streamer with several prompts.
    """
    rows = input_ids.shape[0]
    if streamer is not None and rows > 1:
        raise ValueError(f"A `streamer` takes one text at a time, got a batch of {rows}. Leave it out.")
    settings = resolve_settings(generation_config, drafter.config)
    wants = generation_config.return_dict_in_generate
    costs = None
    if make_schedule(settings).needs_costs:
        costs = profile_of_call(drafter, target, RowProcessors(logits_processor, rows), input_ids[0])
    engine = Engine(
        drafter,
        target,
        settings=settings,
        costs=costs,
        do_sample=generation_config.do_sample,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        batch_size=rows,
        max_length=_longest(generation_config, stopping_criteria, input_ids.shape[1]),
        prefill_chunk_size=getattr(generation_config, "prefill_chunk_size", None),
        generator=generator,
        keep_scores=bool(wants and generation_config.output_scores),
        keep_logits=bool(wants and generation_config.output_logits),
    )
    requests = [
        engine.add_request(prompt, prefix=prefix, num_pads=num_pads)
        for prompt, prefix, num_pads in _without_padding(input_ids, attention_mask)
    ]
    drafter.last_run = RunStatistics(drafter.config.block_size, requests=[item.statistics for item in requests])
    _run(engine, requests, streamer)
    drafter.last_run = RunStatistics.pooled(drafter.config.block_size, [item.statistics for item in requests])
    report_quantized(target, drafter.last_run)
    return _output(input_ids, requests, generation_config)


def _run(engine: Engine, requests: list[Request], streamer: Any) -> None:
    num_streamed = 0
    while engine.requests:
        engine.step()
        if streamer is not None:
            new = requests[0].tokens[num_streamed:].cpu()
            num_streamed += len(new)
            for token in new:
                streamer.put(token[None])
    if streamer is not None:
        streamer.end()


def _without_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Of each row: prompt without padding, prompt with its padding on the left, and how much of that there is.

    What is masked between tokens is no padding: the target does not see it, and logits processors do.
    """
    if attention_mask is None:
        return [(row, row, 0) for row in input_ids]
    prompts = []
    for index, (row, mask) in enumerate(zip(input_ids, attention_mask.to(input_ids.device).bool(), strict=True)):
        if not bool(mask.any()):
            raise ValueError(
                f"Row {index} of the batch is all padding (`attention_mask` is 0 throughout); leave it out."
            )
        first, *_, last = mask.nonzero().flatten().tolist() * 2  # twice, since there may be one only
        prefix = torch.cat([row[last + 1 :], row[: last + 1]])
        prompts.append((row[mask], prefix, len(row) - 1 - last + first))
    return prompts


def _output(
    input_ids: torch.Tensor, requests: list[Request], generation_config: GenerationConfig
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Texts side by side, padded on the right; scores and logits of a finished row are certain of the padding."""
    longest = max(len(request.tokens) for request in requests)
    pad = _pad_token(generation_config)
    input_ids = input_ids.long()  # as plain `generate` returns them
    texts = input_ids.new_full((len(requests), longest), pad)
    for row, request in enumerate(requests):
        texts[row, : len(request.tokens)] = request.tokens.to(texts.device)
    sequences = torch.cat([input_ids, texts], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]  # a LongTensor
        scores=_by_token([r.scores for r in requests], pad) if generation_config.output_scores else None,  # type: ignore[arg-type]
        logits=_by_token([r.logits for r in requests], pad) if generation_config.output_logits else None,  # type: ignore[arg-type]
    )


def _by_token(rows: list[list[torch.Tensor]], pad: int) -> tuple[torch.Tensor, ...]:
    """`[R, V]` of each new token from the logits `[V]` of each row's tokens."""
    filler = torch.full_like(rows[0][0], -torch.inf)
    if pad < len(filler):
        filler[pad] = 0.0
    return tuple(
        torch.stack([row[token] if token < len(row) else filler for row in rows])
        for token in range(max(map(len, rows)))
    )


def _pad_token(generation_config: GenerationConfig) -> int:
    """The token after a text that has ended, as `generate` found it; end of text where there is none."""
    for name in ("_pad_token_tensor", "_eos_token_tensor"):
        token = getattr(generation_config, name, None)
        if token is not None:
            return int(token.flatten()[0])
    return 0


def _longest(
    generation_config: GenerationConfig, stopping_criteria: StoppingCriteriaList, prompt_length: int
) -> int | None:
    """Where texts end at the latest: after one token, since criteria are checked behind it."""
    lengths = [length for length in (generation_config.max_length, stopping_criteria.max_length) if length is not None]
    return max(min(lengths), prompt_length + 1) if lengths else None


def _are_usual(positions: torch.Tensor, mask: torch.Tensor | None, input_ids: torch.Tensor) -> bool:
    """Whether positions are those that `generate` makes from the mask (what it puts at padding does not matter)."""
    if positions.shape[-1] != input_ids.shape[1] or positions.dim() != 2:
        return False
    ones = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    usual = (ones.cumsum(dim=1) - 1).clamp(min=0)
    return bool(((positions == usual) | (ones == 0)).all())


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _why_not_masked(mask: torch.Tensor, input_ids: torch.Tensor) -> str | None:
    if mask.shape != input_ids.shape:
        return f"its `attention_mask` has shape {tuple(mask.shape)} and not that of `input_ids`"
    if not bool(((mask == 0) | (mask == 1)).all()):
        return "its `attention_mask` holds other values than 0 and 1"
    return None


def _drops(target: PreTrainedModel) -> bool:
    """Whether a target has dropout."""
    fields = target.config.get_text_config(decoder=True).to_dict().items()
    rates = [value for name, value in fields if "dropout" in name or name.endswith("pdrop")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def report_quantized(target: PreTrainedModel, statistics: RunStatistics) -> None:
    """Say once how a quantised target fares: its features drift from those the drafter was trained on."""
    if getattr(target, "is_quantized", False) and statistics.rounds:
        logger.warning_once(
            "The target is quantised, so its hidden states differ from those the drafter was trained on; accepted length of "
            f"this call: {statistics.acceptance_length:.2f} tokens a target forward."
        )


_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}

__all__ = ["check_call", "check_inputs", "decode", "report_quantized", "why_not_packed"]
