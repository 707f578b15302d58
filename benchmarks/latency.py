"""Speed of assisted against plain decoding on evaluation prompts, for one or more thread counts, as JSON and a table.

    python -m benchmarks.latency --threads 1 2 --breakdown
    python -m benchmarks.latency --threads 2 --peer prompt_lookup --output /tmp/latency.json
    python -m benchmarks.latency --prompts my_prompts.jsonl --per-set 2 --repeats 3 --max-new-tokens 64

Greedy, batch size 1. For every prompt the methods take turns in the same process, each starting in turn, and the median
of their repeats counts. Tokens per second of a set are the sum of its new tokens over the sum of these medians, prefill
included. Ratios come with a 95 % bootstrap interval over prompts and repeats. The run is refused on a busy machine, unless
`--allow-busy` marks the report. After Ctrl-C, the complete sets are next to the output, as `*.partial.json`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.lib.breakdown import measure_breakdown
from benchmarks.lib.closed_loop import fresh_costs
from benchmarks.lib.latency_summary import DEFINITIONS, summarize_section, summarize_set
from benchmarks.lib.machine import Machine
from benchmarks.lib.measure import PROMPT_LOOKUP, Measurement, Methods, measure, warm_up
from benchmarks.lib.options import (
    CommandParser,
    add_drafting_options,
    add_model_options,
    add_output_option,
    add_prompts_option,
    add_run_options,
    command,
    drafting_arguments,
    positive_int,
    start,
)
from benchmarks.lib.pair import Pair, code_of, describe_drafter, load_pair, load_prompts, methods_of, target_label
from benchmarks.lib.report import latency_tables, partial_path, write_json


Prompts = dict[str, list[list[int]]]  # token ids by set


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("latency", __doc__)
    add_model_options(parser)
    add_drafting_options(parser)
    add_run_options(parser, threads=False)
    group = parser.add_argument_group("what to measure")
    add_prompts_option(group)
    group.add_argument(
        "--per-set", type=positive_int, default=3, metavar="N", help="the first N prompts of each source"
    )
    group.add_argument("--max-new-tokens", type=positive_int, default=128, help="length limit of an answer")
    group.add_argument("--repeats", type=positive_int, default=3, help="timed calls of each method on each prompt")
    group.add_argument(
        "--threads", type=positive_int, nargs="+", metavar="N", help="thread counts, a section each (default: torch's)"
    )
    group.add_argument("--peer", choices=(PROMPT_LOOKUP,), help="also time this alternative of Transformers' own")
    group.add_argument("--peer-tokens", type=positive_int, default=10, help="drafts per round of `prompt_lookup`")
    group.add_argument(
        "--breakdown", action="store_true", help="also show the parts of a round (extra calls, one prompt per set)"
    )
    add_output_option(group, "latency")
    return parser.parse_args(argv)


def measure_set(
    pair: Pair,
    prompts: list[list[int]],
    methods: Methods,
    *,
    max_new_tokens: int,
    repeats: int,
    on_call: Callable[[], Any] | None = None,
) -> list[Measurement]:
    """Time all methods on the prompts (token ids) of a set."""
    return [
        measure(
            pair.target, ids, methods, max_new_tokens=max_new_tokens, repeats=repeats, first=number, on_call=on_call
        )
        for number, ids in enumerate(prompts)
    ]


def measure_section(
    pair: Pair, prompts: Prompts, methods: Methods, *, options: argparse.Namespace, section: dict[str, Any]
) -> None:
    """Fill `section` with the sets of one thread count, set by set, so that an interrupted run keeps what is complete."""
    fresh_costs(pair, [options.schedule], allow_busy=options.allow_busy)  # stored, for `generate` to find
    warm_up(pair.target, next(iter(prompts.values()))[0], methods)
    measurements: dict[str, list[Measurement]] = {}
    total = sum(map(len, prompts.values())) * options.repeats * len(methods)
    with tqdm(total=total, unit="call", desc=f"threads={section['threads']}") as bar:
        for source, ids in prompts.items():
            bar.set_postfix(set=source)
            measurements[source] = measure_set(
                pair,
                ids,
                methods,
                max_new_tokens=options.max_new_tokens,
                repeats=options.repeats,
                on_call=bar.update,
            )
            section["sets"][source] = summarize_set(pair.target, measurements[source])
            section["overall"] = summarize_section(section["sets"], measurements)
    if options.breakdown:
        firsts = [ids[0] for ids in prompts.values()]
        section["breakdown"] = measure_breakdown(pair, firsts, methods, max_new_tokens=options.max_new_tokens)


def load(options: argparse.Namespace) -> tuple[Pair, Prompts, dict[str, dict[str, Any]]]:
    """The models, prompts and methods."""
    records = load_prompts(options.prompts, options.per_set)  # before the models, which take longer
    pair = load_pair(options.target, options.drafter, options.dtype)
    prompts = {source: [pair.prompt_ids(record) for record in of_set] for source, of_set in records.items()}
    methods = methods_of(pair, options)
    if options.peer:
        methods[options.peer] = {"prompt_lookup_num_tokens": options.peer_tokens}
    if options.breakdown:
        code_of(pair.drafter, "engine_observer")  # refuses drafters whose code has none, before anything takes time
    return pair, prompts, methods


def describe_run(pair: Pair, options: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """The head of the JSON: what is measured, where and how."""
    return {
        "environment": machine.environment(options.dtype) | {"threads": options.threads},
        "target": target_label(options.target),
        "drafter": describe_drafter(pair.drafter, options.drafter),
        "settings": {
            "decoding": "greedy, batch size 1",
            "prompts": Path(options.prompts).name,
            "per_set": options.per_set,
            "max_new_tokens": options.max_new_tokens,
            "repeats": options.repeats,
            "drafting": drafting_arguments(options),
            "peer_tokens": options.peer_tokens if options.peer else None,
        },
        "definitions": DEFINITIONS,
        "complete": False,
        "load": machine.load(),
        "sections": [],
    }


def run(options: argparse.Namespace) -> None:
    """Measure every thread count, print and write. Ctrl-C leaves the complete sets in `*.partial.json`."""
    before = torch.get_num_threads()
    options.threads = options.threads or [before]
    machine = start(options)
    pair, prompts, methods = load(options)
    report = describe_run(pair, options, machine)
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            section: dict[str, Any] = {"threads": threads, "sets": {}, "overall": {}}
            report["sections"].append(section)
            measure_section(pair, prompts, methods, options=options, section=section)
        report["complete"] = True
    finally:
        torch.set_num_threads(before)
        report["sections"] = [section for section in report["sections"] if section["overall"]]
        report["load"] = machine.load()
        if report["sections"]:
            print(latency_tables(report))
            path = options.output if report["complete"] else partial_path(options.output)
            print(f"\nwritten to {write_json(path, report)}")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
