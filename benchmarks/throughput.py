"""Tokens per second of the packed loop by requests in flight, for every policy of drafting, as JSON and as diagrams.

    python -m benchmarks.throughput --threads 2
    python -m benchmarks.throughput --concurrency 1 8 --policies plain fixed2 throughput --seconds 10 --output /tmp/t.json
    python -m benchmarks.throughput --drafter random --threads 2
    python -m benchmarks.throughput --plot benchmarks/results/throughput.json --output docs/images

A closed loop of greedy requests (`benchmarks.lib.closed_loop`). Policies take turns in slices of a second or two, in an
order that is drawn anew each time, so that a machine that slows down slows all of them; a slice ends at a number of new
tokens that is the same for all, so they also have the same requests to decode. Time includes the prefills of requests
that join. With `--drafter random` the default drafter gets random weights: what useless drafts cost. Transformers' own
`generate`, on static batches of the same requests, is a column for reference. Finished concurrencies are kept in the
output: a run that was stopped goes on there when it is started again with the same options.
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

from benchmarks.baselines.references import TRANSFORMERS, start_references
from benchmarks.lib.closed_loop import (
    PLAIN,
    ClosedLoop,
    Slice,
    Workload,
    check_policies,
    default_policies,
    make_engine,
    needs_costs,
)
from benchmarks.lib.environment import environment
from benchmarks.lib.packed import add_packed_options, require_matplotlib
from benchmarks.lib.pair import (
    DEFAULT_DRAFTER,
    Pair,
    describe_drafter,
    load_pair,
    load_prompts,
    positive_int,
    target_label,
)
from benchmarks.lib.report import write_json
from benchmarks.lib.throughput_summary import DEFINITIONS, level_table, summarize_level
from training.common.commands import HelpFormatter


HERE = Path(__file__).parent
RANDOM = "random"
_KEY = ("target", "drafter", "settings", "cost_profile")


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.throughput", description=__doc__, formatter_class=HelpFormatter
    )
    add_packed_options(parser, drafter_help=f"; `{RANDOM}`: the default one with random weights")
    group = parser.add_argument_group("what to measure")
    group.add_argument("--concurrency", type=positive_int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="R")
    group.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help="plain, fixed1 to fixedK, confidence, throughput, throughput_lagged",
    )
    group.add_argument("--prompts", default=str(HERE / "prompts_eval.jsonl"), help="JSONL file with `turns`")
    group.add_argument(
        "--max-new-tokens", "--max_new_tokens", type=positive_int, default=96, metavar="N",
        help="about the average limit of a request; limits run from N/2 to 4N/3",
    )  # fmt: skip
    group.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="measured time of plain decoding, for each R; levels that a report holds are kept, whatever their time",
    )
    group.add_argument("--slice-seconds", type=float, default=1.5, help="its time in a slice, more if R is large")
    group.add_argument(
        "--references", action=argparse.BooleanOptionalAction, help="also time Transformers' own loops (default: yes)"
    )
    group.add_argument("--seed", type=int, default=0, help="order of prompts and of turns, and random weights")
    group = parser.add_argument_group("output")
    group.add_argument("--plot", metavar="JSON", help="measure nothing, draw this report instead")
    group.add_argument("--output", help="the JSON file, or the folder of the diagrams (default: by what is run)")
    options = parser.parse_args(argv)
    for name in ("seconds", "slice_seconds"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a positive number, got {getattr(options, name)}")
    return options


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


def describe_run(pair: Pair, options: argparse.Namespace, costs: Any) -> dict[str, Any]:
    """The head of the report: what is measured, where and how."""
    drafter = describe_drafter(pair.drafter, options.drafter)
    if options.drafter == RANDOM:
        drafter["name"] = f"random weights, configuration of {DEFAULT_DRAFTER}"
    profile = None if costs is None else json.loads(json.dumps(asdict(costs)))
    return {
        "environment": environment(options.dtype),
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
        "levels": [],
    }


def finished_levels(path: Path, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Levels of an earlier run with the same options, weights and costs; none, and a word on why, if there are others."""
    if not path.is_file():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    different = [name for name in _KEY if earlier.get(name) != report[name]]
    if different:
        print(f"{path} holds another run ({', '.join(different)}), and is replaced.")
    return [] if different else earlier["levels"]


def start_loops(
    pair: Pair, workload: Workload, options: argparse.Namespace, *, concurrency: int, costs: Any
) -> tuple[dict[str, Any], int, float]:
    """Loops under way and their references; the number of tokens they have got to, and plain tokens per second."""
    loops: dict[str, Any] = {}
    for policy in options.policies:
        engine = make_engine(pair, policy, costs=costs, max_length=workload.max_length)
        loops[policy] = ClosedLoop(engine, workload, concurrency)
        loops[policy].step()  # the prefills, which fill the loop
    plain, seconds = loops[PLAIN], 0.0
    first = plain.num_tokens
    while seconds < options.slice_seconds:
        seconds += plain.step()[0]
    start = plain.num_tokens
    for loop in loops.values():
        loop.run_until(start)
    if options.references:
        loops |= start_references(pair, workload, concurrency, num_tokens=start)
    return loops, start, (start - first) / seconds


def measure_level(
    pair: Pair, workload: Workload, options: argparse.Namespace, *, concurrency: int, costs: Any
) -> dict[str, Any]:
    """Measure all policies at one concurrency, in turns."""
    facts = environment(options.dtype)
    loops, start, rate = start_loops(pair, workload, options, concurrency=concurrency, costs=costs)
    drafter: Any = pair.drafter
    # More than one step can bring (whole blocks, and first tokens of requests that join), so that no slice is empty.
    slice_tokens = max(round(rate * options.slice_seconds), concurrency * (drafter.config.block_size + 2))
    num_slices = math.ceil(rate * options.seconds / slice_tokens)
    slices: dict[str, list[Slice]] = {name: [] for name in loops}
    order, turns = list(loops), random.Random(options.seed)
    for number in tqdm(range(num_slices), desc=f"{concurrency} in flight"):
        turns.shuffle(order)
        for name in order:
            measured = loops[name].run_until(start + (number + 1) * slice_tokens)
            if measured.seconds:
                slices[name].append(measured)
    texts = {name: loop.texts for name, loop in loops.items()}
    if concurrency > 1 and TRANSFORMERS in texts:
        # The first requests of a loop are cut short to spread them, which those of a static batch are not.
        texts[TRANSFORMERS] = {number: text for number, text in texts[TRANSFORMERS].items() if number >= concurrency}
    level = summarize_level(slices, texts, concurrency=concurrency)
    return level | {"slice_tokens": slice_tokens, "plain_seconds": options.seconds, "environment": facts}


def run(options: argparse.Namespace) -> int:
    """Measure, level by level; returns the exit status."""
    records = [record for records in load_prompts(options.prompts).values() for record in records]
    if options.threads:
        torch.set_num_threads(options.threads)
    pair = load(options)
    drafter: Any = pair.drafter
    block_size = drafter.config.block_size
    is_random = options.drafter == RANDOM
    options.policies = options.policies or ([PLAIN, "throughput"] if is_random else default_policies(block_size))
    check_policies(options.policies, block_size)
    options.references = not is_random if options.references is None else options.references
    costs = drafter.profile(pair.target) if needs_costs(options.policies) else None
    report = describe_run(pair, options, costs)
    path = Path(options.output or HERE / "results" / ("throughput_random.json" if is_random else "throughput.json"))
    report["levels"] = finished_levels(path, report)
    prompts = [pair.prompt_ids(record) for record in records]
    workload = Workload(prompts, max_new_tokens=options.max_new_tokens, seed=options.seed)
    for concurrency in options.concurrency:
        if any(level["concurrency"] == concurrency for level in report["levels"]):
            continue
        level = measure_level(pair, workload, options, concurrency=concurrency, costs=costs)
        report["levels"] = sorted([*report["levels"], level], key=lambda entry: entry["concurrency"])
        write_json(path, report)
        print(f"\n{level_table(level)}\n", flush=True)
    write_json(path, report | {"complete": True})
    print(f"written to {path}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    try:
        if options.plot is None:
            return run(options)
        require_matplotlib("--plot")
        from benchmarks.lib.throughput_plots import plot_throughput  # needs matplotlib

        report = json.loads(Path(options.plot).read_text(encoding="utf-8"))
        for path in plot_throughput(report, options.output or "docs/images", lines=options.policies):
            print(f"written to {path}")
        return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the concurrencies that were complete are kept.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
