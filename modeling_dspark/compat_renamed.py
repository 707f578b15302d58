"""Names of the last release, which lead to the new ones with a warning."""

import warnings
from typing import Any


def renamed(old: str, new: str) -> Any:
    """A property under its name in release 0.1, removed in the next release."""

    def value(self: Any) -> Any:
        warnings.warn(f"`{type(self).__name__}.{old}` is now `{new}`.", FutureWarning, stacklevel=2)
        return getattr(self, new)

    return property(value)


__all__ = ["renamed"]
