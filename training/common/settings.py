"""The settings that work was begun with, against those that it would continue with: one check for all that resumes."""

from collections.abc import Mapping
from typing import Any


def check_same_settings(then: Mapping[str, Any], now: Mapping[str, Any], *, subject: str, way_out: str) -> None:
    """Refuse to continue with other settings.

    Args:
        then (`Mapping[str, Any]`): The settings on disk; names that `now` lacks are not compared.
        now (`Mapping[str, Any]`): The settings asked for.
        subject (`str`): The thing with the settings of then, with its verb, e.g. "`runs/answers.jsonl` was made".
        way_out (`str`): What the user can do.

    Raises:
        ValueError: names each setting that differs, with both values.
    """
    changed = {name: (then.get(name), value) for name, value in now.items() if then.get(name) != value}
    if changed:
        raise ValueError(f"{subject} with other settings (then, now): {changed}. {way_out}")


__all__ = ["check_same_settings"]
