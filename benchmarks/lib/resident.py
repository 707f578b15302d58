"""Memory of this process as Linux counts it, and a fresh process to measure it in."""

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.common.environment import REPOSITORY


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(name: str = "VmRSS") -> float:
    """MiB of this process that are resident now (`VmRSS`), or at the peak (`VmHWM`).

    Raises:
        ValueError: where the system does not report it.
    """
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    if not found:
        raise ValueError(f"`{_STATUS}` has no {name}: peak memory is measured on Linux only. Run this on Linux.")
    return int(found[0]) / 1024


def settle(models: Sequence[Any]) -> None:
    """Make resident memory comparable: read all weights once, return freed memory, and reset the peak.

    Raises:
        ValueError: where the system does not let a process reset its peak.
    """
    for model in models:
        for weight in model.parameters():
            weight.sum()  # weights mapped from a file become resident when they are read
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    try:
        _CLEAR.write_text("5", encoding="ascii")  # sets VmHWM back to VmRSS
    except OSError as error:
        raise ValueError(
            f"`{_CLEAR}` cannot be written ({error}), so the peak of loading would be counted."
        ) from error


def in_fresh_process(command: str, argv: Sequence[str], label: str) -> dict[str, Any]:
    """The last line that `python -m benchmarks.<command>` prints in a process of its own, as JSON.

    Raises:
        ValueError: if the process fails, with the last line it wrote.
    """
    arguments = [sys.executable, "-m", f"benchmarks.{command}", *argv]
    result = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise ValueError(f"The process for {label} ended with {result.returncode}: {last}")
    report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return report


__all__ = ["in_fresh_process", "resident", "settle"]
