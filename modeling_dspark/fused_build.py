"""Building C++ and CUDA on first use: once for each source, torch and machine, by any number of processes at a time.

Builds are cached in `$DSPARK_CACHE/kernels`, by default `~/.cache/dspark/kernels`; if that folder cannot be used, in a private
temporary folder of the user. A killed build blocks nobody: the operating system releases its lock (without locks, each
process builds), and a library gets its name only once it is complete. A checksum after its end detects damage; loaders do
not read that far.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

_FLAGS = ["-O3", "-fno-math-errno", "-fopenmp", "-Wno-psabi"]
_CPP_NEEDS = "a C++ compiler (g++ 12 or later) and ninja (`pip install ninja setuptools`) are needed"
_NO_SPACE = "free some space, or set DSPARK_CACHE to a folder on another disk"
_CHECKSUM = 32  # bytes
_TELLING = ("error:", "fatal", "not found", "cannot find")
_loaded: dict[str, ctypes.CDLL] = {}
_failed: dict[str, "BuildError"] = {}  # not tried again in this process


class BuildError(RuntimeError):
    """Why a build failed, and the way out."""


def load_library(name: str, source: str) -> ctypes.CDLL:
    """The library of a C++ source, built if necessary.

    Args:
        name (`str`): Of the library, for people to read.
        source (`str`): Includes the standard library only.

    Raises:
        BuildError: if it can be neither found nor built.
    """

    def compile_in(scratch: Path) -> None:
        compile_extension(name, scratch, cpp_sources=[source], extra_cflags=_FLAGS, extra_ldflags=["-fopenmp"])

    return load_built(name, [source, _FLAGS, _compiler()], compile_in, lasts="10 to 60 seconds", needs=_CPP_NEEDS)


def load_built(
    name: str, key: list[Any], compile_in: Callable[[Path], None], *, lasts: str, needs: str
) -> ctypes.CDLL:
    """The library of a name and key, loaded once per process, and built if necessary.

    Args:
        name (`str`): Of the library, for people to read.
        key (`list`): Everything that the library depends on besides torch and the machine, as JSON values.
        compile_in (`Callable`): Builds it in the given folder, under any name that ends in `.so`.
        lasts (`str`): How long that takes.
        needs (`str`): Requirements of the build, for its error.

    Raises:
        BuildError: if it can be neither found nor built; the same one from then on.
    """
    file = f"{name}-{digest([*key, torch.__version__])}.so"
    if file in _failed:
        raise _failed[file]
    if file not in _loaded:
        try:
            announcement = f"Building {name} in %s, for faster drafting ({lasts}, once on this machine)."
            _loaded[file] = _find(file) or _build(file, compile_in, announcement, needs)
        except (BuildError, OSError) as error:  # a full disk, a lock that cannot be opened
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            way_out = _NO_SPACE if full else "set DSPARK_CACHE to a folder that can be written to"
            _failed[file] = error if isinstance(error, BuildError) else BuildError(f"{error}; {way_out}")
            raise _failed[file] from error
    return _loaded[file]


def compile_extension(name: str, folder: Path, **arguments: Any) -> None:
    """`torch.utils.cpp_extension.load_inline` without headers of torch, in a folder without a lock."""
    with _build_environment():
        from torch.utils import cpp_extension  # needs setuptools, which not every environment has

        cpp_extension.load_inline(
            name, build_directory=str(folder), is_python_module=False, no_implicit_headers=True, **arguments
        )


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    """Put pip's ninja on the path, even if this Python's environment is not activated, and accept any compiler.

    Torch is not linked, so a compiler other than the one that torch was built with is fine.
    """
    before = {name: os.environ.get(name) for name in ("PATH", "TORCH_DONT_CHECK_COMPILER_ABI")}
    os.environ["PATH"] = _search_path()
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _search_path() -> str:
    return os.pathsep.join(filter(None, [os.environ.get("PATH"), sysconfig.get_path("scripts")]))


def _compiler() -> str:
    """The compiler, chosen as torch does: `CXX` is one program, without arguments."""
    return os.environ.get("CXX") or ("cl" if sys.platform == "win32" else "c++")


def _look_for_tools(needs: str) -> None:
    """Refuse early, and name the missing tool."""
    for tool in (_compiler(), "ninja"):
        if shutil.which(tool, path=_search_path()) is None:
            raise BuildError(f"the program `{tool}` is missing; {needs}")


def digest(key: list[Any]) -> str:
    """Short name for the inputs of a build on this kind of machine."""
    key = [*key, platform.system(), platform.machine()]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def read_kept(file: str) -> bytes | None:
    """The library that `keep` wrote under this name, if it exists and is complete."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            if _why_not_own(folder) is None and (content := _whole(folder / file)) is not None:
                return content
    return None


def keep(file: str, content: bytes) -> None:
    """Write a file for `read_kept` of this and other processes, if a folder can be written to."""
    try:
        folder = _writable_folder()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            _write_whole(content, Path(scratch) / file, folder / file)
    except (OSError, BuildError) as error:
        logger.info(f"{file} is not kept: {error}")


def _whole(path: Path) -> bytes | None:
    """The content before its checksum, or `None` if the checksum is wrong."""
    content = path.read_bytes()
    content, checksum = content[:-_CHECKSUM], content[-_CHECKSUM:]
    return content if hashlib.sha256(content).digest() == checksum else None


def _write_whole(content: bytes, scratch: Path, path: Path) -> None:
    """Write content and checksum under a name that exists only once both are on the disk."""
    with scratch.open("wb") as file:
        file.write(content + hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def cache_folder() -> Path:
    """The folder for everything that this project makes once: `$DSPARK_CACHE`, else `~/.cache/dspark`.

    Raises:
        RuntimeError: if there is neither.
    """
    return Path(os.environ.get("DSPARK_CACHE") or "~/.cache/dspark").expanduser()


def _folders() -> Iterator[Path]:
    """Folders for libraries, best first."""
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield cache_folder() / "kernels"
    own = os.getuid() if hasattr(os, "getuid") else "user"
    yield Path(tempfile.gettempdir()) / f"dspark-kernels-{own}"


def _why_not_own(folder: Path) -> str | None:
    """Why libraries in this folder are not loaded: others can write to it, or the system executes nothing from it."""
    if not hasattr(os, "getuid"):
        return None
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        return f"{folder} can be written to by others"
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        return f"{folder} is mounted `noexec`"
    return None


def _find(file: str) -> ctypes.CDLL | None:
    for folder in _folders():
        path = folder / file
        with contextlib.suppress(OSError):  # an unreadable folder
            if not path.is_file() or _why_not_own(folder) is not None:
                continue
            try:
                if _whole(path) is not None:  # loading a truncated file would crash the process
                    return ctypes.CDLL(str(path))
                error: object = "it is damaged"
            except OSError as loader_error:
                error = loader_error
            logger.warning_once(f"{path} cannot be loaded and is built again: {error}")
    return None


def _writable_folder() -> Path:
    reasons = []
    for folder in _folders():
        try:
            if any(sign in str(folder) for sign in "$:\n") and sys.platform != "win32":
                raise OSError(f"{folder} has a `$` or `:` in its path, which ninja does not take")
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if reason := _why_not_own(folder):
                raise PermissionError(reason)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(str(error))
    raise BuildError(f"no folder to build in ({'; '.join(reasons)}); set DSPARK_CACHE to one that can be written to")


def _build(file: str, compile_in: Callable[[Path], None], announcement: str, needs: str) -> ctypes.CDLL:
    folder = _writable_folder()
    with _locked(folder / f"{file}.lock") as is_locked:
        library = _find(file)
        if library is not None:  # another process has built it meanwhile
            return library
        _look_for_tools(needs)
        if is_locked:
            for stale in folder.glob(f".build-{file}-*"):
                shutil.rmtree(stale, ignore_errors=True)
        logger.warning(announcement % folder)
        _compile(compile_in, folder / file, needs)
    return ctypes.CDLL(str(folder / file))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """The operating system's lock on a file, which ends with the process that holds it; yields whether there is one."""
    with path.open("a") as file:
        try:
            if fcntl is None:
                raise OSError("no `flock` on this system")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning(f"Waiting for another process that builds {path.stem}.")
                fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError as error:  # a file system without locks: each process builds for itself
            logger.info(f"{path} cannot be locked: {error}")
            is_locked = False
        yield is_locked


def _compile(compile_in: Callable[[Path], None], path: Path, needs: str) -> None:
    """Build in a fresh folder, which has no lock of an earlier build."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".build-{path.name}-") as scratch:
        try:
            compile_in(Path(scratch))
            (library,) = Path(scratch).glob("*.so")  # torch numbers the names of libraries that a process builds again
            _write_whole(library.read_bytes(), Path(scratch) / "whole", path)
        except Exception as error:  # compilers, ninja and full disks raise various errors
            way_out = _NO_SPACE if "No space left" in str(error) else needs
            raise BuildError(f"{_reason(error)}; {way_out}") from error


def _reason(error: Exception) -> str:
    """The line of a build's output that names the error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    telling = (line for line in lines if any(word in line for word in _TELLING))
    return next(telling, lines[0])[:200]


__all__ = [
    "BuildError",
    "cache_folder",
    "compile_extension",
    "digest",
    "keep",
    "load_built",
    "load_library",
    "read_kept",
]
