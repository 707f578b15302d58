"""Tokens per second of the packed loop by requests in flight, for every policy of drafting, as JSON and as diagrams.

    python -m benchmarks.throughput --threads 2
    python -m benchmarks.throughput --concurrency 1 8 --policies plain fixed2 throughput --seconds 10 --output /tmp/t.json
    python -m benchmarks.throughput --drafter random --threads 2
    python -m benchmarks.throughput --plot benchmarks/results/throughput.json --output docs/images

A closed loop of greedy requests (`benchmarks.lib.closed_loop`). Policies take turns in slices of a second or two, in an
order drawn anew each time, so that a machine that slows down slows all of them. A slice ends at a number of new tokens
that is the same for all policies, so they also decode the same requests. Slices are the repeats behind the interval of
each ratio, at least three of them. Time includes the prefills of requests that join. With `--drafter random` the
default drafter gets random weights, which shows the cost of useless drafts. Transformers' own `generate`, on static
batches of the same requests, is a column for reference. The run is refused on a busy machine, unless `--allow-busy`
marks the report. After Ctrl-C, the complete concurrencies are next to the output, as `*.partial.json`.
"""

import argparse
import json
import math
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.lib.closed_loop import (
    PLAIN,
    ClosedLoop,
    Slice,
    Workload,
    check_policies,
    default_policies,
    fresh_costs,
    make_engine,
)
from benchmarks.lib.machine import Machine
from benchmarks.lib.options import (
    DEFAULT_DRAFTER,
    RESULTS,
    CommandParser,
    add_model_options,
    add_prompts_option,
    add_run_options,
    positive_int,
    positive_seconds,
    start,
)
from benchmarks.lib.pair import Pair, describe_drafter, load_pair, load_prompt_ids, target_label
from benchmarks.lib.references import TRANSFORMERS, start_references
from benchmarks.lib.report import partial_path, require_matplotlib, write_json
from benchmarks.lib.throughput_summary import DEFINITIONS, level_table, report_conditions, summarize_level
from training.common.commands import exit_status


RANDOM = "random"
MIN_REPEATS = 3  # slices of a policy, or batches of a reference, behind a ratio


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("throughput", __doc__)
    add_model_options(parser, drafter_help=f"; `{RANDOM}`: the default one with random weights")
    add_run_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--concurrency",
        type=positive_int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        metavar="R",
        help="requests in flight",
    )
    group.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help="plain, fixed1 to fixedK, confidence, throughput, throughput_lagged (default: all)",
    )
    add_prompts_option(group)
    group.add_argument(
        "--max-new-tokens", type=positive_int, default=96, metavar="N",
        help="about the average limit of a request; limits run from N/2 to 4N/3",
    )  # fmt: skip
    group.add_argument(
        "--seconds", type=positive_seconds, default=10.0, help="measured time of plain decoding for each R"
    )
    group.add_argument(
        "--slice-seconds", type=positive_seconds, default=1.5, help="its time in a slice, more if R is large"
    )
    group.add_argument(
        "--references", action=argparse.BooleanOptionalAction, help="also time Transformers' own loops (default: yes)"
    )
    group.add_argument("--seed", type=int, default=0, help="order of prompts and of turns, and random weights")
    group = parser.add_argument_group("output")
    group.add_argument("--plot", metavar="JSON", help="measure nothing, draw this report instead")
    group.add_argument("--output", help="the JSON file, or the folder of the diagrams (default: by what is run)")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> Pair:
    """Load the models; `random` draws new weights into the default drafter."""
    is_random = options.drafter == RANDOM
    pair = load_pair(options.target, DEFAULT_DRAFTER if is_random else options.drafter, options.dtype)
    if is_random:
        torch.manual_seed(options.seed)
        fresh = dict(type(pair.drafter)(pair.drafter.config).named_parameters())
        with torch.no_grad():
            for name, weight in pair.drafter.named_parameters():
                weight.copy_(fresh[name])
    return pair


def describe_run(pair: Pair, options: argparse.Namespace, costs: Any, machine: Machine) -> dict[str, Any]:
    """The head of the report: what is measured, where and how."""
    drafter = describe_drafter(pair.drafter, options.drafter)
    if options.drafter == RANDOM:
        drafter["name"] = f"random weights, configuration of {DEFAULT_DRAFTER}"
    profile = None if costs is None else json.loads(json.dumps(asdict(costs)))
    return {
        "environment": machine.environment(options.dtype),
        "target": target_label(options.target),
        "drafter": drafter,
        "settings": {
            "decoding": "greedy, closed loop",
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "prompts": Path(options.prompts).name,
            "max_new_tokens": options.max_new_tokens,
            "policies": options.policies,
            "references": options.references,
            "slice_seconds": options.slice_seconds,
            "seed": options.seed,
        },
        "definitions": DEFINITIONS,
        "cost_profile": profile,
        "complete": False,
        "load": machine.load(),
        "levels": [],
    }


def start_loops(
    pair: Pair, workload: Workload, options: argparse.Namespace, *, concurrency: int, costs: Any
) -> tuple[dict[str, Any], int, float]:
    """Loops under way and their references, the number of tokens they have reached, and plain tokens per second."""
    loops: dict[str, Any] = {}
    for policy in options.policies:
        engine = make_engine(pair, policy, costs=costs, max_length=workload.max_length)
        loops[policy] = ClosedLoop(engine, workload, concurrency)
        loops[policy].step()  # the prefills, which fill the loop
    plain, seconds = loops[PLAIN], 0.0
    first = plain.num_tokens
    while seconds < options.slice_seconds:
        seconds += plain.step()[0]
    num_tokens = plain.num_tokens
    for loop in loops.values():
        loop.run_until(num_tokens)
    if options.references:
        loops |= start_references(pair, workload, concurrency, num_tokens=num_tokens)
    return loops, num_tokens, (num_tokens - first) / seconds


def measure_level(
    pair: Pair, workload: Workload, options: argparse.Namespace, *, concurrency: int, costs: Any
) -> dict[str, Any]:
    """Measure all policies at one concurrency, in turns."""
    loops, first, rate = start_loops(pair, workload, options, concurrency=concurrency, costs=costs)
    drafter: Any = pair.drafter
    # More than one step can bring (whole blocks, and first tokens of requests that join), so that no slice is empty.
    slice_tokens = max(round(rate * options.slice_seconds), concurrency * (drafter.config.block_size + 2))
    num_slices = max(MIN_REPEATS, math.ceil(rate * options.seconds / slice_tokens))
    slices: dict[str, list[Slice]] = {name: [] for name in loops}
    order, turns = list(loops), random.Random(options.seed)
    for number in tqdm(range(num_slices), desc=f"{concurrency} in flight"):
        turns.shuffle(order)
        for name in order:
            measured = loops[name].run_until(first + (number + 1) * slice_tokens)
            if measured.seconds:
                slices[name].append(measured)
    for name, measured_slices in slices.items():
        while len(measured_slices) < MIN_REPEATS:  # a static batch can be as long as several slices
            measured_slices.append(loops[name].run_until(loops[name].num_tokens + 1))
    texts = {name: loop.texts for name, loop in loops.items()}
    if concurrency > 1 and TRANSFORMERS in texts:
        # The first requests of a loop are cut short to spread them, which those of a static batch are not.
        texts[TRANSFORMERS] = {number: text for number, text in texts[TRANSFORMERS].items() if number >= concurrency}
    level = summarize_level(slices, texts, concurrency=concurrency)
    return level | {"slice_tokens": slice_tokens, "plain_seconds": options.seconds}


def run(options: argparse.Namespace) -> None:
    """Measure level by level, print and write. Ctrl-C leaves the complete levels in `*.partial.json`."""
    is_random = options.drafter == RANDOM
    path = Path(options.output or RESULTS / ("throughput_random.json" if is_random else "throughput.json"))
    machine = start(options)
    pair = load(options)
    drafter: Any = pair.drafter
    block_size = drafter.config.block_size
    options.policies = options.policies or ([PLAIN, "throughput"] if is_random else default_policies(block_size))
    check_policies(options.policies, block_size)
    options.references = not is_random if options.references is None else options.references
    workload = Workload(
        load_prompt_ids(pair, options.prompts), max_new_tokens=options.max_new_tokens, seed=options.seed
    )
    costs = fresh_costs(pair, options.policies, allow_busy=options.allow_busy)
    report = describe_run(pair, options, costs, machine)
    for concurrency in sorted(set(options.concurrency)):
        level = measure_level(pair, workload, options, concurrency=concurrency, costs=costs)
        report["levels"].append(level)
        report["load"] = machine.load()
        write_json(partial_path(path), report)
        print(f"\n{level_table(level)}\n", flush=True)
    write_json(path, report | {"complete": True})
    partial_path(path).unlink()
    print(f"{report_conditions(report)}\nwritten to {path}")


def plot(options: argparse.Namespace) -> None:
    """Draw a report that was measured before."""
    require_matplotlib("--plot")
    from benchmarks.lib.throughput_plots import plot_throughput  # needs matplotlib

    report = json.loads(Path(options.plot).read_text(encoding="utf-8"))
    for path in plot_throughput(report, options.output or "docs/images", lines=options.policies):
        print(f"written to {path}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    kept = "the complete concurrencies are next to the output, as `*.partial.json`"
    return exit_status(lambda: plot(options) if options.plot else run(options), when_interrupted=kept)


if __name__ == "__main__":
    sys.exit(main())
