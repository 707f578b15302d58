"""Builds of the CUDA source for a CPU: kept by their sources, and made once however many processes ask."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock


HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / "modeling_dspark" / "kernels" / "head_cuda.cu"
_FLAGS = [
    *("-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DDSPARK_EMULATION", f"-I{HERE}"),
    "-U_FORTIFY_SOURCE",  # takes a jump from stack to stack for an error
]
_LIBRARY = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
SANITIZED = ["-O1", "-fsanitize=thread,alignment", "-fno-sanitize-recover=alignment"]


def build_emulator(source: str | None = None, *, only: tuple[str, int] | None = None, sanitize: bool = False) -> Path:
    """A library that exports `emulate_head`, or with `sanitize` a program that looks for races.

    Args:
        source (`str`, *optional*): In place of the text of head_cuda.cu.
        only (`tuple[str, int]`, *optional*): Dtype and tiles of the one kernel to build, which takes less time.
        sanitize (`bool`, *optional*, defaults to `False`): Whether to build the program.
    """
    main, flags = ("race_check.cpp", SANITIZED) if sanitize else ("emulated_head.cpp", _LIBRARY)
    if only is not None:
        flags = [*flags, "-O1", f"-DDSPARK_ONLY_DTYPE={only[0]}", f"-DDSPARK_ONLY_TILES={only[1]}"]
    return _build(main, flags, source)


def build_fake_driver() -> Path:
    """A library in the place of libcuda.so.1."""
    return _build("fake_driver.cpp", _LIBRARY)


def replaced(*replacements: tuple[str, str]) -> str:
    """The kernel's source with each text, which must be there once, in another's place."""
    source = KERNEL.read_text()
    for old, new in replacements:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    return source


def _build(main: str, flags: list[str], source: str | None = None) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation is built with g++, which is not there")
    if source is None:  # what is not ours to judge may have what a warning is for
        source, flags = KERNEL.read_text(), [*flags, "-Werror"]
    texts = [path.read_text() for path in sorted([*HERE.glob("*.h"), HERE / main])]
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    flags = [*_FLAGS, *flags]
    digest = hashlib.sha256("\0".join([source, *texts, *flags, version]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"dspark-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is somebody else's"
    built = folder / f"{Path(main).stem}-{digest}.so"
    with WeakFileLock(folder / f"{built.name}.lock"):
        if not built.is_file():
            _compile([compiler, *flags], main, source, built)
    return built


def _compile(command: list[str], main: str, source: str, built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        kernel, result = Path(scratch) / "head_cuda.inc", Path(scratch) / built.name
        kernel.write_text(source)
        command = [*command, f'-DDSPARK_KERNEL_SOURCE="{kernel}"', str(HERE / main), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if re.search("error|undefined", line)]
            pytest.fail("\n".join(errors or [done.stderr]), pytrace=False)
        result.replace(built)


__all__ = ["KERNEL", "SANITIZED", "build_emulator", "build_fake_driver", "replaced"]
