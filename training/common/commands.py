"""How commands begin and end: the form of `--help`, and what a user's mistake and Ctrl-C leave, without a traceback."""

import argparse
import sys
from collections.abc import Callable

from safetensors import SafetensorError


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults of the arguments that have one, and the description as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def exit_status(run: Callable[[], object], *, when_interrupted: str | None = None) -> int:
    """Run a command: 0, or 2 if it cannot start or go on (the error is printed), or 130 if it was interrupted.

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


__all__ = ["HelpFormatter", "exit_status"]
