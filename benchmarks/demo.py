"""Show a DSpark drafter at work: streamed text, speed against plain decoding, acceptance, and a comparison of the texts.

    python -m benchmarks.demo
    python -m benchmarks.demo --prompt "Write a haiku about rain." --max-new-tokens 64 --repeats 3
    python -m benchmarks.demo --dtype float32
    python -m benchmarks.demo --target my-org/my-model --drafter build/my-drafter --threads 4

The demo streams an answer to each prompt, then times plain and assisted decoding in turns in the same process. Decoding
is greedy: in float32 both texts are equal token for token; in bfloat16 a near-tie of two tokens may fall either way, and
the demo shows where and how close it was. Ctrl-C stops and sums up the prompts so far.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TextStreamer

from benchmarks.lib.machine import Machine
from benchmarks.lib.measure import (
    ASSISTED,
    PLAIN,
    Difference,
    Measurement,
    Methods,
    first_difference,
    measure,
    pooled_run,
    warm_up,
)
from benchmarks.lib.options import CommandParser, add_drafting_options, add_model_options, positive_int
from benchmarks.lib.pair import Pair, load_pair, methods_of, target_label
from benchmarks.lib.report import by_position, markdown_table, verdict


PROMPTS = (
    ("math", "A baker makes 12 trays of 8 rolls and sells 70 rolls. How many rolls are left? Think step by step."),
    ("math", "What is the sum of the first ten odd numbers? Show how you add them up."),
    ("code", "Write a Python function that returns the longest word of a sentence."),
    ("code", "Write a Python function that checks whether a number is prime, and explain it in two sentences."),
    ("chat", "Explain to a ten-year-old why the sky is blue."),
    ("chat", "Give me five tips for a first camping trip."),
)


@dataclass(frozen=True)
class Result:
    """The results of one prompt."""

    name: str
    measurement: Measurement
    difference: Difference | None


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("demo", __doc__)
    add_model_options(parser)
    add_drafting_options(parser)
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt, instead of the six built-in ones; may be repeated"
    )
    group.add_argument("--max-new-tokens", type=positive_int, default=96, help="length limit of an answer")
    group.add_argument("--repeats", type=positive_int, default=1, help="timed runs of each method; medians are shown")
    group.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: one per free core)")
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="which method is timed first (even: plain); greedy decoding draws no numbers",
    )
    return parser.parse_args(argv)


def show_prompt(
    pair: Pair, methods: Methods, prompt: tuple[str, str], *, options: argparse.Namespace, first: int
) -> Result:
    """Stream one answer with the drafter, then time both methods on the prompt."""
    name, text = prompt
    ids = pair.prompt_ids({"turns": [text]})
    streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    input_ids = torch.tensor([ids], device=pair.target.device)
    pair.target.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        streamer=streamer,
        **methods[ASSISTED],
    )
    with tqdm(total=options.repeats * len(methods), desc="timing", unit="run", leave=False, disable=None) as bar:
        measurement = measure(
            pair.target,
            ids,
            methods,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            first=first,
            on_call=bar.update,
        )
    difference = first_difference(pair.target, ids, measurement.tokens(PLAIN), measurement.tokens(ASSISTED))
    return Result(name, measurement, difference)


def describe(result: Result, dtype: str) -> str:
    """The numbers of one prompt."""
    measurement, run = result.measurement, result.measurement.run()
    speeds = (measurement.tokens_per_second(PLAIN), measurement.tokens_per_second(ASSISTED))
    return "\n".join(
        [
            f"  speed       plain {speeds[0]:.1f}, assisted {speeds[1]:.1f} tokens/s: {measurement.ratio():.2f}x",
            f"  tau         {run.acceptance_length:.2f} tokens per target forward (bonus token counted)",
            f"  acceptance  {by_position(run.acceptance_rate_by_position, run.tried_by_position)}   (by draft position)",
            f"  output      {verdict(result.difference, len(measurement.tokens(PLAIN)), dtype)}",
        ]
    )


def summary(results: list[Result], options: argparse.Namespace) -> str:
    """The table over all prompts, and figures pooled over them."""
    if not results:
        return "Nothing was measured."
    rows = [_row(result) for result in results]
    pooled = pooled_run(result.measurement.run() for result in results)
    speed_up = statistics.geometric_mean(result.measurement.ratio() for result in results)
    header = ("prompt", "new tokens", "plain tok/s", "assisted tok/s", "speed-up", "tau", "same text")
    return "\n".join(
        [
            markdown_table(header, rows),
            "",
            f"speed-up (geometric mean over {len(results)} prompt{'s' * (len(results) > 1)}): {speed_up:.2f}x",
            f"tau (pooled over {pooled.rounds} rounds, bonus token counted): {pooled.acceptance_length:.2f}",
            f"acceptance rate by position: {by_position(pooled.acceptance_rate_by_position, pooled.tried_by_position)}",
            _pooled_verdict([result.difference for result in results], options.dtype),
        ]
    )


def _pooled_verdict(differences: list[Difference | None], dtype: str) -> str:
    line = f"identical outputs: {differences.count(None)} of {len(differences)} ({dtype})"
    steps = [
        difference.logit_gap / difference.dtype_step
        for difference in differences
        if difference is not None and difference.logit_gap is not None
    ]
    if steps and dtype != "float32":
        line += (
            f"; where texts part, the target's two logits are at most {max(steps):.1f} {dtype} steps apart"
            f"\n({dtype} rounding decides near-ties; `--dtype float32` compares without it)"
        )
    return line


def _row(result: Result) -> list[str]:
    measurement = result.measurement
    return [
        result.name,
        str(len(measurement.tokens(ASSISTED))),
        f"{measurement.tokens_per_second(PLAIN):.1f}",
        f"{measurement.tokens_per_second(ASSISTED):.1f}",
        f"{measurement.ratio():.2f}x",
        f"{measurement.run().acceptance_length:.2f}",
        "yes" if result.difference is None else f"to token {result.difference.position}",
    ]


def start(options: argparse.Namespace, prompts: list[tuple[str, str]]) -> tuple[Pair, dict[str, dict[str, Any]]]:
    """Load both models, print the conditions, and warm up, which also finds options that do not fit."""
    machine = Machine(allow_busy=True)
    torch.set_num_threads(options.threads or machine.free_cores())
    pair = load_pair(options.target, options.drafter, options.dtype)
    facts, load = machine.environment(options.dtype), machine.load()
    print(f"target   {target_label(options.target)}\ndrafter  {options.drafter}")
    print(f"machine  {facts['cpu']}, {facts['threads']} threads of {facts['cores']} cores, {options.dtype}")
    print(f"versions torch {facts['torch']}, transformers {facts['transformers']}, python {facts['python']}")
    if load["busy"]:
        print(f"busy     {machine.activity()}: speeds will differ from those of a quiet machine")
    methods = methods_of(pair, options)
    warm_up(pair.target, pair.prompt_ids({"turns": [prompts[0][1]]}), methods)
    return pair, methods


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status (1: float32 outputs differ, 2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    prompts = [("yours", text) for text in options.prompt] if options.prompt else list(PROMPTS)
    results: list[Result] = []
    status = 0
    try:
        try:
            pair, methods = start(options, prompts)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for number, prompt in enumerate(prompts):
            print(f"\n[{number + 1}/{len(prompts)}] {prompt[0]}: {prompt[1]}\n", flush=True)
            results.append(show_prompt(pair, methods, prompt, options=options, first=options.seed + number))
            print(f"\n{describe(results[-1], options.dtype)}", flush=True)
    except KeyboardInterrupt:
        print(f"\n\nInterrupted after {len(results)} of {len(prompts)} prompts.")
        status = 130
    print(f"\n{summary(results, options)}")
    if options.dtype == "float32" and any(result.difference is not None for result in results):
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
