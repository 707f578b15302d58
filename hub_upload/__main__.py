"""Command line of `hub_upload`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer


app = typer.Typer(
    help="DSpark drafters on the Hugging Face Hub: convert, card, package, push, verify.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """DSpark drafters on the Hugging Face Hub: convert, card, package, push, verify."""


@app.command()
def card(
    drafter: Annotated[Path, typer.Argument(help="Folder with config.json, model.safetensors and facts.yaml.")],
    report: Annotated[
        list[Path] | None, typer.Option(help="A report of training.evaluate or benchmarks.latency; may be repeated.")
    ] = None,
    facts: Annotated[Path | None, typer.Option(help="The facts file; by default facts.yaml of the folder.")] = None,
    output: Annotated[Path | None, typer.Option(help="The card; by default README.md of the folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card written by hand.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and their sizes; write nothing.")] = False,
) -> None:
    """Make the model card of a drafter, with its plots and .eval_results, from reports and facts."""
    from hub_upload.card.render import card_files, write_card

    try:
        if dry_run:
            files = {name: len(content) for name, content in card_files(drafter, facts=facts, reports=report).items()}
        else:
            paths = write_card(drafter, output=output, facts=facts, reports=report, overwrite=overwrite)
            files = {str(path): path.stat().st_size for path in paths}
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    _list(files)


@app.command()
def package(
    drafter: Annotated[
        str, typer.Argument(help="Folder with config.json, model.safetensors, and facts.yaml or README.md.")
    ],
    output: Annotated[str, typer.Argument(help="Folder to make, e.g. build/dspark-smollm2-135m-instruct.")],
    report: Annotated[list[str] | None, typer.Option(help="A report for the card; may be repeated.")] = None,
    cost_profile: Annotated[str | None, typer.Option(help="A measured cost profile to include.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Hub id of the target, for the config; by default the card's.")
    ] = None,
    no_card: Annotated[
        bool, typer.Option("--no-card", help="Leave the card out, to measure for the first one.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier package.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and their sizes; write nothing.")] = False,
) -> None:
    """Assemble a folder that AutoModel.from_pretrained(..., trust_remote_code=True) loads."""
    from hub_upload.package.assemble import package as assemble
    from hub_upload.package.assemble import planned

    options: dict[str, Any] = {
        "reports": report,
        "cost_profile": cost_profile,
        "target_name": target,
        "with_card": not no_card,
    }
    try:
        if dry_run:
            files = planned(drafter, **options)
        else:
            files = {
                str(path): path.stat().st_size for path in assemble(drafter, output, **options, overwrite=overwrite)
            }
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    _list(files)


def _list(files: dict[str, int]) -> None:
    for path, size in files.items():
        typer.echo(f"{size:>12,}  {path}")


@app.command()
def push(
    folder: Annotated[str, typer.Argument(help="A package, made by `package`.")],
    repo_id: Annotated[str, typer.Argument(help="Repository, owner/name; created if it does not exist.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; private by default.")
    ] = False,
    tag: Annotated[str | None, typer.Option(help="Tag of the commit, e.g. v1.0. Tags do not move.")] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Push a DSpark drafter",
    keep_others: Annotated[
        bool, typer.Option("--keep-others", help="Keep files of the repository that no package has.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the folder and print what would happen; send nothing.")
    ] = False,
) -> None:
    """Push a package to the Hub in one commit. The token is that of `hf auth login`, or HF_TOKEN."""
    from hub_upload.hub.push_command import run

    raise typer.Exit(
        run(folder, repo_id, public=public, tag=tag, message=message, keep_others=keep_others, dry_run=dry_run)
    )


@app.command()
def verify(
    drafter: Annotated[str, typer.Argument(help="A package, or a repository on the Hub, owner/name.")],
    target: Annotated[str, typer.Option(help="The target: a folder or a Hub id.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the repository; by default main.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSONL of prompts; by default the project's evaluation prompts.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per set.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum length of an answer, in tokens.")] = 64,
    device: Annotated[str, typer.Option(help="Where both models run, in fp32, e.g. cuda.")] = "cpu",
    accept_code: Annotated[
        str | None,
        typer.Option(help="Digest, as printed, of code that may run though it differs from the installed project's."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check files, code and card; load and decode nothing.")
    ] = False,
) -> None:
    """Check a drafter: files, code, greedy text; print its acceptance length beside the card's. Exit status 1 if it fails."""
    from hub_upload.hub.verify import PROMPTS, Settings
    from hub_upload.hub.verify_command import run

    settings = Settings(target, prompts or str(PROMPTS), limit, max_new_tokens, device)
    raise typer.Exit(run(drafter, settings, revision=revision, accept_code=accept_code, dry_run=dry_run))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, in any known format.")],
    output: Annotated[str, typer.Argument(help="Folder to make, e.g. build/my-drafter-deepspec.")],
    to: Annotated[str, typer.Option("--to", help="dspark, deepspec (vLLM, SGLang) or speculators.")],
    target: Annotated[str | None, typer.Option("--target", help="The target: folder or Hub id.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bfloat16, float16 or float32 for all weights; by default unchanged.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print format, fields and tensors; write nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion.")] = False,
) -> None:
    """Convert a checkpoint between the formats that DSpark drafters are published in."""
    from hub_upload.convert.plan import check_before, plan_conversion, plan_lines
    from hub_upload.convert.plan import convert as write

    try:
        plan = plan_conversion(source, to, target=target, dtype=dtype)
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
