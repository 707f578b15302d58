"""What a measurement depends on besides the code, and the cores that are free for it."""

import os

import torch

from training.common.environment import REPOSITORY, environment


def free_cores() -> int:
    """Cores that nothing else was using in the last minute, at least one.

    Threads that share a core with another program wait for each other and are many times slower than fewer threads.
    """
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(torch.get_num_threads(), cores - round(load)))


__all__ = ["REPOSITORY", "environment", "free_cores"]
