"""Effect of the fused head on whole rounds of decoding: the same calls with it and with the heads position by position.

    python -m benchmarks.head_rounds --threads 2
    python -m benchmarks.head_rounds --rows 1 --temperature 0 --pairs 100

The heads change from round to round of a call, in the order A B B A, and two neighbors are a pair: they do the same work
a few milliseconds apart, so that a disturbance of the machine affects both. Every round verifies whole blocks. A round
lasts from the start of its draft to the start of the next draft, so it includes verification.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.lib.intervals import drawn, edges
from benchmarks.lib.machine import conditions
from benchmarks.lib.measure import left_padded
from benchmarks.lib.options import (
    CommandParser,
    add_model_options,
    add_output_option,
    add_prompts_option,
    add_run_options,
    positive_int,
    start,
)
from benchmarks.lib.pair import Pair, code_of, describe_drafter, load_pair, load_prompt_ids, target_label
from benchmarks.lib.report import markdown_table, write_json
from training.common.commands import exit_status


VARIABLE = "DSPARK_FUSED_HEAD"
STEPWISE, FUSED = "position by position", "fused"
DEFINITIONS = {
    "pairs": "pairs of neighboring rounds, one of each way, with all rows in both",
    "ms_a_round": "median milliseconds per round, from the start of its draft to the start of the next one, by way",
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


class Rounds:
    """Rounds of calls, whose heads take turns.

    Attributes:
        taken (`list[tuple[str, int, float, float]]`): Way, rows, and seconds of each round and of its heads.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[str, int, float, float]] = []
        self._way, self._rows, self._begun, self._heads, self._number = "", 0, 0.0, 0.0, 0
        chosen = os.environ.get(VARIABLE, "auto")
        self._values = {STEPWISE: "torch", FUSED: "auto" if chosen == "torch" else chosen}

    @contextmanager
    def of_call(self, drafting: Any) -> Iterator[None]:
        """Watch a call; `drafting` is the drafter's module `draft_propose`."""
        names = ("draft_block", "fused_block", "_position_by_position")
        originals, environment_before = {name: getattr(drafting, name) for name in names}, os.environ.get(VARIABLE)
        drafting.draft_block = self._starting(drafting.draft_block)
        drafting.fused_block = self._timing(FUSED, drafting.fused_block)
        drafting._position_by_position = self._timing(STEPWISE, drafting._position_by_position)
        self._way = ""  # the time since the previous call is no round
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(drafting, name, original)
            os.environ.pop(VARIABLE, None)
            if environment_before is not None:
                os.environ[VARIABLE] = environment_before

    def _starting(self, draft_block: Callable) -> Callable:
        def starting(*arguments: Any, **named: Any) -> Any:
            now = perf_counter()
            if self._way:
                self.taken.append((self._way, self._rows, now - self._begun, self._heads))
            self._way = (STEPWISE, FUSED, FUSED, STEPWISE)[self._number % 4]
            self._rows, self._begun, self._heads = len(named["anchor_tokens"]), now, 0.0
            self._number += 1
            os.environ[VARIABLE] = self._values[self._way]
            return draft_block(*arguments, **named)

        return starting

    def _timing(self, way: str, heads: Callable) -> Callable:
        def timed(*arguments: Any, **named: Any) -> Any:
            if way != self._way:
                raise ValueError(f"The heads ran {way}, not {self._way}; a warning above may say why.")
            begun = perf_counter()
            drafts = heads(*arguments, **named)
            self._heads += perf_counter() - begun
            return drafts

        return timed


def pairs_of(taken: Sequence[tuple[str, int, float, float]], rows: int) -> list[dict[str, tuple[float, float]]]:
    """Neighbors of different ways with all rows in both: seconds of a round and of its heads, by way."""
    pairs, waiting = [], None
    for entry in taken:
        if entry[1] != rows:
            waiting = None
        elif waiting is None or waiting[0] == entry[0]:
            waiting = entry
        else:
            pairs.append({way: (seconds, heads) for way, _, seconds, heads in (waiting, entry)})
            waiting = None
    return pairs


def generate(pair: Pair, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int) -> None:
    """One call. Texts do not end early."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    pair.target.generate(
        **left_padded(pair.target, prompts),
        assistant_model=pair.drafter,
        num_assistant_tokens_schedule="fixed",
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        **sampling,
    )


def measure(pair: Pair, prompts: list[list[int]], rows: int, temperature: float, options: argparse.Namespace) -> Any:
    """One case of the table."""
    drafting, batches = code_of(pair.drafter, "draft_propose"), cycle(prompts)
    torch.manual_seed(0)
    generate(pair, prompts[:1], temperature, options.max_new_tokens)  # warms up, and probes the target
    pairs: list[dict[str, tuple[float, float]]] = []
    with tqdm(total=options.pairs, desc=f"R={rows}, temperature {temperature:g}", leave=False) as bar:
        while len(pairs) < options.pairs:
            rounds = Rounds()
            with rounds.of_call(drafting):
                generate(pair, list(islice(batches, rows)), temperature, options.max_new_tokens)
            new = pairs_of(rounds.taken, rows)
            if not new:
                raise ValueError(f"`--max-new-tokens {options.max_new_tokens}` gives no two whole rounds; take more.")
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
        "ms_a_round": {way: round(whole, 3) for way, (whole, _) in milliseconds.items()},
        "heads_ms": {way: round(heads, 3) for way, (_, heads) in milliseconds.items()},
        "ratio": round(float(ratios.quantile(0.5)), 4),
        "interval": list(edges(medians)),
    }


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    machine = start(options)
    pair = load_pair(options.target, options.drafter, options.dtype)
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
    parts = {"ms_a_round": "ms a round", "heads_ms": "of which heads"}
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


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
