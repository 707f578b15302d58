"""The working folder of a benchmark that trains, which resumes only with the settings it was started with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.common.files import checksum, write_atomically


def check_work(work: Path, settings: dict[str, Any], files: dict[str, Sequence[str]]) -> None:
    """Record what the trainings in a folder depend on, or refuse to resume them with anything else.

    Args:
        work (`Path`): The folder, which exists.
        settings (`dict`): Settings of the trainings.
        files (`dict[str, Sequence[str]]`): Files whose content they depend on.

    Raises:
        ValueError: names what differs, with both values.
    """
    digests = {name: [checksum(Path(path))[:16] for path in files[name]] for name in files}
    settings, path = settings | digests, work / "settings.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else settings
    different = {name: (earlier.get(name), value) for name, value in settings.items() if earlier.get(name) != value}
    if different:
        raise ValueError(
            f"`{work}` holds trainings of other settings (then, now): {different}; choose another `--work`."
        )
    write_atomically(path, json.dumps(settings, indent=1) + "\n")


__all__ = ["check_work"]
