"""Schedules against brute force and enumeration, settings, measured costs, and when drafting steps aside."""

import itertools
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils import logging

from modeling_dspark import CostProfile, DSparkConfig, RoundView, Schedule, engine_measure, engine_profile
from modeling_dspark.engine_measure import measure
from modeling_dspark.engine_profile import profile, profile_key
from modeling_dspark.schedule_costs import Curve
from modeling_dspark.schedule_gate import BlockLength, DraftGate, RequestEstimate
from modeling_dspark.schedule_policies import (
    ConfidenceSchedule,
    FixedSchedule,
    LaggedThroughputSchedule,
    ThroughputSchedule,
    checked_lengths,
)
from modeling_dspark.schedule_settings import DraftSettings, fallback_settings, make_schedule, resolve_settings
from modeling_dspark.target_binding import token_buckets
from tests.builders import tiny_drafter, tiny_target


def convex(base=1.0, slope=0.05, bend=0.02, knee=6):
    """Seconds of a round over its tokens: rising, ever faster."""
    return lambda tokens: base + slope * tokens + bend * max(0, tokens - knee) ** 2


def flat(_):
    return 1.0


def steep(tokens):
    return float(tokens) ** 2


def jagged(tokens):
    """Steps of four tokens: the first token of a step costs as much as the fourth."""
    return 1.0 + math.ceil(tokens / 4)


def stepped(tokens):
    """The first draft is dear, the ones after it are not: worth while together or not at all."""
    return 1.0 if tokens <= 1 else 1.7 + 0.1 * tokens


def by_threes(tokens):
    """Rounded up to a multiple of three."""
    return 3 * math.ceil(tokens / 3)


def doubling(tokens):
    """Rounded up to a power of two: far beyond what pays."""
    return 2 ** math.ceil(math.log2(tokens))


def random_view(rng, *, rows=None, seconds=None, width=4):
    """Ragged confidences of a few rows, some of them 0 or 1, beside rows that do not draft."""
    rows = rng.randint(1, 4) if rows is None else rows
    confidence = [
        [rng.choice([rng.random(), rng.random(), 1.0, 0.0, 0.5]) for _ in range(rng.randint(0, width))]
        for _ in range(rows)
    ]
    return RoundView(confidence, num_rows=rows + rng.randint(0, 2), seconds=seconds or convex())


def rate_of(view, lengths):
    """Expected tokens per second when `lengths` are verified, from the confidences alone."""
    expected = view.num_rows + sum(
        math.prod(row[: position + 1])
        for row, length in zip(view.confidence, lengths, strict=True)
        for position in range(length)
    )
    return expected / view.seconds(view.num_rows + sum(lengths))


def all_lengths(view):
    return itertools.product(*(range(len(row) + 1) for row in view.confidence))


class GlobalSchedule(Schedule):
    """Broken on purpose: the best lengths over all confidences of the current block."""

    def lengths(self, view):
        return list(max(all_lengths(view), key=lambda lengths: rate_of(view, lengths)))


class PeekingSchedule(Schedule):
    """Broken on purpose: a position is verified where the position after it looks good."""

    def lengths(self, view):
        return [sum(1 for value in row[1:] if value > 0.5) for row in view.confidence]


def own_schedules():
    """Every schedule on offer, made anew; the lagged one knows rounds enough to look back."""
    rng = random.Random(5)
    lagged = LaggedThroughputSchedule()
    for _ in range(2):
        lagged.lengths(random_view(rng, rows=2, seconds=jagged))
    return {
        "fixed": FixedSchedule(),
        "confidence": ConfidenceSchedule(0.4),
        "throughput": ThroughputSchedule(),
        "lagged": lagged,
        "lagged at first": LaggedThroughputSchedule(),
    }


class TestAlgorithm1:
    def test_it_finds_the_best_prefixes_where_costs_are_convex(self):
        """Concave over convex has one peak, so stopping at the first loss is stopping at the best of all."""
        rng, found = random.Random(0), []
        for _ in range(200):
            seconds = convex(rng.random() + 0.1, rng.random() * 0.3, rng.random() * 0.1, rng.randint(0, 8))
            view = random_view(rng, seconds=seconds)
            lengths = ThroughputSchedule().lengths(view)
            best = max(rate_of(view, candidate) for candidate in all_lengths(view))
            assert rate_of(view, lengths) == pytest.approx(best, rel=1e-12)
            assert all(0 <= length <= len(row) for length, row in zip(lengths, view.confidence, strict=True))
            found.append(sum(lengths) / max(sum(map(len, view.confidence)), 1))
        assert sum(0 < share < 1 for share in found) > 20  # all, nothing, and what is between

    def test_it_stops_at_the_first_position_that_does_not_pay(self):
        """Two more positions would pay together; the first alone does not, and nothing after it is looked at."""
        view = RoundView([[0.9, 0.9, 0.9]], num_rows=1, seconds={1: 1.0, 2: 2.0, 3: 1.0, 4: 1.0}.get)
        assert ThroughputSchedule().lengths(view) == [0]
        assert GlobalSchedule().lengths(view) == [3]

    def test_a_position_that_changes_nothing_is_not_admitted(self):
        """More tokens per second, strictly: `(1 + 1) / 2` is as good as `1 / 1`."""
        view = RoundView([[1.0, 1.0]], num_rows=1, seconds=float)
        assert ThroughputSchedule().lengths(view) == [0]

    def test_flat_costs_verify_everything_that_can_survive(self):
        view = RoundView([[0.9, 0.01], [1.0], [], [0.3, 0.2, 0.1]], num_rows=5, seconds=flat)
        assert ThroughputSchedule().lengths(view) == [2, 1, 0, 3]

    def test_steep_costs_verify_nothing(self):
        view = RoundView([[1.0, 1.0], [0.9]], num_rows=2, seconds=steep)
        assert ThroughputSchedule().lengths(view) == [0, 0]

    def test_no_confidence_verifies_nothing(self):
        """Behind a position that never survives all is lost, however sure the positions behind it are."""
        view = RoundView([[0.0, 1.0, 1.0], [0.5, 0.0, 1.0]], num_rows=2, seconds=flat)
        assert ThroughputSchedule().lengths(view) == [0, 1]

    def test_ties_keep_prefixes(self):
        """Equal survival in all rows and positions: whole positions are admitted row after row, never a later one first."""
        for size in range(1, 13):
            seconds = {tokens: 1.0 if tokens <= 3 + size else 1e9 for tokens in range(30)}.get
            view = RoundView([[1.0] * 4 for _ in range(3)], num_rows=3, seconds=seconds)
            lengths = ThroughputSchedule().lengths(view)
            assert sum(lengths) == size
            assert max(lengths) - min(lengths) <= 1

    @pytest.mark.parametrize("value", [0.0, 0.2, 0.8, 1.0])
    def test_one_row_of_one_position(self, value):
        view = RoundView([[value]], num_rows=1, seconds={1: 1.0, 2: 1.5}.get)
        assert ThroughputSchedule().lengths(view) == [1 if 1 + value > 1.5 else 0]

    def test_rows_that_do_not_draft_count_in_the_costs(self):
        """The same block pays beside 20 plain rows, whose anchors have to be verified anyway, and not alone."""
        seconds = Curve([1, 3, 20, 24], [1.0, 3.0, 4.0, 4.2])
        assert ThroughputSchedule().lengths(RoundView([[0.9, 0.8]], num_rows=1, seconds=seconds)) == [0]
        assert ThroughputSchedule().lengths(RoundView([[0.9, 0.8]], num_rows=20, seconds=seconds)) == [2]

    def test_confidences_that_are_not_numbers(self):
        """A broken drafter: lengths that can be verified, whatever they are."""
        view = RoundView([[math.nan, 0.5], [0.9, math.nan]], num_rows=2, seconds=convex())
        assert checked_lengths(ThroughputSchedule(), view)


class TestOtherSchedules:
    def test_a_threshold_ends_a_row_at_the_first_position_below_it(self):
        rng = random.Random(0)
        for _ in range(50):
            view = random_view(rng)
            for row, length in zip(view.confidence, ConfidenceSchedule(0.5).lengths(view), strict=True):
                assert all(value >= 0.5 for value in row[:length])
                assert length == len(row) or row[length] < 0.5

    def test_thresholds_of_zero_and_one(self):
        view = RoundView([[0.0, 0.3], [1.0, 1.0]], num_rows=2)
        assert ConfidenceSchedule(0.0).lengths(view) == [2, 2]
        assert ConfidenceSchedule(1.0).lengths(view) == [0, 2]

    def test_fixed_is_all_there_is(self):
        view = RoundView([[0.0, 0.0], [], [0.1]], num_rows=3)
        assert FixedSchedule().lengths(view) == [2, 0, 1]

    @pytest.mark.parametrize("seed", range(12))
    def test_the_lagged_capacity_knows_nothing_of_the_last_two_rounds(self, seed):
        """How many positions are admitted follows from the confidences of two rounds ago; which ones, from the current."""
        rng = random.Random(seed)
        confidences = [[[rng.random() for _ in range(4)] for _ in range(3)] for _ in range(5)]
        views = [RoundView(confidence, num_rows=3, seconds=jagged) for confidence in confidences]
        totals = set()
        for before, now in itertools.product(views[1:3], views[3:]):
            schedule = LaggedThroughputSchedule()
            schedule.lengths(views[0])
            schedule.lengths(before)
            totals.add(sum(schedule.lengths(now)))
        rates = {}
        for lengths in all_lengths(views[0]):
            rates[sum(lengths)] = max(rates.get(sum(lengths), 0.0), rate_of(views[0], lengths))
        (total,) = totals
        assert rates[total] == pytest.approx(max(rates.values()), rel=1e-12)

    def test_lagged_positions_are_those_of_the_highest_survival_now(self):
        schedule = LaggedThroughputSchedule()
        rich, poor = [[1.0, 1.0], [0.0, 0.0]], [[0.6, 0.5], [0.9, 0.8]]
        views = [RoundView(confidence, num_rows=2, seconds=flat) for confidence in (rich, rich, poor, poor)]
        # Flat costs: all positions that can survive pay, 2 of them in `rich`, 4 in `poor`.
        assert [sum(schedule.lengths(view)) for view in views[:2]] == [2, 2]  # Algorithm 1, nothing to look back to
        assert schedule.lengths(views[2]) == [0, 2]  # 2 in all: 0.9 and 0.72 come before 0.6
        assert schedule.lengths(views[3]) == [0, 2]
        assert schedule.lengths(views[3]) == [2, 2]

    def test_a_lagged_capacity_is_a_share_of_the_rows(self):
        """Rows join and leave; the number of positions follows their number."""
        schedule = LaggedThroughputSchedule()
        wide = RoundView([[0.9, 0.9]] * 8, num_rows=8, seconds=flat)
        for _ in range(2):
            assert sum(schedule.lengths(wide)) == 16
        assert sum(schedule.lengths(RoundView([[0.9, 0.9, 0.9]] * 2, num_rows=2, seconds=flat))) == 4

    def test_lagged_gets_over_a_step_of_jagged_costs(self):
        """Where one more position never pays and four more do."""
        view = RoundView(
            [[0.9, 0.9, 0.9, 0.9, 0.9]], num_rows=1, seconds={1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 9}.get
        )
        assert ThroughputSchedule().lengths(view) == [0]
        schedule = LaggedThroughputSchedule()
        assert [schedule.lengths(view) for _ in range(3)] == [[0], [0], [4]]


class TestRounding:
    """Numbers of tokens that the target is ready for."""

    @pytest.mark.parametrize("token_bucket", [by_threes, doubling])
    def test_the_next_positions_in_order_fill_up(self, token_bucket):
        """Those with the highest survival, as if costs had let that many in; all there are, where there are too few."""
        rng, filled = random.Random(0), 0
        for _ in range(200):
            view = random_view(rng)
            exact = ThroughputSchedule().lengths(view)
            lengths = ThroughputSchedule().lengths(replace(view, token_bucket=token_bucket))
            positions = sum(map(len, view.confidence))
            wanted = token_bucket(view.num_rows + sum(exact)) - view.num_rows if sum(exact) else 0
            assert sum(lengths) == min(wanted, positions)
            assert all(more >= fewer for more, fewer in zip(lengths, exact, strict=True))
            survival = view.survival()
            kept = [survival[row][position] for row, length in enumerate(lengths) for position in range(length)]
            left = [value for row, length in zip(survival, lengths, strict=True) for value in row[length:]]
            assert not kept or not left or min(kept) >= max(left)
            filled += sum(lengths) > sum(exact)
        assert filled > 40

    def test_a_plain_step_stays_one(self):
        view = RoundView([[1.0, 1.0], [0.9]], num_rows=2, seconds=steep, token_bucket=by_threes)
        for schedule in (ThroughputSchedule(), LaggedThroughputSchedule()):
            assert [schedule.lengths(view) for _ in range(4)] == [[0, 0]] * 4

    def test_a_lagged_capacity_is_rounded_too(self):
        view = RoundView([[0.9, 0.9], [0.8, 0.7]], num_rows=2, seconds=Curve([2, 4, 5], [1.0, 1.05, 3.0]))
        schedules = LaggedThroughputSchedule(), LaggedThroughputSchedule()
        exact, rounded = (
            [schedule.lengths(replace(view, token_bucket=token_bucket)) for _ in range(3)]
            for schedule, token_bucket in zip(schedules, (int, by_threes), strict=True)
        )
        assert exact[-1] == [2, 0]
        assert rounded[-1] == [2, 2]

    def test_what_a_target_is_ready_for(self):
        """Reduced precision on a CPU has few numbers, none below the one asked for; other targets have all of them."""
        target = tiny_target("llama")
        assert [token_buckets(target)(count) for count in range(1, 200)] == list(range(1, 200))
        ready = token_buckets(target.to(torch.bfloat16))
        counts = [ready(count) for count in range(1, 257)]
        assert counts == sorted(counts)
        assert all(count <= number <= max(1.25 * count, 8) for count, number in enumerate(counts, 1))
        assert [ready(count) for count in counts] == counts
        assert len(set(counts)) <= 50


def text_distribution(schedule_of, rows, seconds, token_bucket=int):
    """Joint probabilities of the texts of all rows in one round, by enumeration.

    Each row is `(target, draft, confidence)`: dictionaries from prefixes (tuples of tokens 0 and 1) to the probability of
    token 1 after them, and to the confidence of the position after them. Texts have `K` tokens; where verification ends early
    they go on as the target has it.
    """
    size = max(map(len, rows[0][2])) + 1
    texts = list(itertools.product((0, 1), repeat=size))
    joint = dict.fromkeys(itertools.product(texts, repeat=len(rows)), 0.0)
    for drafts in itertools.product(texts, repeat=len(rows)):
        chance = math.prod(
            probability(draft, text[:position], text[position])
            for (_, draft, _), text in zip(rows, drafts, strict=True)
            for position in range(size)
        )
        confidence = [
            [confidence[text[:position]] for position in range(size)]
            for (_, _, confidence), text in zip(rows, drafts, strict=True)
        ]
        lengths = schedule_of().lengths(RoundView(confidence, len(rows), seconds, token_bucket))
        outcomes = [
            after_verification(target, draft, text, length)
            for (target, draft, _), text, length in zip(rows, drafts, lengths, strict=True)
        ]
        for combination in joint:
            joint[combination] += chance * math.prod(
                outcome.get(text, 0.0) for outcome, text in zip(outcomes, combination, strict=True)
            )
    return joint


def probability(model, prefix, token):
    return model[prefix] if token else 1 - model[prefix]


def after_verification(target, draft, text, length):
    """Probabilities of the texts that come of verifying the first `length` drafts of `text`."""
    outcome, alive = {}, 1.0
    for position in range(length):
        prefix, token = text[:position], text[position]
        kept = min(1.0, probability(target, prefix, token) / probability(draft, prefix, token))
        # Two tokens: what replaces a rejected one is the other one.
        continue_plainly(target, (*prefix, 1 - token), alive * (1 - kept), len(text), outcome)
        alive *= kept
    continue_plainly(target, text[:length], alive, len(text), outcome)
    return outcome


def continue_plainly(target, prefix, chance, size, outcome):
    if len(prefix) == size:
        outcome[prefix] = outcome.get(prefix, 0.0) + chance
        return
    for token in (0, 1):
        continue_plainly(target, (*prefix, token), chance * probability(target, prefix, token), size, outcome)


def plain_distribution(rows):
    size = max(map(len, rows[0][2])) + 1
    texts = list(itertools.product((0, 1), repeat=size))
    return {
        combination: math.prod(
            probability(target, text[:position], text[position])
            for (target, _, _), text in zip(rows, combination, strict=True)
            for position in range(size)
        )
        for combination in itertools.product(texts, repeat=len(rows))
    }


def random_row(rng, size=3):
    prefixes = [prefix for length in range(size) for prefix in itertools.product((0, 1), repeat=length)]
    return tuple({prefix: rng.uniform(0.05, 0.95) for prefix in prefixes} for _ in range(3))


def error_of(schedule_of, rows, seconds, token_bucket=int):
    """Total variation between the texts of a round and plain sampling."""
    ours, exact = text_distribution(schedule_of, rows, seconds, token_bucket), plain_distribution(rows)
    assert sum(ours.values()) == pytest.approx(1)
    return sum(abs(ours[key] - exact[key]) for key in exact) / 2


class TestLosslessness:
    """The distribution of texts after one round, enumerated: drafts, schedule, verification, and what follows."""

    @pytest.mark.parametrize("token_bucket", [int, by_threes, doubling], ids=["exact", "threes", "doubling"])
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", own_schedules())
    def test_schedules_leave_the_distribution_as_it_is(self, name, seed, token_bucket):
        rng = random.Random(seed)
        rows = [random_row(rng) for _ in range(2)]
        seconds = (convex(slope=0.1, bend=0.1, knee=2), convex(slope=0.2), stepped, jagged)[seed]
        assert error_of(lambda: own_schedules()[name], rows, seconds, token_bucket) < 1e-12

    @pytest.mark.parametrize("broken", [GlobalSchedule, PeekingSchedule])
    def test_schedules_that_look_ahead_do_not(self, broken):
        errors = [error_of(broken, [random_row(random.Random(seed))], stepped) for seed in range(4)]
        assert max(errors) > 0.01

    @pytest.mark.parametrize(
        ("schedule", "first_token"), [(ThroughputSchedule, 0.7), (GlobalSchedule, 0.85)], ids=["ours", "global"]
    )
    def test_the_counterexample_of_appendix_a(self, schedule, first_token):
        """Tokens A = 0 and B = 1; confidence 0.8, then 0.9 after A and 0 after B; 1, 0.5 and 0.45 rounds a second."""
        seconds = {1: 1 / 1.0, 2: 1 / 0.5, 3: 1 / 0.45}.get
        target = {(): 0.3, (0,): 0.5, (1,): 0.5}
        draft = {(): 0.5, (0,): 0.5, (1,): 0.5}
        confidence = {(): 0.8, (0,): 0.9, (1,): 0.0}
        joint = text_distribution(schedule, [(target, draft, confidence)], seconds)
        assert sum(value for ((text,), value) in joint.items() if text[0] == 0) == pytest.approx(first_token)
        if schedule is ThroughputSchedule:
            for after in (0.9, 0.0):
                assert schedule().lengths(RoundView([[0.8, after]], num_rows=1, seconds=seconds)) == [0]

    @pytest.mark.parametrize(
        "seconds", [convex(slope=0.3), jagged, flat, stepped], ids=["convex", "jagged", "flat", "stepped"]
    )
    @pytest.mark.parametrize("token_bucket", [int, by_threes, doubling], ids=["exact", "threes", "doubling"])
    @pytest.mark.parametrize("name", own_schedules())
    def test_later_confidences_do_not_decide_about_a_position(self, name, seconds, token_bucket):
        """Nor does the token of the position, which shows in later confidences only."""
        rng = random.Random(0)
        for _ in range(12):
            confidence = [[rng.random() for _ in range(4)] for _ in range(3)]
            before = own_schedules()[name].lengths(RoundView(confidence, 3, seconds, token_bucket))
            for row, position in itertools.product(range(3), range(4)):
                changed = [list(values) for values in confidence]
                changed[row][position + 1 :] = [rng.random() for _ in range(3 - position)]
                after = own_schedules()[name].lengths(RoundView(changed, 3, seconds, token_bucket))
                assert (before[row] > position) == (after[row] > position)

    def test_a_schedule_that_looks_ahead_fails_the_same_check(self):
        seconds = {1: 1.0, 2: 2.0, 3: 1 / 0.45}.get
        lengths = [
            GlobalSchedule().lengths(RoundView([[0.8, after]], num_rows=1, seconds=seconds)) for after in (0.9, 0.0)
        ]
        assert (lengths[0][0] > 0) != (lengths[1][0] > 0)


class TestCheckedLengths:
    VIEW = RoundView([[0.5, 0.5], [0.5]], num_rows=2)

    @pytest.mark.parametrize(
        "lengths",
        [
            [1],
            [1, 1, 1],
            [3, 0],
            [0, 2],
            [-1, 0],
            [0.5, 0],
            [math.nan, 0],
            [math.inf, 0],
            [],
            None,
            3,
            [None, 0],
            [[1, 2], [1, 2]],
        ],
    )
    def test_wrong_lengths_are_named(self, lengths):
        class Wrong(Schedule):
            def lengths(self, view):
                return lengths

        with pytest.raises(ValueError, match=r"Wrong returned the lengths.*between 0 and \[2, 1\]"):
            checked_lengths(Wrong(), self.VIEW)

    def test_a_view_that_is_written_to_changes_nothing(self):
        class Grows(Schedule):
            def lengths(self, view):
                view.confidence[0].append(1.0)
                return [3, 0]

        with pytest.raises(ValueError, match="between 0 and"):
            checked_lengths(Grows(), RoundView([[0.5, 0.5], [0.5]], num_rows=2))

    @pytest.mark.parametrize("lengths", [(2, 0), [2.0, 0.0], torch.tensor([2, 0])], ids=["tuple", "float", "tensor"])
    def test_whole_numbers_of_any_kind_are_taken(self, lengths):
        class Own:
            def lengths(self, view):
                return lengths

        checked = checked_lengths(Own(), self.VIEW)
        assert checked == [2, 0]
        assert all(type(length) is int for length in checked)

    def test_what_is_not_a_schedule_is_refused(self):
        for wrong in ("dynamic", None, 3, ThroughputSchedule, object()):
            with pytest.raises(ValueError, match=r"num_assistant_tokens_schedule.*throughput_lagged.*lengths"):
                make_schedule(DraftSettings(4, wrong, 0.5))

    def test_an_object_without_a_base_class_reads_confidences_and_no_costs(self):
        class Own:
            def lengths(self, view):
                return [0 for _ in view.confidence]

        schedule = make_schedule(DraftSettings(4, Own(), 0.5))
        assert schedule.needs_confidence
        assert not schedule.needs_costs
        assert schedule.lengths(self.VIEW) == [0, 0]

    def test_an_object_may_say_what_it_needs(self):
        class Own:
            needs_confidence, needs_costs = False, True

            def lengths(self, view):
                return [len(row) for row in view.confidence]

        schedule = make_schedule(DraftSettings(4, Own(), 0.5))
        assert not schedule.needs_confidence
        assert schedule.needs_costs

    @pytest.mark.parametrize("name", ["fixed", "confidence", "throughput", "throughput_lagged"])
    def test_a_lagged_schedule_is_made_anew_for_every_run(self, name):
        settings = DraftSettings(4, name, 0.5)
        assert make_schedule(settings) is not make_schedule(settings)


def drafter_config(**fields):
    return DSparkConfig(
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "target_layer_ids": [0],
            "markov_rank": 4,
            "num_target_layers": 4,
            "mask_token_id": 3,
            "block_size": 7,
        }
        | fields
    )


def resolved(config, **fields):
    settings = resolve_settings(GenerationConfig(**fields), config)
    return settings.num_assistant_tokens, settings.schedule, settings.confidence_threshold


class TestSettings:
    TRIPLE = {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    }

    @pytest.mark.parametrize("size", range(4))
    def test_the_values_that_transformers_fills_in_count_as_not_set(self, size):
        for names in itertools.combinations(self.TRIPLE, size):
            given = {name: self.TRIPLE[name] for name in names}
            assert resolved(drafter_config(), **given) == (7, "throughput", 0.5)
            config = drafter_config(
                default_num_assistant_tokens=3,
                default_num_assistant_tokens_schedule="fixed",
                default_assistant_confidence_threshold=0.7,
            )
            assert resolved(config, **given) == (3, "fixed", 0.7)

    def test_a_drafter_without_a_confidence_head_verifies_all(self):
        config = drafter_config(enable_confidence_head=False)
        assert resolved(config) == (7, "fixed", 0.5)
        for schedule in ("confidence", "throughput", "throughput_lagged"):
            with pytest.raises(ValueError, match=f"{schedule}.*confidence head.*fixed"):
                resolved(config, num_assistant_tokens_schedule=schedule)
        with pytest.raises(ValueError, match="confidence head"):
            resolved(config, assistant_confidence_threshold=0.3)

    @pytest.mark.parametrize("schedule", ["fixed", "confidence", "throughput", "throughput_lagged"])
    def test_what_the_call_says_wins(self, schedule):
        config = drafter_config(default_num_assistant_tokens=3, default_num_assistant_tokens_schedule="confidence")
        given = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": schedule}
        assert resolved(config, **given) == (5, schedule, 0.5)

    def test_a_threshold_alone_means_the_static_schedule(self):
        assert resolved(drafter_config(), assistant_confidence_threshold=0.0) == (7, "confidence", 0.0)
        both = {"assistant_confidence_threshold": 0.3, "num_assistant_tokens_schedule": "throughput"}
        assert resolved(drafter_config(), **both) == (7, "throughput", 0.3)

    @pytest.mark.parametrize("cap", [0, 1, 7, 8, 1000])
    def test_the_cap_is_at_most_the_block(self, cap):
        assert resolved(drafter_config(), num_assistant_tokens=cap)[0] == min(cap, 7)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_assistant_tokens", -1),
            ("num_assistant_tokens", 2.5),
            ("num_assistant_tokens", True),
            ("assistant_confidence_threshold", 1.5),
            ("assistant_confidence_threshold", -0.1),
            ("assistant_confidence_threshold", "high"),
            ("assistant_confidence_threshold", math.nan),
            ("num_assistant_tokens_schedule", "heuristic"),
            ("num_assistant_tokens_schedule", ThroughputSchedule),
        ],
    )
    def test_wrong_values_are_named(self, name, value):
        generation = GenerationConfig()
        setattr(generation, name, value)
        with pytest.raises(ValueError, match=f"(?s){name}.*{getattr(value, '__name__', value)}"):
            resolve_settings(generation, drafter_config())

    def test_a_schedule_of_the_users_own_is_passed_on(self):
        schedule = GlobalSchedule()
        generation = GenerationConfig()
        generation.num_assistant_tokens_schedule = schedule
        settings = resolve_settings(generation, drafter_config())
        assert settings.schedule is schedule
        assert make_schedule(settings) is schedule

    @pytest.mark.parametrize("schedule", ["throughput", "throughput_lagged"])
    def test_where_costs_are_not_known_a_static_threshold_serves(self, schedule, caplog):
        logging.get_logger("modeling_dspark.schedule_policies").warning_once.cache_clear()
        config = drafter_config(default_assistant_confidence_threshold=0.6)
        settings = fallback_settings(DraftSettings(5, schedule, 0.6), config)
        assert (settings.num_assistant_tokens, settings.schedule, settings.confidence_threshold) == (
            5,
            "confidence",
            0.6,
        )
        assert "needs measured costs" in caplog.text

    def test_without_a_confidence_head_all_drafts_are_verified(self, caplog):
        class Weighs(FixedSchedule):
            needs_costs = True

        logging.get_logger("modeling_dspark.schedule_policies").warning_once.cache_clear()
        config = drafter_config(enable_confidence_head=False)
        assert fallback_settings(DraftSettings(5, Weighs(), 0.6), config).schedule == "fixed"
        assert "this call uses all drafts" in caplog.text

    @pytest.mark.parametrize("schedule", ["fixed", "confidence", PeekingSchedule()])
    def test_schedules_without_costs_need_no_fallback(self, schedule, caplog):
        settings = DraftSettings(5, schedule, 0.6)
        assert fallback_settings(settings, drafter_config()) is settings
        assert not caplog.records


class TestCurve:
    @pytest.mark.parametrize("seed", range(5))
    def test_between_points_it_is_linear(self, seed):
        rng = random.Random(seed)
        counts = sorted(rng.sample(range(1, 200), rng.randint(2, 9)))
        seconds = list(itertools.accumulate(rng.random() + 0.01 for _ in counts))
        curve = Curve(counts, seconds)
        for count in range(counts[0], counts[-1] + 1):
            index = max(i for i, known in enumerate(counts) if known <= count)
            if index == len(counts) - 1:
                assert curve(count) == pytest.approx(seconds[-1])
                continue
            share = (count - counts[index]) / (counts[index + 1] - counts[index])
            assert curve(count) == pytest.approx((1 - share) * seconds[index] + share * seconds[index + 1])

    def test_beyond_the_last_point_it_goes_on_as_between_the_last_two(self):
        curve = Curve([2, 4, 8], [1.0, 1.5, 3.5])
        assert [curve(count) for count in (8, 9, 16)] == pytest.approx([3.5, 4.0, 7.5])

    def test_before_the_first_point_it_is_constant(self):
        assert [Curve([4, 8], [1.0, 2.0])(count) for count in (0, 1, 3, 4)] == [1.0] * 4

    def test_one_point_is_a_constant(self):
        assert [Curve([4], [0.5])(count) for count in (1, 4, 400)] == [0.5] * 3

    @pytest.mark.parametrize("seed", range(8))
    def test_smoothing_is_isotonic_regression(self, seed):
        """The least-squares rising sequence, by its max-min formula."""
        rng = random.Random(seed)
        values = [rng.random() + 0.1 * index for index in range(rng.randint(1, 9))]

        def mean(first, last):
            return sum(values[first : last + 1]) / (last + 1 - first)

        expected = [
            max(min(mean(first, last) for last in range(index, len(values))) for first in range(index + 1))
            for index in range(len(values))
        ]
        assert Curve.smoothed(range(1, len(values) + 1), values).seconds == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("counts", "seconds"),
        [
            ([], []),
            ([1, 2], [1.0]),
            ([2, 1], [1.0, 2.0]),
            ([1, 1], [1.0, 2.0]),
            ([1, 2], [2.0, 1.0]),
            ([1, 2], [0.0, 1.0]),
            ([1, 2], [-1.0, 1.0]),
            ([1, 2], [1.0, math.inf]),
            ([1, 2], [math.nan, 1.0]),
            ([1, 2], ["1", "2"]),
        ],
    )
    def test_points_that_make_no_curve_are_refused(self, counts, seconds):
        with pytest.raises(ValueError, match="curve"):
            Curve(counts, seconds)


class TestCostProfile:
    def test_a_plain_step_costs_no_drafting(self, fake_costs):
        plain = fake_costs.round_seconds(4, num_drafting=0)
        assert plain == pytest.approx(fake_costs.verify(4) + fake_costs.accept(4))
        assert fake_costs.round_seconds(4, num_drafting=4) > plain

    def test_context_adds_to_the_costs(self, fake_costs):
        costs = replace(fake_costs, seconds_per_context=0.5)
        one, other = (costs.round_seconds(4, num_drafting=2, context=context) for context in (0, 10))
        assert other == pytest.approx(one + 5.0)

    def test_sampling_has_costs_of_its_own(self, fake_costs):
        costs = replace(fake_costs, draft_sampled=Curve([1], [7.0]), accept_sampled=Curve([1], [5.0]))
        gained = costs.round_seconds(4, num_drafting=2, do_sample=True) - costs.round_seconds(4, num_drafting=2)
        assert gained == pytest.approx(7.0 - fake_costs.draft(2) + 5.0 - fake_costs.accept(4))

    def test_files_come_back_as_they_were(self, fake_costs, tmp_path):
        costs = replace(fake_costs, seconds_per_context=1.25e-6, key={"device": "cpu", "threads": 1})
        costs.save(tmp_path / "some" / "costs.json")
        assert CostProfile.load(tmp_path / "some" / "costs.json") == costs
        assert [path.name for path in (tmp_path / "some").iterdir()] == ["costs.json"]

    def test_a_file_that_is_replaced_is_whole_at_any_time(self, fake_costs, tmp_path, monkeypatch):
        """An interrupted save leaves the old file."""
        path = tmp_path / "costs.json"
        fake_costs.save(path)

        def fails(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(json, "dumps", fails)
        with pytest.raises(KeyboardInterrupt):
            replace(fake_costs, seconds_per_context=9.0).save(path)
        assert CostProfile.load(path) == fake_costs

    def test_sglangs_format_both_ways(self, fake_costs, tmp_path):
        """SGLang measures whole steps: what comes back costs the same for whole blocks of all rows."""
        fields = fake_costs.to_sglang(block_size=7)
        assert set(fields) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
        assert fields["max_batch_tokens"] == fields["sample_batch_tokens"][-1]
        (tmp_path / "sglang.json").write_text(json.dumps(fields))
        back = CostProfile.load(tmp_path / "sglang.json")
        for count, rate in zip(fields["sample_batch_tokens"], fields["sample_steps_per_sec"], strict=True):
            assert 1 / back.round_seconds(count, num_drafting=max(count // 8, 1)) == pytest.approx(rate, rel=1e-6)

    def test_sglangs_own_files_are_read(self, tmp_path):
        """Rates as a server measures them, noise included."""
        fields = {
            "sample_batch_tokens": [1, 8, 16, 64],
            "sample_steps_per_sec": [100.0, 95.0, 96.0, 40.0],
            "max_batch_tokens": 64,
        }
        (tmp_path / "sglang.json").write_text(json.dumps(fields))
        costs = CostProfile.load(tmp_path / "sglang.json")
        seconds = [costs.round_seconds(count, num_drafting=1) for count in (1, 8, 16, 64)]
        assert seconds[0] == pytest.approx(0.01, rel=1e-5)
        assert seconds[3] == pytest.approx(0.025, rel=1e-5)
        assert seconds[1] == pytest.approx((1 / 95 + 1 / 96) / 2, rel=1e-5) == seconds[2]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "3",
            "null",
            '"sample_batch_tokens"',
            '{"format": "another", "version": 1}',
            '{"format": "dspark-cost-profile", "version": 99}',
            '{"format": "dspark-cost-profile", "version": 1}',
            '{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]}',
            '{"sample_batch_tokens": [1, 2]}',
            '{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, 0.0]}',
            '{"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [2.0, 1.0]}',
            '{"sample_batch_tokens": [], "sample_steps_per_sec": []}',
            '{"sample_batch_tokens": ["1", "2"], "sample_steps_per_sec": [2.0, 1.0]}',
            '{"sample_batch_tokens": 3, "sample_steps_per_sec": 4}',
        ],
    )
    def test_other_files_are_refused_by_name(self, text, tmp_path):
        path = tmp_path / "costs.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"costs\.json is not a cost profile"):
            CostProfile.load(path)

    @pytest.mark.parametrize(
        "change",
        [
            {"seconds_per_context": -1.0},
            {"seconds_per_context": math.nan},
            {"seconds_per_context": "much"},
            {"verify": None},
            {"verify": {"counts": [1, 2], "seconds": [2.0, 1.0]}},
            {"verify": {"counts": ["1", "2"], "seconds": [1.0, 2.0]}},
            {"draft": {"counts": [1]}},
            {"other": 3},
            {"processing": None},
            {"processing": {"TopK": "fast"}},
            {"processing": {"TopK": -1.0}},
            {"processing": {"TopK": math.nan}},
            {"seconds_per_logits": -5.0},
            {"verify": {"counts": [1, 2], "seconds": [1.0, 10**400]}},
            {"verify": {"counts": [1], "seconds": [1.0]}},
        ],
        ids=str,
    )
    def test_damaged_files_are_refused_by_name(self, change, fake_costs, tmp_path):
        path = tmp_path / "costs.json"
        fake_costs.save(path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ValueError, match=r"costs\.json is not a cost profile"):
            CostProfile.load(path)


class TestProfiles:
    """Measured once, kept in memory and on disk, and measured again where something else runs."""

    @pytest.fixture
    def measured(self, fake_costs, monkeypatch):
        """How often something was measured."""
        calls = []

        def counted(drafter, target, key, **_):
            calls.append(1)
            return replace(fake_costs, key=profile_key(drafter, target))

        monkeypatch.setattr(engine_profile, "measure", counted)
        return calls

    def pair(self, **overrides):
        target = tiny_target("llama", **overrides)
        return tiny_drafter(target), target

    def test_a_pair_is_measured_once(self, measured):
        drafter, target = self.pair()
        assert drafter.profile(target) is drafter.profile(target)
        assert len(measured) == 1
        again, same = self.pair()  # another process: other objects
        assert again.profile(same) == drafter.profile(target)
        assert len(measured) == 1
        drafter.profile(target, refresh=True)
        assert len(measured) == 2

    def test_a_measurement_leaves_random_numbers_alone(self, measured, monkeypatch, fake_costs):
        """It draws tokens; a seed set before the first call has to give what it gives in later ones."""

        def draws(drafter, target, key, **_):
            torch.rand(3)
            return replace(fake_costs, key=profile_key(drafter, target))

        monkeypatch.setattr(engine_profile, "measure", draws)
        pair = self.pair()
        torch.manual_seed(5)
        profile(*pair)
        after = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(1))

    @pytest.mark.parametrize("trouble", ["no home", "closed", "empty variable"])
    def test_a_cache_folder_that_cannot_be_had(self, trouble, measured, monkeypatch, tmp_path):
        """The profile is measured and used all the same."""
        if trouble == "closed":
            monkeypatch.setattr(Path, "exists", self.fail(PermissionError))
        else:
            monkeypatch.setattr(engine_profile, "costs_folder", self.costs_folder)
            monkeypatch.setenv("DSPARK_CACHE", "")
            if trouble == "no home":
                monkeypatch.setattr(Path, "expanduser", self.fail(RuntimeError))
            else:
                monkeypatch.setenv("HOME", str(tmp_path))
        drafter, target = self.pair()
        assert profile(drafter, target) is profile(drafter, target)
        assert len(measured) == 1
        if trouble == "empty variable":
            assert list((tmp_path / ".cache" / "dspark" / "costs").iterdir())

    costs_folder = staticmethod(engine_profile.costs_folder)

    def fail(self, error):
        def fails(*_, **__):
            raise error("no")

        return fails

    def test_progress_bars_may_be_off(self, monkeypatch):
        monkeypatch.setattr(engine_measure, "_SECONDS", 0.0)
        monkeypatch.setattr(engine_measure, "_ROWS", (1, 8))
        monkeypatch.setattr(engine_measure, "_SAMPLED_ROWS", (1, 8))
        logging.disable_progress_bar()
        try:
            assert measure(*self.pair(), {}).verify(1) > 0
        finally:
            logging.enable_progress_bar()

    def test_targets_with_few_positions_are_measured(self, monkeypatch):
        """GPT-2's learned positions end at 1024 (here at 40); no more of them are asked for."""
        monkeypatch.setattr(engine_measure, "_SECONDS", 0.0)
        monkeypatch.setattr(engine_measure, "_ROWS", (1, 2, 8))
        monkeypatch.setattr(engine_measure, "_SAMPLED_ROWS", (1, 2))
        target = tiny_target("gpt2", n_positions=40)
        costs = measure(tiny_drafter(target), target, {})
        assert costs.verify(1) > 0
        few = tiny_target("gpt2", n_positions=8)
        drafter = tiny_drafter(few)
        with pytest.raises(ValueError, match="8 positions"):
            measure(drafter, few, {})

    def test_generate_measures_for_schedules_that_weigh_costs_only(self, measured):
        drafter, target = self.pair()
        kwargs = {"assistant_model": drafter, "max_new_tokens": 3, "do_sample": False}
        target.generate(torch.tensor([[5, 6]]), num_assistant_tokens_schedule="fixed", **kwargs)
        assert not measured
        for _ in range(2):
            target.generate(torch.tensor([[5, 6]]), **kwargs)
        assert len(measured) == 1

    def test_whatever_costs_depend_on_is_in_the_key(self, measured, monkeypatch):
        drafter, target = self.pair()
        profile(drafter, target)
        changes = [
            lambda: self.pair(intermediate_size=64),
            lambda: (drafter, target.to(torch.bfloat16)),
            lambda: (tiny_drafter(target, block_size=3), target),
            lambda: (target.set_attn_implementation("eager"), (drafter, target))[1],
            lambda: (monkeypatch.setattr(torch, "get_num_threads", lambda: 77), (drafter, target))[1],
            lambda: (monkeypatch.setattr(engine_profile, "_cpu_name", lambda: "another"), (drafter, target))[1],
            lambda: (monkeypatch.setattr(torch, "__version__", "9.9"), (drafter, target))[1],
        ]
        for count, change in enumerate(changes, 2):
            profile(*change())
            assert len(measured) == count

    @pytest.mark.parametrize(
        "damage", [lambda text: text[: len(text) // 2], lambda _: "[]", lambda t: t.replace("sdpa", "other")]
    )
    def test_a_file_that_is_damaged_or_of_something_else_is_replaced(self, damage, measured):
        drafter, target = self.pair()
        expected = profile(drafter, target)
        (path,) = engine_profile.costs_folder().iterdir()
        whole = path.read_text()
        path.write_text(damage(whole))
        assert profile(*self.pair()) == expected
        assert len(measured) == 2
        assert path.read_text() == whole

    def test_a_folder_that_cannot_be_written_costs_a_warning(self, measured, monkeypatch, tmp_path, caplog):
        logging.get_logger("modeling_dspark.engine_profile").warning_once.cache_clear()
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(engine_profile, "costs_folder", lambda: tmp_path / "file" / "costs")
        drafter, target = self.pair()
        assert profile(drafter, target) is profile(drafter, target)
        assert "could not be stored" in caplog.text

    def test_costs_are_told_apart(self):
        """Of times that follow the formula, its parts are found again; a position also costs what attention pads."""
        per_context, position, padded = 1e-6, {"greedy": 2e-3, "sampled": 3e-3}, 4e-4
        verify, draft, accept = (Curve([1, 400], values) for values in ([0.04, 0.44], [0.005, 0.105], [1e-4, 4e-3]))
        fastest = {}
        for task in engine_measure._tasks(5):
            verifying = verify(task.num_tokens) + per_context * task.rows * task.context
            verifying += padded * task.rows * task.length if task.kind == "ragged" else 0.0
            drafting = draft(task.rows) + task.num_draft_positions * task.rows * position.get(
                task.kind, position["greedy"]
            )
            fastest[task] = (drafting, verifying, accept(task.num_tokens))
        costs = engine_measure._fitted(fastest, {"made": "up"})
        assert costs.seconds_per_context == pytest.approx(per_context)
        assert costs.key == {"made": "up"}
        for tokens in (1, 5, 32, 100):
            assert costs.verify(tokens) == pytest.approx(verify(tokens))
            assert costs.accept(tokens) == pytest.approx(accept(tokens))
            assert costs.accept_sampled(max(tokens, 2)) == pytest.approx(accept(max(tokens, 2)))
        for rows in (2, 8, 20, 32):
            assert [costs.draft(rows), costs.draft_sampled(rows)] == pytest.approx([draft(rows)] * 2)
            assert costs.position(rows) == pytest.approx(rows * (position["greedy"] + padded))
        assert costs.position(1) == pytest.approx(position["greedy"])
        assert costs.position_sampled.counts == [1, 8, 32]
        assert costs.position_sampled(8) == pytest.approx(8 * (position["sampled"] + padded))

    @pytest.mark.slow
    def test_a_real_measurement(self):
        drafter, target = self.pair()
        before = target.config._attn_implementation
        costs = measure(drafter, target, {})
        assert costs.verify(1) <= costs.verify(64) < 1.0
        assert costs.draft(1) <= costs.draft(32) < 1.0
        assert 0 <= costs.seconds_per_context < 1e-3
        assert costs.round_seconds(8, num_drafting=1) > costs.round_seconds(8, num_drafting=0) > 0
        assert costs.key == profile_key(drafter, target)
        assert target.config._attn_implementation == before


class Drafting:
    """Rounds of some requests with `DraftGate`, in units of a plain step: drafting adds `overhead` to a round."""

    SIZE = 7

    def __init__(self, *quality, overhead=0.19, per_token=0.0, seed=0):
        """`quality`: the chance that a request's next draft is right, a number or a function of the round."""
        self.quality = [value if callable(value) else lambda _, value=value: value for value in quality]
        self.estimates = [RequestEstimate() for _ in quality]
        self.parking, self.rng = DraftGate(), random.Random(seed)
        self.overhead, self.per_token = overhead, per_token
        self.time, self.tokens, self.drafted = 0.0, 0, [[] for _ in quality]
        self.rounds = 0

    def seconds(self, tokens, drafting):
        return 1.0 + self.per_token * (tokens - len(self.quality)) + (self.overhead if drafting else 0.0)

    def run(self, rounds):
        for _ in range(rounds):
            admitted = self.parking.admit(self.estimates, num_rows=len(self.estimates), seconds=self.seconds)
            verified = 0
            for index, quality in enumerate(self.quality):
                accepted = 0
                if index in admitted:
                    while accepted < self.SIZE and self.rng.random() < quality(self.rounds):
                        accepted += 1
                    verified += self.SIZE
                    self.parking.record(self.estimates[index], accepted=accepted, verified=self.SIZE)
                self.tokens += 1 + accepted
                self.drafted[index].append(index in admitted)
            self.time += self.seconds(len(self.estimates) + verified, len(admitted))
            self.rounds += 1
        return self

    @property
    def speed(self):
        """Against plain steps, which give one token a request and unit of time."""
        return self.tokens / self.time / len(self.estimates)


class TestParking:
    @pytest.mark.parametrize("rounds", [64, 256])
    @pytest.mark.parametrize("requests", [1, 8])
    def test_useless_drafts_cost_almost_nothing(self, rounds, requests):
        """Drafting takes 19 % of a plain step and never helps: at most 3 % are lost, from the first round on."""
        assert Drafting(*[0.0] * requests).run(rounds).speed > 0.97

    def test_useless_drafts_cost_less_the_longer_a_text_is(self):
        losses = [1 - Drafting(0.0).run(rounds).speed for rounds in (64, 256, 1024)]
        assert losses[0] > losses[1] > losses[2]
        assert losses[2] < 0.01

    @pytest.mark.parametrize(("quality", "share"), [(0.6, 0.95), (0.8, 0.98), (1.0, 1.0)])
    def test_good_drafts_are_hardly_ever_left_out(self, quality, share):
        runs = [Drafting(quality, seed=seed).run(256) for seed in range(20)]
        assert sum(sum(run.drafted[0]) for run in runs) >= share * 20 * 256
        assert min(run.speed for run in runs) > 1.2

    def test_a_request_that_becomes_good_is_found_again(self):
        run = Drafting(lambda number: 0.9 if number >= 200 else 0.0).run(200)
        before = sum(run.drafted[0])
        run.run(140)
        assert before < 30
        assert sum(run.drafted[0][-60:]) >= 59

    @pytest.mark.parametrize("requests", [1, 4])
    def test_a_request_that_becomes_useless_is_left_out(self, requests):
        """However good the rounds before were, twenty rounds without a draft that is kept are enough."""
        run = Drafting(*[lambda number: 0.9 if number < 200 else 0.0] * requests).run(200)
        assert min(sum(drafted) for drafted in run.drafted) >= 198
        tokens, seconds = run.tokens, run.time
        run.run(100)
        assert max(sum(drafted[200:]) for drafted in run.drafted) <= 28
        assert (run.tokens - tokens) / (run.time - seconds) / requests > 0.95

    def test_requests_are_judged_one_by_one(self):
        run = Drafting(0.9, 0.0, 0.9, 0.0, per_token=0.05).run(200)
        good, useless = (sum(run.drafted[index][50:]) for index in (0, 1))
        assert good >= 148
        assert useless < 30

    def test_a_new_request_is_judged_by_those_before_it(self):
        """After many useless texts, the next one starts without drafts."""
        run = Drafting(0.0).run(200)
        run.estimates[0] = RequestEstimate()
        begin = len(run.drafted[0])
        run.run(12)
        assert sum(run.drafted[0][begin:]) <= 2

    def test_drafting_that_costs_nothing_is_never_left_out(self):
        assert all(Drafting(0.05, overhead=0.0, per_token=0.0).run(100).drafted[0])

    def test_no_requests(self):
        assert DraftGate().admit([], num_rows=3, seconds=lambda *_: 1.0) == []


class TestBlockLength:
    """How many positions are drafted, where a position costs a part of a round."""

    def choices(self, right, *, cost, rounds=320, rows=1):
        """Choices of `rounds` rounds in which the first `right(round)` drafts of a block are right."""
        length, chosen = BlockLength(7), []
        for number in range(rounds):
            chosen.append(
                length.choose(num_rows=rows, num_drafting=rows, seconds=lambda _, positions: 1.0 + cost * positions)
            )
            for _ in range(rows):
                length.record(
                    num_draft_positions=chosen[-1], accepted=min(right(number), chosen[-1]), verified=chosen[-1]
                )
        assert all(1 <= choice <= 7 for choice in chosen)
        return chosen

    @pytest.mark.parametrize("rows", [1, 8])
    @pytest.mark.parametrize("right", [1, 2, 4, 7])
    def test_positions_that_bring_nothing_are_not_drafted(self, right, rows):
        chosen = self.choices(lambda _: right, cost=0.05, rows=rows)
        assert sum(choice == right for choice in chosen[-64:]) >= 60

    def test_positions_that_cost_nothing_are_all_drafted(self):
        assert set(self.choices(lambda number: number % 3, cost=0.0)) == {7}

    def test_all_positions_are_tried_now_and_then(self):
        """So that a text that becomes easy is noticed."""
        chosen = self.choices(lambda _: 1, cost=0.2)
        assert all(7 in chosen[first : first + 16] for first in range(304))
        chosen = self.choices(lambda number: 7 if number >= 200 else 0, cost=0.05, rounds=1400, rows=4)
        assert sum(chosen[100:200]) < 250
        assert min(chosen[-64:]) == 7


def test_decisions_of_a_round_take_little_time(fake_costs):
    """32 rows of 7 positions, the dearest case: every position is looked at. 2 % of a 40 ms round are 0.8 ms."""
    rng = random.Random(0)
    confidence = [[rng.uniform(0.97, 1.0) for _ in range(7)] for _ in range(32)]
    view = RoundView(confidence, num_rows=32, seconds=lambda tokens: fake_costs.round_seconds(tokens, num_drafting=32))
    schedules = [ThroughputSchedule(), LaggedThroughputSchedule()]
    parking, estimates = DraftGate(), [RequestEstimate() for _ in range(32)]

    def decide(schedule):
        parking.admit(
            estimates,
            num_rows=32,
            seconds=lambda tokens, drafting: fake_costs.round_seconds(tokens, num_drafting=drafting),
        )
        lengths = checked_lengths(schedule, view)
        for estimate, length in zip(estimates, lengths, strict=True):
            parking.record(estimate, accepted=length, verified=length)
        return lengths

    for schedule in schedules:
        fastest = math.inf
        for _ in range(30):
            begun = time.perf_counter()
            lengths = decide(schedule)
            fastest = min(fastest, time.perf_counter() - begun)
        assert sum(lengths) > 150
        assert fastest < 4 * 0.02 * 0.040  # a slow and busy machine is given four times as long


def test_local_lines_keep_a_line_and_take_off_noise():
    """Points on a line stay; of noisy points the slopes are nearer to the truth than those of the points themselves."""
    counts = [1, 2, 4, 8, 12, 16, 24, 32, 64]
    line = [1.0 + 0.02 * count for count in counts]
    assert Curve.local(counts, line).seconds == pytest.approx(line)
    generator = random.Random(3)
    raw, fitted = [], []
    for _ in range(200):
        noisy = [value + generator.random() * 0.1 for value in line]
        for curve, errors in ((Curve.smoothed(counts, noisy), raw), (Curve.local(counts, noisy), fitted)):
            slopes = [(curve(b) - curve(a)) / (b - a) for a, b in itertools.pairwise(counts)]
            errors.append(sum(abs(slope - 0.02) for slope in slopes))
    assert sum(fitted) < 0.7 * sum(raw)
