"""Checks of a package that run nothing of it: files, hashes, code, calibration, and the metadata of its card."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_upload.card.header import greedy_lengths
from hub_upload.hub.push import PackageFile
from hub_upload.package.assemble import AUTO_MAP, custom_generate_file, remote_code_files
from hub_upload.package.contents import REQUIRED, foreign_files
from hub_upload.package.manifest import MANIFEST, read_manifest
from hub_upload.package.scan import scan


OK, FAIL, OPEN = "ok", "FAIL", "open"


@dataclass(frozen=True)
class Check:
    """A row of the output: `ok`, `FAIL`, or `open` where there was nothing to check against."""

    name: str
    verdict: str
    message: str

    @classmethod
    def of(cls, name: str, problems: list[str], success: str) -> "Check":
        """`ok` if there are no problems; names at most five of them."""
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        return cls(name, FAIL, "; ".join(problems[:5]) + more) if problems else cls(name, OK, success)


def static_checks(folder: Path, accepted_code: str | None) -> Iterator[Check]:
    """All checks of this module; the first alone if the folder is not a package."""
    files = read_package(folder)
    yield check_files(files)
    if any(name not in files for name in REQUIRED):
        return
    yield check_manifest(folder, files)
    yield check_code(folder, files, accepted_code)
    if "calibration.json" in files:
        yield check_calibration(folder)
    yield check_card(folder)


def read_package(folder: Path) -> dict[str, PackageFile]:
    """The files of a package by name, with their hashes."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: PackageFile.read(path, name) for name, path in sorted(paths.items())}


def check_files(files: dict[str, PackageFile]) -> Check:
    """Only files that a package may hold, none that runs code when it is loaded, and nothing private."""
    problems = [f"no {name}" for name in REQUIRED if name not in files]
    problems += [f"{name}: not a file of a package" for name in foreign_files(files)]
    problems += [finding for file in files.values() for finding in scan(file.path, file.name)]
    return Check.of("files", problems, f"{len(files)}, all of a package; no pickles, no secrets")


def check_manifest(folder: Path, files: dict[str, PackageFile]) -> Check:
    """Every file has the hash under which it was packaged."""
    if MANIFEST not in files:
        return Check("manifest", OPEN, f"there is no {MANIFEST} with the hashes of the packaged files")
    try:
        expected = read_manifest(folder)
    except ValueError as error:
        return Check("manifest", FAIL, str(error))
    hashes = {name: file.oids[1] for name, file in files.items() if name not in (MANIFEST, ".gitattributes")}
    changed = [name for name in sorted(expected.keys() | hashes.keys()) if expected.get(name) != hashes.get(name)]
    return Check.of("manifest", [f"{name} is not as packaged" for name in changed], f"{len(hashes)} files as packaged")


def check_code(folder: Path, files: dict[str, PackageFile], accepted: str | None) -> Check:
    """The code is the installed project's, or code that the user has read and accepted by its digest."""
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


def check_calibration(folder: Path) -> Check:
    """config.json has the temperatures of calibration.json."""
    temperatures = _json(folder / "calibration.json").get("temperatures")
    same = temperatures == _json(folder / "config.json").get("confidence_temperatures")
    problems = [] if same else ["config.json and calibration.json have different temperatures"]
    return Check.of("calibration", problems, "config.json has the temperatures of calibration.json")


def check_card(folder: Path) -> Check:
    """The card's metadata can be read, and state acceptance lengths."""
    try:
        lengths = greedy_lengths(folder)
    except ValueError as error:
        return Check("card", FAIL, str(error))
    if not lengths:
        return Check("card", OPEN, "its metadata state no acceptance length for greedy decoding")
    return Check("card", OK, f"acceptance lengths of {len(lengths)} sets of prompts")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


__all__ = ["FAIL", "OK", "OPEN", "Check", "static_checks"]
