"""The figures of a drafter on recorded rounds: lists of rounds in, numbers out.

The rounds are those of `training.confidence.rounds`: every block verified at full length. The metric modules in `training/evaluation/metrics`
are these functions. Nothing is read, written, decoded or timed here.

Shapes: `n` rounds, `K` positions, `P` prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from modeling_dspark import RunStatistics
from training.confidence.outputs import without_nan
from training.confidence.rounds import pad_logits, without_tail
from training.confidence.scaling import Rounds, calibration_report


@dataclass(frozen=True)
class ThresholdPoint:
    """Figures of verification that stops at the first confidence below `threshold`.

    Attributes:
        threshold (`float`): Smallest calibrated confidence `c_k` that is verified.
        drafts_per_round (`float`): Mean number of drafts verified per round.
        acceptance_length (`float`): Tokens per round, bonus token included.
        verify_rate (`float`, *optional*): Drafts accepted over drafts verified; `None` where nothing is verified.
    """

    threshold: float
    drafts_per_round: float
    acceptance_length: float
    verify_rate: float | None


@dataclass(frozen=True)
class Speed:
    """Tokens per second of assisted and plain decoding, prompt by prompt in turn.

    Attributes:
        num_prompts (`int`): Prompts that were timed.
        plain, assisted (`float`): New tokens over seconds, both summed over the prompts; prefill included.
        ratio (`float`): `assisted / plain`.
        interval (`tuple[float, float]`, *optional*): 95 % of that ratio over resampled prompts; `None` for one prompt.
    """

    num_prompts: int
    plain: float
    assisted: float
    ratio: float
    interval: tuple[float, float] | None


def acceptance_figures(
    *,
    verified: Sequence[int],
    accepted: Sequence[int],
    new_tokens: Sequence[int],
    num_draft_positions: int | None = None,
) -> dict[str, Any]:
    """Acceptance length, verify rate and acceptance rate by position of rounds.

    Args:
        verified (`Sequence[int]`): Drafts that the target verified in each round; 0 in a round without drafts.
        accepted (`Sequence[int]`): Leading drafts that it kept.
        new_tokens (`Sequence[int]`): Tokens of the round, bonus or replacement token included.
        num_draft_positions (`int`, *optional*): Positions of a block; by default the maximum that a round verified.

    Returns:
        `dict`: `rounds` and `new_tokens`, in all; `acceptance_length`, tokens per round; `drafts_per_round`, verified;
        `verify_rate`, accepted over verified drafts; `tried_by_position`, rounds in which the position was verified and all
        before it were accepted; `acceptance_rate_by_position`, the share of those in which it was accepted. Drafts behind the
        end of a text count as not verified. A share of nothing is `None`.

    Raises:
        ValueError: if there are no rounds, or numbers that no round can have.
    """
    lengths = {len(verified), len(accepted), len(new_tokens)}
    if len(lengths) != 1 or not len(verified):
        raise ValueError(
            f"There must be as many `verified` as `accepted` and `new_tokens`, and at least one: {lengths}."
        )
    for number, (checked, kept, tokens) in enumerate(zip(verified, accepted, new_tokens, strict=True)):
        if not (0 <= kept <= checked and 1 <= tokens <= kept + 1):
            raise ValueError(
                f"Round {number} has `verified` {checked}, `accepted` {kept} and `new_tokens` {tokens}; a round has "
                "0 <= accepted <= verified and 1 <= new_tokens <= accepted + 1."
            )
    positions = max(max(verified), 1) if num_draft_positions is None else num_draft_positions
    if positions < max(verified):
        raise ValueError(
            f"`num_draft_positions` is {num_draft_positions}, but a round has {max(verified)} drafts verified."
        )
    run = _run(positions, verified=verified, accepted=accepted, new_tokens=new_tokens)
    tried = run.tried_by_position
    shares = zip(run.acceptance_rate_by_position, tried, strict=True)
    return {
        "rounds": run.rounds,
        "new_tokens": sum(run.new_tokens),
        "acceptance_length": run.acceptance_length,
        "drafts_per_round": run.mean_verified_tokens,
        "verify_rate": _share(sum(run.accepted), sum(run.verified)),
        "tried_by_position": tried,
        "acceptance_rate_by_position": [share if count else None for share, count in shares],
    }


def _run(
    num_draft_positions: int, *, verified: Sequence[int], accepted: Sequence[int], new_tokens: Sequence[int]
) -> RunStatistics:
    run = RunStatistics(num_draft_positions)
    for checked, kept, tokens in zip(verified, accepted, new_tokens, strict=True):
        checked, kept = without_tail(verified=checked, accepted=kept, new_tokens=tokens)
        run.add_round(drafted=checked, verified=checked, accepted=kept, new_tokens=tokens)
    return run


def calibration_figures(
    *,
    logits: Sequence[Sequence[float]],
    accepted: Sequence[int],
    verified: Sequence[int],
    temperatures: Sequence[float] | None = None,
) -> dict[str, Any]:
    """How well survival, the product of confidences up to a position, predicts what is kept.

    Args:
        logits (`Sequence[Sequence[float]]`): Confidence logits of each round, `K` at most; of its verified positions at least.
        accepted (`Sequence[int]`): Leading drafts kept in each round.
        verified (`Sequence[int]`): Drafts verified in each round.
        temperatures (`Sequence[float]`, *optional*): `T_k` of each position; by default nothing is scaled.

    Returns:
        `dict`: `temperatures`; and for each position that was ever verified: `counts`, rounds in which it was; `survived`, the
        share in which the prefix up to it was kept; `ece_floor`, the error that chance alone would show; `before` and
        `after` scaling, each with `ece`, `auc` and `brier`. `means` has the means over positions. Without temperatures,
        `after` is `None`; so is an AUC where all outcomes agree.

    Raises:
        ValueError: if no position was verified, or lengths do not fit.
    """
    reached = max(verified, default=0)
    if reached == 0:
        raise ValueError("No round has a verified draft, so there are no figures of confidence.")
    for number, (row, checked) in enumerate(zip(logits, verified, strict=True)):
        if len(row) < checked:
            raise ValueError(f"Round {number} has {checked} verified drafts and {len(row)} logits.")
    rounds = Rounds.of(pad_logits(logits, reached), accepted, verified)
    scaled = [1.0] * reached if temperatures is None else list(temperatures)[:reached]
    report = calibration_report(rounds, scaled)
    figures = asdict(report) | {"means": {"before": report.before.means(), "after": report.after.means()}}
    if temperatures is None:
        figures |= {"temperatures": None, "after": None, "means": {"before": report.before.means(), "after": None}}
    return without_nan(figures)


def threshold_sweep(
    rounds: Rounds, new_tokens: Sequence[int], *, temperatures: Sequence[float] | None, thresholds: Sequence[float]
) -> list[ThresholdPoint]:
    """Figures that confidence thresholds would have given in rounds that were verified at full length.

    Each round is cut before its first position with `c_k < threshold`; a round that loses accepted drafts yields the token
    after the cut, as the target's own. Rounds begin where those of full length began; in a run with the threshold, others
    follow a cut.

    Args:
        rounds (`Rounds`): All rounds, those without drafts (`verified` 0) included.
        new_tokens (`Sequence[int]`): Tokens of each.
        temperatures (`Sequence[float]`, *optional*): `T_k` of each position.
        thresholds (`Sequence[float]`): In [0, 1].
    """
    positions = torch.arange(rounds.num_draft_positions)
    scale = torch.ones(rounds.num_draft_positions) if temperatures is None else torch.tensor(temperatures)
    confidence = torch.sigmoid(rounds.logits / scale)
    tokens = torch.tensor(new_tokens)
    points = []
    for threshold in thresholds:
        passed = (confidence >= threshold) & (positions < rounds.verified[:, None])
        verified = passed.long().cumprod(dim=1).sum(dim=1)
        loses = verified < rounds.accepted
        figures = acceptance_figures(
            verified=verified.tolist(),
            accepted=torch.where(loses, verified, rounds.accepted).tolist(),
            new_tokens=torch.where(loses, verified + 1, tokens).tolist(),
            num_draft_positions=rounds.num_draft_positions,
        )
        named = {name: figures[name] for name in ("drafts_per_round", "acceptance_length", "verify_rate")}
        points.append(ThresholdPoint(threshold, **named))
    return points


def speed_figures(records: Sequence[dict[str, Any]], *, resamples: int = 2000, seed: int = 0) -> Speed:
    """Speed over records of `plain` and `assisted`, each with `tokens` and `seconds`; at least one record."""
    columns = [
        [record[method][name] for record in records]
        for method in ("assisted", "plain")
        for name in ("tokens", "seconds")
    ]
    tokens, seconds, plain_tokens, plain_seconds = torch.tensor(columns, dtype=torch.float64)
    assisted, plain = (float(a.sum() / b.sum()) for a, b in ((tokens, seconds), (plain_tokens, plain_seconds)))
    interval = None
    if len(records) > 1:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(records), (resamples, len(records)), generator=generator)
        sums = [column[drawn].sum(dim=1) for column in (tokens, seconds, plain_tokens, plain_seconds)]
        ratios = (sums[0] / sums[1]) / (sums[2] / sums[3])
        low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        interval = low, high
    return Speed(len(records), plain, assisted, assisted / plain, interval)


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


__all__ = [
    *("Speed", "ThresholdPoint", "acceptance_figures", "calibration_figures", "speed_figures", "threshold_sweep"),
]
