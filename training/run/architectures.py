"""The architectures that can be trained, by the name that `architecture` has in a recipe; imported when asked for."""

import importlib
from collections.abc import Iterator, Mapping

from modeling_dspark import DSparkModel


_CLASSES = {
    "dspark": "modeling_dspark.DSparkModel",
    "eagle": "benchmarks.baselines.autoregressive.EagleDrafter",
}


class _Architectures(Mapping[str, type[DSparkModel]]):
    """Classes of drafters by name.

    Raises:
        ValueError: if the module of an architecture is not installed.
    """

    def __getitem__(self, name: str) -> type[DSparkModel]:
        module, _, attribute = _CLASSES[name].rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"`architecture: {name}` needs the module `{module}`, which is not installed ({error}): run from a clone of "
                "the repository."
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, name: object) -> bool:  # the default would import the class
        return name in _CLASSES


ARCHITECTURES = _Architectures()

__all__ = ["ARCHITECTURES"]
