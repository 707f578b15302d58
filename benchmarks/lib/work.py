"""The working folder of a benchmark that trains, which resumes only with the settings it was started with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.common.files import checksum, write_atomically
from training.common.settings import check_same_settings


def check_work(work: Path, settings: dict[str, Any], files: dict[str, Sequence[str]]) -> None:
    """Record the settings of the trainings in a folder, or refuse to resume there with others.

    Args:
        work (`Path`): The folder, which exists.
        settings (`dict`): The settings that the trainings depend on.
        files (`dict[str, Sequence[str]]`): Files whose content they depend on, too.

    Raises:
        ValueError: names each setting that differs, with both values.
    """
    digests = {name: [checksum(Path(path))[:16] for path in files[name]] for name in files}
    settings, path = settings | digests, work / "settings.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else settings
    way_out = "For these settings, choose another `--work`."
    check_same_settings(earlier, settings, subject=f"`{work}` holds trainings", way_out=way_out)
    write_atomically(path, json.dumps(settings, indent=1) + "\n")


__all__ = ["check_work"]
