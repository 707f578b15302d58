"""Output of `python -m hub_upload verify`, and its exit status: 0 passed, 1 failed, 2 could not check, 130 for Ctrl-C."""

import typer

from hub_upload.hub.checks import FAIL, OPEN, Check
from hub_upload.hub.errors import HUB_ERRORS, explain
from hub_upload.hub.verify import Settings, verify


def run(
    name: str,
    settings: Settings,
    *,
    revision: str | None,
    accept_code: str | None,
    dry_run: bool = False,
) -> int:
    """Check, print a row per check and the verdict; returns the exit status."""
    rows: list[Check] = []
    try:
        for check in verify(name, settings, revision=revision, accepted_code=accept_code, dry_run=dry_run):
            rows.append(check)
            typer.echo(f"{check.verdict:<5} {check.name:<18} {_one_line(check.message)}")
    except HUB_ERRORS as error:
        return _stop(f"error: {explain(error, name)}", 2)
    except (OSError, ValueError) as error:
        return _stop(f"error: {error}", 2)
    except KeyboardInterrupt:
        return _stop("Interrupted before a verdict.", 130)
    failed = [row.name for row in rows if row.verdict == FAIL]
    still_open = [row.name for row in rows if row.verdict == OPEN]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "passed"
    if still_open:
        verdict += f"; nothing to check against: {', '.join(still_open)}"
    if dry_run:
        verdict += "; a dry run: the drafter was not loaded, and no prompt was answered"
    typer.echo(f"\n{verdict}")
    return 1 if failed else 0


def _one_line(text: str) -> str:
    """A message may quote a file, whose words must not look like a row of the output."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _stop(line: str, status: int) -> int:
    typer.echo(line, err=True)
    return status


__all__ = ["run"]
