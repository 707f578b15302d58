"""Training of DSpark drafters: the commands `regenerate`, `train`, `calibrate`, `refit_confidence` and `evaluate`."""

import sys

from dspark.moved import MovedModules


_MOVED = {
    "training.calibration": "training.confidence.scaling",
    "training.evaluation_report": "training.evaluation.report",
    "training.initialization": "training.run.initialization",
    "training.losses": "training.objective.losses",
    "training.targets": "training.common.targets",
}

sys.meta_path.append(MovedModules(_MOVED))  # `training.evaluation` has its own
