"""How the commands of this package begin and end: the form of `--help`; what a user's mistake and Ctrl-C leave."""

import argparse
import sys
from collections.abc import Callable


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults of the arguments, and the description as it is written."""


def run_command(command: Callable[[], object], *, when_interrupted: str) -> None:
    """Run a command; a user's mistake, or a file or Hub that fails, ends it with status 1 and a message, Ctrl-C with 130.

    Args:
        command (`Callable[[], object]`): The command.
        when_interrupted (`str`): What Ctrl-C leaves behind, and what starting again does.
    """
    try:
        command()
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted: {when_interrupted}\n")
        raise SystemExit(130) from None


__all__ = ["HelpFormatter", "run_command"]
