"""Command line of `hub_upload`."""

from typing import Annotated

import typer


app = typer.Typer(help="Package DSpark drafters for the Hugging Face Hub.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Package DSpark drafters for the Hugging Face Hub."""


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


if __name__ == "__main__":
    app()
