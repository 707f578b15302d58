"""Training of DSpark drafters: the commands `regenerate`, `train`, `calibrate`, `refit_confidence` and `evaluate`."""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


_MOVED = {
    "training.calibration": "training.confidence.scaling",
    "training.evaluation_report": "training.evaluation.report",
    "training.initialization": "training.run.initialization",
    "training.losses": "training.objective.losses",
    "training.targets": "training.common.targets",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules under their names of release 0.1, which go with the next release; `training.evaluation` has its own."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname not in _MOVED:
            return None
        warnings.warn(f"`{fullname}` is now `{_MOVED[fullname]}`.", DeprecationWarning, stacklevel=2)
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_MOVED[module.__name__])


sys.meta_path.append(_MovedModules())
