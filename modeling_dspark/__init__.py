"""DSpark drafters for Transformers: `target.generate(**inputs, assistant_model=drafter)`.

The files of this package are the data path; docs/data-path.md is the map. The same files are the remote code of a Hub
repository.
"""

import sys

from transformers import AutoConfig, AutoModel

from dspark.moved import MovedModules

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
