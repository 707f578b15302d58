"""`files.json` of a package: size and SHA-256 of every other file, to check that weights and code are as published."""

import json
from pathlib import Path
from typing import Any

from training.common.files import checksum


MANIFEST = "files.json"
FORMAT = 1


def manifest(folder: Path) -> dict[str, Any]:
    """The content of a folder's manifest: its files, except the manifest itself. Equal files give equal manifests."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {
        path.relative_to(folder).as_posix(): {"sha256": checksum(path), "size": path.stat().st_size} for path in paths
    }
    return {"format": FORMAT, "files": files}


def write_manifest(folder: Path) -> None:
    """Write `files.json`."""
    (folder / MANIFEST).write_text(json.dumps(manifest(folder), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by name, as stated by the manifest of a folder.

    Raises:
        ValueError: if it cannot be read.
    """
    path = folder / MANIFEST
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        files = {name: entry["sha256"] for name, entry in written["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{path}` is not a manifest: {error!r}.") from error
    if written.get("format") != FORMAT:
        raise ValueError(f"`{path}` is not a manifest of format {FORMAT}.")
    return files


__all__ = ["FORMAT", "MANIFEST", "manifest", "read_manifest", "write_manifest"]
