"""Command line of `hub_upload`."""

import sys
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


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, in any of the formats that are read.")],
    output: Annotated[str, typer.Argument(help="Folder to make, e.g. build/my-drafter-deepspec.")],
    to: Annotated[str, typer.Option("--to", help="dspark, deepspec (vLLM, SGLang) or speculators.")],
    target: Annotated[str | None, typer.Option("--target", help="The target: folder or Hub id.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print format, fields and tensors; write nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion.")] = False,
) -> None:
    """Convert a checkpoint between the formats that DSpark drafters are published in."""
    from pathlib import Path

    from hub_upload.convert import check_before, plan_conversion, plan_lines
    from hub_upload.convert import convert as write

    try:
        plan = plan_conversion(source, to, target=target)
        for note in plan.notes:
            typer.echo(f"note: {note}", err=True)
        if dry_run:
            typer.echo("\n".join(plan_lines(plan)))
            return
        check_before(plan, Path(output), overwrite=overwrite)
        with typer.progressbar(length=plan.num_bytes, label=f"{plan.kind} to {plan.to}", file=sys.stderr) as bar:
            files = write(plan, output, overwrite=overwrite, advance=bar.update)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    for path in files:
        typer.echo(f"{path.stat().st_size:>12,}  {path}")


if __name__ == "__main__":
    app()
