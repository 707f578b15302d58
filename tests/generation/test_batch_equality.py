"""fp32 greedy text of a batch equals what plain `generate` makes of each row, whatever the drafter and the schedule do.

The reference is plain `generate` on each prompt alone, without padding. Where rows end on their own it is plain `generate`
on the same batch too, whose padding behind finished rows is part of its output.
"""

import contextlib
import copy
import dataclasses
import itertools
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, set_seed
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from modeling_dspark import CostProfile, Engine, EngineObserver, Schedule, engine_drafts, engine_loop, engine_profile
from modeling_dspark.schedule_costs import Curve
from modeling_dspark.schedule_settings import DraftSettings
from modeling_dspark.target_packed import why_not_packable
from tests.builders import FAMILIES, VOCAB, script_rows, tiny_drafter, varied_target
from tests.generation.test_greedy_equality import HEADS


PROMPTS = [
    [7, 11, 13, 17, 19, 23],
    [9],
    [5, 8, 21],
    [31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21],
    [40, 41],
    [17, 19, 23, 29, 31, 37, 41],
    [9, 9, 9, 9],
]
NEW = 20
BEFORE_5_24 = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
UNUSED = 59  # an end-of-text token that no plain text of llama here contains


class HalfForEveryOtherRow:
    """A user's own schedule, without a base class."""

    def lengths(self, view):
        return [len(row) // 2 if index % 2 else len(row) for index, row in enumerate(view.confidence)]


SCHEDULES = ["fixed", "confidence", "throughput", "throughput_lagged", "own"]


def schedule_of(name):
    return HalfForEveryOtherRow() if name == "own" else name


@lru_cache
def target_of(family):
    return varied_target(family)


def alone(target, prompt, **kwargs):
    """The new tokens of plain `generate` on one prompt."""
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None} | kwargs
    return target.generate(torch.tensor([prompt]), **kwargs)[0, len(prompt) :].tolist()


def packable_target(family):
    """The target; before 5.24 SDPA leaves out the soft cap of Gemma 2's scores, so packed attention would differ."""
    target = target_of(family)
    if BEFORE_5_24 and (reason := why_not_packable(target)):
        pytest.skip(f"this Transformers: {reason}")
    return target


@lru_cache
def texts_of(family):
    """Plain texts of `PROMPTS`; together they vary, so that wrong attention cannot go unseen."""
    texts = [alone(target_of(family), prompt) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 10
    assert family != "llama" or not any(UNUSED in text for text in texts)
    return texts


def first_seen(text, start):
    """The first place from `start` on whose token is not in the text before it."""
    return next(index for index in range(start, len(text)) if text[index] not in text[:index])


def padded(prompts, side):
    """`input_ids` and `attention_mask`; padding is token 0."""
    width = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        pads = [0] * (width - len(prompt))
        rows.append(pads + prompt if side == "left" else prompt + pads)
        ones = [1] * len(prompt)
        masks.append(pads + ones if side == "left" else ones + pads)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def filled(texts, pad=0):
    longest = max(map(len, texts))
    return [text + [pad] * (longest - len(text)) for text in texts]


def assisted(target, drafter, prompts, *, side="left", **kwargs):
    """The new tokens of each row, padding behind them included."""
    inputs = padded(prompts, side)
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None} | kwargs
    output = target.generate(**inputs, assistant_model=drafter, **kwargs)
    width = inputs["input_ids"].shape[1]
    assert output[:, :width].tolist() == inputs["input_ids"].tolist()
    return output[:, width:].tolist()


def plain(target, prompts, **kwargs):
    """The same of plain `generate` on the batch, which takes padding on the left only."""
    inputs = padded(prompts, "left")
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None} | kwargs
    return target.generate(**inputs, **kwargs)[:, inputs["input_ids"].shape[1] :].tolist()


def right_drafter(target, prompts, texts, *, wrong_every=1000, **fields):
    """A drafter that proposes these texts and is sure of it."""
    references = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    return script_rows(
        tiny_drafter(target, **fields), target, references, wrong_every=wrong_every, confidence_logit=5.0
    )


def wrong_drafter(target, prompts, texts, **fields):
    """A drafter that is wrong every third time, with confidences that say nothing."""
    references = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    return script_rows(tiny_drafter(target, **fields), target, references, wrong_every=3)


def case(index):
    """Every family three times in `3 * len(FAMILIES)`; heads, schedules, batch sizes and padding in turn."""
    head = list(HEADS)[index % len(HEADS)]
    schedule = "fixed" if head == "no_confidence" else SCHEDULES[index % len(SCHEDULES)]
    size, side = (1, 2, 5, 17)[index % 4], ("left", "right")[index // 4 % 2]
    return list(FAMILIES)[index % len(FAMILIES)], head, schedule, size, side


@pytest.mark.parametrize(
    ("family", "head", "schedule", "size", "side"), [case(index) for index in range(3 * len(FAMILIES))]
)
def test_families_heads_schedules_sizes_and_padding(family, head, schedule, size, side):
    target, texts = packable_target(family), texts_of(family)
    rows = [row % len(PROMPTS) for row in range(size)]
    prompts, expected = [PROMPTS[row] for row in rows], [texts[row] for row in rows]
    kwargs = {"side": side, "num_assistant_tokens_schedule": schedule_of(schedule)}
    wrong = wrong_drafter(target, PROMPTS, texts, **HEADS[head])
    assert assisted(target, wrong, prompts, **kwargs) == expected
    right = right_drafter(target, PROMPTS, texts, **HEADS[head])
    assert assisted(target, right, prompts, **kwargs) == expected
    # The first token comes from the prefill, then blocks of 5: 4 rounds, 1 bonus token in each.
    assert sum(right.last_run.accepted) >= (10 if schedule == "own" else 15) * size


@pytest.mark.parametrize("index", range(10))
def test_a_drafter_of_random_weights(index):
    head = [name for name in HEADS if name != "no_confidence"][index % 5]
    schedule = SCHEDULES[(index + index // 5) % 5]
    target, texts = target_of("llama"), texts_of("llama")
    drafter = tiny_drafter(target, seed=index, **HEADS[head])
    kwargs = {"num_assistant_tokens_schedule": schedule_of(schedule)}
    assert assisted(target, drafter, PROMPTS[:3], **kwargs) == texts[:3]
    assert sum(drafter.last_run.drafted) > 0


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_a_cap_on_drafts_holds_for_every_row(cap):
    target, texts = target_of("qwen3"), texts_of("qwen3")
    drafter = right_drafter(target, PROMPTS, texts)
    output = assisted(target, drafter, PROMPTS, num_assistant_tokens=cap, num_assistant_tokens_schedule="fixed")
    assert output == texts
    assert [max(run.verified) for run in drafter.last_run.requests] == [cap] * len(PROMPTS)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_texts_end_at_the_longest_length(length, schedule):
    target, texts = target_of("llama"), texts_of("llama")
    expected = [text[:length] for text in texts]
    for drafter in (right_drafter(target, PROMPTS, texts), wrong_drafter(target, PROMPTS, texts)):
        kwargs = {"max_new_tokens": length, "num_assistant_tokens_schedule": schedule_of(schedule)}
        assert assisted(target, drafter, PROMPTS, **kwargs) == expected
        assert sum(drafter.last_run.new_tokens) == len(PROMPTS) * (length - 1)


def test_max_length_counts_padding_as_plain_generate_does():
    target, texts = target_of("llama"), texts_of("llama")
    drafter = right_drafter(target, PROMPTS, texts)
    length = max(map(len, PROMPTS)) + 5
    output = assisted(target, drafter, PROMPTS, max_new_tokens=None, max_length=length)
    assert output == plain(target, PROMPTS, max_new_tokens=None, max_length=length)


@lru_cache
def long_case(family):
    """Prompts far longer than windows and than what is attended to in one padded call, short ones, and their texts."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (70, 1, 34, 33, 5)]
    return prompts, [alone(target_of(family), prompt, max_new_tokens=8) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "chunk", "side"),
    [
        *((family, None, "left") for family in ("llama", "mistral", "gemma2", "gemma3_mixed", "gpt_oss", "gpt2")),
        *((family, 7, "right") for family in ("llama", "mistral", "gemma3_mixed", "gpt_oss")),
        ("gpt_oss", 33, "left"),
        ("gemma2", 33, "right"),
        ("mistral", 1, "left"),
    ],
)
def test_long_and_short_prompts_in_chunks(family, chunk, side, monkeypatch):
    target, (prompts, texts) = packable_target(family), long_case(family)
    if chunk == 7:  # more prompt tokens than one forward takes
        monkeypatch.setattr(engine_loop, "_PREFILL_TOKENS", 64)
    drafter = wrong_drafter(target, prompts, texts)
    assert assisted(target, drafter, prompts, side=side, max_new_tokens=8, prefill_chunk_size=chunk) == texts


@pytest.mark.parametrize(("chunk", "most"), [(None, 71), (7, 7 + 1), (33, 33 + 1)])
def test_chunks_bound_the_prompt_tokens_of_one_forward(chunk, most):
    """A prompt of 70 tokens beside one of a single token, which is in one of the forwards."""
    target, (prompts, texts) = target_of("llama"), long_case("llama")
    assisted(target, tiny_drafter(target), prompts[:2], max_new_tokens=1)  # whether it can be packed is known by now
    sizes = []
    handle = target.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        output = assisted(target, tiny_drafter(target), prompts[:2], max_new_tokens=1, prefill_chunk_size=chunk)
    finally:
        handle.remove()
    assert output == [text[:1] for text in texts[:2]]
    assert sum(sizes) == 71
    assert max(sizes) <= most


@pytest.mark.parametrize("schedule", ["throughput", "throughput_lagged"])
def test_rounds_have_few_numbers_of_tokens_where_each_needs_kernels(schedule, fake_costs, monkeypatch):
    """Rounds with drafts; a schedule left to itself uses whatever number of tokens pays. Texts are the same."""
    costs = dataclasses.replace(fake_costs, verify=Curve([1, 101], [1.0, 5.0]))  # not all positions pay
    monkeypatch.setattr(engine_profile, "measure", lambda *_, **__: costs)
    prompts, texts = PROMPTS * 2, texts_of("llama") * 2
    sizes = {}
    for step in (1, 4):
        monkeypatch.setattr(engine_drafts, "token_buckets", lambda _, step=step: lambda n: -(-n // step) * step)
        target = copy.deepcopy(target_of("llama"))
        drafter = wrong_drafter(target, prompts, texts, block_size=5)
        assisted(target, drafter, prompts, max_new_tokens=1)  # whether it can be packed is known by now
        seen = sizes[step] = []
        target.model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        assert assisted(target, drafter, prompts, num_assistant_tokens_schedule=schedule) == texts
    uneven = {step: sum(size % 4 > 0 for size in seen if size > len(prompts)) for step, seen in sizes.items()}
    assert uneven[4] < uneven[1]  # not none: where whole blocks of all rows pay there is nothing to fill up with


def test_a_mask_of_ones_and_no_mask_are_the_same():
    target, texts = target_of("qwen2"), texts_of("qwen2")
    drafter = right_drafter(target, PROMPTS, texts)
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "assistant_model": drafter}
    output = target.generate(torch.tensor([PROMPTS[0]] * 3), **kwargs)
    assert output[:, 6:].tolist() == [texts[0]] * 3


@pytest.mark.parametrize("as_type", [torch.bool, torch.float32])
def test_masks_of_any_type_and_with_holes(as_type):
    """Tokens that are masked in the middle of a prompt are left out, as plain `generate` does."""
    target, texts = target_of("llama"), texts_of("llama")
    ids = torch.tensor([PROMPTS[0], [7, 50, 51, 11, 13, 17], [50, 51, 52, 5, 8, 21]])
    mask = torch.tensor([[1] * 6, [1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    kwargs = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    expected = target.generate(ids, attention_mask=mask, **kwargs)
    assert expected[2, 6:].tolist() == texts[2][:12]
    drafter = right_drafter(target, PROMPTS, texts)
    output = target.generate(ids, attention_mask=mask.to(as_type), assistant_model=drafter, **kwargs)
    assert output.tolist() == expected.tolist()


def test_the_place_of_a_row_does_not_matter():
    target, texts = target_of("qwen3"), texts_of("qwen3")
    drafter = wrong_drafter(target, PROMPTS, texts)
    generator = torch.Generator().manual_seed(0)
    for schedule in SCHEDULES:
        order = torch.randperm(len(PROMPTS), generator=generator).tolist()
        prompts = [PROMPTS[row] for row in order]
        output = assisted(target, drafter, prompts, num_assistant_tokens_schedule=schedule_of(schedule))
        assert output == [texts[row] for row in order]


def test_a_reduced_draft_vocabulary():
    target, texts = target_of("qwen3"), texts_of("qwen3")
    ids = sorted({token for text in texts for token in text})[::2]
    drafter = right_drafter(target, PROMPTS, texts, draft_token_ids=ids)
    for schedule in SCHEDULES:
        assert assisted(target, drafter, PROMPTS, num_assistant_tokens_schedule=schedule_of(schedule)) == texts
    assert sum(drafter.last_run.accepted) > 0


class TestEnds:
    """Rows end at different times, inside accepted blocks."""

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("first", [0, 3])
    def test_end_of_text_tokens(self, first, schedule):
        """The tokens at which rows end are taken from the middle of their own texts, one of each."""
        target, texts = target_of("llama"), texts_of("llama")
        eos = [text[first + 2 * row] for row, text in enumerate(texts[:5])]
        expected = plain(target, PROMPTS, eos_token_id=eos)
        lengths = [min(index for index, token in enumerate([*text, eos[0]]) if token in eos) + 1 for text in texts]
        assert len(set(lengths)) > 2
        for drafter in (right_drafter(target, PROMPTS, texts), wrong_drafter(target, PROMPTS, texts)):
            kwargs = {"eos_token_id": eos, "num_assistant_tokens_schedule": schedule_of(schedule)}
            assert assisted(target, drafter, PROMPTS, **kwargs) == expected
            cut = [text[:length] for text, length in zip(texts, lengths, strict=True)]
            assert assisted(target, drafter, PROMPTS, side="right", **kwargs) == filled(cut)
            found = [sum(run.new_tokens) + 1 for run in drafter.last_run.requests]
            assert found == [len(text) for text in cut]

    def test_end_of_text_inside_an_accepted_block(self):
        target, texts = target_of("llama"), texts_of("llama")
        drafter = right_drafter(target, PROMPTS, texts)
        # The prefill gives token 0, accepted blocks and their bonus tokens 1 to 5, 6 to 10, ...
        end = next(end for end in (7, 8, 9, 12, 13, 14) if texts[0][end] not in texts[0][:end])
        eos = texts[0][end]
        kwargs = {"eos_token_id": [eos], "num_assistant_tokens_schedule": "fixed"}
        assert assisted(target, drafter, PROMPTS[:2], **kwargs) == plain(target, PROMPTS[:2], eos_token_id=[eos])
        run = drafter.last_run.requests[0]
        assert sum(run.new_tokens) == end
        assert run.verified[-1] == 4
        assert run.accepted[-1] == run.new_tokens[-1] == (end - 1) % 5 + 1 < 4

    def test_end_of_text_as_the_first_token(self):
        """Rows that end with their prefill take part in no round."""
        target, texts = target_of("llama"), texts_of("llama")
        drafter = right_drafter(target, PROMPTS, texts)
        for row in range(len(PROMPTS)):
            eos = [texts[row][0]]
            expected = plain(target, PROMPTS, eos_token_id=eos)
            assert assisted(target, drafter, PROMPTS, eos_token_id=eos) == expected
        eos = [text[0] for text in texts]
        assert assisted(target, drafter, PROMPTS, eos_token_id=eos) == [[token] for token in eos]
        assert drafter.last_run.rounds == 0

    def test_padding_is_the_end_of_text_token_where_no_other_is_set(self):
        target = copy.deepcopy(target_of("llama"))
        target.generation_config.pad_token_id = None
        target.config.pad_token_id = None
        texts = texts_of("llama")
        eos = texts[0][3]
        kwargs = {"eos_token_id": eos}
        drafter = right_drafter(target, PROMPTS, texts)
        assert assisted(target, drafter, PROMPTS, **kwargs) == plain(target, PROMPTS, **kwargs)

    @pytest.mark.parametrize("schedule", ["fixed", "throughput"])
    def test_stop_strings(self, schedule, tiny_tokenizer):
        target, texts = target_of("llama"), texts_of("llama")
        stops = [tiny_tokenizer.decode(text[2 + row : 4 + row]) for row, text in enumerate(texts[1:5])]
        kwargs = {"stop_strings": stops, "tokenizer": tiny_tokenizer, "eos_token_id": UNUSED}
        expected = plain(target, PROMPTS, **kwargs)
        assert len({row.index(0) if 0 in row else NEW for row in expected}) > 2
        for drafter in (right_drafter(target, PROMPTS, texts), wrong_drafter(target, PROMPTS, texts)):
            assert assisted(target, drafter, PROMPTS, num_assistant_tokens_schedule=schedule, **kwargs) == expected

    def test_criteria_of_the_users_own(self):
        target, texts = target_of("llama"), texts_of("llama")
        criteria = {"stopping_criteria": StoppingCriteriaList([_StopAt([texts[0][5]]), _StopAt([texts[3][9]])])}
        expected = [alone(target, prompt, **criteria) for prompt in PROMPTS]
        for drafter in (right_drafter(target, PROMPTS, texts), wrong_drafter(target, PROMPTS, texts)):
            assert assisted(target, drafter, PROMPTS, **criteria) == filled(expected)

    def test_criteria_that_look_at_their_row_of_the_batch(self):
        target, texts = target_of("llama"), texts_of("llama")
        tokens = [text[first_seen(text, 2 * row)] for row, text in enumerate(texts)]
        criteria = StoppingCriteriaList([_StopEachRowAt(tokens)])
        kwargs = {"eos_token_id": UNUSED, "stopping_criteria": criteria}
        expected = plain(target, PROMPTS, **kwargs)
        cut = [text[: text.index(token) + 1] for text, token in zip(texts, tokens, strict=True)]
        assert expected == filled(cut)
        for drafter in (right_drafter(target, PROMPTS, texts), wrong_drafter(target, PROMPTS, texts)):
            for side in ("left", "right"):
                assert assisted(target, drafter, PROMPTS, side=side, **kwargs) == expected

    def test_criteria_that_read_scores(self):
        """One score for each token of the text so far, with a row for each row of the batch."""
        target, texts = target_of("llama"), texts_of("llama")
        criteria = StoppingCriteriaList([_StopWhenSure(len(PROMPTS))])
        kwargs = {
            "eos_token_id": UNUSED,
            "stopping_criteria": criteria,
            "output_scores": True,
            "return_dict_in_generate": True,
            "do_sample": False,
            "max_new_tokens": NEW,
        }
        inputs = padded(PROMPTS, "left")
        expected = target.generate(**inputs, **kwargs).sequences
        assert len({row.index(0) for row in expected[:, 11:].tolist() if 0 in row}) > 1
        output = target.generate(**inputs, assistant_model=right_drafter(target, PROMPTS, texts), **kwargs)
        assert output.sequences.tolist() == expected.tolist()

    def test_a_time_limit_ends_all_rows(self):
        target, texts = target_of("llama"), texts_of("llama")
        kwargs = {"max_time": 1e-9}
        expected = plain(target, PROMPTS, **kwargs)
        assert expected == [text[:1] for text in texts]
        assert assisted(target, right_drafter(target, PROMPTS, texts), PROMPTS, **kwargs) == expected

    def test_a_criterion_that_stops_at_a_length(self):
        class Stops(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return input_ids.shape[1] >= 17

        target, texts = target_of("llama"), texts_of("llama")
        kwargs = {"stopping_criteria": StoppingCriteriaList([Stops()])}
        expected = plain(target, PROMPTS, **kwargs)
        assert assisted(target, right_drafter(target, PROMPTS, texts), PROMPTS, **kwargs) == expected


class _StopAt(StoppingCriteria):
    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


class _StopEachRowAt(_StopAt):
    def __call__(self, input_ids, scores, **kwargs):
        assert len(input_ids) == len(self.tokens)
        return input_ids[:, -1] == self.tokens


class _StopWhenSure(StoppingCriteria):
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __call__(self, input_ids, scores, **kwargs):
        assert scores[-1].shape == (self.num_rows, VOCAB)
        assert len(scores) == input_ids.shape[1] - max(map(len, PROMPTS))
        best = scores[-1].topk(2).values
        return (len(scores) > 3) & (best[:, 0] - best[:, 1] > 2.0)


class _BiasOfRows(LogitsProcessor):
    """A user's own processor that favours another token in each row of the batch, and after each token."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(self.tokens)
        favoured = (self.tokens + input_ids[:, -1]) % VOCAB
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 6.0))


ROW_FREE_PROCESSORS = [
    {"repetition_penalty": 1.7},
    {"bad_words_ids": [[10], [7, 11], [23]]},
    {"min_new_tokens": 12, "eos_token_id": [10, 23]},
    {"suppress_tokens": [10, 23, 6]},
    {"sequence_bias": {(10,): -3.0, (23, 10): 2.0}},
]
PADDED_PROCESSORS = [
    {"no_repeat_ngram_size": 2},
    {"min_length": 18, "eos_token_id": [10, 23]},
    {"forced_eos_token_id": 2, "eos_token_id": 2},
    {"exponential_decay_length_penalty": (5, 1.1), "eos_token_id": 2},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [10], "min_new_tokens": 4},
]


def drafters_of(target, prompts, texts):
    return right_drafter(target, prompts, texts, wrong_every=5), wrong_drafter(target, prompts, texts)


class TestProcessors:
    """Every position of every row sees its own prefix, drafts included."""

    @pytest.mark.parametrize("processors", ROW_FREE_PROCESSORS, ids=str)
    def test_processors_that_padding_does_not_change(self, processors):
        if BEFORE_5_24 and "repetition_penalty" in processors:
            pytest.skip("this Transformers penalises padding")
        target = target_of("llama")
        texts = [alone(target, prompt, **processors) for prompt in PROMPTS]
        unlike = [text[: len(other)] != other for text, other in zip(texts_of("llama"), texts, strict=True)]
        assert sum(unlike) > 2  # the processor does something
        settings = (("left", "throughput"), ("right", "fixed"))
        for drafter, (side, schedule) in zip(drafters_of(target, PROMPTS, texts), settings, strict=True):
            kwargs = {"side": side, "num_assistant_tokens_schedule": schedule, **processors}
            assert assisted(target, drafter, PROMPTS, **kwargs) == filled(texts)
            assert sum(drafter.last_run.accepted) > 0

    @pytest.mark.parametrize("processors", PADDED_PROCESSORS, ids=str)
    def test_processors_see_the_padding_that_plain_generate_shows_them(self, processors):
        target = target_of("llama")
        texts = plain(target, PROMPTS, **processors)
        for drafter, side in zip(drafters_of(target, PROMPTS, texts), ("left", "right"), strict=True):
            assert assisted(target, drafter, PROMPTS, side=side, **processors) == texts
            assert sum(drafter.last_run.accepted) > 0

    def test_processors_of_the_users_own_find_their_row(self):
        target = target_of("llama")
        kwargs = {"logits_processor": LogitsProcessorList([_BiasOfRows([3, 5, 7, 11, 13, 17, 19])])}
        texts = plain(target, PROMPTS, **kwargs)
        for drafter in drafters_of(target, PROMPTS, texts):
            assert assisted(target, drafter, PROMPTS, **kwargs) == texts
            assert sum(drafter.last_run.accepted) > 0

    def test_drafts_and_verification_show_processors_the_same_prefixes(self):
        """All drafts are right, so every prefix inside a block is shown twice: where it is drafted on, and verified."""

        class Keeps(LogitsProcessor):
            seen = []

            def __call__(self, input_ids, scores):
                assert (input_ids == input_ids[0]).all()
                self.seen.append(input_ids[0].tolist())
                return scores

        target, texts = target_of("llama"), texts_of("llama")
        processor, drafter = Keeps(), right_drafter(target, PROMPTS[:1], texts[:1])
        kwargs = {"logits_processor": [processor], "num_assistant_tokens_schedule": "fixed"}
        assert assisted(target, drafter, PROMPTS[:1], max_new_tokens=11, **kwargs) == [texts[0][:11]]
        # The prefill gives the first token; then two blocks of four drafts and a bonus token.
        shown = [processor.seen.count(PROMPTS[0] + texts[0][:length]) for length in range(11)]
        assert shown == [1, *[2, 2, 2, 2, 1] * 2]

    def test_prefix_allowed_tokens_fn_by_row(self):
        target = target_of("llama")

        def allowed(row, ids):
            return [token for token in range(3, VOCAB) if (token + int(ids[-1]) + row) % 3]

        texts = plain(target, PROMPTS, prefix_allowed_tokens_fn=allowed)
        assert texts != plain(target, PROMPTS)
        for drafter, side in zip(drafters_of(target, PROMPTS, texts), ("left", "right"), strict=True):
            assert assisted(target, drafter, PROMPTS, side=side, prefix_allowed_tokens_fn=allowed) == texts

    def test_prefix_allowed_tokens_fn_is_asked_about_texts_of_its_own_row_only(self):
        """A grammar for each row has nothing to say about the text of another."""
        target = target_of("llama")
        width = max(map(len, PROMPTS))

        def allowed(row, ids):
            prompt = PROMPTS[row]
            if ids[width - len(prompt) : width].tolist() != prompt:
                return []  # Transformers calls this an error
            return list(range(3, 30))

        texts = plain(target, PROMPTS, prefix_allowed_tokens_fn=allowed)
        drafter = right_drafter(target, PROMPTS, texts)
        assert assisted(target, drafter, PROMPTS, prefix_allowed_tokens_fn=allowed) == texts


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3, "suppress_tokens": [10]}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_and_logits_come_by_token(side, processors):
    """As plain `generate` gives them, wherever a row has not ended."""
    target, texts = target_of("llama"), texts_of("llama")
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": 15,
        "eos_token_id": [texts[0][7], texts[2][3], texts[3][11]],
        "do_sample": False,
        **processors,
    }
    expected = target.generate(**padded(PROMPTS, "left"), **wanted)
    drafter = wrong_drafter(target, PROMPTS, texts)
    output = target.generate(**padded(PROMPTS, side), assistant_model=drafter, **wanted)
    width = max(map(len, PROMPTS))
    assert output.sequences[:, width:].tolist() == expected.sequences[:, width:].tolist()
    assert len(output.scores) == len(output.logits) == output.sequences.shape[1] - width
    for name in ("scores", "logits"):
        for step, (ours, theirs) in enumerate(zip(output[name], expected[name], strict=True)):
            for row, run in enumerate(drafter.last_run.requests):
                if step < sum(run.new_tokens) + 1:
                    # Two forwards of different shapes round differently, by far less than this.
                    torch.testing.assert_close(ours[row], theirs[row], atol=2e-4, rtol=1e-4)


def state_of(target, drafter):
    """All that a call must leave as it was."""
    return {
        "configs": [copy.deepcopy(model.config.to_dict()) for model in (target, drafter)],
        "generation": copy.deepcopy(target.generation_config.to_dict()),
        "attention": [
            (name, module.config._attn_implementation)
            for name, module in target.named_modules()
            if hasattr(module, "config")
        ],
        "training": [module.training for module in target.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()],
        "weights": [parameter.data_ptr() for parameter in target.parameters()],
    }


class TestNothingIsChanged:
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_after_success(self, implementation):
        target = varied_target("gemma3_mixed")
        target.set_attn_implementation(implementation)
        drafter = wrong_drafter(target, PROMPTS, texts_of("gemma3_mixed"))
        target(torch.tensor([[5]]), output_hidden_states=True)  # Transformers keeps its hooks for hidden states
        before = state_of(target, drafter)
        assert assisted(target, drafter, PROMPTS) == texts_of("gemma3_mixed")
        assert state_of(target, drafter) == before
        assert before["attention"][0][1] == implementation
        assert plain(target, PROMPTS) == texts_of("gemma3_mixed")

    def test_after_an_error_in_a_criterion(self):
        class Fails(StoppingCriteria):
            calls = 0

            def __call__(self, input_ids, scores, **kwargs):
                self.calls += 1
                if self.calls == 20:
                    raise RuntimeError("of the user's own")
                return torch.zeros(len(input_ids), dtype=torch.bool)

        target, texts = target_of("llama"), texts_of("llama")
        drafter = wrong_drafter(target, PROMPTS, texts)
        before = state_of(target, drafter)
        with pytest.raises(RuntimeError, match="own"):
            assisted(target, drafter, PROMPTS, stopping_criteria=StoppingCriteriaList([Fails()]))
        assert state_of(target, drafter) == before
        assert plain(target, PROMPTS) == texts
        assert assisted(target, drafter, PROMPTS) == texts

    @pytest.mark.parametrize("call", [1, 3])
    def test_after_an_interrupt_inside_a_forward(self, call):
        target, texts = target_of("llama"), texts_of("llama")
        drafter = wrong_drafter(target, PROMPTS, texts)
        assisted(target, drafter, PROMPTS[:2])  # whether the target can be packed is known by now
        before, calls = state_of(target, drafter), []

        def interrupt(*_):
            calls.append(target.config._attn_implementation)
            if len(calls) == call:
                raise KeyboardInterrupt

        handle = target.model.layers[2].register_forward_pre_hook(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                assisted(target, drafter, PROMPTS)
        finally:
            handle.remove()
        assert calls[-1] != before["attention"][0][1]  # the packed attention was in place
        assert state_of(target, drafter) == before
        assert plain(target, PROMPTS) == texts
        assert assisted(target, drafter, PROMPTS) == texts

    def test_the_users_generation_config(self):
        target = target_of("llama")
        generation = copy.deepcopy(target.generation_config)
        generation.update(max_new_tokens=5, eos_token_id=UNUSED, num_assistant_tokens_schedule="throughput_lagged")
        before = copy.deepcopy(generation.to_dict())
        drafter = wrong_drafter(target, PROMPTS, texts_of("llama"))
        target.generate(**padded(PROMPTS, "left"), assistant_model=drafter, generation_config=generation)
        assert generation.to_dict() == before


def finish(engine):
    while engine.requests:
        engine.step()


class TestEngine:
    """Requests that join and leave at any time get the texts they would get alone."""

    def engine(self, drafter, target, schedule, costs, **kwargs):
        settings = DraftSettings(4, schedule_of(schedule), 0.5)
        return Engine(drafter, target, settings=settings, costs=costs, **kwargs)

    @pytest.mark.parametrize("stage", ["begun", "encoded", "scored", "drafted", "verified", "settled"])
    def test_after_an_observer_that_raises_there_is_no_wrong_text(self, stage, fake_costs):
        """In whichever round it raises, the engine either refuses to go on or gives the text of the target."""
        target, text = target_of("llama"), texts_of("llama")[0]
        for round_ in range(1, 5):

            class Observer(EngineObserver):
                calls = 0

            def fail(self, *_, round_=round_):
                self.calls += 1
                if self.calls == round_:
                    raise OSError(stage)

            setattr(Observer, stage, fail)
            drafter = wrong_drafter(target, PROMPTS, texts_of("llama"))
            engine = self.engine(drafter, target, "fixed", fake_costs, observer=Observer())
            request = engine.add_request(torch.tensor(PROMPTS[0]), max_new_tokens=len(text))
            with pytest.raises(OSError, match=stage):
                finish(engine)
            with contextlib.suppress(RuntimeError):  # "An exception interrupted an earlier step of this engine"
                finish(engine)
                assert request.tokens.tolist() == text

    @pytest.mark.parametrize("observer", [3, [], object(), EngineObserver])
    def test_what_cannot_observe_is_refused(self, observer, fake_costs):
        target = target_of("llama")
        with pytest.raises(TypeError, match="`observer` must be an instance"):
            self.engine(tiny_drafter(target), target, "fixed", fake_costs, observer=observer)

    @pytest.mark.parametrize(
        "sizes", [(0, 9, None), (1.5, 9, None), (1, 1, None), (1, 2.5, None), (1, 9, 99), (1, 9, -1)]
    )
    def test_sizes_that_cannot_be_filled_are_refused(self, sizes, fake_costs):
        target = target_of("llama")
        engine = self.engine(tiny_drafter(target), target, "fixed", fake_costs)
        with pytest.raises(ValueError, match="`fill` takes `num_rows` of at least 1"):
            engine.fill(sizes[0], context=sizes[1], num_draft_positions=sizes[2])

    def run(self, engine, arrivals):
        """Texts by name; `arrivals` is a list of `(round, name, prompt, number of tokens)`."""
        requests, finished, rounds = {}, [], 0
        while engine.requests or arrivals:
            for arrival in [item for item in arrivals if item[0] <= rounds]:
                _, name, prompt, length = arrival
                requests[name] = engine.add_request(torch.tensor(prompt), max_new_tokens=length)
                arrivals.remove(arrival)
            finished += engine.step()
            rounds += 1
        assert sorted(map(id, finished)) == sorted(map(id, requests.values()))  # each once
        assert all(request.finished for request in finished)
        return {name: request.tokens.tolist() for name, request in requests.items()}

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("seed", range(2))
    def test_requests_that_join_and_leave(self, schedule, seed, fake_costs):
        target, texts = target_of("mistral"), texts_of("mistral")
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(0, 10**6, (11, 3), generator=generator).tolist()
        plan = [(one % 8, two % len(PROMPTS), 1 + three % NEW) for one, two, three in draws]
        arrivals = [(when, name, PROMPTS[row], length) for name, (when, row, length) in enumerate(plan)]
        drafter = wrong_drafter(target, PROMPTS, texts)
        output = self.run(self.engine(drafter, target, schedule, fake_costs), arrivals)
        assert output == {name: texts[row][:length] for name, (_, row, length) in enumerate(plan)}

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_the_order_of_requests_does_not_matter(self, schedule, fake_costs):
        target, texts = target_of("llama"), texts_of("llama")
        drafter = wrong_drafter(target, PROMPTS, texts)
        for order in (range(7), [3, 0, 6, 2, 5, 1, 4]):
            arrivals = [(0, row, PROMPTS[row], 4 + 2 * row) for row in order]
            output = self.run(self.engine(drafter, target, schedule, fake_costs), arrivals)
            assert output == {row: texts[row][: 4 + 2 * row] for row in range(7)}

    def test_a_prompt_of_one_token_joins_as_another_leaves(self, fake_costs):
        """Nothing is drafted in that round, so the drafter's cache has never seen the new row."""
        target, texts = target_of("llama"), texts_of("llama")
        drafter = right_drafter(target, PROMPTS, texts)
        # The first step gives the first request 1 token by the prefill and 5 by a round, the second its last one.
        arrivals = [(0, "first", PROMPTS[0], 7), (1, "second", PROMPTS[1], 2), (2, "third", PROMPTS[2], 9)]
        output = self.run(self.engine(drafter, target, "fixed", fake_costs), arrivals)
        assert output == {"first": texts[0][:7], "second": texts[1][:2], "third": texts[2][:9]}

    def test_drafting_that_stops_and_starts_again_while_others_join(self):
        """Costs in which one row may draft and many may not: rows of the drafter's cache trade places."""
        target, texts = target_of("llama"), texts_of("llama")
        flat, steep = Curve([1], [0.01]), Curve([1, 2, 6, 8], [1.0, 1.01, 1.05, 9.0])
        costs = CostProfile(steep, 0.0, *[flat] * 6)
        drafter = wrong_drafter(target, PROMPTS, texts)
        engine = self.engine(drafter, target, "throughput", costs)
        arrivals = [
            (when, name, PROMPTS[name % 7], NEW - name) for name, when in enumerate([0, 3, 4, 4, 5, 6, 7, 9, 9])
        ]
        output = self.run(engine, arrivals)
        assert output == {name: texts[name % 7][: NEW - name] for name in range(9)}

    def test_statistics_by_request(self, fake_costs):
        """One entry a round and request; confidences are kept where they are asked for, in rounds that drafted."""
        target, texts = target_of("llama"), texts_of("llama")
        drafter = right_drafter(target, PROMPTS, texts)
        engine = self.engine(drafter, target, "fixed", fake_costs, record_confidence=True)
        requests = [engine.add_request(torch.tensor(PROMPTS[row]), max_new_tokens=7 + row) for row in range(3)]
        while engine.requests:
            engine.step()
        runs = [request.statistics for request in requests]
        # The prefill gives one token; then 4 drafts and a bonus; then what is left, the last token undrafted.
        assert [run.new_tokens for run in runs] == [[5, 1], [5, 2], [5, 3]]
        assert [run.verified for run in runs] == [[4, 0], [4, 1], [4, 2]]
        assert [run.accepted for run in runs] == [[4, 0], [4, 1], [4, 2]]
        assert [len(logits) for run in runs for logits in run.confidence_logits] == [4, 4, 2, 4, 2]
        assert not any(run.plain_rounds for run in runs if run is not runs[0])

    @pytest.mark.parametrize("when", [2, 6])
    def test_a_step_that_was_left_half_done_is_not_gone_on_with(self, when):
        class Fails(StoppingCriteria):
            calls = 0

            def __call__(self, input_ids, scores, **kwargs):
                self.calls += 1
                if self.calls == when:
                    raise KeyboardInterrupt
                return torch.zeros(len(input_ids), dtype=torch.bool)

        target, texts = target_of("llama"), texts_of("llama")
        drafter = wrong_drafter(target, PROMPTS, texts)
        engine = self.engine(drafter, target, "fixed", None, stopping_criteria=StoppingCriteriaList([Fails()]))
        for prompt in PROMPTS[:3]:
            engine.add_request(torch.tensor(prompt), max_new_tokens=9)
        with pytest.raises(KeyboardInterrupt):
            list(iter(engine.step, None))  # until it fails
        with pytest.raises(RuntimeError, match="Add the requests to a new engine"):
            engine.step()

    @pytest.mark.parametrize(
        ("prompt", "length", "error", "match"),
        [
            ([5, 6], 4, TypeError, "tensor of token ids"),
            (torch.tensor([5.0]), 4, TypeError, "prompt.*float32"),
            (torch.tensor([5, 61]), 4, ValueError, "ids from 5 to 61.*0 to 60"),
            (torch.tensor([-1]), 4, ValueError, "ids from -1"),
            (torch.tensor([5]), 2.5, TypeError, "max_new_tokens.*2.5"),
            (torch.tensor([5]), "4", TypeError, "max_new_tokens"),
        ],
        ids=str,
    )
    def test_a_bad_request_is_refused_and_others_go_on(self, prompt, length, error, match):
        target, texts = target_of("llama"), texts_of("llama")
        engine = self.engine(wrong_drafter(target, PROMPTS, texts), target, "fixed", None)
        with pytest.raises(error, match=match):
            engine.add_request(prompt, max_new_tokens=length)
        assert self.run(engine, [(0, 0, PROMPTS[0], 9)]) == {0: texts[0][:9]}

    @pytest.mark.parametrize("chunk", [0, -1, 2.5, "4", True])
    def test_a_chunk_size_that_is_none_is_named(self, chunk):
        target = target_of("llama")
        with pytest.raises(ValueError, match="prefill_chunk_size"):
            self.engine(tiny_drafter(target), target, "fixed", None, prefill_chunk_size=chunk)

    @pytest.mark.parametrize("length", [7, 12])
    def test_texts_end_at_the_engines_longest_length(self, length):
        target, texts = target_of("llama"), texts_of("llama")
        engine = self.engine(right_drafter(target, PROMPTS, texts), target, "fixed", None, max_length=length)
        assert self.run(engine, [(0, 0, PROMPTS[0], 9999)]) == {0: texts[0][: length - len(PROMPTS[0])]}
        with pytest.raises(ValueError, match=f"max_length={length}"):
            engine.add_request(torch.arange(length), max_new_tokens=5)

    def test_a_request_without_a_bound_is_refused(self):
        target = target_of("llama")
        engine = self.engine(tiny_drafter(target), target, "fixed", None)
        for wrong in (None, 0, -3):
            with pytest.raises(ValueError, match="max_new_tokens"):
                engine.add_request(torch.tensor([5, 6]), max_new_tokens=wrong)
        with pytest.raises(ValueError, match="prompt"):
            engine.add_request(torch.tensor([], dtype=torch.long), max_new_tokens=4)

    def test_own_processors_and_criteria_of_an_engine_that_runs_on(self):
        """More requests than rows of the batch that they expect: each is asked about with a batch of that size."""

        class Forbids(LogitsProcessor):
            def __call__(self, input_ids, scores):
                sizes.add(len(input_ids))
                return scores.masked_fill(torch.arange(scores.shape[1]) == forbidden, -torch.inf)

        class AfterSix(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                sizes.add(len(input_ids))
                return torch.full((len(input_ids),), input_ids.shape[1] >= len(PROMPTS[0]) + 6)

        sizes = set()
        target, texts = target_of("llama"), texts_of("llama")
        forbidden = texts[0][3]
        expected = alone(target, PROMPTS[0], logits_processor=LogitsProcessorList([Forbids()]), max_new_tokens=6)
        for batch_size in (1, 2):
            sizes.clear()
            engine = self.engine(
                wrong_drafter(target, PROMPTS, texts), target, "fixed", None, batch_size=batch_size,
                logits_processor=LogitsProcessorList([Forbids()]), stopping_criteria=StoppingCriteriaList([AfterSix()]),
            )  # fmt: skip
            arrivals = [(name, name, PROMPTS[0], NEW) for name in range(5)]
            assert self.run(engine, arrivals) == dict.fromkeys(range(5), expected)
            assert sizes == {batch_size}

    def test_costs_that_say_nothing_are_warned_about(self, fake_costs, caplog):
        logging.get_logger("modeling_dspark.engine_drafts").warning_once.cache_clear()
        target = target_of("llama")
        for verify, warned in ((Curve([1, 101], [1.0, 1.1]), False), (Curve([1, 101], [1.0, 1.0]), True)):
            self.engine(tiny_drafter(target), target, "throughput", dataclasses.replace(fake_costs, verify=verify))
            assert ("101 tokens in the time of one" in caplog.text) == warned

    def test_a_schedule_that_weighs_costs_needs_them(self):
        target = target_of("llama")
        with pytest.raises(ValueError, match="costs"):
            self.engine(tiny_drafter(target), target, "throughput", None)


class TestSeeds:
    KWARGS = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "top_k": 0}

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_set_seed_repeats_a_batch(self, schedule):
        target = target_of("llama")
        drafter = wrong_drafter(target, PROMPTS, texts_of("llama"))
        outputs = []
        for seed in (11, 11, 12):
            set_seed(seed)
            outputs.append(
                assisted(target, drafter, PROMPTS, num_assistant_tokens_schedule=schedule_of(schedule), **self.KWARGS)
            )
        assert outputs[0] == outputs[1] != outputs[2]

    def test_set_seed_repeats_a_batch_whatever_processors_cost(self, monkeypatch):
        """A clock that runs ever faster: what is measured twice is dearer the second time, and must not matter."""
        ticks = (1e-6 * 10.0**index for index in itertools.count())
        monkeypatch.setattr(engine_profile, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        target = varied_target("llama")
        drafter = wrong_drafter(target, PROMPTS, texts_of("llama"))
        kwargs = self.KWARGS | {"top_k": 9, "temperature": 0.8, "num_assistant_tokens_schedule": "throughput"}
        outputs = []
        for _ in range(3):
            set_seed(11)
            outputs.append(assisted(target, drafter, PROMPTS, **kwargs))
            assert sum(drafter.last_run.drafted) > 0
        assert outputs[0] == outputs[1] == outputs[2]

    def test_a_generator_repeats_a_batch_and_leaves_the_global_one_alone(self):
        target = target_of("llama")
        drafter = tiny_drafter(target)
        inputs, outputs = padded(PROMPTS, "left"), []
        for global_seed, seed in ((1, 11), (2, 11), (2, 12)):
            torch.manual_seed(global_seed)
            before = torch.get_rng_state()
            generator = torch.Generator().manual_seed(seed)
            kwargs = {"custom_generate": drafter.decode, "generator": generator, **self.KWARGS}
            outputs.append(target.generate(**inputs, **kwargs).tolist())
            assert torch.equal(torch.get_rng_state(), before)
        assert outputs[0] == outputs[1] != outputs[2]


def test_drafter_as_custom_generate_is_the_same_loop():
    target, texts = target_of("llama"), texts_of("llama")
    drafter = right_drafter(target, PROMPTS, texts)
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    output = target.generate(**padded(PROMPTS, "left"), custom_generate=drafter.decode, **kwargs)
    assert output[:, 11:].tolist() == texts
    assert sum(drafter.last_run.accepted) > 50


def test_a_schedule_of_the_users_own_sees_every_drafting_row():
    """What the view holds: confidences in (0, 1) of the positions that may be verified, and costs where they are asked for."""
    views = []

    class Keeps(Schedule):
        needs_costs = True

        def lengths(self, view):
            views.append((view, view.seconds(view.num_rows)))
            return [len(row) for row in view.confidence]

    target, texts = target_of("llama"), texts_of("llama")
    drafter = right_drafter(target, PROMPTS, texts)
    assert assisted(target, drafter, PROMPTS, num_assistant_tokens_schedule=Keeps(), max_new_tokens=8) == [
        text[:8] for text in texts
    ]
    first, seconds = views[0]
    assert first.num_rows == len(first.confidence) == len(PROMPTS)
    assert seconds > 0
    # After the first token 7 may come: 4 drafts and a bonus, then 1 draft and a bonus at most.
    assert [len(row) for row in first.confidence] == [4] * len(PROMPTS)
    assert all(0 < value < 1 for row in first.confidence for value in row)
    assert max(len(row) for row in views[1][0].confidence) == 4 or all(len(row) <= 1 for row in views[1][0].confidence)


@pytest.mark.parametrize(
    "lengths", [[1], [-1] * 7, [5] * 7, [0.5] * 7, [1] * 8], ids=["few", "negative", "long", "broken", "many"]
)
def test_a_schedule_of_the_users_own_that_is_wrong_is_named(lengths):
    class Wrong:
        def lengths(self, view):
            return lengths

    target, texts = target_of("llama"), texts_of("llama")
    drafter = right_drafter(target, PROMPTS, texts)
    before = state_of(target, drafter)
    with pytest.raises(ValueError, match="Wrong returned"):
        assisted(target, drafter, PROMPTS, num_assistant_tokens_schedule=Wrong())
    assert state_of(target, drafter) == before


def test_a_row_of_padding_is_refused():
    target = target_of("llama")
    inputs = padded(PROMPTS, "left")
    inputs["attention_mask"][2] = 0
    with pytest.raises(ValueError, match="Row 2.*padding"):
        target.generate(**inputs, assistant_model=tiny_drafter(target), max_new_tokens=3)


def test_a_streamer_takes_one_text():
    class Ignores(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            pass

    target = target_of("llama")
    with pytest.raises(ValueError, match="streamer"):
        assisted(target, tiny_drafter(target), PROMPTS[:2], streamer=Ignores())
