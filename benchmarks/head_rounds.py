"""Effect of the fused head on whole rounds of decoding: the same calls with it and with the heads position by position.

    python -m benchmarks.head_rounds --threads 2
    python -m benchmarks.head_rounds --rows 1 --temperature 0 --pairs 100

Two engines, one with fused heads, decode the same prompts, and their rounds take turns in the order A B B A. Round `i` of
both is a pair: they do the same work a few milliseconds apart, so that a disturbance of the machine affects both. Every
round verifies whole blocks. `DSPARK_FUSED_HEAD` chooses the backend of the fused heads, as it does for a user.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from benchmarks.lib.breakdown import HEADS, StageTimer
from benchmarks.lib.closed_loop import settings_of
from benchmarks.lib.intervals import drawn, edges
from benchmarks.lib.machine import conditions
from benchmarks.lib.options import (
    CommandParser,
    add_model_options,
    add_output_option,
    add_prompts_option,
    add_run_options,
    command,
    positive_int,
    start,
)
from benchmarks.lib.pair import Pair, code_of, describe_drafter, load_pair, load_prompt_ids, target_label
from benchmarks.lib.report import markdown_table, write_json


STEPWISE, FUSED = "position by position", "fused"
DEFINITIONS = {
    "pairs": "pairs of rounds, one of each way, with all rows in both",
    "ms_per_round": "median milliseconds per round (a step of the engine), by way",
    "heads_ms": "median milliseconds per round in its sequential and confidence heads, by way",
    "ratio": "median over pairs of (position by position / fused) of the round; above 1 the fused head is faster",
    "interval": "95 % bootstrap of that median over pairs",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("head_rounds", __doc__)
    add_model_options(parser)
    add_run_options(parser)
    group = parser.add_argument_group("what to measure")
    add_prompts_option(group)
    group.add_argument("--rows", type=positive_int, nargs="+", default=[1, 8], metavar="R", help="prompts per call")
    group.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0: greedy")
    group.add_argument("--pairs", type=positive_int, default=300, help="pairs of rounds per case")
    group.add_argument("--max-new-tokens", type=positive_int, default=48, help="length of every answer")
    add_output_option(group, "head_rounds")
    return parser.parse_args(argv)


class HeadTimer(StageTimer):
    """Seconds of the heads, with rounds timed from outside."""

    def heads_of_last_round(self) -> float:
        """Heads and schedule; in a fixed schedule the latter takes no time."""
        return self.durations[HEADS][-1]


def make_engine(pair: Pair, temperature: float, *, fused_head: str | None, timer: HeadTimer) -> Any:
    """An engine that drafts and verifies whole blocks. Texts end at their length limit alone."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature else [])
    return code_of(pair.drafter, "engine_loop").Engine(
        pair.drafter,
        pair.target,
        settings=settings_of(pair, f"fixed{pair.drafter.config.block_size}"),
        do_sample=bool(temperature),
        logits_processor=processors,
        fused_head=fused_head,
        observer=timer,
    )


def paired_rounds(
    pair: Pair, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int
) -> list[dict[str, tuple[float, float]]]:
    """Pairs of rounds over these prompts, as long as all of them are being decoded: seconds of a round and of its heads."""
    timers = {STEPWISE: HeadTimer(), FUSED: HeadTimer()}
    choices = {STEPWISE: "torch", FUSED: None}
    engines = {way: make_engine(pair, temperature, fused_head=choices[way], timer=timers[way]) for way in timers}
    for engine in engines.values():
        for prompt in prompts:
            engine.add_request(torch.tensor(list(prompt)), max_new_tokens=max_new_tokens)
        engine.step()  # the prefills
    pairs: list[dict[str, tuple[float, float]]] = []
    while all(len(engine.requests) == len(prompts) for engine in engines.values()):
        order = (STEPWISE, FUSED) if len(pairs) % 2 == 0 else (FUSED, STEPWISE)
        times = {}
        for way in order:
            begun = perf_counter()
            engines[way].step()
            times[way] = (perf_counter() - begun, timers[way].heads_of_last_round())
        pairs.append(times)
    return pairs


def measure(pair: Pair, prompts: list[list[int]], rows: int, temperature: float, options: argparse.Namespace) -> Any:
    """One case of the table."""
    batches = cycle(prompts)
    torch.manual_seed(0)
    paired_rounds(pair, prompts[:1], temperature, options.max_new_tokens)  # warms up, and probes the target
    pairs: list[dict[str, tuple[float, float]]] = []
    with tqdm(total=options.pairs, desc=f"R={rows}, temperature {temperature:g}", leave=False) as bar:
        while len(pairs) < options.pairs:
            new = paired_rounds(pair, list(islice(batches, rows)), temperature, options.max_new_tokens)
            if not new:
                raise ValueError(f"`--max-new-tokens {options.max_new_tokens}` gives no whole round; pass more.")
            pairs += new
            bar.update(len(new))
    seconds = {way: torch.tensor([times[way] for times in pairs], dtype=torch.float64) for way in (STEPWISE, FUSED)}
    ratios = seconds[STEPWISE][:, 0] / seconds[FUSED][:, 0]
    medians = ratios[drawn(len(pairs), (len(pairs),))].quantile(0.5, dim=1)
    milliseconds = {way: (1000 * values).quantile(0.5, dim=0).tolist() for way, values in seconds.items()}
    return {
        "rows": rows,
        "temperature": temperature,
        "pairs": len(pairs),
        "ms_per_round": {way: round(whole, 3) for way, (whole, _) in milliseconds.items()},
        "heads_ms": {way: round(heads, 3) for way, (_, heads) in milliseconds.items()},
        "ratio": round(float(ratios.quantile(0.5)), 4),
        "interval": list(edges(medians)),
    }


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    machine = start(options)
    pair = load_pair(options.target, options.drafter, options.dtype)
    drafter: Any = pair.drafter
    if reason := drafter.bind(pair.target).reason:
        raise ValueError(
            f"The heads of `--drafter {options.drafter}` are not fused, so there is nothing to compare: {reason}."
        )
    prompts = load_prompt_ids(pair, options.prompts)
    cases = [(rows, temperature) for rows in options.rows for temperature in options.temperature]
    results = [measure(pair, prompts, *case, options) for case in tqdm(cases, desc="Cases")]
    print(rounds_table(results))
    content = {
        "environment": machine.environment(options.dtype),
        "target": target_label(options.target),
        "drafter": describe_drafter(pair.drafter, options.drafter),
        "definitions": DEFINITIONS,
        "results": results,
        "load": machine.load(),
    }
    print(f"\n{conditions(content, batch='rows as listed', repeats=f'at least {options.pairs} pairs of rounds')}")
    print(f"written to {write_json(options.output, content)}")


def rounds_table(results: list[dict[str, Any]]) -> str:
    """The cases as Markdown, as the documentation quotes them."""
    parts = {"ms_per_round": "ms per round", "heads_ms": "of which heads"}
    header = [*(f"{label}, {way}" for label in parts.values() for way in (STEPWISE, FUSED))]
    table = [
        [
            case["rows"],
            case["temperature"],
            case["pairs"],
            *(case[part][way] for part in parts for way in (STEPWISE, FUSED)),
            case["ratio"],
            " to ".join(map(str, case["interval"])),
        ]
        for case in results
    ]
    return markdown_table(["rows", "temperature", "pairs", *header, "ratio", "interval"], table)


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
