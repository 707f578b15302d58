"""What a drafter brings on sets of prompts, measured and reported."""

import importlib
import warnings
from typing import Any


# `training.evaluation` of release 0.1 was the module `figures`; its names go from here with the next release.
_MOVED = ("Speed", "ThresholdPoint", "acceptance_figures", "calibration_figures", "speed_figures", "threshold_sweep")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    figures = "training.evaluation.figures"
    warnings.warn(f"`{__name__}.{name}` is now `{figures}.{name}`.", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(figures), name)
