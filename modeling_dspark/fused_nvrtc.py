"""The head's GPU kernels, compiled by NVRTC and launched by the driver: no compiler and no CUDA toolkit are needed.

NVRTC comes with every torch for CUDA, as a wheel or inside it. A kernel is compiled on first use, in about half a second,
and stored with the libraries of `fused_build`.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from .fused_build import BuildError, digest, keep, read_kept
from .fused_launch import Grid, HeadArguments, Kernels, LaunchError, architecture, kernel_macros, kernel_name


_WHEELS = ("nvidia/*/lib/libnvrtc.so.*", "nvidia/*/bin/nvrtc64_*.dll", "torch/lib/nvrtc64_*.dll")
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class NvrtcKernels(Kernels):
    """Kernels compiled by NVRTC for the current device; one object per device.

    Args:
        source (`str`): Of head_cuda.cu.
        capability (`tuple[int, int]`): The device's compute capability.
        driver (`ctypes.CDLL`, `str` or `Path`, *optional*): Another library with the driver's functions.

    Raises:
        BuildError: without NVRTC.
        LaunchError: without a driver.
    """

    def __init__(self, source: str, capability: tuple[int, int], driver: ctypes.CDLL | str | Path = _DRIVER) -> None:
        super().__init__()
        self._source, self._architecture = source, architecture(capability)
        self._nvrtc = Nvrtc()
        try:
            self._driver = driver if isinstance(driver, ctypes.CDLL) else ctypes.CDLL(str(driver))
        except OSError as error:
            raise LaunchError(f"NVIDIA's driver cannot be loaded: {error}") from error
        self._functions: dict[tuple[int, int], ctypes.c_void_p] = {}

    def _allow(self, dtype: int, tiles: int, threads: int, shared_bytes: int) -> int:
        function, blocks = self._function(dtype, tiles), ctypes.c_int()
        size = ctypes.c_size_t(shared_bytes)
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, size)
        return blocks.value

    def launch(self, dtype: int, tiles: int, arguments: HeadArguments, first: int, last: int, grid: Grid) -> None:
        blocks, threads, shared_bytes, stream, cooperative = grid
        values = (arguments, ctypes.c_int32(first), ctypes.c_int32(last))
        parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
        shape = (blocks, 1, 1, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), parameters)
        if cooperative:
            self._call("cuLaunchCooperativeKernel", self._function(dtype, tiles), *shape)
        else:
            self._call("cuLaunchKernel", self._function(dtype, tiles), *shape, None)

    def _function(self, dtype: int, tiles: int) -> ctypes.c_void_p:
        if (dtype, tiles) not in self._functions:
            image = self._nvrtc.compile_kept(self._source, kernel_macros(dtype, tiles), self._architecture)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            name = kernel_name(dtype, tiles).encode()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name)
            self._functions[dtype, tiles] = function
        return self._functions[dtype, tiles]

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            raise LaunchError(f"{name}: {(text.value or b'unknown error').decode()}", error)


class Nvrtc:
    """NVIDIA's compiler as a library.

    Raises:
        BuildError: if there is none.
    """

    def __init__(self) -> None:
        self._library = find_nvrtc()
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile_kept(self, source: str, macros: dict[str, str], number: int) -> bytes:
        """`compile`, cached for all processes."""
        key = digest([source, macros, number, self.version])
        file = f"{'-'.join(['nvrtc', *macros.values(), f'sm{number}', key])}.cubin"
        image = read_kept(file)
        if image is None:
            image = self.compile(source, macros, number)
            keep(file, image)
        return image

    def compile(self, source: str, macros: dict[str, str], number: int) -> bytes:
        """A cubin for architecture `number`, or PTX for the driver to translate if this NVRTC is older than the GPU.

        Raises:
            BuildError: with the compiler's message.
        """
        supported = self._architectures()
        older = [known for known in supported if known < number]
        if number not in supported and not older:
            raise BuildError(f"NVRTC {self.version[0]}.{self.version[1]} does not compile for sm_{number} any more")
        target, kind = (f"sm_{number}", "CUBIN") if number in supported else (f"compute_{max(older)}", "PTX")
        options = ["-std=c++17", f"--gpu-architecture={target}"]
        options += [f"-D{name}={value}" for name, value in macros.items()]
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"head_cuda.cu", 0, None, None)
        try:
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), encoded):
                raise BuildError(self._first_error(program))
            return self._output(program, kind)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return list(numbers)

    def _output(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, content)
        return content.raw

    def _first_error(self, program: ctypes.c_void_p) -> str:
        lines = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").splitlines()
        return next((line for line in lines if "error" in line), "NVRTC failed without a message")[:200]

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._library, name)(*arguments):
            text = self._library.nvrtcGetErrorString(error)
            raise BuildError(f"{name}: {text.decode()} (NVRTC error {error})")


def find_nvrtc() -> ctypes.CDLL:
    """NVRTC: the copy that this process uses, else a wheel's (first of torch's version of CUDA), else the system's.

    Raises:
        BuildError: if there is none that can be loaded.
    """
    reasons = []
    for file, mode in _candidates():
        try:
            for builtins in Path(file).parent.glob("*nvrtc-builtins*") if os.sep in file else ():
                if ".alt." not in builtins.name:  # NVRTC opens it by name, which works only once it is loaded
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(file, mode=mode)
        except OSError as error:
            reasons.append(str(error))
    raise BuildError(
        f"NVRTC cannot be loaded ({reasons[-1]}); it comes with torch for CUDA, or as `pip install nvidia-cuda-nvrtc`"
    )


def _candidates() -> Iterator[tuple[str, int]]:
    """Files or names of NVRTC, best first, and how to open them."""
    cuda = f".so.{(torch.version.cuda or '').split('.')[0]}"
    names = sorted(_SONAMES, key=lambda name: cuda not in name)
    if hasattr(os, "RTLD_NOLOAD"):
        for name in names:
            yield name, os.RTLD_NOLOAD | os.RTLD_NOW
    files = (path for folder in sys.path for wheel in _WHEELS for path in sorted(Path(folder or ".").glob(wheel)))
    usable = [str(path.absolute()) for path in files if ".alt." not in path.name]
    for file in sorted(usable, key=lambda file: cuda not in file):
        yield file, ctypes.DEFAULT_MODE
    for name in (*names, "libnvrtc.so"):
        yield name, ctypes.DEFAULT_MODE


__all__ = ["Nvrtc", "NvrtcKernels", "find_nvrtc"]
