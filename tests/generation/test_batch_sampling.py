"""Sampling in a batch is lossless: the texts of every row are distributed as plain sampling would draw them.

- `TestJoint` draws the first three tokens of hundreds of rows at once, over a vocabulary of three, with three prompts of
  different lengths, and compares each prompt's texts with the enumerated distribution. Schedules decide for groups of four
  rows; confidences depend on earlier tokens, so that a schedule that looks ahead shows. Broken variants fail the same test.
- `TestRows` draws long texts of a target that looks at the last token only, in batches of four through `generate`, and
  checks every token of every row.

Seeds are fixed; chi-square at p > 0.001, shared among the tests of one run.
"""

import itertools
import random
import sys
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modeling_dspark import Engine, RoundView, Schedule, draft_accept
from modeling_dspark.schedule_costs import Curve
from modeling_dspark.schedule_policies import (
    ConfidenceSchedule,
    FixedSchedule,
    LaggedThroughputSchedule,
    ThroughputSchedule,
)
from modeling_dspark.schedule_settings import DraftSettings
from tests.builders import tiny_drafter, tiny_target
from tests.generation.test_sampling_lossless import p_value
from tests.modeling.test_scheduling import GlobalSchedule, PeekingSchedule


SIZE, LENGTH = 3, 3
PROMPTS = [[1, 0], [2], [0, 0, 1, 2, 2]]
COPIES = 125  # of each prompt, at once
BATCHES = 6
PROCESSORS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top_k": [TopKLogitsWarper(2)],
    "top_p": [TopPLogitsWarper(0.8)],
    "min_p": [MinPLogitsWarper(0.15)],
    "repetition_penalty": [RepetitionPenaltyLogitsProcessor(1.8)],
}


def soft_target():
    """Distributions over three tokens that are neither flat nor peaked."""
    fields = {"vocab_size": SIZE, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    target = tiny_target("qwen3", **fields)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    return target


def telling_drafter(target, *, favour=0.0, **fields):
    """Drafts that are often right and often wrong, and confidences that are high after token 0 and low after others.

    With `favour`, every place of a text has a token of its own that is drafted more often, so that the distributions of
    two rows cannot be taken for each other.
    """
    fields = {"block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": 0} | fields
    drafter = tiny_drafter(target, **fields)
    forward, head_step, state = drafter.forward, drafter.head_step, {}

    def places(*args, cache=None, context_lengths=None, **kwargs):
        lengths = zip(cache.lengths, context_lengths, strict=False)
        state["places"] = torch.tensor([length + new for length, new in lengths])
        return forward(*args, cache=cache, context_lengths=context_lengths, **kwargs)

    def tells(hidden, base_logits, previous_tokens, head_state=None):
        step = head_step(hidden, base_logits, previous_tokens, head_state)
        favoured = state["places"] % step.logits.shape[-1]
        state["places"] = state["places"] + 1
        return step._replace(
            logits=step.logits.scatter_add(1, favoured[:, None], torch.full((len(favoured), 1), favour)),
            confidence_logits=torch.where(previous_tokens == 0, 2.5, -1.5),
        )

    drafter.forward, drafter.head_step = places, tells
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.mul_(0.5)
    return drafter


@torch.no_grad()
def exact_distribution(target, prompt, processors):
    """Probabilities `[SIZE ** LENGTH]` of all texts after `prompt`."""
    texts = torch.tensor(list(itertools.product(range(SIZE), repeat=LENGTH)))
    ids = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], dim=1)
    logits, total = target(ids).logits, torch.ones(len(texts), dtype=torch.float64)
    for position in range(len(prompt), len(prompt) + LENGTH):
        scores = LogitsProcessorList(processors)(ids[:, :position], logits[:, position - 1].float().clone())
        total *= scores.softmax(-1).double().gather(1, ids[:, position : position + 1]).squeeze(1)
    return total


class InGroups(Schedule):
    """A schedule that decides for four rows at a time, as if each four were a batch of their own."""

    def __init__(self, make, size=4):
        self.make, self.size, self.schedules = make, size, {}

    def lengths(self, view):
        lengths = []
        for first in range(0, len(view.confidence), self.size):
            rows = view.confidence[first : first + self.size]
            schedule = self.schedules.setdefault(first, self.make())
            lengths += schedule.lengths(RoundView(rows, num_rows=len(rows), seconds=self.seconds))
        return lengths

    def seconds(self, tokens):
        """The first draft is dear and the ones after it are not: looking ahead pays."""
        return 1.0 + 0.05 * tokens + (0.15 if tokens > self.size else 0.0)


SCHEDULES = {
    "fixed": FixedSchedule,
    "confidence": lambda: ConfidenceSchedule(0.5),
    "throughput": lambda: InGroups(ThroughputSchedule),
    "throughput_lagged": lambda: InGroups(LaggedThroughputSchedule),
}
BROKEN_SCHEDULES = {
    "global": lambda: InGroups(GlobalSchedule, size=1),
    "peeking": lambda: PeekingSchedule(),
}


def sampled(target, drafter, schedule, *, processors=(), costs=None, batches=BATCHES):
    """Counts `[SIZE ** LENGTH]` of the texts of each prompt, and the drafts verified in each round of each request."""
    powers = torch.tensor([SIZE**2, SIZE, 1])
    counts = torch.zeros(len(PROMPTS), SIZE**LENGTH, dtype=torch.float64)
    generator, verified = torch.Generator().manual_seed(1234), []
    for _ in range(batches):
        engine = Engine(
            drafter,
            target,
            settings=DraftSettings(3, schedule, 0.5),
            costs=costs,
            do_sample=True,
            logits_processor=LogitsProcessorList(processors),
            batch_size=COPIES * len(PROMPTS),
            generator=generator,
        )
        # Five tokens leave room for a whole block after the first one; texts are compared up to the third.
        requests = [
            engine.add_request(torch.tensor(prompt), max_new_tokens=LENGTH + 2)
            for _ in range(COPIES)
            for prompt in PROMPTS
        ]
        while engine.requests:
            engine.step()
        for index, request in enumerate(requests):
            counts[index % len(PROMPTS), int((request.tokens[:LENGTH] * powers).sum())] += 1
            verified += request.statistics.verified
    return counts, verified


def p_values(target, counts, processors=()):
    return [
        p_value(row, exact_distribution(target, prompt, list(processors)))
        for prompt, row in zip(PROMPTS, counts, strict=True)
    ]


class TestJoint:
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_schedules(self, name):
        target = soft_target()
        counts, verified = sampled(target, telling_drafter(target), SCHEDULES[name]())
        assert len(set(verified)) >= 3  # lengths vary
        assert min(p_values(target, counts)) > 0.001 / 12

    @pytest.mark.parametrize("name", ["throughput", "throughput_lagged"])
    def test_schedules_by_name_with_parking(self, name, fake_costs):
        """All rows in one decision; costs in which some positions pay."""
        cheap = Curve([1], [0.05])
        costs = replace(fake_costs, verify=Curve([1, 1000], [1.0, 3.0]), draft=cheap, draft_sampled=cheap)
        target = soft_target()
        counts, verified = sampled(target, telling_drafter(target), name, costs=costs, batches=4)
        assert len(set(verified)) >= 3
        assert min(p_values(target, counts)) > 0.001 / 6

    @pytest.mark.parametrize(
        ("processors", "schedule"),
        [("temperature", "confidence"), ("top_p", "throughput_lagged"), ("repetition_penalty", "throughput")],
    )
    def test_processors(self, processors, schedule):
        target, given = soft_target(), PROCESSORS[processors]
        counts, _ = sampled(target, telling_drafter(target), SCHEDULES[schedule](), processors=given, batches=4)
        assert min(p_values(target, counts, given)) > 0.001 / 9

    @pytest.mark.slow
    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("processors", PROCESSORS)
    def test_all_processors_with_all_schedules(self, processors, schedule):
        target, given = soft_target(), PROCESSORS[processors]
        counts, _ = sampled(target, telling_drafter(target), SCHEDULES[schedule](), processors=given, batches=40)
        assert min(p_values(target, counts, given)) > 0.001 / 72

    @pytest.mark.parametrize("fields", [{"markov_head_type": "rnn"}, {"draft_token_ids": [0, 2]}], ids=str)
    def test_other_drafters(self, fields):
        target = soft_target()
        counts, _ = sampled(target, telling_drafter(target, **fields), SCHEDULES["throughput"](), batches=4)
        assert min(p_values(target, counts)) > 0.001 / 6

    @pytest.mark.parametrize("name", BROKEN_SCHEDULES)
    def test_schedules_that_look_ahead_fail(self, name):
        target = soft_target()
        counts, _ = sampled(target, telling_drafter(target), BROKEN_SCHEDULES[name]())
        assert min(p_values(target, counts)) < 1e-6

    @pytest.mark.parametrize("broken", ["uniform", "of another row"])
    def test_a_wrong_draft_distribution_fails(self, broken, monkeypatch):
        """The distribution in the acceptance is not the one that was drawn from."""
        real = draft_accept.accept_sampled

        def wrong(draft_tokens, draft_logits, *args, **kwargs):
            other = torch.zeros_like(draft_logits) if broken == "uniform" else draft_logits.roll(1, dims=0)
            return real(draft_tokens, other, *args, **kwargs)

        for name, module in list(sys.modules.items()):
            if name.startswith("modeling_dspark.") and hasattr(module, "accept_sampled"):
                monkeypatch.setattr(module, "accept_sampled", wrong)
        target = soft_target()
        counts, _ = sampled(target, telling_drafter(target), FixedSchedule())
        assert min(p_values(target, counts)) < 1e-6


def last_token_target():
    """A target whose distribution depends on the last token only: attention adds nothing."""
    target = soft_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        target.lm_head.weight.mul_(0.4)
    return target


class TestRows:
    ROWS = [[1, 0, 2, 2, 0], [2], [1, 0], [0, 1, 1]]
    NEW = 200

    @pytest.mark.parametrize(
        ("schedule", "arguments", "processors"),
        [
            ("fixed", {}, []),
            ("confidence", {"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
            ("throughput", {"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
            ("throughput_lagged", {}, []),
            ("own", {"top_k": 2}, [TopKLogitsWarper(2)]),
        ],
    )
    def test_every_row_of_a_batch(self, schedule, arguments, processors):
        """Every token that `generate` draws in each row, against the exact distribution after its predecessor."""
        target = last_token_target()
        drafter = telling_drafter(target, max_position_embeddings=4096)
        width = max(map(len, self.ROWS))
        inputs = {
            "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in self.ROWS]),
            "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in self.ROWS]),
        }
        torch.manual_seed(99)
        output = target.generate(
            **inputs,
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=self.NEW,
            eos_token_id=None,
            num_assistant_tokens_schedule=InGroups(ThroughputSchedule) if schedule == "own" else schedule,
            **({"top_k": 0} | arguments),
        )[:, width - 1 :]
        assert sum(drafter.last_run.accepted) > 25
        with torch.no_grad():
            logits = target(torch.arange(SIZE)[:, None]).logits[:, -1].float()
        exact = LogitsProcessorList(processors)(torch.arange(SIZE)[:, None], logits).softmax(-1).double()
        for row in output:
            pairs = torch.bincount(row[:-1] * SIZE + row[1:], minlength=SIZE**2).view(SIZE, SIZE).double()
            for previous in range(SIZE):
                if pairs[previous].sum() >= 25:
                    assert p_value(pairs[previous], exact[previous]) > 0.001 / 12

    @pytest.mark.parametrize("schedule", ["fixed", "throughput"])
    def test_rows_that_join_and_leave(self, schedule, fake_costs):
        """Texts of 2 to 9 tokens, 30 at a time: in most rounds some rows draft and others do not, in changing order.

        The target's distribution is the same at every place and the drafter's is not, so places are looked at apart.
        """
        cheap = Curve([1], [0.05])
        target = last_token_target()
        engine = Engine(
            telling_drafter(target, favour=3.0),
            target,
            settings=DraftSettings(3, schedule, 0.5),
            costs=replace(fake_costs, verify=Curve([1, 1000], [1.0, 3.0]), draft=cheap, draft_sampled=cheap),
            do_sample=True,
            generator=torch.Generator().manual_seed(7),
        )
        rng, requests = random.Random(1), []
        while len(requests) < 900 or engine.requests:
            for _ in range(30 - len(engine.requests) if len(requests) < 900 else 0):
                prompt = torch.tensor(rng.choice(self.ROWS))
                requests.append(engine.add_request(prompt, max_new_tokens=rng.randint(2, 9)))
            engine.step()
        assert sum(sum(request.statistics.accepted) for request in requests) > 300
        counts = torch.zeros(SIZE, SIZE, SIZE, dtype=torch.float64)  # [place, token before, token]
        for request in requests:
            text = [int(request.prompt[-1]), *request.tokens.tolist()]
            for place, (before, token) in enumerate(itertools.pairwise(text), len(request.prompt)):
                counts[place % SIZE, before, token] += 1
        with torch.no_grad():
            exact = target(torch.arange(SIZE)[:, None]).logits[:, -1].float().softmax(-1).double()
        for place, before in itertools.product(range(SIZE), range(SIZE)):
            assert p_value(counts[place, before], exact[before]) > 0.001 / 18

    def test_rows_that_end_on_their_own(self):
        """Lengths of texts that end on a token are geometric in every row, as plain sampling has them."""
        target = last_token_target()
        drafter, stop, longest = telling_drafter(target), 2, 5
        with torch.no_grad():
            step = target(torch.arange(SIZE)[:, None]).logits[:, -1].float().softmax(-1).double()
        counts = torch.zeros(4, longest, dtype=torch.float64)
        ids = torch.tensor([[1, 0], [0, 0], [2, 0], [1, 0]]).repeat(50, 1)
        torch.manual_seed(3)
        for schedule in ("fixed", "throughput"):
            output = target.generate(
                ids,
                assistant_model=drafter,
                do_sample=True,
                max_new_tokens=longest,
                eos_token_id=stop,
                pad_token_id=stop,
                top_k=0,
                num_assistant_tokens_schedule=schedule,
            )[:, 2:]
            for row, text in enumerate(output.tolist()):
                length = text.index(stop) + 1 if stop in text else len(text)
                assert set(text[length:]) <= {stop}
                counts[row % 4, length - 1] += 1
        alive, exact = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(longest, dtype=torch.float64)
        alive[0] = 1
        for length in range(longest):
            alive = alive @ step
            exact[length] = alive[stop] if length < longest - 1 else alive.sum()
            alive[stop] = 0
        for row in counts:
            assert p_value(row, exact) > 0.001 / 4
