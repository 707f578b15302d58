"""Decoding with the drafter of this repository, for any batch size: the loop behind `assistant_model`, by another door.

target.generate(**inputs, custom_generate="org/repo", assistant_model=drafter, trust_remote_code=True)
"""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel


def generate(model: PreTrainedModel, assistant_model: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """Generate with `model`, the target; takes every argument of `GenerationMixin.generate`.

    Raises:
        ValueError: without a drafter.
    """
    if getattr(getattr(assistant_model, "config", None), "model_type", None) != "dspark":
        raise ValueError(
            "Pass the drafter as `assistant_model`: `AutoModel.from_pretrained(<this repository>, trust_remote_code=True)`; "
            f"got {type(assistant_model).__name__}."
        )
    return GenerationMixin.generate(model, assistant_model=assistant_model, **kwargs)
