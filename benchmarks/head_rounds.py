"""What the fused head brings to whole rounds of decoding: the same calls with it and with the heads slot by slot.

    python -m benchmarks.head_rounds --threads 2
    python -m benchmarks.head_rounds --rows 1 --temperature 0 --max-new-tokens 128

Calls take turns on the same prompts. Whole blocks are verified in every round, so that a round is the same work both ways,
and the seconds of a round are compared: the median of the paired ratios, and its interval by resampling the pairs.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from benchmarks.environment import environment
from benchmarks.measure import left_padded
from benchmarks.packed import add_packed_options, exit_status
from benchmarks.pair import HelpFormatter, Pair, describe_drafter, load_pair, load_prompts, positive_int, target_label
from benchmarks.report import markdown_table, write_json


HERE = Path(__file__).parent
VARIABLE = "DSPARK_FUSED_HEAD"
WAYS = {"slot by slot": "torch", "fused": "auto"}
DEFINITIONS = {
    "ms_a_round": "median milliseconds of a round (whole call, prefill included, over its rounds), by way",
    "ratio": "median over pairs of (slot by slot / fused); above 1 the fused head is faster",
    "interval": "95 % of that median by resampling the pairs",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.head_rounds", description=__doc__, formatter_class=HelpFormatter
    )
    add_packed_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument("--prompts", default=str(HERE / "prompts_eval.jsonl"), help="JSONL file with `turns`")
    group.add_argument("--rows", type=positive_int, nargs="+", default=[1, 8], metavar="R", help="prompts of a call")
    group.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0: greedy")
    group.add_argument("--pairs", type=positive_int, default=24, help="calls of each way")
    group.add_argument("--max-new-tokens", type=positive_int, default=48, help="length of every answer")
    group.add_argument("--output", default=str(HERE / "results" / "head_rounds.json"), help="the JSON file to write")
    return parser.parse_args(argv)


@contextmanager
def heads(choice: str) -> Iterator[None]:
    """The environment with a choice of what the heads run on."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = choice
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def seconds_of_a_round(pair: Pair, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int) -> float:
    """Of one call. Texts do not end early, and the draws are the same each time as far as the way allows."""
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    begun = perf_counter()
    pair.target.generate(
        **left_padded(pair.target, prompts),
        assistant_model=pair.drafter,
        num_assistant_tokens_schedule="fixed",
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        **sampling,
    )
    return (perf_counter() - begun) / pair.drafter.last_run.rounds


def measure(pair: Pair, prompts: list[list[int]], rows: int, temperature: float, options: argparse.Namespace) -> Any:
    """One case."""
    batches = cycle(prompts)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(options.pairs + 1):  # the first pair warms up
        batch = list(islice(batches, rows))
        for name in sorted(WAYS, reverse=bool(number % 2)):
            with heads(WAYS[name]):
                passed = seconds_of_a_round(pair, batch, temperature, options.max_new_tokens)
            if number:
                seconds[name].append(passed)
    ratios = np.array(seconds["slot by slot"]) / np.array(seconds["fused"])
    resampled = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    return {
        "rows": rows,
        "temperature": temperature,
        "pairs": options.pairs,
        "ms_a_round": {name: round(1000 * statistics.median(values), 3) for name, values in seconds.items()},
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(edge), 4) for edge in np.quantile(np.median(resampled, axis=1), [0.025, 0.975])],
    }


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    if options.threads:
        torch.set_num_threads(options.threads)
    pair = load_pair(options.target, options.drafter, options.dtype)
    facts = environment(options.dtype)
    prompts = [pair.prompt_ids(record) for records in load_prompts(options.prompts).values() for record in records]
    cases = [(rows, temperature) for rows in options.rows for temperature in options.temperature]
    results = [measure(pair, prompts, *case, options) for case in tqdm(cases, desc="Cases")]
    header = ["rows", "temperature", *(f"{name}, ms a round" for name in WAYS), "ratio", "interval"]
    table = [
        [case["rows"], case["temperature"], *case["ms_a_round"].values(), case["ratio"], case["interval"]]
        for case in results
    ]
    print(markdown_table(header, table))
    content = {
        "environment": facts,
        "target": target_label(options.target),
        "drafter": describe_drafter(pair.drafter, options.drafter),
        "definitions": DEFINITIONS,
        "results": results,
    }
    print(f"written to {write_json(options.output, content)}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
