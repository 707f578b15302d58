"""Two hundred calls with everything drawn at random: greedy text is that of each prompt alone, samples are well-formed.

One seed makes one call; a failure names it, and `call(seed)` makes it again.
"""

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.builders import VOCAB, script_rows, tiny_drafter
from tests.generation.test_batch_equality import SCHEDULES, alone, filled, padded, schedule_of, target_of
from tests.generation.test_greedy_equality import HEADS


FAMILIES = ("llama", "mistral", "gpt2", "qwen3")
LONGEST = 12
BLOCK = 4
# What padding on the left of a prompt does not change, so that a prompt alone is the reference.
PROCESSORS = (
    {},
    {"repetition_penalty": 1.6},
    {"bad_words_ids": [[10], [7, 11], [23]]},
    {"suppress_tokens": [10, 23, 6]},
    {"min_new_tokens": 5},
    {"sequence_bias": {(10,): -3.0, (23, 10): 2.0}},
)


@lru_cache
def prompts_of(family):
    rng = random.Random(family)
    return [tuple(rng.randrange(3, VOCAB) for _ in range(length)) for length in (1, 2, 3, 5, 6, 9, 14)]


@lru_cache
def longest_text(family, prompt, processors):
    """Plain text of one prompt alone."""
    return alone(target_of(family), list(prompt), max_new_tokens=LONGEST, **processors_of(processors, LONGEST))


def text_of(family, prompt, *, processors, eos, length):
    """Plain text that ends at a length or a token: the beginning of a longer one, unless a processor looks at the end."""
    if "min_new_tokens" in PROCESSORS[processors]:
        given = processors_of(processors, length)
        return alone(target_of(family), list(prompt), max_new_tokens=length, eos_token_id=list(eos) or None, **given)
    text = longest_text(family, prompt, processors)[:length]
    return text[: next((index for index, token in enumerate(text, 1) if token in eos), length)]


def processors_of(processors, length):
    given = PROCESSORS[processors]
    return {name: min(value, length) if name == "min_new_tokens" else value for name, value in given.items()}


@dataclass
class Call:
    """One call, drawn at random."""

    family: str
    prompts: list[tuple[int, ...]]
    texts: list[list[int]]
    mode: str
    head: str
    wrong_every: int | None
    eos: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def call(seed):
    rng = random.Random(seed)
    family, processors = rng.choice(FAMILIES), rng.choice((0, 0, *range(len(PROCESSORS))))
    prompts = [rng.choice(prompts_of(family)) for _ in range(rng.randint(1, 6))]
    long = [longest_text(family, prompt, processors) for prompt in prompts]
    eos = tuple(rng.choice(text[:8]) for text in rng.sample(long, min(rng.choice((0, 1, 2)), len(long))))
    length = rng.choice((1, 2, 3, 5, 8, LONGEST, LONGEST))
    head, mode = rng.choice(list(HEADS)), rng.choice(("greedy", "greedy", "greedy", "cold", "sampled"))
    kwargs = {
        "side": rng.choice(("left", "right")),
        "max_new_tokens": length,
        "eos_token_id": list(eos) or None,
        "num_assistant_tokens_schedule": schedule_of(
            "fixed" if head == "no_confidence" else rng.choice((*SCHEDULES, "throughput"))
        ),
        "num_assistant_tokens": rng.choice((None, None, 1, 2, 3)),
        "prefill_chunk_size": rng.choice((None, None, 1, 4)),
    }
    if head != "no_confidence":
        kwargs["assistant_confidence_threshold"] = rng.choice((None, 0.2, 0.7))
    kwargs = {name: value for name, value in kwargs.items() if value is not None or name == "eos_token_id"}
    kwargs |= {"greedy": {"do_sample": False}, "cold": {"do_sample": True, "temperature": 1e-3, "top_k": 1}}.get(
        mode, {"do_sample": True, "top_k": rng.choice((0, 7)), "temperature": rng.choice((0.6, 1.2))}
    )
    texts = [text_of(family, prompt, processors=processors, eos=eos, length=length) for prompt in prompts]
    wrong_every = rng.choice((None, 2, 3, 1000, 1000))
    return Call(family, prompts, texts, mode, head, wrong_every, eos, kwargs | processors_of(processors, length))


def drafter_of(made, seed):
    drafter = tiny_drafter(target_of(made.family), seed=seed, **HEADS[made.head])
    if made.wrong_every is None:
        return drafter
    references = [list(prompt) + text for prompt, text in zip(made.prompts, made.texts, strict=True)]
    logit = (None, 4.0)[seed % 2]
    return script_rows(
        drafter, target_of(made.family), references, wrong_every=made.wrong_every, confidence_logit=logit
    )


def check_counts(run, texts):
    """Statistics agree with the texts, row by row and round by round."""
    assert [sum(row.new_tokens) + 1 for row in run.requests] == [len(text) for text in texts]
    rounds = zip(run.drafted, run.verified, run.accepted, run.new_tokens, strict=True)
    for drafted, verified, accepted, new in rounds:
        assert 0 <= accepted <= verified <= drafted <= BLOCK
        assert accepted <= new <= accepted + 1
        assert new >= 1


def check(seed):
    made = call(seed)
    kwargs = dict(made.kwargs)
    inputs = padded([list(prompt) for prompt in made.prompts], kwargs.pop("side"))
    drafter = drafter_of(made, seed)
    torch.manual_seed(seed)
    output = target_of(made.family).generate(**inputs, assistant_model=drafter, **kwargs)
    width = inputs["input_ids"].shape[1]
    assert output[:, :width].tolist() == inputs["input_ids"].tolist()
    rows = output[:, width:].tolist()
    if made.mode != "sampled":
        assert rows == filled(made.texts)
        check_counts(drafter.last_run, made.texts)
        return sum(drafter.last_run.accepted)
    length, texts = kwargs["max_new_tokens"], []
    for row in rows:
        end = next((index for index, token in enumerate(row, 1) if token in made.eos), len(row))
        assert not any(row[end:])  # padding
        assert end == length or row[end - 1] in made.eos
        texts.append(row[:end])
    assert max(map(len, texts)) == len(rows[0])
    assert all(0 <= token < VOCAB for row in rows for token in row)
    check_counts(drafter.last_run, texts)
    return sum(drafter.last_run.accepted)


@pytest.mark.parametrize("tens", range(20))
def test_random_calls(tens):
    accepted = 0
    for seed in range(10 * tens, 10 * tens + 10):
        try:
            accepted += check(seed)
        except Exception as error:
            raise AssertionError(f"call({seed}) failed: {call(seed)}") from error
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2, 22))
def test_many_more_random_calls(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"call({seed}) failed: {call(seed)}") from error
