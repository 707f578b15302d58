"""DSpark drafters for Transformers: `target.generate(**inputs, assistant_model=drafter)`.

The files of this package are the data path; CONTRIBUTING.md lists them in order. The same files are the remote code of a
Hub repository.
"""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .costs_dspark import CostProfile
from .dispatcher_dspark import install_dispatcher, remove_dispatcher
from .drafting_dspark import Proposal
from .engine_dspark import Engine
from .modeling_dspark import DSparkModel, DSparkOutput, DSparkPreTrainedModel
from .scheduling_dspark import RoundView, Schedule
from .statistics_dspark import RunStatistics


__version__ = "0.1.0"

AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkModel, exist_ok=True)

__all__ = [
    "CostProfile",
    "DSparkConfig",
    "DSparkModel",
    "DSparkOutput",
    "DSparkPreTrainedModel",
    "Engine",
    "Proposal",
    "RoundView",
    "RunStatistics",
    "Schedule",
    "install_dispatcher",
    "remove_dispatcher",
]
