"""The conditions of a measurement besides the code: machine, versions, commit."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers


REPOSITORY = Path(__file__).resolve().parents[2]


def environment(dtype: str, device: str = "cpu") -> dict[str, Any]:
    """Describe this machine, process and checkout; `dtype` and `device` are those of the models."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        # Above about 0.5 before a run starts, something else uses the machine, and timings are unreliable.
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": dtype,
        **git_state(),
    }


def cpu_model() -> str:
    """The processor's name from the kernel, or else from `platform`."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_state() -> dict[str, Any]:
    """The commit that is checked out, and whether anything but results differs from it; `None` where there is no git.

    An installed copy of this file may be inside another project's repository, whose commit would mislead.
    """
    if _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return {"git_commit": None, "git_dirty": None}
    commit = _git("rev-parse", "--verify", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


__all__ = ["REPOSITORY", "cpu_model", "environment", "git_state"]
