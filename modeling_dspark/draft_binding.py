"""A drafter bound to a target: what it borrows, and how its heads run. Both are decided once per call.

Shapes: `V` vocabulary, `Vd` draft vocabulary.
"""

import os
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from .fused_backends import backend_names
from .fused_head import head_weights, why_not_fused
from .model_protocol import Drafter
from .target_binding import TargetBinding, logits_dtype


_VARIABLE = "DSPARK_FUSED_HEAD"


class DraftBinding(TargetBinding):
    """Embedding and LM head of the target, and the drafter's heads as one operation where they can be.

    Args:
        drafter ([`Drafter`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): Its target.
        fused_head (`str`, *optional*):
            What the heads run on: `"auto"`, `"cpu"`, `"cuda"`, `"nvrtc"` or `"torch"` (position by position). By default the
            environment variable `DSPARK_FUSED_HEAD`, else `"auto"`.

    Attributes:
        backend (`str`): What the operation runs on.

    Raises:
        ValueError: if the target does not fit the drafter, or `fused_head` is none of the choices.
    """

    def __init__(self, drafter: Drafter, target: PreTrainedModel, *, fused_head: str | None = None):
        super().__init__(target, drafter.config, drafter.draft_token_ids)
        self.drafter, self.backend = drafter, head_choice(fused_head)
        backend_names(drafter.device, self.backend)  # refuses a wrong choice now; a build can wait for the first draft

    @cached_property
    def reason(self) -> str | None:
        """Why the heads are not fused, or `None`."""
        return why_heads_are_not_fused(self.drafter, self.target, self.backend)

    @cached_property
    def heads(self) -> dict[str, Any] | None:
        """Weights for the fused operation; `None` where the heads run position by position."""
        return None if self.reason else head_weights(self.drafter)


def why_heads_are_not_fused(drafter: Drafter, target: PreTrainedModel, choice: str) -> str | None:
    """The reason for a pair, or `None`."""
    return why_not_fused(drafter, logits_dtype(target.get_output_embeddings(), drafter.dtype), choice=choice)


def head_choice(fused_head: str | None) -> str:
    """The backend asked for: the argument, else the environment variable, else `"auto"`."""
    return fused_head or os.environ.get(_VARIABLE) or "auto"


__all__ = ["DraftBinding", "head_choice", "why_heads_are_not_fused"]
