"""Peak memory of the packed loop against plain `generate`, for the same prompts and lengths, as JSON and a table.

    python -m benchmarks.memory --threads 2
    python -m benchmarks.memory --batch-sizes 8 --max-new-tokens 32 --output /tmp/memory.json

Every number comes from a fresh process, which loads the models, decodes a little, returns what it can to the system,
notes how much of it is resident, and then decodes the batch. What counts is the peak above that: caches, logits,
features and whatever is there for a moment. The weights of target and drafter are listed apart and are in no
difference; plain `generate` runs in a process without the drafter. End-of-text tokens are switched off, so that all
texts have the same length. The drafter verifies whole blocks by default, which needs the most. Linux only.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import REPOSITORY, environment
from benchmarks.lib.measure import left_padded
from benchmarks.lib.packed import exit_status
from benchmarks.lib.pair import (
    add_pair_options,
    describe_drafter,
    drafting_arguments,
    load_drafter,
    load_pair,
    load_prompts,
    positive_int,
    target_label,
)
from benchmarks.lib.report import markdown_table, write_json
from training.common.commands import HelpFormatter


HERE = Path(__file__).parent
PLAIN, PACKED = "plain", "packed"
DEFINITIONS = {
    "resident_after_loading": "MiB of the process when the models are loaded and have run once",
    "peak": "most MiB of the process while it decodes the batch, weights and libraries included",
    "decoding": "peak - resident_after_loading: what decoding itself needs at most",
    "weights": "MiB of parameters and buffers; the drafter's count in `peak` of the packed loop alone",
    "difference": "`decoding` of the packed loop - that of plain generate; no weights in it",
}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MIB = 2**20


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__, formatter_class=HelpFormatter)
    add_pair_options(parser)
    parser.set_defaults(schedule="fixed")
    group = parser.add_argument_group("what to measure")
    group.add_argument("--prompts", default=str(HERE / "prompts_eval.jsonl"), help="JSONL file with `turns`")
    group.add_argument("--batch-sizes", type=positive_int, nargs="+", default=[8, 32], metavar="R")
    group.add_argument("--max-new-tokens", type=positive_int, default=128, help="length of every answer")
    group.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's)")
    group.add_argument("--output", default=str(HERE / "results" / "memory.json"), help="the JSON file to write")
    group.add_argument("--only", choices=(PLAIN, PACKED), help=argparse.SUPPRESS)  # what a fresh process does
    return parser.parse_args(argv)


def resident(name: str = "VmRSS") -> float:
    """MiB of this process that are resident now (`VmRSS`), or were at most (`VmHWM`).

    Raises:
        ValueError: where the system does not say.
    """
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    if not found:
        raise ValueError(f"`{_STATUS}` has no {name}: peak memory is measured on Linux only. Run this on Linux.")
    return int(found[0]) / 1024


def settle(models: Sequence[Any]) -> None:
    """Make what is resident comparable: weights are read once, freed memory goes back, the peak starts from here.

    Raises:
        ValueError: where the system does not let a process reset its peak.
    """
    for model in models:
        for weight in model.parameters():
            weight.sum()  # weights that are mapped from a file are resident only once they were read
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    try:
        _CLEAR.write_text("5", encoding="ascii")  # sets VmHWM back to VmRSS
    except OSError as error:
        raise ValueError(
            f"`{_CLEAR}` cannot be written ({error}), so the peak of loading would be counted."
        ) from error


def generate(target: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, arguments: dict[str, Any]) -> int:
    """Greedy `generate` over a batch, padded on the left; returns the length of its texts."""
    batch = left_padded(target, prompts)
    output = target.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, **arguments)
    return output.shape[1] - batch["input_ids"].shape[1]


def measure(
    target: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Decode in this process and report its memory; `arguments` are those of `generate`, with the drafter if there is one.

    Raises:
        ValueError: if the texts do not have the length that was asked for.
    """
    models = {"target": target, "drafter": arguments.get("assistant_model")}
    models = {name: model for name, model in models.items() if model is not None}
    target.generation_config.eos_token_id = None
    generate(target, prompts[:1], max_new_tokens=16, arguments=arguments)
    settle(list(models.values()))
    before = resident()
    length = generate(target, prompts, max_new_tokens=max_new_tokens, arguments=arguments)
    if length != max_new_tokens:
        raise ValueError(f"`max_new_tokens={max_new_tokens}` gave texts of {length}: `--target` ends by itself.")
    peak = resident("VmHWM")
    return {
        "resident_after_loading": round(before, 1),
        "peak": round(peak, 1),
        "decoding": round(peak - before, 1),
        "weights": {name: round(model.get_memory_footprint() / _MIB, 1) for name, model in models.items()},
    }


def run_only(options: argparse.Namespace) -> None:
    """What a fresh process does: measure one method and one batch, and print JSON."""
    if options.threads:
        torch.set_num_threads(options.threads)
    (size,) = options.batch_sizes
    pair = load_pair(options.target, options.drafter, options.dtype)
    records = [record for records in load_prompts(options.prompts).values() for record in records]
    prompts = [pair.prompt_ids(records[row % len(records)]) for row in range(size)]
    target = pair.target
    arguments = {"assistant_model": pair.drafter, **drafting_arguments(options)} if options.only == PACKED else {}
    del pair  # and the drafter with it, where it is not used
    print(json.dumps(measure(target, prompts, max_new_tokens=options.max_new_tokens, arguments=arguments)))


def in_fresh_process(argv: Sequence[str], method: str, size: int) -> dict[str, Any]:
    """The report of one method and batch size.

    Raises:
        ValueError: if the process fails, with the last line it wrote.
    """
    command = [sys.executable, "-m", "benchmarks.memory", *argv, "--only", method, "--batch-sizes", str(size)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise ValueError(f"The process for `{method}`, batch {size}, ended with {result.returncode}: {last}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def run(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure everything in fresh processes, print the table and write the report."""
    drafter = describe_drafter(load_drafter(options.drafter, options.dtype), options.drafter)
    report: dict[str, Any] = {
        "environment": environment(options.dtype) | ({"threads": options.threads} if options.threads else {}),
        "target": target_label(options.target),
        "drafter": drafter,
        "settings": {"max_new_tokens": options.max_new_tokens, "prompts": Path(options.prompts).name}
        | {"drafting": drafting_arguments(options)},
        "definitions": DEFINITIONS,
        "batches": [],
    }
    rows = []
    for size in options.batch_sizes:
        entry = {method: in_fresh_process(argv, method, size) for method in (PLAIN, PACKED)}
        difference = round(entry[PACKED]["decoding"] - entry[PLAIN]["decoding"], 1)
        report["batches"].append({"batch_size": size, **entry, "difference": difference})
        rows += [
            [f"{method}, batch {size}", *(found[name] for name in ("resident_after_loading", "peak", "decoding"))]
            for method, found in entry.items()
        ]
        write_json(options.output, report)
    print(markdown_table(["MiB", "after loading", "peak", "decoding"], rows))
    print(f"\nweights {report['batches'][-1][PACKED]['weights']} MiB, in no difference\nwritten to {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(argv)
    return exit_status(lambda: run_only(options) if options.only else run(options, argv))


if __name__ == "__main__":
    sys.exit(main())
