"""What differs between the supported versions of Transformers, and nothing else."""

from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import output_capturing


def cache_keyword() -> str:
    """`cache` from Transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def target_cache(model_kwargs: dict[str, Any]) -> Any:
    """The target's cache among the keyword arguments of a decoding method, or `None`."""
    return model_kwargs.get(cache_keyword())


def loop_takes_embeddings() -> bool:
    """Whether Transformers' assisted loop is right with `inputs_embeds` (not before 5.24)."""
    return cache_keyword() == "cache"


def selects_hidden_states() -> bool:
    """Whether `output_hidden_states` may be a list of indices.

    Transformers before 5.24 counts a selected index from the first layer's output, and so cannot select the embedding
    output.
    """
    return getattr(output_capturing, "selected_hidden_states", None) is not None


__all__ = ["cache_keyword", "loop_takes_embeddings", "selects_hidden_states", "target_cache"]
