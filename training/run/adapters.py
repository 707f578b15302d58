"""Low-rank adapters (LoRA, by `peft`) for a drafter: fine-tune one for a domain, and merge it for use.

The backbone's linear layers get adapters; the heads, which are small, are trained whole. What is saved for use is a plain
drafter with the adapters merged.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import nn

from modeling_dspark import DSparkModel


if TYPE_CHECKING:
    from peft import LoraConfig

_HEADS = ("markov_head", "confidence_head")


def add_lora(drafter: DSparkModel, *, rank: int, alpha: int, dropout: float = 0.0) -> "LoraConfig":
    """Put adapters into every linear layer of the backbone; from then on only they and the heads train.

    Raises:
        ValueError: without `peft`.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("`peft: lora` needs the package peft: `pip install peft`.") from error
    names = [
        name
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(_HEADS)
    ]
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names)
    inject_adapter_in_model(config, drafter)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith(_HEADS))
    return config


def save_adapter(drafter: DSparkModel, config: "LoraConfig", folder: Path) -> None:
    """Adapters and heads as `peft.PeftModel.from_pretrained(drafter, folder)` reads them."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    heads = {name for name, _ in drafter.named_children() if name in _HEADS}
    described = replace(config, modules_to_save=sorted(heads))  # which `peft` would have wrapped in training
    described.save_pretrained(str(folder))
    tensors = get_peft_model_state_dict(drafter, adapter_name="default")
    tensors |= {name: tensor for name, tensor in drafter.state_dict().items() if name.startswith(_HEADS)}
    # The prefix is that of a `PeftModel`, which holds the drafter; here there was none.
    save_file(
        {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )


def merge_lora(drafter: DSparkModel) -> None:
    """Add the adapters to the weights that they adapt, and take them out."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(drafter.named_modules()):
        if isinstance(module, LoraLayer):
            merged: Any = module
            merged.merge()
            parent, _, child = name.rpartition(".")
            setattr(drafter.get_submodule(parent), child, module.get_base_layer())
    if hasattr(drafter, "peft_config"):
        del drafter.peft_config
    drafter.requires_grad_(True)


__all__ = ["add_lora", "merge_lora", "save_adapter"]
