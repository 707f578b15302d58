"""What the benchmarks of the packed loop share: the loop's code, and options that choose the models.

A drafter brings its own copy of the code when it is loaded as remote code. That copy is what is measured, so that the
numbers are those of what a user of the package runs; nothing here imports `modeling_dspark`.
"""

import argparse
import importlib
import importlib.util
from typing import Any

from transformers import PreTrainedModel

from benchmarks.lib.pair import add_model_options, positive_int
from training.common.commands import exit_status


def add_packed_options(parser: argparse.ArgumentParser, *, drafter_help: str = "") -> None:
    """Options for the models and the threads; how the drafter drafts is up to the benchmark."""
    group = add_model_options(parser, drafter_help=drafter_help)
    group.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's)")


def code_of(drafter: PreTrainedModel, name: str) -> Any:
    """A module of the code that `drafter` came with, e.g. `"engine_loop"`.

    Raises:
        ValueError: if that code is from before the packed loop.
    """
    package = type(drafter).__module__.rpartition(".")[0]
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"`--drafter {drafter.name_or_path}` is packaged with code that has no `{name}.py`. Package it again: "
            "`python -m hub_upload package FOLDER OUTPUT --overwrite`."
        ) from error


def eos_token_ids(target: PreTrainedModel) -> list[int]:
    """The end-of-text tokens that `generate` stops at."""
    ids = target.generation_config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def require_matplotlib(option: str) -> None:
    """Refuse to plot without matplotlib, before anything takes time.

    Raises:
        ValueError: says how to get it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"`{option}` needs matplotlib: `pip install matplotlib`.")


__all__ = ["add_packed_options", "code_of", "eos_token_ids", "exit_status", "require_matplotlib"]
