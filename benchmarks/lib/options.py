"""Command lines: the options that benchmarks share, under one name each."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import training
from benchmarks.lib.machine import Machine
from training.common.commands import HelpFormatter, exit_status
from training.common.targets import EMBEDDED_TARGET


RESULTS = Path(__file__).parents[1] / "results"
EVAL_PROMPTS = Path(training.__file__).parent / "evaluation" / "prompts_eval.jsonl"
DEFAULT_DRAFTER = "build/dspark-smollm2-135m-instruct"
DTYPES = ("bfloat16", "float16", "float32")


class CommandParser(argparse.ArgumentParser):
    """A parser whose `--help` shows the module's docstring, and which reads `--some_option` as `--some-option`.

    Args:
        name (`str`): Of the command, as in `python -m benchmarks.<name>`.
        description (`str`, *optional*): The module's docstring, with examples.
    """

    def __init__(self, name: str, description: str | None):
        super().__init__(f"python -m benchmarks.{name}", description=description, formatter_class=HelpFormatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse reads everything through it
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenated(text) for text in given], namespace)


def _hyphenated(text: str) -> str:
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else text


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_seconds(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def add_model_options(parser: argparse.ArgumentParser, *, drafter_help: str = "") -> None:
    """Options that choose the models."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", default=EMBEDDED_TARGET, help=f"the model to speed up: `{EMBEDDED_TARGET}`, a folder or a Hub id"
    )
    group.add_argument(
        "--drafter",
        default=DEFAULT_DRAFTER,
        help=f"its DSpark drafter: a folder made by `dspark package`, or a Hub id; its code is run{drafter_help}",
    )
    group.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="dtype of the weights of both models")


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose how the drafter is used."""
    group = parser.add_argument_group("drafting (default: the drafter's own settings)")
    group.add_argument(
        "--num-assistant-tokens",
        type=int,
        metavar="N",
        help="verify at most N draft tokens per round (0 drafts nothing)",
    )
    group.add_argument(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="stop a draft before the first token whose calibrated confidence is below C, in [0, 1]; exactly 0.4 is "
        "what Transformers fills in by itself and counts as not set",
    )
    group.add_argument(
        "--schedule",
        choices=("fixed", "confidence", "throughput", "throughput_lagged"),
        help="how many drafts to verify (see docs/scheduling.md)",
    )


def drafting_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The drafting options that were given, under the names they have in `generate`."""
    given = {
        "num_assistant_tokens": options.num_assistant_tokens,
        "assistant_confidence_threshold": options.confidence_threshold,
        "num_assistant_tokens_schedule": options.schedule,
    }
    return {name: value for name, value in given.items() if value is not None}


def add_run_options(parser: argparse.ArgumentParser, *, threads: bool = True) -> None:
    """Options of a measurement: threads, and whether a busy machine is accepted."""
    group = parser.add_argument_group("the machine")
    if threads:
        group.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's)")
    group.add_argument(
        "--allow-busy", action="store_true", help="measure although other processes are running, and mark the report"
    )


def start(options: argparse.Namespace) -> Machine:
    """Read the machine's load, then set the number of threads; call it before anything is loaded.

    Raises:
        ValueError: if the machine is busy and `--allow-busy` was not given.
    """
    machine = Machine(allow_busy=options.allow_busy)
    if isinstance(options.threads, int):
        torch.set_num_threads(options.threads)
    return machine


def add_output_option(parser: argparse.ArgumentParser, name: str) -> None:
    """`--output`, by default the committed report of that name."""
    parser.add_argument("--output", default=str(RESULTS / f"{name}.json"), help="the JSON file to write")


def add_prompts_option(parser: Any, flags: Sequence[str] = ("--prompts",)) -> None:
    """A file of prompts, by default the evaluation prompts of this repository."""
    parser.add_argument(*flags, default=str(EVAL_PROMPTS), help="JSONL file with `turns`, grouped by `source`")


def command(
    parse_options: Callable[[list[str] | None], argparse.Namespace], run: Callable[[argparse.Namespace], object]
) -> Callable[..., int]:
    """The `main(argv)` of a benchmark; it returns the exit status (2: cannot start, 130: interrupted)."""

    def main(argv: list[str] | None = None) -> int:
        options = parse_options(argv)
        return exit_status(lambda: run(options))

    return main


__all__ = [
    "command",
    *("DEFAULT_DRAFTER", "DTYPES", "EVAL_PROMPTS", "RESULTS", "CommandParser", "add_drafting_options"),
    *("add_model_options", "add_output_option", "add_prompts_option", "add_run_options", "drafting_arguments"),
    *("positive_int", "positive_seconds", "start"),
]
