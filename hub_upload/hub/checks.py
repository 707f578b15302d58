"""What can be checked of a package without running it: its files, its code, its weights, and what its card says."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hub_upload.hub.claims import Claims, claims_of_card, claims_of_report, contradictions
from hub_upload.hub.push import PackageFile
from hub_upload.package.contents import REQUIRED, foreign_files
from hub_upload.package.manifest import MANIFEST, read_manifest
from hub_upload.package.assemble import AUTO_MAP, custom_generate_file, remote_code_files
from hub_upload.package.scan import scan
from modeling_dspark import DSparkModel
from training.data.features import fingerprint
from training.evaluation.report import EvalReport


OK, FAIL, OPEN = "ok", "FAIL", "open"


@dataclass(frozen=True)
class Check:
    """A row of the verdict: `ok`, `FAIL`, or `open` where there was nothing to check against."""

    name: str
    verdict: str
    said: str

    @classmethod
    def of(cls, name: str, problems: list[str], fine: str) -> "Check":
        """`ok` if there are no problems; names at most five of them."""
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        return cls(name, FAIL, "; ".join(problems[:5]) + more) if problems else cls(name, OK, fine)


@dataclass(frozen=True)
class Report:
    """A report to check against: an `EvalReport`, or only the hash of the weights that something was measured with."""

    evaluation: EvalReport | None
    weights: str | None

    @classmethod
    def read(cls, path: str | Path) -> "Report":
        """Read a report of `training.evaluate` or of `benchmarks.latency`.

        Raises:
            ValueError: if it is neither.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            data = json.loads(text)
            if isinstance(data, dict) and "sections" in data:
                return cls(None, data["drafter"]["sha256"])
            return cls(EvalReport.from_json(text), None)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`--report`: `{path}` is no report of training.evaluate or benchmarks.latency: {error}."
            ) from error


def read_package(folder: Path) -> dict[str, PackageFile]:
    """The files of a package by name, with their hashes."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: PackageFile.read(path, name) for name, path in sorted(paths.items())}


def check_files(files: dict[str, PackageFile]) -> Check:
    """Only what a package has, and nothing that runs code when it is loaded or that is private."""
    problems = [f"no {name}" for name in REQUIRED if name not in files]
    problems += [f"{name}: no package has this file" for name in foreign_files(files)]
    problems += [found for file in files.values() for found in scan(file.path, file.name)]
    return Check.of("files", problems, f"{len(files)}, all of a package; no pickles, no secrets")


def check_manifest(folder: Path, files: dict[str, PackageFile]) -> Check:
    """Every file is the one that was packaged."""
    if MANIFEST not in files:
        return Check("manifest", OPEN, f"there is no {MANIFEST} with the hashes of what was packaged")
    try:
        expected = read_manifest(folder)
    except ValueError as error:
        return Check("manifest", FAIL, str(error))
    found = {name: file.oids[1] for name, file in files.items() if name not in (MANIFEST, ".gitattributes")}
    changed = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    return Check.of("manifest", [f"{name} is not as packaged" for name in changed], f"{len(found)} files as packaged")


def check_code(folder: Path, files: dict[str, PackageFile], accepted: str | None) -> Check:
    """The code is that of the installed project, or what the user has looked at and accepted by its digest."""
    installed = {path.name: path for path in remote_code_files()} | {
        "custom_generate/generate.py": custom_generate_file()
    }
    code = {name: file.oids[1] for name, file in files.items() if name.endswith(".py")}
    digest = hashlib.sha256("".join(f"{name} {code[name]}\n" for name in sorted(code)).encode()).hexdigest()[:16]
    problems = [f"{name} is missing" for name in sorted(installed.keys() - code.keys())]
    problems += [f"{name} is not of this project" for name in sorted(code.keys() - installed.keys())]
    same = installed.keys() & code.keys()
    problems += [f"{n} differs" for n in sorted(same) if PackageFile.read(installed[n], n).oids[1] != code[n]]
    if _json(folder / "config.json").get("auto_map") != AUTO_MAP:
        problems.append("`auto_map` of config.json names other code")
    if problems and accepted == digest:
        return Check("code", OK, f"not the installed project's, accepted by --accept-code {digest}")
    hint = [f"if you have read it and trust it: --accept-code {digest}"] if problems else []
    return Check.of("code", problems[:4] + hint, f"{len(code)} files, each the installed project's")


def check_weights(folder: Path, files: dict[str, PackageFile], report: Report | None) -> Check:
    """The weights and temperatures are those that calibration and report are about."""
    problems, against = [], []
    config = _json(folder / "config.json")
    if "calibration.json" in files:
        against.append("calibration.json")
        temperatures = _json(folder / "calibration.json").get("temperatures")
        if temperatures != config.get("confidence_temperatures"):
            problems.append("config.json and calibration.json have different temperatures")
    if report is not None:
        against.append("the report")
        if report.weights not in (None, files["model.safetensors"].oids[1]):
            problems.append(
                f"the report is of weights {report.weights[:12]}, not {files['model.safetensors'].oids[1][:12]}"
            )
        if report.evaluation is not None and report.evaluation.drafter["fingerprint"] != _fingerprint(folder, report):
            problems.append("the report is of other weights (another fingerprint)")
    if not against:
        return Check("weights", OPEN, "nothing here says which weights the numbers are of; pass --report")
    return Check.of("weights", problems, f"fit {' and '.join(against)}")


def check_card(folder: Path, report: Report | None) -> tuple[Check, Claims | None]:
    """The card's numbers agree with each other and with the report; also what is claimed, the report's word first."""
    stated = claims_of_report(report.evaluation) if report is not None and report.evaluation is not None else None
    try:
        card = claims_of_card(folder)
        problems = contradictions(folder, card, stated) if card is not None else []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        return Check("card", FAIL, f"cannot be read: {error}"), stated
    if card is None:
        return Check("card", OPEN, "has no table of greedy results in the form of `hub_upload card`"), stated
    return Check.of(
        "card", problems, f"{len(card.sets)} sets agree{' with the report' * (stated is not None)}"
    ), stated or card


def static_checks(
    folder: Path, *, report: Report | None, accepted_code: str | None
) -> Iterator[tuple[Check, Claims | None]]:
    """All checks of this module, with the claims that the last of them found."""
    files = read_package(folder)
    first = check_files(files)
    yield first, None
    if any(name not in files for name in REQUIRED):
        return
    yield check_manifest(folder, files), None
    yield check_code(folder, files, accepted_code), None
    yield check_weights(folder, files, report), None
    yield check_card(folder, report)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _fingerprint(folder: Path, report: Report) -> str:
    dtype = report.evaluation.settings.get("dtype", "float32") if report.evaluation else "float32"
    try:
        return fingerprint(DSparkModel.from_pretrained(folder, dtype=dtype))
    except (ValueError, OSError, RuntimeError):
        return "weights that cannot be loaded"


__all__ = ["FAIL", "OK", "OPEN", "Check", "Report", "static_checks"]
