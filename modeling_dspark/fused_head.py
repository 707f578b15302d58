"""The whole sequential head of a block as one operation, `dspark::sequential_head`.

Unfused, every position takes a handful of small operations and a pass over the logits; the necessary work is one read of
`W2` a position. `fused_backends` has the fused forms; elsewhere the operation is the same steps in PyTorch.

Tokens are chosen from the logits as they are returned: rounded to the dtype of the weights, ties to the lowest index.
Numbers for drawing come from a counter (Philox), so they depend on seed, row and position alone (and on a GPU on the column).

Shapes: `R` rows, `K` positions, `D` hidden size, `V` vocabulary, `Vd` draft vocabulary, `r` Markov rank.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from .fused_backends import backend_for, backend_names, give_up, serves
from .fused_build import BuildError
from .fused_launch import LaunchError
from .fused_torch import HeadInputs, Outputs, empty_outputs, head_in_torch
from .model_protocol import Drafter


logger = logging.get_logger(__name__)

_MIN_TEMPERATURE = 1e-30
_MIXER_ROWS = {"vanilla": 0, "gated": 1, "rnn": 3}  # of the linear layer that makes a latent, in ranks


class BlockTokens(NamedTuple):
    """The tokens of a block.

    Attributes:
        columns (`torch.LongTensor` of shape `(R, K)`): Places of the tokens in the draft vocabulary.
        tokens (`torch.LongTensor` of shape `(R, K)`): Tokens of the target's vocabulary.
        logits (`torch.Tensor` of shape `(R, K, Vd)`, *optional*): Logits that they were chosen from, if requested.
        confidence_logits (`torch.Tensor` of shape `(R, K)`, *optional*): In fp32; `None` without a confidence head.
    """

    columns: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor | None
    confidence_logits: torch.Tensor | None


def why_not_fused(drafter: Drafter, logits_dtype: torch.dtype, *, choice: str = "auto") -> str | None:
    """Why the heads of a drafter cannot run as one operation, or `None` if they can.

    Args:
        drafter ([`Drafter`]): The drafter.
        logits_dtype (`torch.dtype`): Of the base logits, which are on the drafter's device.
        choice (`str`, *optional*, defaults to `"auto"`): The backend, one of `CHOICES`.

    Raises:
        ValueError: if `choice` is not one of `CHOICES`.
    """
    head, device = drafter.markov_head, drafter.device
    if not backend_names(device, choice):
        return f"there is no fused form for {device.type}" if choice == "auto" else f"`fused_head={choice!r}`"
    if head is None:
        return "the drafter has no Markov head"
    own = vars(drafter)  # a method that the user has replaced may carry its attributes
    if not all(
        getattr(getattr(type(drafter), name), "fusable", False) and name not in own
        for name in ("head_step", "to_target_ids")
    ):
        return "the drafter has a custom `head_step` or `to_target_ids`"
    if not all(_is_plain(module) for module in (head, drafter.confidence_head) if module is not None):
        return "its heads do more than their weights say: an adapter, a hook, quantisation"
    weight = head.markov_w2.weight
    weights = [
        item for module in (head, drafter.confidence_head) if module is not None for item in module.parameters()
    ]
    is_alike = serves(*weights) and (weight.dtype, weight.device) == (logits_dtype, device)
    if not is_alike or torch.is_autocast_enabled(device.type):
        reason = (
            f"it needs the target's logits ({logits_dtype}) and the drafter's weights ({weight.dtype}) on one "
            "device and in one dtype, which is fp32, bf16 or fp16; load both models with the same `dtype=`, and leave out autocast"
        )
        logger.warning_once(f"The fused sequential head is not used, and drafting is a little slower: {reason}.")
        return reason
    if backend_for(device, weight.dtype, weight.shape[1], choice=choice) is None:
        return "no backend could be made; a warning above names the reason"
    return None


def head_weights(drafter: Drafter) -> dict[str, Any]:
    """Weights and kind of a drafter's heads, by the names of the operation's arguments."""
    head: Any = drafter.markov_head
    confidence = drafter.confidence_head
    mixer = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}[head.kind]
    mixer = None if mixer is None else getattr(head, mixer)
    return {
        "w1": head.markov_w1.weight,
        "w2": head.markov_w2.weight,
        "mixer_weight": None if mixer is None else mixer.weight,
        "mixer_bias": None if mixer is None else mixer.bias,
        "confidence_weight": None if confidence is None else confidence.proj.weight[0],
        "confidence_bias": None if confidence is None else confidence.proj.bias,
        "draft_to_target": drafter.d2t if drafter.config.draft_vocab_size is not None else None,
        "kind": head.kind,
    }


def _is_plain(head: nn.Module) -> bool:
    """Whether a head computes exactly what its weights imply."""
    if torch.nn.modules.module._has_any_global_hook():
        return False
    return all(
        (type(module) in (nn.Linear, nn.Embedding) or type(module).__name__ in ("MarkovHead", "ConfidenceHead"))
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not any(map(callable, vars(module).values()))  # a `forward` of accelerate's, a `step` of a user's
        and all(type(weight) is nn.Parameter for weight in module._parameters.values() if weight is not None)
        for module in head.modules()
    )


def fused_block(
    heads: dict[str, Any],
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    keep_logits: bool = False,
    backend: str = "auto",
) -> BlockTokens:
    """Choose or draw the tokens of a block, position after position (docs/data-path.md, "One round").

    Args:
        heads (`dict`): Weights and kind, as `head_weights` gives them.
        base_logits (`torch.Tensor` of shape `(R, K, Vd)`): `U`.
        hidden (`torch.Tensor` of shape `(R, K, D)`): Backbone outputs.
        anchors (`torch.LongTensor` of shape `(R,)`): Token before the first position, in target ids, on the same device.
        temperature (`float`, *optional*, defaults to `0.0`): Of the draws; 0 takes the highest logit.
        seed (`int`, *optional*, defaults to `0`): Of the draws.
        keep_logits (`bool`, *optional*, defaults to `False`): Whether to return the logits.
        backend (`str`, *optional*, defaults to `"auto"`): The backend, one of `CHOICES`.

    Raises:
        ValueError: if a shape or a device is wrong; on a CPU also if an anchor is not in the target's vocabulary. (A GPU
            takes the nearest token instead, because checking would wait for the device.)
    """
    with torch.no_grad():  # choices have no gradient
        columns, tokens, logits, confidence = _operation(
            base_logits,
            hidden,
            anchors,
            **heads,
            temperature=temperature,
            seed=seed,
            keep_logits=keep_logits,
            backend=backend,
        )
    has_confidence = heads["confidence_weight"] is not None
    return BlockTokens(columns, tokens, logits if keep_logits else None, confidence if has_confidence else None)


def _run(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    mixer_weight: torch.Tensor | None,
    mixer_bias: torch.Tensor | None,
    confidence_weight: torch.Tensor | None,
    confidence_bias: torch.Tensor | None,
    draft_to_target: torch.Tensor | None,
    kind: str,
    temperature: float,
    seed: int,
    keep_logits: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = locals()
    inputs = HeadInputs(**{name: arguments[name] for name in HeadInputs._fields})
    _check_shapes(inputs)
    tensors = (base_logits, hidden, w1, w2, mixer_weight, mixer_bias, confidence_weight, confidence_bias)
    # Kernels have the temperature's inverse in fp32.
    is_usual = temperature == 0 or _MIN_TEMPERATURE <= temperature <= 1 / _MIN_TEMPERATURE
    kernel = backend_for(w2.device, w2.dtype, w2.shape[1], choice=backend) if is_usual and serves(*tensors) else None
    if kernel is not None:
        try:
            return kernel(inputs)
        except (BuildError, LaunchError) as error:
            give_up(kernel, w2.dtype, w2.shape[1], error)
    return head_in_torch(inputs)


def _check_shapes(inputs: HeadInputs) -> None:
    """Refuse shapes of which a kernel would read beyond the end."""
    base_logits, hidden, kind, confidence = inputs.base_logits, inputs.hidden, inputs.kind, inputs.confidence_weight
    if (
        kind not in _MIXER_ROWS
        or base_logits.dim() != 3
        or hidden.dim() != 3
        or not 0 <= inputs.temperature < math.inf
    ):
        raise ValueError(
            f"`kind` must be one of {tuple(_MIXER_ROWS)}, `base_logits` [R, K, Vd], `hidden` [R, K, D] and `temperature` "
            f"from 0, got {kind!r}, {list(base_logits.shape)}, {list(hidden.shape)} and {inputs.temperature}."
        )
    (num_rows, num_positions, vocabulary), size, rank = base_logits.shape, hidden.shape[2], inputs.w2.shape[-1]
    if vocabulary == 0 or rank == 0 or (inputs.draft_to_target is None and vocabulary > len(inputs.w1)):
        raise ValueError(
            f"`base_logits` must have columns, `w2` a rank, and `w1` a row for each column, got {vocabulary}, {rank} and "
            f"{len(inputs.w1)}."
        )
    units, reads = _MIXER_ROWS[kind] * rank, 2 * rank if kind == "rnn" else rank
    expected = {
        "hidden": (num_rows, num_positions, size),
        "anchors": (num_rows,),
        "w1": (len(inputs.w1), rank),
        "w2": (vocabulary, rank),
        "mixer_weight": (units, size + reads) if units else None,
        "mixer_bias": (units,) if units else None,
        "confidence_weight": None if confidence is None else (size if len(confidence) == size else size + rank,),
        "confidence_bias": None if confidence is None else (1,),
        "draft_to_target": None if inputs.draft_to_target is None else (vocabulary,),
    }
    for name, shape in expected.items():
        tensor = getattr(inputs, name)
        actual = None if tensor is None else tuple(tensor.shape)
        if actual != shape:
            raise ValueError(f"`{name}` must be of shape {shape}, got {actual}.")
    if inputs.anchors.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`anchors` must be integers, got {inputs.anchors.dtype}.")
    _check_devices(inputs)


def _check_devices(inputs: HeadInputs) -> None:
    device = inputs.base_logits.device
    for name, tensor in inputs._asdict().items():
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            raise ValueError(f"`{name}` must be on {device}, where `base_logits` is, got {tensor.device}.")


def _fake(*arguments: Any) -> Outputs:
    inputs = HeadInputs(*arguments[:-1])  # the last one chooses the backend
    _check_devices(inputs)  # a single tensor on `meta` leads here
    return empty_outputs(inputs.base_logits, inputs.confidence_weight, with_logits=inputs.keep_logits)


def _registered(library: torch.library.Library) -> Callable[..., Outputs]:
    """The operation. An earlier copy of this code may have registered it, perhaps with other arguments."""
    name, schema = "sequential_head", torch.library.infer_schema(_run, mutates_args=())
    registered = getattr(torch.ops.dspark, name, None)
    if registered is not None:
        if str(registered.default._schema) == f"dspark::{name}{schema}":
            return registered.default
        name += "_" + hashlib.sha256(schema.encode()).hexdigest()[:8]
    # By hand, because the wrapper of `custom_op` takes as long as the rest of a call.
    library.define(name + schema)
    library.impl(name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dspark::{name}", _fake, lib=library)
    return getattr(torch.ops.dspark, name).default


_library = torch.library.Library("dspark", "FRAGMENT")  # the operation lives as long as this
_operation = _registered(_library)


def fusable(method: Callable) -> Callable:
    """Mark a method that does what the fused operation does."""
    method.fusable = True  # type: ignore[attr-defined]
    return method


__all__ = ["BlockTokens", "fusable", "fused_block", "head_weights", "why_not_fused"]
