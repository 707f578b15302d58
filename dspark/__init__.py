"""The command `dspark`: one verb for each command of this project, listed by `dspark --help`.

Nothing heavy is imported before the verb is known, so this is a package beside `modeling_dspark`, whose import loads
PyTorch. The wheel puts `training` and `hub_upload` into this folder, because names that common do not belong in
site-packages; in a clone they are in the folder above.
"""

import importlib
import importlib.metadata
import runpy
import sys
from pathlib import Path


_HERE = Path(__file__).resolve().parent
_IS_INSTALLED = (_HERE / "training").is_dir()
_HUB = "hub_upload.__main__"
_OWN = ("benchmarks", "dspark", "hub_upload", "modeling_dspark", "training")

# Verb, module, and what the verb does; in the order in which a drafter is made.
VERBS: dict[str, tuple[str, str]] = {
    "regenerate": ("training.regenerate", "let the target answer prompts, which are what a drafter learns from"),
    "train": ("training.train", "train a drafter on the answers"),
    "refit-confidence": ("training.refit_confidence", "fit the confidence head again, on prompts not trained on"),
    "calibrate": ("training.calibrate", "fit the temperatures that scale the confidence"),
    "evaluate": ("training.evaluate", "measure acceptance, calibration and speed, by set of prompts"),
    "convert": (_HUB, "convert between the formats in which drafters are published"),
    "card": (_HUB, "write the model card, from reports and facts"),
    "package": (_HUB, "assemble a folder that loads with trust_remote_code=True"),
    "push": (_HUB, "push a package to the Hub"),
    "verify": (_HUB, "check a package or a repository against its card"),
}
_CLONE_VERBS = {
    "demo": "generate with and without a drafter, side by side (from a clone)",
    "bench NAME": "run benchmarks/NAME.py (from a clone)",
}


def add_to_path() -> Path:
    """Make `training` and `hub_upload` importable in this process; returns the folder that holds them."""
    folder = _HERE if _IS_INSTALLED else _HERE.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def help_text() -> str:
    """What `dspark --help` prints."""
    lines = {verb: summary for verb, (_, summary) in VERBS.items()}
    lines |= {"recipes": "list the recipes for `dspark train --config`"} | _CLONE_VERBS
    return "\n".join(
        [
            "usage: dspark VERB [ARGUMENTS]     (`dspark VERB --help` lists the arguments of a verb)",
            "",
            "Train, measure and publish DSpark drafters for Hugging Face Transformers.",
            "",
            *(f"  {verb:<18}{summary}" for verb, summary in lines.items()),
            "",
            "  -h, --help        show this message",
            "  --version         show the version",
            "",
        ]
    )


def main() -> int:
    """Run the command line in `sys.argv`; returns the exit status, unless the verb itself exits."""
    verb, *arguments = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    if verb == "--version":
        sys.stdout.write(f"{importlib.metadata.version('modeling-dspark')}\n")
        return 0
    folder = add_to_path()
    if verb == "recipes":
        sys.stdout.write("".join(f"{path}\n" for path in sorted((folder / "training" / "configs").glob("*.yaml"))))
        return 0
    if verb in ("demo", "bench"):
        return _run_benchmark("demo" if verb == "demo" else None, arguments)
    if verb not in VERBS:
        return _fail(f"`{verb}` is not a verb of `dspark`; it has {', '.join(VERBS)}, recipes, demo and bench.")
    module = VERBS[verb][0]
    try:
        if module == _HUB:
            return importlib.import_module(module).app([verb, *arguments], prog_name="dspark")
        return _run_module(module, arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OWN:
            raise
        extra = "hub" if module == _HUB else "train"
        return _fail(
            f"`dspark {verb}` needs the package `{error.name}`; install modeling-dspark with the extra `{extra}`, "
            f"from a clone by `pip install '.[{extra}]'`."
        )


def _run_benchmark(name: str | None, arguments: list[str]) -> int:
    if _IS_INSTALLED:
        return _fail("demo and benchmarks are not part of the installed package; run `dspark` from a clone of it.")
    commands = sorted(
        path.stem for path in (_HERE.parent / "benchmarks").glob("*.py") if not path.stem.startswith("__")
    )
    if name is None:
        name, *arguments = arguments or [""]
    if name not in commands:
        return _fail(f"`dspark bench` needs the name of a benchmark, one of {', '.join(commands)}; got `{name}`.")
    return _run_module(f"benchmarks.{name}", arguments)


def _run_module(module: str, arguments: list[str]) -> int:
    """The same as `python -m module arguments`."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


__all__ = ["VERBS", "add_to_path", "help_text", "main"]
