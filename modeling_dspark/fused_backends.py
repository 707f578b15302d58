"""Backends of the fused head: C++ on a CPU, CUDA by nvcc or NVRTC on a GPU, chosen per device and built on first use.

`DSPARK_FUSED_HEAD` chooses: `auto` (the default: `cpu` on a CPU, `cuda` or else `nvrtc` on a GPU), `cpu`, `cuda`, `nvrtc`,
or `torch` for none. A failure is reported once, and not tried again in the process.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from transformers.utils import logging

from .fused_build import BuildError, load_library
from .fused_launch import KINDS, HeadArguments, Kernels, LaunchError, launch, scratch_bytes
from .fused_nvcc import NoToolkitError, NvccKernels
from .fused_nvrtc import NvrtcKernels
from .fused_sources import HEAD_CPU, HEAD_CUDA
from .fused_torch import HeadInputs, Outputs, empty_outputs


logger = logging.get_logger(__name__)

CHOICES = ("auto", "cpu", "cuda", "nvrtc", "torch")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# CUDA's errors for too many blocks in a cooperative launch, as on a partitioned GPU, and for an unsupported feature.
_NOT_COOPERATIVE = (720, 801)


class Backend(Protocol):
    """Runs blocks on one device."""

    def __call__(self, inputs: HeadInputs) -> Outputs:
        """Columns, tokens, logits and confidence logits.

        Raises:
            BuildError: if a kernel for these sizes cannot be made.
            LaunchError: if it cannot be launched.
        """


class CpuBackend:
    """The C++ of head_cpu.cpp.

    Args:
        isa (`int`, *optional*, defaults to `-1`): 0 generic, 1 AVX2, 2 AVX-512, 3 with bf16 products; -1: the best.
    """

    def __init__(self, isa: int = -1) -> None:
        self._library = load_library("dspark_head", HEAD_CPU)
        self._isa = isa

    @property
    def best_isa(self) -> int:
        """Of this machine."""
        return self._library.dspark_head_best_isa()

    def __call__(self, inputs: HeadInputs) -> Outputs:
        """A block; draws by inversion."""
        # A draw reads the logits twice, so they are always written for it.
        packed, outputs, _alive = pack(inputs, with_logits=inputs.keep_logits or inputs.temperature > 0)
        self.launch(packed)
        columns, tokens, logits, confidence = outputs
        return columns, tokens, logits if inputs.keep_logits else inputs.base_logits.new_empty(0), confidence

    def launch(self, packed: HeadArguments) -> None:
        """Run a block whose arguments are packed.

        Raises:
            LaunchError: if the machine lacks the instruction set.
            ValueError: if an anchor or a draft token is not in the target's vocabulary.
        """
        packed.isa, packed.threads = self._isa, torch.get_num_threads()
        refusal = self._library.dspark_head_cpu(ctypes.byref(packed))
        if refusal == 1:
            raise LaunchError(f"this machine lacks instruction set {self._isa}; its best is {self.best_isa}")
        if refusal == 2:
            anchors = (ctypes.c_int64 * packed.rows).from_address(packed.anchors)
            raise ValueError(
                f"`anchors` must be tokens from 0 to {packed.target_vocabulary - 1}, got {list(anchors)}."
            )
        if refusal == 3:
            raise ValueError(f"`draft_to_target` must lead to tokens from 0 to {packed.target_vocabulary - 1}.")
        if refusal:
            raise LaunchError(f"no kernel for dtype {packed.dtype}")


class GpuBackend:
    """The kernel of head_cuda.cu on one GPU; draws by Gumbel noise.

    Args:
        make_kernels (callable): `NvccKernels` or `NvrtcKernels`.
        device (`torch.device`): The GPU.
    """

    def __init__(self, make_kernels: Callable[[str, tuple[int, int]], Kernels], device: torch.device) -> None:
        with torch.cuda.device(device):
            self._kernels = make_kernels(HEAD_CUDA, torch.cuda.get_device_capability(device))
        properties = torch.cuda.get_device_properties(device)
        self._sizes = {
            "num_multiprocessors": properties.multi_processor_count,
            "max_shared_bytes": getattr(properties, "shared_memory_per_block_optin", 48 * 1024),  # that every GPU has
        }
        self._stepwise = False

    def __call__(self, inputs: HeadInputs) -> Outputs:
        """A block on the current stream."""
        device = inputs.base_logits.device
        with torch.cuda.device(device):
            packed, outputs, _alive = pack(inputs, with_logits=inputs.keep_logits)
            size = scratch_bytes(packed.rows, packed.positions, packed.rank, inputs.kind)
            scratch = torch.zeros(size, dtype=torch.uint8, device=device)
            packed.scratch = scratch.data_ptr()
            vectors = [packed.w1, packed.w2, packed.rank * inputs.w1.element_size()]
            packed.aligned = all(number % 16 == 0 for number in vectors)
            stream = torch.cuda.current_stream(device).cuda_stream
            stepwise = self._stepwise or torch.cuda.is_current_stream_capturing()
            try:
                launch(self._kernels, packed, stream=stream, stepwise=stepwise, **self._sizes)
            except LaunchError as error:
                if stepwise or error.code not in _NOT_COOPERATIVE:
                    raise
                # Nothing has run so far.
                logger.warning_once(
                    f"The fused sequential head needs one launch per position on {device}, not one per block: {error}."
                )
                launch(self._kernels, packed, stream=stream, stepwise=True, **self._sizes)
                self._stepwise = True
        return outputs


def pack(inputs: HeadInputs, *, with_logits: bool) -> tuple[HeadArguments, Outputs, list[torch.Tensor]]:
    """Arguments for a kernel, its outputs, and all tensors behind its addresses."""
    base_logits, hidden, confidence = inputs.base_logits, inputs.hidden, inputs.confidence_weight
    num_rows, num_positions, vocabulary = base_logits.shape
    if hidden.stride()[1:] != (hidden.shape[2], 1):
        hidden = hidden.contiguous()
    outputs = empty_outputs(base_logits, confidence, with_logits=with_logits)
    named = dict(zip(("columns", "tokens", "logits", "confidence"), outputs, strict=True))
    tensors = {
        "w1": inputs.w1.contiguous(),
        "w2": inputs.w2.contiguous(),
        "base": base_logits.contiguous(),
        "hidden": hidden,
        "anchors": inputs.anchors.long().contiguous(),
        "draft_to_target": None if inputs.draft_to_target is None else inputs.draft_to_target.long().contiguous(),
        "confidence_weight": None if confidence is None else confidence.contiguous(),
        "confidence_bias": inputs.confidence_bias,
        **_mixer(inputs, hidden),
        **{name: tensor if tensor.numel() else None for name, tensor in named.items()},
    }
    arguments = HeadArguments(
        rows=num_rows,
        positions=num_positions,
        vocabulary=vocabulary,
        target_vocabulary=len(inputs.w1),
        rank=inputs.w2.shape[1],
        hidden_size=hidden.shape[2],
        hidden_row_stride=hidden.stride(0),
        mixer_row_stride=0 if inputs.mixer_weight is None else inputs.mixer_weight.shape[1],
        temperature=inputs.temperature,
        seed=inputs.seed % 2**64,
        kind=KINDS.index(inputs.kind),
        confidence_reads_tokens=confidence is not None and len(confidence) > hidden.shape[2],
        dtype=_DTYPES[base_logits.dtype],
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
    )
    return arguments, outputs, [tensor for tensor in tensors.values() if tensor is not None]


def _mixer(inputs: HeadInputs, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mixer's weight for tokens and state, and its product with the hidden states of all positions."""
    if inputs.mixer_weight is None:
        return {}
    weight, size = inputs.mixer_weight.contiguous(), hidden.shape[2]
    if inputs.kind == "gated":  # [hidden, previous]
        of_hidden, of_tokens = weight[:, :size], weight[:, size:]
    else:  # [state, previous, hidden]
        of_tokens, of_hidden = weight[:, :-size], weight[:, -size:]
    product = nn.functional.linear(hidden, of_hidden, inputs.mixer_bias).to(
        hidden.dtype
    )  # autocast chooses its own dtype
    return {"mixer_hidden": product.contiguous(), "mixer_weight": of_tokens}


_lock = threading.Lock()
_made: dict[tuple[str, torch.device], Backend | None] = {}  # `None`: it failed
_given_up: set[tuple[Backend, torch.dtype | None, int | None]] = set()
_makers: dict[str, Callable[[torch.device], Backend]] = {
    "cpu": lambda _: CpuBackend(),
    "cuda": lambda device: GpuBackend(NvccKernels, device),
    "nvrtc": lambda device: GpuBackend(NvrtcKernels, device),
}


def backend_names(device: torch.device, choice: str) -> tuple[str, ...]:
    """Backends for a device, best first; none stands for PyTorch.

    Raises:
        ValueError: if `choice` is not one of `CHOICES`.
    """
    if choice not in CHOICES:
        raise ValueError(
            f"`fused_head` (or the environment variable DSPARK_FUSED_HEAD) must be one of {CHOICES}, got {choice!r}."
        )
    names: tuple[str, ...] = ()
    if device.type == "cpu":
        names = ("cpu",)
    elif device.type == "cuda" and torch.version.cuda is not None:  # the same device type is AMD's
        names = ("cuda", "nvrtc")
    return names if choice == "auto" else (choice,) if choice in names else ()


def serves(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel can take these tensors: all on one device, in one dtype that the kernels know."""
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors if tensor is not None}
    return len(kinds) == 1 and next(iter(kinds))[0] in _DTYPES


def backend_for(
    device: torch.device, dtype: torch.dtype | None = None, rank: int | None = None, *, choice: str = "auto"
) -> Backend | None:
    """The backend to run on, built if necessary, or `None` for PyTorch.

    Args:
        device (`torch.device`): Where the tensors are.
        dtype (`torch.dtype`, *optional*): Of the weights.
        rank (`int`, *optional*): Of the Markov head. Backends that failed for this dtype and rank are skipped.
        choice (`str`, *optional*, defaults to `"auto"`): One of `CHOICES`.

    Raises:
        ValueError: if `choice` is not one of `CHOICES`.
    """
    for name in (names := backend_names(device, choice)):
        key = (name, device)
        backend = _made[key] if key in _made else _make(*key, last=name == names[-1])
        if backend is not None and (backend, dtype, rank) not in _given_up:
            return backend
    return None


def give_up(backend: Backend, dtype: torch.dtype, rank: int, error: Exception) -> None:
    """Stop using this backend for weights of this dtype and rank, and warn with the reason."""
    _given_up.add((backend, dtype, rank))
    _warn(str(error))


def _make(name: str, device: torch.device, *, last: bool) -> Backend | None:
    """Make a backend, in one thread. If a toolkit is missing, only the last backend warns."""
    with _lock:
        if (name, device) not in _made:
            try:
                _made[name, device] = _makers[name](device)
            except (BuildError, LaunchError) as error:
                _made[name, device] = None
                if last:
                    _warn(f"{name}: {error}")
                else:
                    log = logger.info if isinstance(error, NoToolkitError) else logger.warning_once
                    log(f"NVRTC compiles the fused sequential head, because nvcc could not build it: {error}.")
        return _made[name, device]


def _warn(reason: str) -> None:
    logger.warning_once(
        f"The fused sequential head is not used, and drafting is a little slower: {reason}. "
        "Set DSPARK_FUSED_HEAD=torch to silence this warning."
    )


__all__ = [
    "CHOICES", "Backend", "CpuBackend", "GpuBackend", "backend_for", "backend_names", "give_up", "pack", "serves",
]  # fmt: skip
