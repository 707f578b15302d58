"""The interface of a drafter in the data path. `DSparkModel` has it, and so has a copy of it from remote code.

Shapes: `...` any leading shape, `R` rows, `D` hidden size, `V` vocabulary, `Vd` draft vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from .configuration_dspark import DSparkConfig
from .model_cache import DSparkCache
from .model_heads import ConfidenceHead, MarkovHead


class Drafter(Protocol):
    """A drafter, as drafting, decoding and measuring use it."""

    config: DSparkConfig
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    d2t: torch.Tensor
    last_run: Any
    __call__: Callable[..., Any]  # the backbone: `DSparkModel.forward`

    @property
    def norm(self) -> nn.Module:
        """The final norm of the backbone."""

    @property
    def device(self) -> torch.device:
        """Device of its weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids `[Vd]` of a reduced draft vocabulary, or `None`."""

    def extend_context(self, features: torch.Tensor, cache: DSparkCache, *, row: int) -> None:
        """Add target features to one row of the context without drafting."""

    def head_step(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        previous_tokens: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> Any:
        """One draft position through the sequential and the confidence head."""

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids to target ids."""

    def to_target_logits(self, logits: torch.Tensor, fill: float = ...) -> torch.Tensor:
        """Logits `[R, Vd]` in the target's vocabulary `[R, V]`."""


__all__ = ["Drafter"]
