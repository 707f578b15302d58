"""Answers by the in-process target, batch by batch.

Every batch has its own seed, so the answers do not depend on where an earlier run was stopped.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from training.answers.arguments import RegenerateArguments
from training.answers.plan import Answer, Answers, Request, follow_ups, plan_batches
from training.common.targets import load_target


def batch_seed(seed: int, batch: int) -> int:
    """Seed of a batch of a run with `seed`."""
    return seed * 1_000_003 + batch


def eos_ids(target: PreTrainedModel) -> set[int | None]:
    """The tokens at which the target stops."""
    eos = target.generation_config.eos_token_id
    return set(eos) if isinstance(eos, list) else {eos}


@torch.inference_mode()
def answer_batch(target: PreTrainedModel, batch: list[Request], *, pad_token_id: int) -> list[list[int]]:
    """Answers of one batch; each ends with the end-of-text token, or is cut at `max_new_tokens`."""
    width = max(len(request.input_ids) for request in batch)
    input_ids = torch.full((len(batch), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(batch):
        input_ids[row, width - len(request.input_ids) :] = torch.tensor(request.input_ids)
        attention_mask[row, width - len(request.input_ids) :] = 1
    first = batch[0]
    sampling: dict[str, Any] = {"do_sample": False}
    if first.temperature > 0:
        sampling = {"do_sample": True, "temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
    output = target.generate(  # type: ignore[operator]  # causal language models have it
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        max_new_tokens=first.max_new_tokens,
        pad_token_id=pad_token_id,
        **sampling,
    )
    stops = eos_ids(target)
    return [_cut_after_eos(row, stops) for row in output[:, width:].tolist()]


def _cut_after_eos(ids: list[int], stops: set[int | None]) -> list[int]:
    end = next((index for index, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: end + 1]


def answers_of_target(
    arguments: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, requests: list[Request], answers: Answers
) -> Iterator[dict[str, Any]]:
    """Yield the records that `answers` lacks: all first turns, then all second turns, and so on."""
    target: Any = load_target(arguments.target, arguments.dtype)
    target.to(arguments.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    stops = eos_ids(target)
    answers = dict(answers)
    num_batches = 0
    while requests:
        batches = plan_batches(requests, arguments.batch_size, arguments.seed)
        for index, batch in enumerate(batches, num_batches):
            seed = batch_seed(arguments.seed, index) if batch[0].seed is None else batch[0].seed
            pending = to_answer(batch, answers, seed)
            if not pending:
                continue
            set_seed(seed % 2**32)
            for request, ids in zip(pending, answer_batch(target, pending, pad_token_id=pad), strict=True):
                if request.key not in answers:
                    reason = "stop" if ids[-1] in stops else "length"
                    answers[request.key] = Answer(array("i", ids), seed)
                    yield request.record(ids, seed=seed, finish_reason=reason)
        num_batches += len(batches)
        requests = follow_ups(requests, answers, tokenizer, arguments)


def to_answer(batch: list[Request], answers: Answers, seed: int) -> list[Request]:
    """The requests of a batch that the target has to answer.

    Draws depend on the rows drawn together, so a batch that a kill cut in the middle is answered again as a whole. If its
    answers are from another batch (a run with another `limit`), only the missing ones are answered.
    """
    missing = [request for request in batch if request.key not in answers]
    cut = any(request.key in answers and answers[request.key].seed == seed for request in batch)
    return batch if missing and cut else missing


__all__ = ["answer_batch", "answers_of_target", "batch_seed", "eos_ids", "to_answer"]
