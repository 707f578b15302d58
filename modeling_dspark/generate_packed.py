"""The packed loop behind `generate`, for any batch size: prompts in, the return value of `generate` out.

Shapes: `R` rows of the batch, `T` prompt length with padding, `V` vocabulary.
"""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .engine_counts import RunStatistics
from .engine_loop import Engine
from .engine_observer import EngineObserver
from .engine_processors import RowProcessors
from .engine_profile import profile_of_call
from .engine_request import Request
from .generate_call import AssistedCall
from .model_protocol import Drafter
from .schedule_settings import make_schedule, resolve_settings


logger = logging.get_logger(__name__)


def decode(
    drafter: Drafter,
    call: AssistedCall,
    *,
    generator: torch.Generator | None = None,
    fused_head: str | None = None,
    observer: EngineObserver | None = None,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode a call that the packed loop serves (`generate_call.why_not_packed`).

    Args:
        drafter ([`Drafter`]): The drafter; its `last_run` is set.
        call ([`AssistedCall`]): The call.
        generator (`torch.Generator`, *optional*): Source of randomness; the global one by default.
        fused_head (`str`, *optional*): What the drafter's heads run on; see [`DraftBinding`].
        observer ([`EngineObserver`], *optional*): Called at each stage of each round.

    Returns:
        `torch.LongTensor` of shape `(R, T + new)`, or [`~transformers.generation.GenerateDecoderOnlyOutput`].

    Raises:
        ValueError: for a prompt that is all padding, or a streamer with several prompts.
    """
    num_rows, config = call.input_ids.shape[0], call.generation_config
    if call.streamer is not None and num_rows > 1:
        raise ValueError(f"A `streamer` takes one text at a time, got a batch of {num_rows}. Leave it out.")
    settings = resolve_settings(config, drafter.config)
    wants = config.return_dict_in_generate
    costs = None
    if make_schedule(settings).needs_costs:
        processors = RowProcessors(call.logits_processor, num_rows)
        costs = profile_of_call(drafter, call.target, processors, call.input_ids[0], fused_head=fused_head)
    engine = Engine(
        drafter,
        call.target,
        settings=settings,
        costs=costs,
        do_sample=config.do_sample,
        logits_processor=call.logits_processor,
        stopping_criteria=call.stopping_criteria,
        batch_size=num_rows,
        max_length=_longest(config, call.stopping_criteria, call.input_ids.shape[1]),
        prefill_chunk_size=getattr(config, "prefill_chunk_size", None),
        generator=generator,
        keep_scores=bool(wants and config.output_scores),
        keep_logits=bool(wants and config.output_logits),
        fused_head=fused_head,
        observer=observer,
    )
    requests = [
        engine.add_request(prompt, prefix=prefix, num_pads=num_pads)
        for prompt, prefix, num_pads in _without_padding(call.input_ids, call.model_kwargs.get("attention_mask"))
    ]
    block_size, statistics = drafter.config.block_size, [request.statistics for request in requests]
    drafter.last_run = RunStatistics(block_size, requests=statistics)
    _run(engine, requests, call.streamer)
    drafter.last_run = RunStatistics.pooled(block_size, statistics)
    report_quantized(call.target, drafter.last_run)
    return _output(call.input_ids, requests, config)


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
    """For each row: the prompt without padding, the prompt with its padding on the left, and the length of the padding.

    Masked tokens between others are not padding: the target does not see them, but logits processors do.
    """
    if attention_mask is None:
        return [(row, row, 0) for row in input_ids]
    prompts = []
    for index, (row, mask) in enumerate(zip(input_ids, attention_mask.to(input_ids.device).bool(), strict=True)):
        if not bool(mask.any()):
            raise ValueError(
                f"Row {index} of the batch is all padding (`attention_mask` is 0 throughout); leave it out."
            )
        first, *_, last = mask.nonzero().flatten().tolist() * 2  # twice, because there may be only one
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
    """The maximum length of a text: at least one new token, since criteria are checked after it."""
    lengths = [length for length in (generation_config.max_length, stopping_criteria.max_length) if length is not None]
    return max(min(lengths), prompt_length + 1) if lengths else None


def report_quantized(target: PreTrainedModel, statistics: RunStatistics) -> None:
    """Warn once about a quantised target: its features drift from those the drafter was trained on."""
    if getattr(target, "is_quantized", False) and statistics.rounds:
        logger.warning_once(
            "The target is quantised, so its hidden states differ from those the drafter was trained on; acceptance length of "
            f"this call: {statistics.acceptance_length:.2f} tokens per target forward."
        )


__all__ = ["decode", "report_quantized"]
