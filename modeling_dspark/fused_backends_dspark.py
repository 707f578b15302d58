"""What the fused head runs on: C++ on a CPU, CUDA by nvcc or NVRTC on a GPU, chosen for each device and made on first use.

`DSPARK_FUSED_HEAD` chooses: `auto` (the default: `cpu` on a CPU, `cuda` or else `nvrtc` on a GPU), `cpu`, `cuda`, `nvrtc`,
or `torch` for none. What fails is said once, and not tried again in the process.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers.utils import logging

from .fused_build_dspark import BuildError, load_library
from .fused_launch_dspark import HeadArguments, Kernels, LaunchError, launch, scratch_bytes
from .fused_nvcc_dspark import NvccKernels
from .fused_nvrtc_dspark import NvrtcKernels
from .fused_reference_dspark import Outputs, empty_outputs
from .fused_sources_dspark import HEAD_CPU, HEAD_CUDA


logger = logging.get_logger(__name__)

CHOICES = ("auto", "cpu", "cuda", "nvrtc", "torch")
_KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Backend(Protocol):
    """Runs blocks on one device."""

    def __call__(self, **arguments: Any) -> Outputs:
        """Columns, tokens, logits and confidence logits; arguments as for `fused_block`.

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

    def __call__(self, **arguments: Any) -> Outputs:
        """A block; draws by inversion."""
        keep_logits, base_logits = arguments["keep_logits"], arguments["base_logits"]
        # A draw goes over the logits twice, so they are written for it in any case.
        with_logits = keep_logits or arguments["temperature"] > 0
        packed, outputs, _alive = pack(**arguments, with_logits=with_logits)
        self.launch(packed)
        columns, tokens, logits, confidence = outputs
        return columns, tokens, logits if keep_logits else base_logits.new_empty(0), confidence

    def launch(self, packed: HeadArguments) -> None:
        """Run a block whose arguments are packed.

        Raises:
            LaunchError: if the machine lacks the instruction set.
            ValueError: if an anchor is no token of the target.
        """
        packed.isa, packed.threads = self._isa, torch.get_num_threads()
        refusal = self._library.dspark_head_cpu(ctypes.byref(packed))
        if refusal == 1:
            raise LaunchError(f"instruction set {self._isa} is not of this machine, whose best is {self.best_isa}")
        if refusal == 2:
            anchors = (ctypes.c_int64 * packed.rows).from_address(packed.anchors)
            raise ValueError(f"`anchors` are tokens from 0 to {packed.target_vocabulary - 1}, got {list(anchors)}.")


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
            "max_shared_bytes": getattr(properties, "shared_memory_per_block_optin", 48 * 1024),  # of every GPU
        }
        self._stepwise = False

    def __call__(self, **arguments: Any) -> Outputs:
        """A block on the current stream."""
        device = arguments["base_logits"].device
        with torch.cuda.device(device):
            packed, outputs, alive = pack(**arguments, with_logits=arguments["keep_logits"])
            size = scratch_bytes(packed.rows, packed.slots, packed.rank, arguments["kind"])
            scratch = torch.zeros(size, dtype=torch.uint8, device=device)
            packed.scratch = scratch.data_ptr()
            vectors = [packed.w1, packed.w2, packed.rank * alive[0].element_size()]
            packed.aligned = all(number % 16 == 0 for number in vectors)
            stream = torch.cuda.current_stream(device).cuda_stream
            stepwise = self._stepwise or torch.cuda.is_current_stream_capturing()
            try:
                launch(self._kernels, packed, stream=stream, stepwise=stepwise, **self._sizes)
            except LaunchError:
                if stepwise:
                    raise
                # A GPU that is shared out may have no room for all blocks at once. Nothing has run so far.
                launch(self._kernels, packed, stream=stream, stepwise=True, **self._sizes)
                self._stepwise = True
        return outputs


def pack(
    *,
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
    keep_logits: bool,  # noqa: ARG001  `with_logits` says what is written
    with_logits: bool,
) -> tuple[HeadArguments, Outputs, list[torch.Tensor]]:
    """Arguments for a kernel, what it writes to, and the tensors whose addresses it has, those of `w1` first."""
    rows, slots, vocabulary = base_logits.shape
    if hidden.stride()[1:] != (hidden.shape[2], 1):
        hidden = hidden.contiguous()
    tensors = {
        "w1": w1.contiguous(),
        "w2": w2.contiguous(),
        "base": base_logits.contiguous(),
        "hidden": hidden,
        "anchors": anchors.long().contiguous(),
        "draft_to_target": None if draft_to_target is None else draft_to_target.long().contiguous(),
        "confidence_weight": None if confidence_weight is None else confidence_weight.contiguous(),
        "confidence_bias": confidence_bias,
    }
    if mixer_weight is not None:
        of_tokens, of_hidden = _parts_of_mixer(kind, mixer_weight.contiguous(), hidden.shape[2])
        # What does not depend on tokens is one product for all slots.
        of_hidden_states = nn.functional.linear(hidden, of_hidden, mixer_bias)
        tensors["mixer_hidden"] = of_hidden_states.to(hidden.dtype).contiguous()  # autocast gives another dtype
        tensors["mixer_weight"] = of_tokens
    outputs = empty_outputs(base_logits, confidence_weight, with_logits=with_logits)
    named = dict(zip(("columns", "tokens", "logits", "confidence"), outputs, strict=True))
    tensors |= {name: tensor if tensor.numel() else None for name, tensor in named.items()}
    arguments = HeadArguments(
        rows=rows,
        slots=slots,
        vocabulary=vocabulary,
        target_vocabulary=len(w1),
        rank=w2.shape[1],
        hidden_size=hidden.shape[2],
        hidden_row_stride=hidden.stride(0),
        mixer_row_stride=0 if mixer_weight is None else mixer_weight.shape[1],
        temperature=temperature,
        seed=seed % 2**64,
        kind=_KINDS[kind],
        confidence_reads_tokens=confidence_weight is not None and len(confidence_weight) > hidden.shape[2],
        dtype=_DTYPES[base_logits.dtype],
        isa=-1,
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
    )
    return arguments, outputs, [tensor for tensor in tensors.values() if tensor is not None]


def _parts_of_mixer(kind: str, weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of a mixer's weight for tokens (and state), and for hidden states."""
    if kind == "gated":  # [hidden, previous]
        return weight[:, size:], weight[:, :size]
    return weight[:, : weight.shape[1] - size], weight[:, weight.shape[1] - size :]  # [state, previous, hidden]


_lock = threading.Lock()
_made: dict[tuple[str, torch.device], Backend | None] = {}  # `None`: tried in vain
_makers: dict[str, Callable[[torch.device], Backend]] = {
    "cpu": lambda _: CpuBackend(),
    "cuda": lambda device: GpuBackend(NvccKernels, device),
    "nvrtc": lambda device: GpuBackend(NvrtcKernels, device),
}


def serves(*tensors: torch.Tensor | None) -> bool:
    """Whether there may be a fused form for these tensors: all on one device, in one dtype that the kernels know."""
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors if tensor is not None}
    return len(kinds) == 1 and next(iter(kinds))[0] in _DTYPES


def backend_for(device: torch.device) -> Backend | None:
    """What to run on, or `None` for PyTorch.

    Raises:
        ValueError: if `DSPARK_FUSED_HEAD` is none of the choices.
    """
    names = _names(device)
    for name in names:
        if (found := _made.get((name, device))) is not None:
            return found
    return _make(names, device) if any((name, device) not in _made for name in names) else None


def give_up(backend: Backend, error: Exception) -> None:
    """Never take this backend again, and say why."""
    for key, made in _made.items():
        if made is backend:
            _made[key] = None
    _warn([str(error)])


def _names(device: torch.device) -> tuple[str, ...]:
    choice = os.environ.get("DSPARK_FUSED_HEAD", "auto")
    if choice not in CHOICES:
        raise ValueError(f"The environment variable DSPARK_FUSED_HEAD must be one of {CHOICES}, got {choice!r}.")
    there: tuple[str, ...] = ()
    if device.type == "cpu":
        there = ("cpu",)
    elif device.type == "cuda" and torch.version.cuda is not None:  # the same device type is AMD's
        there = ("cuda", "nvrtc")
    return there if choice == "auto" else (choice,) if choice in there else ()


def _make(names: tuple[str, ...], device: torch.device) -> Backend | None:
    reasons = []
    with _lock:
        for name in names:
            try:
                if (name, device) not in _made:
                    _made[name, device] = _makers[name](device)
                if _made[name, device] is not None:
                    return _made[name, device]
            except (BuildError, LaunchError) as error:
                _made[name, device] = None
                reasons.append(f"{name}: {error}" if len(names) > 1 else str(error))
    if reasons:
        _warn(reasons)
    return None


def _warn(reasons: list[str]) -> None:
    logger.warning_once(
        f"The fused sequential head is not used, and drafting is a little slower: {'; '.join(reasons)}. "
        "DSPARK_FUSED_HEAD=torch says that this is fine."
    )


__all__ = ["CHOICES", "Backend", "CpuBackend", "GpuBackend", "backend_for", "give_up", "pack", "serves"]
