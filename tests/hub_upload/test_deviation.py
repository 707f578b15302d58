"""The interval keeps its promise: a true claim is rarely called wrong, a wrong one often enough to be worth asking."""

import re
from pathlib import Path

import numpy as np
import pytest

from hub_upload.hub.deviation import compare


def prompts_of(random, num_prompts, tau):
    """Tokens and rounds of prompts whose own accepted lengths scatter around `tau`, as answers of several kinds do."""
    lengths = np.maximum(1.0, random.normal(tau, 0.35, num_prompts))
    rounds = random.integers(20, 45, num_prompts)
    return [
        int(random.poisson((length - 1) * n) + n) for length, n in zip(lengths, rounds, strict=True)
    ], rounds.tolist()


def share_of_deviations(claim_factor, cases=120, here=12, there=24):
    random = np.random.default_rng(1)
    found = 0
    for _ in range(cases):
        tokens, rounds = prompts_of(random, there, 2.0)
        claim = claim_factor * sum(tokens) / sum(rounds)
        found += compare(*prompts_of(random, here, 2.0), claim, claim_prompts=there).deviates
    return found / cases


def test_true_claims_stand():
    assert share_of_deviations(1.0) <= 0.03


def test_wrong_claims_are_found():
    assert share_of_deviations(0.65) >= 0.9


def test_what_the_guide_says_is_found():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "publish.md").read_text()
    said = [int(share) / 100 for share in re.findall(r"in (\d+) %", page.partition("in a simulation")[2])]
    found = [share_of_deviations(1.4), share_of_deviations(1.2), share_of_deviations(1.2, here=24)]
    assert found == pytest.approx(said, abs=0.03)  # other versions of numpy may draw other cases


def test_the_interval_by_hand():
    """Six equal prompts have an interval of no width; rounding is all that is left of it."""
    found = compare([4] * 6, [2] * 6, 2.004, claim_prompts=6, rounding=0.005)
    assert (found.measured, found.low, found.high, found.deviates) == (2.0, 1.995, 2.005, False)
    assert compare([4] * 6, [2] * 6, 2.006, claim_prompts=6, rounding=0.005).deviates
    with pytest.raises(ValueError, match="at least 6"):
        compare([4] * 5, [2] * 5, 2.0, claim_prompts=6)


def test_small_claims_widen_it():
    tokens, rounds = prompts_of(np.random.default_rng(0), 12, 2.0)
    widths = [compare(tokens, rounds, 2.0, claim_prompts=n) for n in (6, 12, 1000)]
    widths = [each.high - each.low for each in widths]
    assert widths[0] > widths[1] > widths[2]
    assert widths[0] / widths[2] == pytest.approx((3 / 1.012) ** 0.5, rel=1e-6)
