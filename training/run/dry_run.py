"""The cost of a training run before anything is loaded: parameters, memory per GPU, size of a feature cache.

Target and drafter are made on the meta device, so the counts are exact and cost nothing. Weights, gradients, optimizer
states and the feature cache follow from them; activations are an estimate of what autograd keeps.

Shapes: `B` sequences of a GPU, `T` tokens, `Q` block positions, `D` hidden size, `L` tapped layers, `V` vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from modeling_dspark import DSparkConfig, DSparkModel
from training.common.targets import resolve_target
from training.data.features import bytes_per_token
from training.run.adapters import add_lora
from training.run.arguments import DSparkTrainingArguments


logger = logging.get_logger(__name__)

_SHARDS = 8  # GPUs of the second column
_LOSS_CHUNK = 256  # positions, as in training.objective.losses
_FP32 = 4


@dataclass(frozen=True)
class DryRun:
    """Counts and sizes of a training run.

    Attributes:
        target_parameters, drafter_parameters, trainable_parameters (`int`): Exact counts.
        memory (`dict[str, int]`): Bytes on each GPU with DDP, by use.
        sharded (`dict[str, int]`): The same with FSDP over eight GPUs.
        cache_bytes (`int`): Feature cache of 1,000 conversations of `max_length` tokens.
        block_positions (`int`): The maximum number of block positions in a GPU's batch.
        sequences (`int`): Sequences of an optimizer step on one GPU.
    """

    target_parameters: int
    drafter_parameters: int
    trainable_parameters: int
    memory: dict[str, int]
    sharded: dict[str, int]
    cache_bytes: int
    block_positions: int
    sequences: int

    def __str__(self) -> str:
        lines = [
            "Dry run: nothing is loaded or written.",
            f"  target       {self.target_parameters:>16,} parameters, frozen",
            f"  drafter      {self.drafter_parameters:>16,} parameters, {self.trainable_parameters:,} of them trainable",
            f"  step         {self.sequences:>16,} sequences on each GPU, {self.block_positions:,} block positions at once",
            "",
            f"  {'GB on each GPU':<36}{'DDP':>10}{f'FSDP x {_SHARDS}':>12}",
        ]
        for name, amount in self.memory.items():
            lines.append(f"  {name:<36}{_gb(amount):>10}{_gb(self.sharded[name]):>12}")
        total, sharded = sum(self.memory.values()), sum(self.sharded.values())
        lines.append(f"  {'total':<36}{_gb(total):>10}{_gb(sharded):>12}")
        lines += ["", f"  feature cache: {_gb(self.cache_bytes)} GB for 1,000 conversations of the full length"]
        return "\n".join(lines) + "\n"


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.2f}"


def meta_target(name_or_path: str, shape_file: str | None, dtype: str) -> PreTrainedModel:
    """The target without weights, from its config: of the folder or the Hub, or else of `shape_file`.

    Args:
        name_or_path (`str`): The target, as for `training.common.targets.load_target`.
        shape_file (`str`, *optional*): JSON of config fields, `model_type` among them.
        dtype (`str`): Of the weights.

    Raises:
        ValueError: if neither can be read, or there is no such dtype.
    """
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"`target_dtype` must be a dtype of PyTorch, like bfloat16, got {dtype!r}.")
    try:
        config = AutoConfig.from_pretrained(resolve_target(name_or_path))
    except OSError as error:
        if shape_file is None:
            raise ValueError(
                f"`target`: the config of `{name_or_path}` cannot be read ({str(error).splitlines()[0]}). Pass a folder, "
                "go online, or name a JSON file of its config fields as `target_shape`."
            ) from error
        logger.warning(f"The config of `{name_or_path}` cannot be reached; its shape is read from `{shape_file}`.")
        config = _config_of(Path(shape_file))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def _config_of(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"`target_shape` needs a JSON file, got `{path}`.")
    fields = json.loads(path.read_text())
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"`target_shape`: `{path}` must hold an object of config fields with `model_type`.")
    return AutoConfig.for_model(**fields)


def given_config(drafter: str) -> DSparkConfig:
    """Configuration of the drafter that training continues.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        return DSparkConfig.from_pretrained(drafter)
    except OSError as error:
        raise ValueError(
            f"`drafter`: `{drafter}` is neither a folder with a config nor on the Hub ({str(error).splitlines()[0]})."
        ) from error


def dry_run(
    target: PreTrainedModel,
    config: DSparkConfig,
    training: DSparkTrainingArguments,
    *,
    max_length: int,
    lora_rank: int | None = None,
) -> DryRun:
    """Sizes of training a drafter of `config`, whole or by adapters, for `target`, which may be on the meta device."""
    with torch.device("meta"):
        drafter = DSparkModel(config)
        num_parameters = drafter.num_parameters()  # without adapters
        if lora_rank is not None:
            add_lora(drafter, rank=lora_rank, alpha=lora_rank)
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    kept = {
        "drafter: weights (fp32)": _FP32 * sum(parameter.numel() for parameter in drafter.parameters()),
        "drafter: gradients (fp32)": _FP32 * trainable,
        "drafter: optimizer, two states (fp32)": 2 * _FP32 * trainable,
    }
    batch = training.per_device_train_batch_size
    anchors = min(training.num_anchors, max_length)
    passing = {
        f"target: weights ({str(target.dtype).removeprefix('torch.')})": _size(target),
        "target: hidden states (estimate)": _target_states(target, config, batch * max_length),
        "drafter: activations (estimate)": _activations(config, training, batch, anchors, max_length),
        "loss: one chunk of logits (estimate)": _loss(target, config),
    }
    return DryRun(
        target_parameters=sum(parameter.numel() for parameter in target.parameters()),
        drafter_parameters=num_parameters,
        trainable_parameters=trainable,
        memory=kept | passing,
        sharded={name: -(-amount // _SHARDS) for name, amount in kept.items()} | passing,
        cache_bytes=1000 * max_length * bytes_per_token(config.hidden_size, len(config.target_layer_ids or ())),
        block_positions=batch * anchors * config.block_size,
        sequences=batch * training.gradient_accumulation_steps,
    )


def _size(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _target_states(target: PreTrainedModel, config: DSparkConfig, tokens: int) -> int:
    """The tapped hidden states, and a layer's input, output and widest intermediate."""
    text = target.config.get_text_config()
    width = (len(config.target_layer_ids or ()) + 2) * text.hidden_size + 3 * text.intermediate_size
    return tokens * width * target.dtype.itemsize


def _activations(
    config: DSparkConfig, training: DSparkTrainingArguments, batch: int, anchors: int, max_length: int
) -> int:
    """The backbone's tensors that autograd keeps: norms, projections, rotations and products of each layer."""
    itemsize = 2 if training.bf16 or training.fp16 else _FP32
    size, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim or 0
    key_value = 4 * (config.num_key_value_heads or 0) * head_dim
    block = (5 + 2 * config.sandwich_norms) * size + 3 * heads * head_dim + key_value + 4 * config.intermediate_size
    queries, context = batch * anchors * config.block_size, batch * max_length
    layer = queries * block + context * key_value
    layers = config.num_hidden_layers
    # Transformers 5.24 renamed it; older versions have the first name only.
    checkpointing = training.gradient_checkpointing or getattr(training, "activation_checkpointing", False)
    elements = queries * size * layers + layer if checkpointing else layer * layers
    elements += context * (len(config.target_layer_ids or ()) + 2) * size  # the fusion's input and output
    # Boolean, and once more as the bias that attention adds.
    mask = queries * (max_length + anchors * config.block_size)
    return elements * itemsize + mask * (1 + itemsize)


def _loss(target: PreTrainedModel, config: DSparkConfig) -> int:
    """One chunk of draft logits, q, p, gradient and the logits before them, and the gradient of `W2` twice."""
    vocabulary = config.draft_vocab_size or config.vocab_size
    logits = _LOSS_CHUNK * (4 * vocabulary * _FP32 + config.vocab_size * target.dtype.itemsize)
    return logits + 2 * vocabulary * config.markov_rank * _FP32


__all__ = ["DryRun", "dry_run", "given_config", "meta_target"]
