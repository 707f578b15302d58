"""The head's GPU kernels, built by nvcc of a CUDA toolkit through `torch.utils.cpp_extension`.

Torch is not linked: streams and addresses are passed as integers, so the library is the same for every build of torch,
including those without CUDA.
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .fused_build import BuildError, compile_extension, load_built
from .fused_launch import Grid, HeadArguments, Kernels, LaunchError, architecture, kernel_name


_NAME = "dspark_head_cuda"
_FLAGS = ["-O3", "-std=c++17"]
_SECONDS = 60  # maximum for a question to nvcc
_USUAL_HOME = Path("/usr/local/cuda")
_INCLUDES = ("include", "targets/*/include")
_LIBRARIES = ("lib64", "lib", "targets/*/lib")
_NEEDS = (
    "an nvcc that knows this GPU, a C++ compiler that it supports and ninja (`pip install ninja`) are needed; "
    "CUDA_HOME chooses among toolkits"
)


class NoToolkitError(BuildError):
    """No toolkit is installed, as on most machines."""


class Toolkit(NamedTuple):
    """A CUDA toolkit.

    Attributes:
        home (`Path`): Folder with `bin/nvcc`.
        version (`str`): Of nvcc, such as `13.0.88`.
    """

    home: Path
    version: str


class NvccKernels(Kernels):
    """Kernels built by nvcc for the current device; one object per device.

    Args:
        source (`str`): Of head_cuda.cu.
        capability (`tuple[int, int]`): The device's compute capability.

    Raises:
        BuildError: without a toolkit, or if the build fails.
    """

    def __init__(self, source: str, capability: tuple[int, int]) -> None:
        super().__init__()
        self._library = build(source, capability)
        self._library.dspark_head_error.restype = ctypes.c_char_p

    def _allow(self, dtype: int, tiles: int, threads: int, shared_bytes: int) -> int:
        blocks = ctypes.c_int32()
        self._check(
            self._library.dspark_head_occupancy(dtype, tiles, threads, shared_bytes, ctypes.byref(blocks)),
            dtype,
            tiles,
        )
        return blocks.value

    def launch(self, dtype: int, tiles: int, arguments: HeadArguments, first: int, last: int, grid: Grid) -> None:
        blocks, threads, shared_bytes, stream, _ = grid  # the library launches several phases cooperatively
        error = self._library.dspark_head_launch(
            dtype, tiles, ctypes.byref(arguments), first, last, blocks, threads, shared_bytes, ctypes.c_void_p(stream)
        )
        self._check(error, dtype, tiles)

    def _check(self, error: int, dtype: int, tiles: int) -> None:
        if error:
            self._library.cudaGetLastError()  # clears it, or torch would report it for its next kernel
            text = self._library.dspark_head_error(error).decode()
            raise LaunchError(f"{kernel_name(dtype, tiles)}: {text}", error)


def build(source: str, capability: tuple[int, int]) -> ctypes.CDLL:
    """The library for one architecture, built if necessary."""
    number = architecture(capability)
    toolkit = find_toolkit()
    flags = [*_FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}"]  # without it, torch looks for a GPU

    def compile_in(scratch: Path) -> None:
        _compile(source, flags, toolkit.home, scratch)

    return load_built(_NAME, [source, flags, *map(str, toolkit)], compile_in, lasts="about ten seconds", needs=_NEEDS)


def _compile(source: str, flags: list[str], home: Path, scratch: Path) -> None:
    from torch.utils import cpp_extension  # needs setuptools, which not every environment has

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = str(home)  # no argument sets it, and the environment is read at import only
    try:
        compile_extension(
            _NAME,
            scratch,
            cpp_sources=[],
            cuda_sources=[source],
            extra_cuda_cflags=flags,
            extra_ldflags=_link_flags(home, scratch / "link"),
        )
    finally:
        cpp_extension.CUDA_HOME = before


def _link_flags(home: Path, folder: Path) -> list[str]:
    """Flags before torch's own, which ask for libraries that wheels, and builds of torch without CUDA, lack.

    Empty archives stand in for torch's libraries, and a link for `libcudart.so`, which wheels have under its full name
    only. At run time, the copy that torch has loaded is used if its version matches, else the toolkit's.
    """
    folder.mkdir()
    for name in ("c10_cuda", "torch_cuda"):
        (folder / f"lib{name}.a").write_bytes(b"!<arch>\n")
    flags = [f"-L{shlex.quote(str(folder))}", "-Wl,--as-needed"]
    runtimes = (path for pattern in _LIBRARIES for path in sorted(home.glob(f"{pattern}/libcudart.so*")))
    if runtime := next(runtimes, None):
        (folder / "libcudart.so").symlink_to(runtime)
        flags.append(f"-Wl,-rpath,{shlex.quote(str(runtime.parent))}")
    return flags


def find_toolkit() -> Toolkit:
    """The CUDA toolkit to build with: `CUDA_HOME`, `CUDA_PATH`, that of the nvcc on the path, the usual place, or wheels.

    Raises:
        NoToolkitError: if there is none with both nvcc and the header of the run time.
    """
    looked = []
    for home in map(Path.absolute, _homes()):
        nvcc = home / "bin" / "nvcc"
        has_header = any(any(home.glob(f"{folder}/cuda_runtime.h")) for folder in _INCLUDES)
        answer = _ask(nvcc, "--version") if has_header and nvcc.is_file() else ""
        if version := re.search(r"V(\d+\.\d+\.\d+)", answer):
            return Toolkit(home, version[1])
        looked.append(str(home))
    raise NoToolkitError(
        "no CUDA toolkit with `bin/nvcc` and `include/cuda_runtime.h` was found "
        f"(looked in {', '.join(dict.fromkeys(looked)) or 'no folder'}); install one, or set CUDA_HOME to it"
    )


def _homes() -> Iterator[Path]:
    """Folders that may hold a toolkit, best first."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    if nvcc := shutil.which("nvcc"):
        # The nvcc on the path may be a script that calls another; a dry run names the real one.
        if real := re.search(r"_HERE_=(.+)", _ask(Path(nvcc), "--dryrun", "-x", "cu", os.devnull)):
            yield Path(real[1].strip()).parent
        yield Path(nvcc).resolve().parents[1]
    yield _USUAL_HOME
    for folder in map(Path, sys.path):
        yield from sorted(folder.glob("nvidia/cu[0-9]*"), reverse=True)
        yield from folder.glob("nvidia/cuda_nvcc")


def _ask(nvcc: Path, *arguments: str) -> str:
    """The output of nvcc, from either stream; empty if it cannot run."""
    try:
        run = subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout + run.stderr


__all__ = ["NoToolkitError", "NvccKernels", "Toolkit", "build", "find_toolkit"]
