"""Time and memory of a training step and of its loss, against a naive PyTorch implementation of the same maths.

    python -m benchmarks.training_step --threads 1
    python -m benchmarks.training_step --positions 256 --repeats 1 --output /tmp/training_step.json

Both ways take turns in one process, in changing order; the table has the fastest turn of each, and the ratio with the
range over turns. Peak memory is that of one forward and backward in a fresh process of each way: the resident peak
(`VmHWM`, reset before) above what is resident once inputs and weights are loaded and the kernels have run. It includes
the gradients of the weights. CPU and Linux only.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.lib.machine import conditions
from benchmarks.lib.options import CommandParser, add_output_option, add_run_options, positive_int, start
from benchmarks.lib.report import markdown_table, write_json
from benchmarks.lib.resident import in_fresh_process, resident, settle
from benchmarks.lib.training_cases import NAIVE, OURS, WAYS, LossCase, StepCase
from training.common.commands import exit_status


DEFINITIONS = {
    "loss": "CE, total variation, acceptance and agreement of all positions, and gradients of hidden states, latents and W2",
    "step": "frozen target, draft backbone, heads, loss, backward and AdamW on one batch",
    "float32": "everything in fp32",
    "bfloat16": "target and LM head in bf16, the rest under autocast; trained weights and their gradients in fp32",
    "seconds": "of the fastest turn",
    "peak": "MiB above the resident memory before, in a fresh process",
    "time_ratio": "seconds of ours / seconds of naive",
    "time_ratio_range": "lowest and highest ratio of a turn of ours and the turn of naive next to it",
    "memory_ratio": "peak of ours / peak of naive",
    "loss_difference": "distance of the two losses, relative (two steps differ by one update)",
}


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("training_step", __doc__)
    loss = parser.add_argument_group("the loss alone")
    loss.add_argument("--vocabulary", type=positive_int, default=151936, metavar="V", help="size of the vocabulary")
    loss.add_argument(
        "--positions", "--slots", type=positive_int, default=2048, metavar="N", help="supervised positions"
    )
    loss.add_argument("--hidden", type=positive_int, default=576, metavar="D", help="hidden size")
    loss.add_argument("--rank", type=positive_int, default=256, metavar="R", help="of the sequential head")
    step = parser.add_argument_group("the whole step (a random target with the shape of SmolLM2-135M)")
    step.add_argument("--sequences", type=positive_int, default=2, help="sequences per batch")
    step.add_argument("--tokens", type=positive_int, default=256, help="tokens per sequence")
    step.add_argument("--anchors", type=positive_int, default=96, help="blocks per sequence")
    step.add_argument("--layers", type=positive_int, default=2, help="layers of the drafter")
    step.add_argument("--step-vocabulary", type=positive_int, default=49152, metavar="V", help="of its vocabulary")
    step.add_argument("--target-layers", type=positive_int, default=30, help="layers of the target")
    common = parser.add_argument_group("both")
    common.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    common.add_argument("--repeats", type=positive_int, default=3, help="turns of each way")
    add_output_option(common, "training_step")
    common.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # in a fresh process: part, way, dtype
    add_run_options(parser)
    return parser.parse_args(argv)


def make_case(part: str, dtype: str, options: argparse.Namespace, folder: str) -> LossCase | StepCase:
    """The loss, or a whole step."""
    if part == "loss":
        sizes = {name: getattr(options, name) for name in ("positions", "vocabulary", "hidden", "rank")}
        return LossCase(**sizes, dtype=dtype)
    sizes = {name: getattr(options, name) for name in ("sequences", "tokens", "anchors", "layers")}
    target = {"num_hidden_layers": options.target_layers}
    return StepCase(**sizes, vocabulary=options.step_vocabulary, dtype=dtype, folder=folder, **target)


def timed(case: LossCase | StepCase, repeats: int, bar: tqdm) -> dict[str, dict[str, Any]]:
    """Seconds of the turns of each way, and its last loss."""
    for way in WAYS:  # the first run of a shape prepares kernels and memory
        _warm_up(case, way)
    turns: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = {}
    for repeat in range(repeats):
        for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
            case.clear()
            start = time.perf_counter()
            losses[way] = case.run(way)
            turns[way].append(time.perf_counter() - start)
            bar.update()
    return {way: {"turns": turns[way], "loss": losses[way]} for way in WAYS}


def _warm_up(case: LossCase | StepCase, way: str) -> None:
    if isinstance(case, LossCase):
        case.run(way, positions=8)
    else:
        case.run(way)
    case.clear()


def run_only(options: argparse.Namespace) -> None:
    """In a fresh process: run one way once and print its peak."""
    part, way, dtype = options.only
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(part, dtype, options, folder)
        _warm_up(case, way)
        settle([])
        before = resident()
        case.run(way)
        print(json.dumps({"peak": round(resident("VmHWM") - before, 1)}))


def measure(part: str, dtype: str, options: argparse.Namespace, argv: Sequence[str], bar: tqdm) -> dict[str, Any]:
    """Both ways of one part in one dtype."""
    peaks = {}
    for way in WAYS:
        peaks[way] = in_fresh_process(
            "training_step", [*argv, "--only", part, way, dtype], f"`{part}`, {way}, {dtype},"
        )["peak"]
        bar.update()
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(part, dtype, options, folder)
        times = timed(case, options.repeats, bar)
    fastest = {way: min(times[way]["turns"]) for way in WAYS}
    ratios = [ours / naive for ours, naive in zip(times[OURS]["turns"], times[NAIVE]["turns"], strict=True)]
    return {
        "part": part,
        "dtype": dtype,
        "positions": options.positions if isinstance(case, LossCase) else case.num_draft_positions,
        "vocabulary": options.vocabulary if part == "loss" else options.step_vocabulary,
        **{f"{way}_seconds": round(fastest[way], 3) for way in WAYS},
        "time_ratio": round(fastest[OURS] / fastest[NAIVE], 3),
        "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        **{f"{way}_peak": peaks[way] for way in WAYS},
        "memory_ratio": round(peaks[OURS] / peaks[NAIVE], 3),
        "loss_difference": float(f"{abs(times[OURS]['loss'] / times[NAIVE]['loss'] - 1):.1e}"),
    }


def step_table(results: Sequence[dict[str, Any]]) -> str:
    """The cases as Markdown, as the documentation quotes them."""
    header = ["", "positions x vocabulary", "seconds: ours", "naive", "ratio", "peak MiB: ours", "naive", "ratio"]
    rows = [
        [
            f"{case['part']}, {case['dtype']}",
            f"{case['positions']:,} x {case['vocabulary']:,}",
            f"{case['ours_seconds']:.2f}",
            f"{case['naive_seconds']:.2f}",
            f"{case['time_ratio']:.2f}",
            f"{case['ours_peak']:,.0f}",
            f"{case['naive_peak']:,.0f}",
            f"{case['memory_ratio']:.2f}",
        ]
        for case in results
    ]
    return markdown_table(header, rows)


def run(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure, print and write."""
    machine = start(options)
    report: dict[str, Any] = {"environment": machine.environment(", ".join(options.dtype)), "definitions": DEFINITIONS}
    report["settings"] = {
        name: value for name, value in vars(options).items() if name not in ("only", "output", "allow_busy")
    }
    results: list[dict[str, Any]] = []
    cases = [(part, dtype) for part in ("loss", "step") for dtype in options.dtype]
    with tqdm(total=len(cases) * 2 * (1 + options.repeats), desc="Runs") as bar:
        for part, dtype in cases:
            results.append(measure(part, dtype, options, argv, bar))
    report |= {"results": results, "complete": True, "load": machine.load()}
    write_json(options.output, report)
    print(step_table(results))
    print(f"\n{conditions(report, batch='sizes as listed', repeats=f'{options.repeats} turns')}")
    print(f"written to {options.output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    return exit_status(lambda: run_only(options) if options.only else run(options, argv))


if __name__ == "__main__":
    sys.exit(main())
