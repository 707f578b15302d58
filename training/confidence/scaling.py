"""Sequential temperature scaling (STS) of the confidence head: tensors in, numbers out.

`c_k = sigmoid(z_k / T_k)` is the chance that position `k` is kept given that the positions before it were, and the survival
`a_k = c_0 * .. * c_k` is the chance that the whole prefix up to position `k` is kept. STS chooses one temperature per
position such that survival is the observed frequency. A position's temperature is shared by all rounds, so the order of its confidences stays.
Nothing is read, written, decoded or drawn here; `training.confidence.rounds` records the data.

Shapes: `n` rounds, `K` positions, `B` bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


NUM_BINS = 20
# 2 % apart and symmetric about 1, which is in the middle; rounded as a config holds them.
TEMPERATURE_GRID = tuple(round(0.05 * 400 ** (step / 300), 4) for step in range(301))


@dataclass(frozen=True)
class Rounds:
    """Verification rounds; build with `Rounds.of`, which checks them.

    Attributes:
        logits (`torch.Tensor` of shape `(n, K)`): Logits of the confidence head, before any temperature; fp64.
        accepted (`torch.LongTensor` of shape `(n,)`): Leading drafts kept.
        verified (`torch.LongTensor` of shape `(n,)`):
            Drafts verified. `K` but for a round cut short, whose positions from `verified` on are unknown and left out.
    """

    logits: torch.Tensor
    accepted: torch.Tensor
    verified: torch.Tensor

    @classmethod
    def of(
        cls,
        logits: torch.Tensor | Sequence[Sequence[float]],
        accepted: torch.Tensor | Sequence[int],
        verified: torch.Tensor | Sequence[int] | None = None,
    ) -> "Rounds":
        """Make and check rounds; without `verified`, all were verified at full length."""
        scores = torch.as_tensor(logits, dtype=torch.float64)
        if scores.dim() != 2 or scores.shape[1] == 0:
            raise ValueError(f"`logits` must have shape (rounds, positions), got {tuple(scores.shape)}.")
        kept = torch.as_tensor(accepted, dtype=torch.long)
        checked = torch.full_like(kept, scores.shape[1]) if verified is None else torch.as_tensor(verified).long()
        for name, value in (("accepted", kept), ("verified", checked)):
            if value.shape != scores.shape[:1]:
                raise ValueError(f"`{name}` must have shape ({scores.shape[0]},), got {tuple(value.shape)}.")
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("`logits` must be finite; a drafter that returns NaN or infinity cannot be calibrated.")
        if not bool(((kept >= 0) & (kept <= checked) & (checked <= scores.shape[1])).all()):
            raise ValueError(
                f"Each round must satisfy 0 <= `accepted` <= `verified` <= {scores.shape[1]} (positions)."
            )
        return cls(scores, kept, checked)

    @property
    def num_draft_positions(self) -> int:
        return self.logits.shape[1]

    def __len__(self) -> int:
        return self.logits.shape[0]

    def outcome(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rounds verified `position` (`[n]`, boolean), and of those, whether the prefix up to it was kept."""
        reached = self.verified > position
        if not bool(reached.any()):
            raise ValueError(
                f"Position {position} was verified in none of {len(self)} rounds; record more prompts, or longer answers."
            )
        return reached, self.accepted[reached] > position


@dataclass(frozen=True)
class ReliabilityBins:
    """Equal-width bins over [0, 1], the last one closed; both means are NaN in an empty bin.

    Attributes:
        counts (`torch.LongTensor` of shape `(B,)`): Examples in each bin.
        confidence, observed (`torch.Tensor` of shape `(B,)`): Their mean confidence, and the share that came true.
    """

    counts: torch.Tensor
    confidence: torch.Tensor
    observed: torch.Tensor


@dataclass(frozen=True)
class SurvivalMetrics:
    """How well survival predicts what is kept; one entry per position (AUC is NaN where all outcomes agree)."""

    ece: tuple[float, ...]
    auc: tuple[float, ...]
    brier: tuple[float, ...]

    def means(self) -> dict[str, float]:
        """Mean of each figure over the positions."""
        return {name: sum(values) / len(values) for name, values in vars(self).items()}


@dataclass(frozen=True)
class CalibrationReport:
    """Survival on one set of rounds, before (all temperatures 1) and after scaling.

    Attributes:
        temperatures (`tuple[float, ...]`): The temperatures of "after".
        counts (`tuple[int, ...]`): Rounds in which the position was verified.
        survived (`tuple[float, ...]`): The share of those in which the prefix up to the position was kept.
        ece_floor (`tuple[float, ...]`): The ECE to expect from this many rounds if "after" were exact.
        before, after (`SurvivalMetrics`): The figures.
    """

    temperatures: tuple[float, ...]
    counts: tuple[int, ...]
    survived: tuple[float, ...]
    ece_floor: tuple[float, ...]
    before: SurvivalMetrics
    after: SurvivalMetrics


def survival(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """`a_k`, the cumulative product of `sigmoid(z_k / T_k)`: `[n, K]` to `[n, K]`."""
    return torch.sigmoid(logits / logits.new_tensor(temperatures)).cumprod(dim=1)


def reliability_bins(confidence: torch.Tensor, outcome: torch.Tensor, num_bins: int = NUM_BINS) -> ReliabilityBins:
    """Mean confidence and observed share in each bin: `[n]` and `[n]` to `[B]`."""
    confidence, outcome = _checked(confidence, outcome)
    counts = _bin_sums(torch.ones_like(confidence), confidence, num_bins)
    sums = [_bin_sums(values, confidence, num_bins) for values in (confidence, outcome)]
    return ReliabilityBins(counts.long(), sums[0] / counts, sums[1] / counts)


def expected_calibration_error(confidence: torch.Tensor, outcome: torch.Tensor, num_bins: int = NUM_BINS) -> float:
    """Distance between mean confidence and observed share over equal-width bins, weighted by their counts.

    It is biased upwards in a finite sample: with `n` examples, even exact confidences give up to about
    `0.4 * sqrt(num_bins / n)` (0.9 % at n = 40,000), since chance moves every bin away from its mean. Compare figures of
    similar `n` only, and with `ece_floor`.
    """
    confidence, outcome = _checked(confidence, outcome)
    return float(_bin_sums(confidence - outcome, confidence, num_bins).abs().sum() / len(outcome))


def ece_floor(confidence: torch.Tensor, num_bins: int = NUM_BINS) -> float:
    """Expected ECE if every outcome were drawn with exactly its confidence (normal approximation in each bin)."""
    confidence, _ = _checked(confidence, torch.zeros_like(confidence))
    variance = _bin_sums(confidence * (1 - confidence), confidence, num_bins)
    return float((2 / math.pi * variance.clamp(min=0)).sqrt().sum() / len(confidence))


def auc(score: torch.Tensor, outcome: torch.Tensor) -> float:
    """Chance that a kept example scores above one that was not, ties counted half; NaN if all outcomes agree."""
    _, inverse, counts = torch.unique(score.double(), return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]  # from 1; the mean rank among ties
    positive, total = int(outcome.bool().sum()), len(outcome)
    if positive in (0, total):
        return math.nan
    above = float(ranks[outcome.bool()].sum()) - positive * (positive + 1) / 2
    return above / (positive * (total - positive))


def brier(confidence: torch.Tensor, outcome: torch.Tensor) -> float:
    """Mean squared distance between confidence and outcome."""
    return float((confidence.double() - outcome.double()).square().mean())


def fit_temperatures(
    rounds: Rounds, *, grid: Sequence[float] = TEMPERATURE_GRID, num_bins: int = NUM_BINS
) -> tuple[float, ...]:
    """Choose `T_0 .. T_{K-1}` from left to right: each minimises the ECE of survival up to its position, given those before.

    Args:
        rounds (`Rounds`): Rounds verified at full length; a schedule that looks at confidence would censor them.
        grid (`Sequence[float]`, *optional*): Temperatures to choose from. Among equals, the one closest to 1 wins.
        num_bins (`int`, *optional*, defaults to 20): Bins of the ECE.

    Raises:
        ValueError: if a position was never verified, or `grid` is not a list of positive numbers.
    """
    if not grid or not all(0 < temperature < math.inf for temperature in grid):
        raise ValueError(f"`grid` must be a non-empty list of positive numbers, got {list(grid)[:10]}.")
    candidates = sorted(grid, key=lambda temperature: abs(math.log(temperature)))
    prefix = torch.ones(len(rounds), dtype=torch.float64)
    temperatures: list[float] = []
    for position in range(rounds.num_draft_positions):
        reached, kept = rounds.outcome(position)
        before, logits = prefix[reached], rounds.logits[reached, position]
        errors = [
            expected_calibration_error(before * torch.sigmoid(logits / candidate), kept, num_bins)
            for candidate in candidates
        ]
        temperatures.append(candidates[errors.index(min(errors))])
        prefix = prefix * torch.sigmoid(rounds.logits[:, position] / temperatures[-1])
    return tuple(temperatures)


def calibration_report(rounds: Rounds, temperatures: Sequence[float], num_bins: int = NUM_BINS) -> CalibrationReport:
    """Measure survival before and after scaling, on rounds that the temperatures were not fitted on."""
    if len(temperatures) != rounds.num_draft_positions or not all(
        0 < temperature < math.inf for temperature in temperatures
    ):
        raise ValueError(
            f"`temperatures` must be {rounds.num_draft_positions} positive numbers, got {list(temperatures)}."
        )
    positions = range(rounds.num_draft_positions)
    after = survival(rounds.logits, temperatures)
    outcomes = [rounds.outcome(position) for position in positions]
    return CalibrationReport(
        temperatures=tuple(temperatures),
        counts=tuple(len(kept) for _, kept in outcomes),
        survived=tuple(float(kept.double().mean()) for _, kept in outcomes),
        ece_floor=tuple(ece_floor(after[outcomes[position][0], position], num_bins) for position in positions),
        before=_metrics(survival(rounds.logits, [1.0] * rounds.num_draft_positions), outcomes, num_bins),
        after=_metrics(after, outcomes, num_bins),
    )


def _metrics(
    confidence: torch.Tensor, outcomes: Sequence[tuple[torch.Tensor, torch.Tensor]], num_bins: int
) -> SurvivalMetrics:
    pairs = [(confidence[reached, position], kept) for position, (reached, kept) in enumerate(outcomes)]
    return SurvivalMetrics(
        ece=tuple(expected_calibration_error(values, kept, num_bins) for values, kept in pairs),
        auc=tuple(auc(values, kept) for values, kept in pairs),
        brier=tuple(brier(values, kept) for values, kept in pairs),
    )


def _checked(confidence: torch.Tensor, outcome: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = tuple(confidence.shape), tuple(outcome.shape)
    if confidence.dim() != 1 or shapes[0] != shapes[1] or not len(confidence):
        raise ValueError(f"`confidence` and `outcome` must be non-empty vectors of one length, got shapes {shapes}.")
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ValueError("`confidence` must lie in [0, 1]; pass probabilities, not logits.")
    return confidence.double(), outcome.double()


def _bin_sums(values: torch.Tensor, confidence: torch.Tensor, num_bins: int) -> torch.Tensor:
    return torch.bincount((confidence * num_bins).long().clamp(max=num_bins - 1), values, minlength=num_bins)


__all__ = [
    *("NUM_BINS", "TEMPERATURE_GRID", "CalibrationReport", "ReliabilityBins", "Rounds", "SurvivalMetrics"),
    *("auc", "brier", "calibration_report", "ece_floor", "expected_calibration_error", "fit_temperatures"),
    *("reliability_bins", "survival"),
]
