"""The inputs of a card: the drafter's folder, its facts and its reports, all of the same drafter."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_upload.card.facts import FACTS_FILE, Facts, read_facts
from hub_upload.card.quotes import Source, read_source, slug
from modeling_dspark import DSparkModel
from modeling_dspark.formats.tensors import read_header
from training.common.files import checksum
from training.data.features import fingerprint
from training.evaluation.report import EvalReport


WEIGHTS = "model.safetensors"
_OLD_KEYS = {  # of reports of 0.1
    "accepted_length": "acceptance_length",
    "acceptance_by_position": "acceptance_rate_by_position",
    "num_slots": "num_draft_positions",
}


@dataclass(frozen=True)
class CardInputs:
    """Attributes:
    facts ([`Facts`]): What the author states.
    config, weights (`Source`): The drafter's config.json; hash and size of its weights.
    calibration (`Source`, *optional*): Its calibration.json, if there is one.
    evaluations, latencies (`tuple[Source, ...]`): Reports of `training.evaluate` and of `benchmarks.latency`.
    """

    facts: Facts
    config: Source
    weights: Source
    calibration: Source | None
    evaluations: tuple[Source, ...]
    latencies: tuple[Source, ...]


def read_inputs(drafter: Path, *, facts: Path | None = None, reports: Sequence[Path] | None = None) -> CardInputs:
    """Read the inputs of a card.

    Args:
        drafter (`Path`): Folder with `config.json`, `model.safetensors`, and `calibration.json` if there is one.
        facts (`Path`, *optional*): The facts file; by default `facts.yaml` of the folder.
        reports (`Sequence[Path]`, *optional*): Reports; by default those that the facts file lists.

    Raises:
        ValueError: if a file is missing or broken, or belongs to another drafter.
    """
    facts_file = facts or drafter / FACTS_FILE
    author = read_facts(facts_file)
    paths = list(reports) if reports else [facts_file.parent / name for name in author.reports]
    if not paths:
        raise ValueError("A card needs a report: pass `--report`, or list `reports` in the facts file.")
    config = read_source(drafter / "config.json")
    checked = _CheckedReports(drafter)
    for path in paths:
        checked.add(path)
    evaluations, latencies = tuple(checked.evaluations), tuple(checked.latencies)
    return CardInputs(author, config, checked.weights, _calibration(drafter, config), evaluations, latencies)


class _CheckedReports:
    """Reports by kind; a report of other weights than the folder's is refused."""

    def __init__(self, drafter: Path):
        self.drafter = drafter
        self.weights = describe_weights(drafter / WEIGHTS)
        self.evaluations: list[Source] = []
        self.latencies: list[Source] = []
        self._fingerprints: dict[str, str] = {}

    def add(self, path: Path) -> None:
        source = read_source(path)
        source = Source(source.name, renamed(source.data))
        if slug(path.stem) in {slug(Path(each.name).stem) for each in (*self.evaluations, *self.latencies)}:
            raise ValueError(
                f"`{path}` has the name of another report, and plots and results are named after it; rename the file."
            )
        kinds = (("pooled", self._evaluation), ("sections", self._latency))
        for mark, read in kinds:
            if isinstance(source.data, dict) and mark in source.data:
                read(path, source)
                return
        raise ValueError(f"`{path}` is not a report of `training.evaluate` or `benchmarks.latency`.")

    def _evaluation(self, path: Path, source: Source) -> None:
        try:
            report = EvalReport.from_json(json.dumps(source.data))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"`{path}` is not a report that can be quoted: {error}") from error
        if not report.sets:
            raise ValueError(f"`{path}` has no set of prompts.")
        found = report.drafter.get("fingerprint")
        self._check(path, found, self._fingerprint(report.settings.get("dtype", "float32")))
        self.evaluations.append(source)

    def _latency(self, path: Path, source: Source) -> None:
        if not source.data.get("complete") or not source.data["sections"]:
            raise ValueError(f"`{path}` was interrupted; run `python -m benchmarks.latency` again.")
        self._check(path, source.at("drafter.sha256"), self.weights.at("sha256"))
        self.latencies.append(source)

    def _check(self, path: Path, found: Any, expected: str) -> None:
        if found != expected:
            raise ValueError(
                f"`{path}` is of another drafter ({found}) than the weights in `{self.drafter}` ({expected}); measure "
                "these (`package --no-card` makes a folder for that), or leave the report out."
            )

    def _fingerprint(self, dtype: str) -> str:
        if dtype not in self._fingerprints:
            self._fingerprints[dtype] = fingerprint(DSparkModel.from_pretrained(self.drafter, dtype=dtype))
        return self._fingerprints[dtype]


def renamed(data: Any) -> Any:
    """A report with today's names in the place of those of 0.1."""
    if isinstance(data, dict):
        return {_OLD_KEYS.get(name, name): renamed(value) for name, value in data.items()}
    return [renamed(value) for value in data] if isinstance(data, list) else data


def describe_weights(path: Path) -> Source:
    """Hash, size and number of parameters of a file of weights.

    Raises:
        ValueError: if it is missing, corrupt or truncated.
    """
    if not path.is_file():
        raise ValueError(f"There are no weights `{path}`.")
    tensors = read_header(path)
    parameters = sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    return Source(path.name, {"sha256": checksum(path), "bytes": path.stat().st_size, "parameters": parameters})


def _calibration(drafter: Path, config: Source) -> Source | None:
    path = drafter / "calibration.json"
    if not path.is_file():
        return None
    source = read_source(path)
    used = config.at("confidence_temperatures")
    if source.at("temperatures") != used:
        raise ValueError(
            f"`{path}` has temperatures {source.at('temperatures')}, and config.json uses {used}; take both from one run "
            "of `python -m training.calibrate`."
        )
    return source


__all__ = ["WEIGHTS", "CardInputs", "describe_weights", "read_inputs"]
