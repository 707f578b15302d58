"""How a command ends: what goes wrong outside of it is told in one line, without a traceback. Knows nothing of what it does."""

import sys
from collections.abc import Callable

from safetensors import SafetensorError


def exit_status(run: Callable[[], object]) -> int:
    """Run a command: 0, or 2 if it cannot start or go on (the error is printed), or 130 if it was interrupted."""
    try:
        run()
    except (OSError, SafetensorError, ValueError) as error:  # the second on a full disk
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


__all__ = ["exit_status"]
