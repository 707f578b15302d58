"""`files.json` of a package: size and SHA-256 of every other file, so that weights and code can be checked as published."""

import json
from pathlib import Path
from typing import Any

from hub_upload.card_inputs import sha256


MANIFEST = "files.json"
FORMAT = 1


def manifest(folder: Path) -> dict[str, Any]:
    """Describe the files of a folder, but for a manifest; the same for the same files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "size": path.stat().st_size} for path in paths
    }
    return {"format": FORMAT, "files": files}


def write_manifest(folder: Path) -> None:
    """Write `files.json`."""
    (folder / MANIFEST).write_text(json.dumps(manifest(folder), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def changed_files(folder: Path) -> list[str]:
    """Files that are missing, unexpected or other than the manifest of the folder says; sorted.

    Raises:
        ValueError: if the folder has no manifest that can be read.
    """
    path = folder / MANIFEST
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        expected = written["files"] if written["format"] == FORMAT else None
    except FileNotFoundError:
        raise ValueError(f"`{folder}` has no `{MANIFEST}`, so its files cannot be checked.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`{path}` is no manifest: {error!r}.") from error
    if not isinstance(expected, dict):
        raise ValueError(f"`{path}` is no manifest of format {FORMAT}.")
    found = manifest(folder)["files"]
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


__all__ = ["FORMAT", "MANIFEST", "changed_files", "manifest", "write_manifest"]
