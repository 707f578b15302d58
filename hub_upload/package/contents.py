"""Names of the files that a package may hold: text, and one file of weights. No other file is pushed.

This module opens no file and needs neither torch nor a network.
"""

import re
from collections.abc import Iterable


REQUIRED = ("config.json", "model.safetensors", "README.md", "modeling_dspark.py", "configuration_dspark.py")
_PATTERNS = (
    r"config\.json",
    r"README\.md",
    r"model\.safetensors",
    r"(compat|model|target|fused|schedule|draft|engine|generate)_\w+\.py",
    r"[a-z]\w*_dspark\.py",  # the code of packages of 0.1
    r"custom_generate/generate\.py",
    r"calibration\.json",
    r"cost_profile\.json",
    r"files\.json",
    r"\.eval_results/[\w.-]+\.yaml",
    r"(images/)?[\w-]+\.png",
    r"LICENSE",
)
_FROM_THE_HUB = (".gitattributes",)  # the Hub adds it to each repository


def is_package_file(path: str) -> bool:
    """Whether a package may hold a file of this name, relative to its root, with `/`."""
    return any(re.fullmatch(pattern, path) for pattern in _PATTERNS)


def foreign_files(paths: Iterable[str]) -> list[str]:
    """The paths that no package has, sorted, except files that the Hub adds by itself."""
    return sorted(path for path in paths if not is_package_file(path) and path not in _FROM_THE_HUB)


__all__ = ["REQUIRED", "foreign_files", "is_package_file"]
