"""Peak memory of the packed loop against plain `generate`, for the same prompts and lengths, as JSON and a table.

    python -m benchmarks.memory --threads 2
    python -m benchmarks.memory --batch-sizes 8 --max-new-tokens 32 --output /tmp/memory.json

Every number comes from a fresh process, which loads the models, decodes a little, returns unused memory to the system,
notes its resident memory, and then decodes the batch. The result is the peak above that: caches, logits, features and
temporary tensors. The weights of target and drafter are listed separately and are in no difference; plain `generate`
runs in a process without the drafter. End-of-text tokens are switched off, so that all texts have the same length. The
drafter verifies whole blocks by default, which needs the most memory. Linux only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.machine import conditions
from benchmarks.lib.measure import left_padded
from benchmarks.lib.options import (
    CommandParser,
    add_drafting_options,
    add_model_options,
    add_output_option,
    add_prompts_option,
    add_run_options,
    drafting_arguments,
    positive_int,
    start,
)
from benchmarks.lib.pair import describe_drafter, load_drafter, load_pair, load_prompt_ids, target_label
from benchmarks.lib.report import markdown_table, write_json
from benchmarks.lib.resident import in_fresh_process, resident, settle
from training.common.commands import exit_status


PLAIN, PACKED = "plain", "packed"
DEFINITIONS = {
    "resident_after_loading": "MiB of the process after the models were loaded and ran once",
    "peak": "peak MiB of the process while it decodes the batch, weights and libraries included",
    "decoding": "peak - resident_after_loading: the peak of decoding itself",
    "weights": "MiB of parameters and buffers; the drafter's count in `peak` of the packed loop alone",
    "difference": "`decoding` of the packed loop - that of plain generate; no weights in it",
}
_MIB = 2**20


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("memory", __doc__)
    add_model_options(parser)
    add_drafting_options(parser)
    add_run_options(parser)
    parser.set_defaults(schedule="fixed")
    group = parser.add_argument_group("what to measure")
    add_prompts_option(group)
    group.add_argument(
        "--batch-sizes", type=positive_int, nargs="+", default=[8, 32], metavar="R", help="prompts decoded together"
    )
    group.add_argument("--max-new-tokens", type=positive_int, default=128, help="length of every answer")
    add_output_option(group, "memory")
    group.add_argument("--only", choices=(PLAIN, PACKED), help=argparse.SUPPRESS)  # in a fresh process
    return parser.parse_args(argv)


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
    """In a fresh process: measure one method and one batch, and print JSON."""
    if options.threads:
        torch.set_num_threads(options.threads)
    (size,) = options.batch_sizes
    pair = load_pair(options.target, options.drafter, options.dtype)
    prompts = list(islice(cycle(load_prompt_ids(pair, options.prompts)), size))
    target = pair.target
    arguments = {"assistant_model": pair.drafter, **drafting_arguments(options)} if options.only == PACKED else {}
    del pair  # and the drafter with it, if unused
    print(json.dumps(measure(target, prompts, max_new_tokens=options.max_new_tokens, arguments=arguments)))


def run(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure everything in fresh processes, print the table and write the report."""
    machine = start(options)
    drafter = describe_drafter(load_drafter(options.drafter, options.dtype), options.drafter)
    report: dict[str, Any] = {
        "environment": machine.environment(options.dtype),
        "target": target_label(options.target),
        "drafter": drafter,
        "settings": {"max_new_tokens": options.max_new_tokens, "prompts": Path(options.prompts).name}
        | {"drafting": drafting_arguments(options)},
        "definitions": DEFINITIONS,
        "batches": [],
    }
    rows = []
    for size in options.batch_sizes:
        entry = {
            method: in_fresh_process(
                "memory", [*argv, "--only", method, "--batch-sizes", str(size)], f"`{method}`, batch {size}"
            )
            for method in (PLAIN, PACKED)
        }
        difference = round(entry[PACKED]["decoding"] - entry[PLAIN]["decoding"], 1)
        report["batches"].append({"batch_size": size, **entry, "difference": difference})
        rows += [
            [f"{method}, batch {size}", *(memory[name] for name in ("resident_after_loading", "peak", "decoding"))]
            for method, memory in entry.items()
        ]
    report["load"] = machine.load()
    write_json(options.output, report)
    print(markdown_table(["MiB", "after loading", "peak", "decoding"], rows))
    print(f"\nweights {report['batches'][-1][PACKED]['weights']} MiB, in no difference")
    print(conditions(report, batch="batches as listed", repeats="one fresh process per row"))
    print(f"written to {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(argv)
    return exit_status(lambda: run_only(options) if options.only else run(options, argv))


if __name__ == "__main__":
    sys.exit(main())
