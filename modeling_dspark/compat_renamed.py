"""Names of the last release, which lead to the new ones with a warning."""

import sys
import warnings
from collections.abc import Callable
from typing import Any


def renamed(old: str, new: str) -> Any:
    """A property under its name in release 0.1, removed in the next release."""

    def value(self: Any) -> Any:
        warnings.warn(f"`{type(self).__name__}.{old}` is now `{new}`.", FutureWarning, stacklevel=2)
        return getattr(self, new)

    return property(value)


def renamed_in(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for its names in release 0.1, removed in the next release.

    Args:
        module (`str`): `__name__` of the module.
        names (`dict[str, str]`): New names by old ones.
    """

    def value(old: str) -> Any:
        if old not in names:
            raise AttributeError(f"module {module!r} has no attribute {old!r}")
        warnings.warn(f"`{module}.{old}` is now `{names[old]}`.", FutureWarning, stacklevel=2)
        return getattr(sys.modules[module], names[old])

    return value


__all__ = ["renamed", "renamed_in"]
