"""Output of `python -m hub_upload push`, and its exit status: 0, 2 for errors that the user can correct, 130 for Ctrl-C."""

import re
from collections.abc import Sequence

import typer

from hub_upload.hub.errors import HUB_ERRORS, explain
from hub_upload.hub.push import PackageFile, Pushed, check_repo_id, checked_files, push


def run(
    folder: str, repo_id: str, *, public: bool, tag: str | None, message: str, keep_others: bool, dry_run: bool
) -> int:
    """Check, push and report; returns the exit status."""
    try:
        files = checked_files(folder)
        check_repo_id(repo_id)
        _print_files(files)
        if others := _others_in_card(files, repo_id):
            typer.echo(f"note: the card loads `{others[0]}`, not `{repo_id}`: users would copy that.", err=True)
            typer.echo("      Set `repo_id` in facts.yaml and package again, or edit your own card.", err=True)
        if dry_run:
            _print_plan(repo_id, public=public, tag=tag)
            return 0
        pushed = push(files, repo_id, public=public, tag=tag, keep_others=keep_others, message=message)
    except HUB_ERRORS as error:
        return _fail(explain(error, repo_id))
    except (OSError, ValueError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        typer.echo("Interrupted. The branch is as it was; run the command again to continue.", err=True)
        return 130
    _print_pushed(pushed, repo_id, tag)
    return 0


def _others_in_card(files: Sequence[PackageFile], repo_id: str) -> list[str]:
    """The repositories from which the card's snippets load the drafter, unless this one is among them."""
    text = "".join(file.path.read_text(encoding="utf-8") for file in files if file.name == "README.md")
    names = re.findall(r"\bAutoModel\.from_pretrained\(\s*[\"']([^\"'\n]+)", text)
    return [] if repo_id in names else names


def _fail(message: str) -> int:
    typer.echo(f"error: {message}", err=True)
    return 2


def _print_files(files: list[PackageFile]) -> None:
    for file in files:
        typer.echo(f"{file.size:>14,}  {file.name}")
    typer.echo(
        f"{sum(file.size for file in files):>14,}  bytes in {len(files)} files; no secrets, no pickles, nothing foreign"
    )


def _print_plan(repo_id: str, *, public: bool, tag: str | None) -> None:
    visible = "public" if public else "private"
    typer.echo(
        f"Dry run: nothing was sent. It would create `{repo_id}` ({visible}) if it does not exist, and make one commit"
    )
    typer.echo(
        f"with these files{f', tagged `{tag}`' if tag else ''}; files of an earlier package that this one lacks would be removed."
    )


def _print_pushed(pushed: Pushed, repo_id: str, tag: str | None) -> None:
    if pushed.removed:
        typer.echo(f"removed: {', '.join(pushed.removed)}")
    typer.echo(f"{'pushed' if pushed.new else 'nothing changed'}: {pushed.url}{f' (tag {tag})' if tag else ''}")
    revision = f', revision="{tag}"' if tag else ""
    typer.echo("\nIn a program:\n")
    typer.echo(f'drafter = AutoModel.from_pretrained("{repo_id}"{revision}, trust_remote_code=True)')
    typer.echo("output = target.generate(**inputs, assistant_model=drafter)")
    typer.echo(f"\nNext: python -m hub_upload verify {repo_id} --revision {pushed.commit} --target TARGET")


__all__ = ["run"]
