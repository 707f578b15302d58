"""The machine and what else it was doing while something was measured.

A measurement starts with a reading over two seconds, before any model is loaded, and is refused on a busy machine unless
the user passes `--allow-busy`. The criterion is the processor time that *other* processes used in those seconds: the
counters of `/proc/stat` less this process's own. The load average is reported beside it but decides nothing, since it
remembers for minutes what has already ended, such as the command run just before. It decides only where there is no
`/proc/stat`. The same counters, read again when a report is written, give the others' share of the whole measurement.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.common.environment import environment


BUSY_CORES_PER_CORE = 0.125  # a quarter of a core on a machine with two
SAMPLE_SECONDS = 2.0
_COUNTERS = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)  # idle and iowait, of "user nice system idle iowait irq softirq steal guest guest_nice"


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment, in seconds.

    Attributes:
        time (`float`): The clock.
        own (`float`): Processor time of this process and of its children that have ended.
        total (`float`, *optional*): Processor time of the whole machine; `None` where the system does not report it.
    """

    time: float
    own: float
    total: float | None

    @classmethod
    def take(cls) -> "Snapshot":
        """Read the counters."""
        own = os.times()
        return cls(time.monotonic(), sum(own[:4]), _machine_seconds())

    def others_until(self, later: "Snapshot") -> float | None:
        """Cores that other processes used on average between two snapshots."""
        if self.total is None or later.total is None:
            return None
        return max(0.0, later.total - self.total - (later.own - self.own)) / max(later.time - self.time, 1e-9)


def _machine_seconds() -> float | None:
    if not _COUNTERS.is_file():
        return None
    ticks = [int(field) for field in _COUNTERS.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return sum(ticks[index] for index in range(len(ticks)) if index not in _IDLE_FIELDS) / os.sysconf("SC_CLK_TCK")


class Machine:
    """The machine from the start of a measurement; create it before anything is loaded.

    Args:
        allow_busy (`bool`, *optional*, defaults to `False`): Measure on a busy machine and mark the report.

    Raises:
        ValueError: if the machine is busy and `allow_busy` is not set.
    """

    def __init__(self, *, allow_busy: bool = False):
        self.allow_busy = allow_busy
        self.average_before = load_average()
        first = Snapshot.take()
        time.sleep(SAMPLE_SECONDS)
        self._start = Snapshot.take()
        self.others_before = first.others_until(self._start)
        if self._is_busy(self.others_before) and not allow_busy:
            raise ValueError(
                f"The machine is busy: {self.activity()}, and a measurement tolerates {self.limit:g} of its "
                f"{_num_cores()} cores. Wait until it is quiet, or pass `--allow-busy` to measure anyway; the report "
                "then says so."
            )

    @property
    def limit(self) -> float:
        """Cores that other processes may use."""
        return BUSY_CORES_PER_CORE * _num_cores()

    def environment(self, dtype: str, device: str = "cpu") -> dict[str, Any]:
        """Hardware, versions and commit, with the load average from before anything was loaded."""
        return environment(dtype, device) | {"load_average_1min": self.average_before}

    def load(self) -> dict[str, Any]:
        """What other processes did before the measurement and since it began; for the report, at its end."""
        during = self._start.others_until(Snapshot.take())
        return {
            "cores_used_by_others": {"before": _rounded(self.others_before), "during": _rounded(during)},
            "load_average_1min": {"before": self.average_before, "after": load_average()},
            "limit": self.limit,
            "allow_busy": self.allow_busy,
            "busy": self._is_busy(self.others_before) or (during is not None and during > self.limit),
        }

    def free_cores(self) -> int:
        """Cores that no other process uses, at least one: threads that share a core wait for each other."""
        used = self.others_before if self.others_before is not None else self.average_before or 0.0
        return max(1, min(torch.get_num_threads(), _num_cores() - round(used)))

    def _is_busy(self, others: float | None) -> bool:
        return (self.average_before or 0.0 if others is None else others) > self.limit

    def activity(self) -> str:
        """What other processes did before the measurement, in words."""
        average = f"load average over a minute {self.average_before}"
        if self.others_before is None:
            return average
        return f"other processes use {self.others_before:.2f} cores ({average})"


def load_average() -> float | None:
    """Of the last minute; `None` where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def conditions(report: dict[str, Any], *, batch: str, repeats: str) -> str:
    """Under a table: hardware, threads, dtype, batch, commit, load and repeats, as Markdown.

    Args:
        report (`dict`): A report with `environment`, and `load` if it was measured with a [`Machine`].
        batch (`str`): What ran at once.
        repeats (`str`): How often.
    """
    facts = report["environment"]
    threads = facts["threads"] if isinstance(facts["threads"], list) else [facts["threads"]]
    commit = (facts["git_commit"] or "unknown")[:9] + (" with changes" if facts["git_dirty"] else "")
    parts = [
        facts["cpu"],
        f"{' and '.join(map(str, threads))} of {facts['cores']} cores",
        *(facts["dtype"], batch, repeats, f"commit {commit}", f"torch {facts['torch']}"),
    ]
    load = report.get("load")
    if load is None:
        return f"{', '.join(parts)}, load average {facts['load_average_1min']} at the start."
    others, averages = load["cores_used_by_others"], load["load_average_1min"]
    text = f"{', '.join(parts)}. "
    if others["before"] is not None:
        text += f"Other processes used {others['before']:.2f} cores before and {others['during']:.2f} during it; "
    text += f"load average {averages['before']} before, {averages['after']} after."
    if load["busy"]:
        text += "\n\n**Measured on a busy machine: these times are not to be compared with others.**"
    return text


def _num_cores() -> int:
    return os.cpu_count() or 1


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


__all__ = ["BUSY_CORES_PER_CORE", "Machine", "Snapshot", "conditions", "load_average"]
