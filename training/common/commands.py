"""The start and end of commands: one dialect of flags, the form of `--help`, mistakes and Ctrl-C without a traceback."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safetensors import SafetensorError
from transformers import HfArgumentParser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults of the arguments that have one, and the description as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class CommandParser(HfArgumentParser):
    """Flags with hyphens for the fields of dataclasses; the spelling with underscores is accepted and not shown."""

    def __init__(self, dataclasses: Any, *, command: str, description: str | None, **options: Any):
        super().__init__(
            dataclasses,
            prog=f"python -m training.{command}",
            description=description,
            formatter_class=HelpFormatter,
            **options,
        )

    def add_argument(self, *flags: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*flags, **options)  # registers every spelling
        action.option_strings = [flag for flag in action.option_strings if "_" not in flag] or action.option_strings
        return action


def parse_command_line(arguments: type, argv: Sequence[str] | None, *, command: str, description: str | None) -> Any:
    """Arguments of `python -m training.<command>` as an instance of a dataclass; without `argv`, of this process."""
    parser = CommandParser(arguments, command=command, description=description)
    return parser.parse_args_into_dataclasses(args=None if argv is None else list(argv))[0]


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is not one of the choices of an argument."""
    if value not in (allowed := list(choices)):
        raise ValueError(f"`{name}` must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}.")


def exit_status(run: Callable[[], object], *, when_interrupted: str | None = None) -> int:
    """Run a command: 0, or 2 if it cannot start or continue (the error is printed), or 130 if it was interrupted.

    Args:
        run (`Callable[[], object]`): The command.
        when_interrupted (`str`, *optional*): What Ctrl-C leaves behind, and what starting again does.
    """
    try:
        run()
    except (OSError, SafetensorError, ValueError) as error:  # the second on a full disk
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted: {when_interrupted}\n" if when_interrupted else "\n")
        return 130
    return 0


__all__ = ["CommandParser", "HelpFormatter", "check_choice", "exit_status", "parse_command_line"]
