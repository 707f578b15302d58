"""DSpark drafters for Transformers: `target.generate(**inputs, assistant_model=drafter)`.

The files of this package are the data path, in this order: configuration, cache, backbone, heads, target, scheduling,
verification, drafting, candidate generator, generation, checkpoints, modeling. The same files are the remote code of a
Hub repository.
"""

from transformers import AutoConfig, AutoModel

from .candidate_generator_dspark import RunStatistics
from .configuration_dspark import DSparkConfig
from .drafting_dspark import Proposal
from .generation_dspark import install_dispatcher, remove_dispatcher
from .modeling_dspark import DSparkModel, DSparkOutput, DSparkPreTrainedModel


__version__ = "0.1.0"

AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkModel, exist_ok=True)

__all__ = [
    "DSparkConfig",
    "DSparkModel",
    "DSparkOutput",
    "DSparkPreTrainedModel",
    "Proposal",
    "RunStatistics",
    "install_dispatcher",
    "remove_dispatcher",
]
