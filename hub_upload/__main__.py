"""Command line of `hub_upload`."""

from typing import Annotated

import typer


app = typer.Typer(help="DSpark drafters on the Hugging Face Hub: package, push, verify.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """DSpark drafters on the Hugging Face Hub: package, push, verify."""


@app.command()
def package(
    drafter: Annotated[str, typer.Argument(help="Folder with config.json, model.safetensors and README.md.")],
    output: Annotated[str, typer.Argument(help="Folder to make, e.g. build/dspark-smollm2-135m-instruct.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier package.")] = False,
) -> None:
    """Assemble a folder that AutoModel.from_pretrained(..., trust_remote_code=True) loads."""
    from hub_upload.package import package as assemble

    try:
        files = assemble(drafter, output, overwrite=overwrite)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    for path in files:
        typer.echo(f"{path.stat().st_size:>12,}  {path}")


@app.command()
def push(
    folder: Annotated[str, typer.Argument(help="A package: what `package` wrote.")],
    repo_id: Annotated[str, typer.Argument(help="Repository, owner/name; created if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; else private.")] = False,
    tag: Annotated[str | None, typer.Option(help="Tag of the commit, e.g. v1.0; else none. Tags do not move.")] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Push a DSpark drafter",
    keep_others: Annotated[
        bool, typer.Option("--keep-others", help="Push beside files of the repository that no package has.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the folder, say what would happen, stop.")] = False,
) -> None:
    """Push a package to the Hub in one commit. The token is that of `hf auth login`, or HF_TOKEN."""
    from hub_upload.push_command import run

    raise typer.Exit(
        run(folder, repo_id, public=public, tag=tag, message=message, keep_others=keep_others, dry_run=dry_run)
    )


if __name__ == "__main__":
    app()
