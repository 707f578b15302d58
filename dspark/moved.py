"""Modules under their names of the last release. Without torch, so that a package can use it before it loads anything."""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds documented modules of release 0.1; they go with the next release.

    Args:
        moved (`dict[str, str]`): New names by old ones.
    """

    def __init__(self, moved: Mapping[str, str]):
        self._moved = moved

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """A spec for an old name; warns."""
        if fullname not in self._moved:
            return None
        warnings.warn(f"`{fullname}` is now `{self._moved[fullname]}`.", DeprecationWarning, stacklevel=2)
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the place of the old one."""
        sys.modules[module.__name__] = importlib.import_module(self._moved[module.__name__])


__all__ = ["MovedModules"]
