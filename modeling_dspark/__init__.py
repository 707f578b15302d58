"""DSpark drafters for Transformers: `target.generate(**inputs, assistant_model=drafter)`.

The files of this package are the data path; docs/data-path.md is the map. The same files are the remote code of a Hub
repository.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .draft_propose import Proposal
from .draft_tokens import DraftSampling
from .engine_counts import RunStatistics
from .engine_loop import Engine
from .engine_observer import EngineObserver
from .formats import foreign_arguments
from .generate_dispatch import install_dispatcher, remove_dispatcher
from .modeling_dspark import DSparkModel, DSparkOutput, DSparkPreTrainedModel
from .schedule_costs import CostProfile
from .schedule_policies import RoundView, Schedule


__version__ = "0.1.0"


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules under their documented names of release 0.1, which go with the next release.

    Args:
        moved (`dict[str, str]`): New names by old ones.
    """

    def __init__(self, moved: Mapping[str, str]):
        self._moved = moved

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """A spec for an old name; warns."""
        if fullname not in self._moved:
            return None
        warnings.warn(f"`{fullname}` is now `{self._moved[fullname]}`.", DeprecationWarning, stacklevel=2)
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the place of the old one."""
        sys.modules[module.__name__] = importlib.import_module(self._moved[module.__name__])


_MOVED = {
    "cache_dspark": "model_cache",
    "costs_dspark": "schedule_costs",
    "drafting_dspark": "draft_propose",
    "requests_dspark": "engine_request",
    "scheduling_dspark": "schedule_settings",
    "target_dspark": "target_binding",
    "verification_dspark": "draft_accept",
}

sys.meta_path.append(MovedModules({f"{__name__}.{old}": f"{__name__}.{new}" for old, new in _MOVED.items()}))
DSparkModel.foreign_arguments = staticmethod(foreign_arguments)
AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkModel, exist_ok=True)

__all__ = [
    "CostProfile",
    "DSparkConfig",
    "DSparkModel",
    "DSparkOutput",
    "DSparkPreTrainedModel",
    "DraftSampling",
    "Engine",
    "EngineObserver",
    "Proposal",
    "RoundView",
    "RunStatistics",
    "Schedule",
    "install_dispatcher",
    "remove_dispatcher",
]
