"""Whether assisted greedy decoding gives the target's own text, token for token, on evaluation prompts, as JSON.

    python -m benchmarks.equality
    python -m benchmarks.equality --limit 6 --batch-size 3 --max-new-tokens 32

fp32, greedy, batches of prompts of different lengths, padded left; the reference is plain `generate` of each prompt
alone. Batches take turns with the settings in `SETTINGS`. The exit code is 1 if any output differs.
"""

import argparse
import sys
from typing import Any

from tqdm.auto import tqdm

from benchmarks.lib.measure import first_difference, left_padded, timed_call
from benchmarks.lib.options import (
    CommandParser,
    add_model_options,
    add_output_option,
    add_prompts_option,
    positive_int,
)
from benchmarks.lib.pair import Pair, describe_drafter, load_pair
from benchmarks.lib.report import write_json
from training.common.commands import exit_status
from training.common.environment import environment
from training.common.files import read_jsonl


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_assistant_tokens_schedule": "fixed"},
    {"num_assistant_tokens_schedule": "throughput_lagged"},
    {"assistant_confidence_threshold": 0.3},
    {"num_assistant_tokens": 2},
]


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("equality", __doc__)
    add_model_options(parser)
    parser.set_defaults(dtype="float32")
    group = parser.add_argument_group("what to compare")
    add_prompts_option(group)
    group.add_argument("--limit", type=positive_int, metavar="N", help="only the first N prompts")
    group.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="prompts decoded together")
    group.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="length of the answers")
    add_output_option(group, "equality")
    return parser.parse_args(argv)


def compare(
    pair: Pair, records: list[dict[str, Any]], settings: dict[str, Any], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Decode a batch assisted and its prompts one by one plainly: tokens, rounds, and the first difference, if any."""
    prompts = [pair.prompt_ids(record) for record in records]
    arguments = {"assistant_model": pair.drafter, **settings}
    texts, run = batch_texts(pair, prompts, max_new_tokens=max_new_tokens, arguments=arguments)
    results = []
    for record, prompt, text, rounds in zip(records, prompts, texts, run.requests, strict=True):
        plain = timed_call(pair.target, prompt, max_new_tokens=max_new_tokens, arguments={})
        difference = first_difference(pair.target, prompt, plain.tokens, text)
        results.append(
            {
                "source": record["source"],
                "settings": settings,
                "prompt_tokens": len(prompt),
                "new_tokens": len(plain.tokens),
                "rounds": rounds.rounds,
                "equal": difference is None,
                "first_difference": None if difference is None else vars(difference),
            }
        )
    return results


def batch_texts(
    pair: Pair, prompts: list[Any], *, max_new_tokens: int, arguments: dict[str, Any]
) -> tuple[list[list[int]], Any]:
    """New tokens of each prompt of a batch without padding, and the statistics of the run."""
    target: Any = pair.target
    batch = left_padded(target, prompts)
    width = batch["input_ids"].shape[1]
    output = target.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, **arguments)
    run: Any = pair.drafter.last_run
    lengths = [1 + sum(request.new_tokens) for request in run.requests]  # the prefill gives the first token
    return [row[width : width + length] for row, length in zip(output.tolist(), lengths, strict=True)], run


def run(options: argparse.Namespace) -> bool:
    """Compare all batches, print and write; whether all outputs are equal."""
    pair = load_pair(options.target, options.drafter, options.dtype)
    records = read_jsonl(options.prompts)[: options.limit]
    report = {
        "drafter": describe_drafter(pair.drafter, options.drafter),
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "settings": SETTINGS,
        "environment": environment(options.dtype),
    }
    results: list[dict[str, Any]] = []
    size = options.batch_size
    for number, first in enumerate(tqdm(range(0, len(records), size), unit="batch")):
        settings = SETTINGS[number % len(SETTINGS)]
        results += compare(pair, records[first : first + size], settings, options.max_new_tokens)
    different = [index for index, result in enumerate(results) if not result["equal"]]
    num_equal = len(results) - len(different)
    write_json(options.output, {**report, "num_equal": num_equal, "prompts": results})
    tokens = sum(result["new_tokens"] for result in results)
    print(f"{num_equal} of {len(results)} outputs equal ({tokens} tokens); different: {different}")
    return not different


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (1: an output differs, 2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    equal: list[bool] = []
    status = exit_status(lambda: equal.append(run(options)))
    return status or int(not equal[0])


if __name__ == "__main__":
    sys.exit(main())
