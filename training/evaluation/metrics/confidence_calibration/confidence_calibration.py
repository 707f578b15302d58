"""Calibration of a drafter's confidence as a metric of the library `evaluate`.

`evaluate.load` copies this file elsewhere, so it imports by absolute names only.
"""

from typing import Any

import datasets
import evaluate

from training.evaluation.figures import calibration_figures


_DESCRIPTION = (
    "How well the survival that a drafter's confidence promises (the product of confidences up to a position) predicts "
    "which prefixes of its blocks are kept: expected calibration error, area under the ROC curve, Brier score."
)

_INPUTS = """
Args:
    predictions (`list[list[float]]`): Confidence logits of each round, one for each position from position 0 on.
    references (`list[int]`): Leading drafts that were kept in each round.
    verified (`list[int]`): Drafts that were verified in each round, at full length whatever their confidence.
    temperatures (`list[float]`, *optional*): `T_k` of each position, for figures after scaling.

Returns:
    `dict`: `temperatures`; a value for each position in `counts`, `survived`, `ece_floor`, and in `ece`, `auc` and `brier` of
    `before` and `after` (`None` without temperatures); their `means` over positions.

Example:

    >>> import evaluate
    >>> calibration = evaluate.load("training/evaluation/metrics/confidence_calibration")
    >>> figures = calibration.compute(predictions=[[0.0], [0.0]], references=[1, 0], verified=[1, 1])
    >>> figures["before"]["brier"]
    [0.25]
"""


class ConfidenceCalibration(evaluate.Metric):
    """Wraps `training.evaluation.figures.calibration_figures`, for rounds that come one by one or in batches."""

    def _info(self) -> evaluate.MetricInfo:
        features = {
            "predictions": datasets.Sequence(datasets.Value("float64")),
            "references": datasets.Value("int64"),
            "verified": datasets.Value("int64"),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(features),
        )

    def _compute(
        self,
        predictions: list[list[float]],
        references: list[int],
        verified: list[int],
        temperatures: list[float] | None = None,
    ) -> dict[str, Any]:
        return calibration_figures(
            logits=predictions, accepted=references, verified=verified, temperatures=temperatures
        )
