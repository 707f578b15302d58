"""Speed of assisted against plain decoding on evaluation prompts, for one or more thread counts, as JSON and a table.

    python -m benchmarks.latency --threads 1 2 --breakdown
    python -m benchmarks.latency --threads 2 --peer prompt_lookup --output /tmp/latency.json
    python -m benchmarks.latency --prompts my_prompts.jsonl --per-set 2 --repeats 1 --max-new-tokens 64

Greedy, batch size 1. For every prompt the methods take turns in the same process (another one starts each time), and
the median of their repeats counts; tokens per second of a set are the sum of its new tokens over the sum of these
medians, prefill included. Run it on a quiet machine: the JSON records the load it found. Interrupted with Ctrl-C, it
writes the sets that are complete next to the output, as `*.partial.json`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.breakdown import measure_breakdown
from benchmarks.lib.environment import environment
from benchmarks.lib.measure import (
    PROMPT_LOOKUP,
    Measurement,
    Methods,
    measure,
    warm_up,
)
from benchmarks.lib.pair import (
    Pair,
    add_pair_options,
    describe_drafter,
    drafting_arguments,
    load_pair,
    load_prompts,
    methods_of,
    positive_int,
    target_label,
)
from benchmarks.lib.report import latency_tables, write_json
from benchmarks.lib.summary import DEFINITIONS, summarize_section, summarize_set
from training.common.commands import HelpFormatter


HERE = Path(__file__).parent


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.latency", description=__doc__, formatter_class=HelpFormatter
    )
    add_pair_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--prompts", default=str(HERE / "prompts_eval.jsonl"), help="JSONL file with `turns` and `source`"
    )
    group.add_argument(
        "--per-set", type=positive_int, default=4, metavar="N", help="the first N prompts of each source"
    )
    group.add_argument("--max-new-tokens", type=positive_int, default=128, help="longest answer")
    group.add_argument("--repeats", type=positive_int, default=3, help="timed calls of each method on each prompt")
    group.add_argument(
        "--threads", type=positive_int, nargs="+", metavar="N", help="thread counts, a section each (default: torch's)"
    )
    group.add_argument("--peer", choices=(PROMPT_LOOKUP,), help="also time this alternative of Transformers' own")
    group.add_argument("--peer-tokens", type=positive_int, default=10, help="drafts a round of `prompt_lookup`")
    group.add_argument(
        "--breakdown", action="store_true", help="also show where a round's time goes (extra calls, one prompt a set)"
    )
    group.add_argument("--output", default=str(HERE / "results" / "latency.json"), help="the JSON file to write")
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
    pair: Pair, prompts: dict[str, list[list[int]]], methods: Methods, *, options: argparse.Namespace, section: dict
) -> None:
    """Fill `section` with the sets of one thread count, set by set, so that an interrupted run keeps what is complete."""
    warm_up(pair.target, next(iter(prompts.values()))[0], methods)
    runs: list[Any] = []
    total = sum(map(len, prompts.values())) * options.repeats * len(methods)
    with tqdm(total=total, unit="call", desc=f"threads={section['threads']}") as bar:
        for source, ids in prompts.items():
            bar.set_postfix(set=source)
            measurements = measure_set(
                pair,
                ids,
                methods,
                max_new_tokens=options.max_new_tokens,
                repeats=options.repeats,
                on_call=bar.update,
            )
            section["sets"][source] = summarize_set(pair.target, measurements)
            runs += [measurement.run() for measurement in measurements]
            section["overall"] = summarize_section(section["sets"], runs)
    if options.breakdown:
        firsts = [ids[0] for ids in prompts.values()]
        section["breakdown"] = measure_breakdown(pair, firsts, methods, max_new_tokens=options.max_new_tokens)


def start(options: argparse.Namespace) -> tuple[Pair, dict[str, list[list[int]]], dict[str, dict[str, Any]]]:
    """Load prompts and models; the models, prompts as token ids by set, and methods. Finds options that do not fit."""
    records = load_prompts(options.prompts, options.per_set)  # before the models, which take longer
    pair = load_pair(options.target, options.drafter, options.dtype)
    prompts = {source: [pair.prompt_ids(record) for record in of_set] for source, of_set in records.items()}
    methods = methods_of(pair, options)
    if options.peer:
        methods[options.peer] = {"prompt_lookup_num_tokens": options.peer_tokens}
    warm_up(pair.target, next(iter(prompts.values()))[0], methods, max_new_tokens=2)
    return pair, prompts, methods


def describe_run(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """The head of the JSON: what is measured, where and how."""
    return {
        "environment": environment(options.dtype) | {"threads": options.threads},
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
        "sections": [],
    }


def run(
    pair: Pair,
    prompts: dict[str, list[list[int]]],
    methods: Methods,
    *,
    options: argparse.Namespace,
    report: dict[str, Any],
) -> None:
    """Measure every thread count into `report`, which marks itself `complete` at the end; Ctrl-C ends early."""
    before = torch.get_num_threads()
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            section: dict[str, Any] = {"threads": threads, "sets": {}, "overall": {}}
            report["sections"].append(section)
            measure_section(pair, prompts, methods, options=options, section=section)
        report["complete"] = True
    except KeyboardInterrupt:
        report["sections"] = [section for section in report["sections"] if section["overall"]]
    finally:
        torch.set_num_threads(before)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    options.threads = options.threads or [torch.get_num_threads()]
    try:
        pair, prompts, methods = start(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    report = describe_run(pair, options)
    run(pair, prompts, methods, options=options, report=report)
    output = Path(options.output)
    if not report["complete"]:
        output = output.with_suffix(".partial.json")
    if report["sections"]:
        print(latency_tables(report["sections"]))
        print(f"\nwritten to {write_json(output, report)}")
    return 0 if report["complete"] else 130


if __name__ == "__main__":
    sys.exit(main())
