"""When a measured ratio contradicts a claimed one: bootstrap over prompts, whose rounds are alike.

A ratio is pooled (rounds that a claim expects over rounds, drafts kept over drafts tried). Prompts are drawn with
replacement, and the ratio is pooled anew in each of `RESAMPLES` draws. The interval spans the middle `1 - level` of these, and
each half is stretched by

    sqrt(m / (m - 1) * (1 + m / n)) * t / z

for `m` prompts here and `n` behind the claim: the first factor since a draw of `m` from `m` varies too little, the second
since the claim is a sample as well, and `t / z`, the quantile of Student's distribution with `m - 1` degrees of freedom over
the normal one, since the scatter is itself estimated. A claim outside the interval, widened by the claim's own rounding,
deviates. A true claim does so in about `level` of all cases. The draws are seeded: the same measurement gives the same
interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


LEVEL = 0.01
RESAMPLES = 5_000
FEWEST = 6  # prompts below which an interval over prompts means nothing
FEWEST_TRIALS = 30


@dataclass(frozen=True)
class Comparison:
    """A measured ratio, the interval around it, and the claim."""

    measured: float
    low: float
    high: float
    claim: float

    @property
    def deviates(self) -> bool:
        return not self.low <= self.claim <= self.high


def compare(
    numerators: Sequence[float],
    denominators: Sequence[float],
    claim: float,
    *,
    claim_prompts: int,
    rounding: float = 0.0,
    level: float = LEVEL,
) -> Comparison:
    """Compare a claimed ratio with that of some prompts.

    Args:
        numerators (`Sequence[float]`): One for every prompt.
        denominators (`Sequence[float]`): One for every prompt.
        claim (`float`): What is claimed.
        claim_prompts (`int`): Prompts behind the claim.
        rounding (`float`, *optional*): How far the claim may be from the unrounded number.
        level (`float`, *optional*): Share of true claims that are taken for wrong.

    Raises:
        ValueError: if there are fewer than `FEWEST` prompts.
    """
    over, under = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    num_prompts = len(over)
    if num_prompts < FEWEST:
        raise ValueError(f"`limit`: {num_prompts} prompts say too little; at least {FEWEST} are needed.")
    measured = float(over.sum() / under.sum())
    drawn = np.random.default_rng(0).integers(num_prompts, size=(RESAMPLES, num_prompts))
    pooled = over[drawn].sum(1) / np.maximum(under[drawn].sum(1), 1e-12)
    low, high = np.quantile(pooled, [level / 2, 1 - level / 2])
    stretch = math.sqrt(num_prompts / (num_prompts - 1) * (1 + num_prompts / max(claim_prompts, 1)))
    stretch *= _student(level, num_prompts - 1)
    return Comparison(
        measured,
        measured - stretch * (measured - float(low)) - rounding,
        measured + stretch * (float(high) - measured) + rounding,
        claim,
    )


def _student(level: float, degrees: int) -> float:
    """`t / z` of a two-sided interval, by the first terms of the expansion in `1 / degrees` (Abramowitz & Stegun 26.7.5)."""
    z2 = NormalDist().inv_cdf(1 - level / 2) ** 2
    return 1 + (z2 + 1) / (4 * degrees) + (5 * z2**2 + 16 * z2 + 3) / (96 * degrees**2)


__all__ = ["FEWEST", "FEWEST_TRIALS", "LEVEL", "Comparison", "compare"]
