"""The interface for recorders and measurements, and their only access to a round.

Shapes: `R` requests that draft, `Q` positions of the block, `D` hidden size.
"""

import torch

from .draft_tokens import DraftBlock
from .engine_request import Request
from .engine_round import ScheduledDrafts


class EngineObserver:
    """Called at each stage of a round, in this order; does nothing. Subclass it and override what matters.

    An observer must not change requests or tensors.
    """

    def begun(self, requests: list[Request]) -> None:
        """A round begins with these requests, in the order of the target's rows."""

    def encoded(self, hidden_states: torch.Tensor) -> None:
        """The backbone has run: its output `[R, Q, D]`. Not called in a plain step."""

    def scored(self, block: DraftBlock) -> None:
        """The base logits exist. Not called in a plain step."""

    def drafted(self, drafts: ScheduledDrafts) -> None:
        """Drafts exist and are scheduled; without a proposal in a plain step."""

    def verified(self, drafts: ScheduledDrafts) -> None:
        """The target has run over anchors and drafts."""

    def settled(self, drafts: ScheduledDrafts) -> None:
        """Texts have their new tokens, and each request's statistics the round."""


def checked_observer(observer: EngineObserver | None) -> EngineObserver:
    """The observer to call, one that does nothing by default.

    Raises:
        TypeError: for anything without the methods of [`EngineObserver`]; a subclass from another copy of the code has them.
    """
    if observer is None:
        return EngineObserver()
    stages = [name for name in vars(EngineObserver) if not name.startswith("_")]
    if isinstance(observer, type) or not all(callable(getattr(observer, name, None)) for name in stages):
        raise TypeError(f"`observer` must be an instance of a subclass of `EngineObserver`, got {observer!r}.")
    return observer


__all__ = ["EngineObserver", "checked_observer"]
