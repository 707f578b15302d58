"""Building C++ on first use: once for each source, torch and machine, by any number of processes at the same time.

What is built is kept in `$DSPARK_CACHE/kernels`, by default `~/.cache/dspark/kernels`, or where that cannot be written to
in a folder of the user's own for temporary files. A build that is killed leaves nothing that a later one would wait for:
the lock is the operating system's, and a library gets its name when it is whole.
"""

import ctypes
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub.utils import WeakFileLock
from transformers.utils import logging


logger = logging.get_logger(__name__)

_FLAGS = ["-O3", "-fno-math-errno", "-fopenmp", "-Wno-psabi"]
_loaded: dict[str, ctypes.CDLL] = {}
_failed: dict[str, "BuildError"] = {}  # not tried again in this process


class BuildError(RuntimeError):
    """The reason, and what can be done about it."""


def load_library(name: str, source: str) -> ctypes.CDLL:
    """The library made of a C++ source, built if it is not there yet.

    Args:
        name (`str`): Of the library, for people to read.
        source (`str`): Includes nothing but the standard library.

    Raises:
        BuildError: if it can be neither found nor built.
    """
    file = f"{name}-{_digest(source)}.so"
    if file in _failed:
        raise _failed[file]
    if file not in _loaded:
        try:
            _loaded[file] = _find(file) or _build(name, source, file)
        except BuildError as error:
            _failed[file] = error
            raise
    return _loaded[file]


def _digest(source: str) -> str:
    key = [source, _FLAGS, torch.__version__, platform.system(), platform.machine()]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    """Where libraries may be, best first."""
    yield Path(os.environ.get("DSPARK_CACHE", Path.home() / ".cache" / "dspark")) / "kernels"
    own = os.getuid() if hasattr(os, "getuid") else "user"
    yield Path(tempfile.gettempdir()) / f"dspark-kernels-{own}"


def _is_own(folder: Path) -> bool:
    """Whether nobody else can put a library there."""
    if not hasattr(os, "getuid"):
        return True
    state = folder.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022


def _find(file: str) -> ctypes.CDLL | None:
    for folder in _folders():
        path = folder / file
        if path.is_file() and _is_own(folder):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                logger.warning(f"{path} cannot be loaded and is built again: {error}")
    return None


def _writable_folder() -> Path:
    reasons = []
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_own(folder):
                raise PermissionError(f"{folder} can be written to by others")
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(str(error))
    raise BuildError(f"no folder to build in ({'; '.join(reasons)}); set DSPARK_CACHE to one that can be written to")


def _build(name: str, source: str, file: str) -> ctypes.CDLL:
    folder = _writable_folder()
    with WeakFileLock(folder / f"{file}.lock"):
        if not (folder / file).is_file() or _find(file) is None:
            logger.warning(f"Building {name} in {folder} (once, some seconds).")
            _compile(name, source, folder / file)
    try:
        return ctypes.CDLL(str(folder / file))
    except OSError as error:
        raise BuildError(f"what was built cannot be loaded ({error}); is {folder} mounted `noexec`?") from error


def _compile(name: str, source: str, path: Path) -> None:
    """Build in a folder of its own, so that no lock of an earlier build can be in the way."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        try:
            from torch.utils import cpp_extension  # needs setuptools, which not every environment has

            cpp_extension.load_inline(
                name,
                [source],
                extra_cflags=_FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=scratch,
                is_python_module=False,
                no_implicit_headers=True,
            )
            (Path(scratch) / f"{name}.so").replace(path)
        except Exception as error:  # whatever a compiler, ninja or a full disk comes up with
            raise BuildError(
                f"{_reason(error)}; a C++ compiler (g++ 12 or later) and ninja (`pip install ninja`) are "
                "needed"
            ) from error


def _reason(error: Exception) -> str:
    """The line of a build's output that says what went wrong."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    telling = (line for line in lines if "error:" in line or "not found" in line)
    return next(telling, lines[0])[:200]


__all__ = ["BuildError", "load_library"]
