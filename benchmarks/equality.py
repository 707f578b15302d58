"""Whether assisted greedy decoding gives the target's own text, token for token, on evaluation prompts, as JSON.

    python -m benchmarks.equality
    python -m benchmarks.equality --limit 6 --batch-size 3 --max-new-tokens 32

fp32, greedy, batches of prompts of different lengths, padded left; the reference is plain `generate` of each prompt by
itself. Batches take turns with the settings in `SETTINGS`. Finished batches are kept in the output, so a run that was
stopped goes on where it was when started again. Exit code 1 if any output differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.lib.environment import environment
from benchmarks.lib.measure import first_difference, left_padded, timed_call
from benchmarks.lib.pair import Pair, add_pair_options, describe_drafter, load_pair, positive_int
from benchmarks.lib.report import write_json
from training.common.commands import HelpFormatter
from training.common.files import read_jsonl


HERE = Path(__file__).parent
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_assistant_tokens_schedule": "fixed"},
    {"num_assistant_tokens_schedule": "throughput_lagged"},
    {"assistant_confidence_threshold": 0.3},
    {"num_assistant_tokens": 2},
]


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.equality", description=__doc__, formatter_class=HelpFormatter
    )
    add_pair_options(parser)
    parser.set_defaults(dtype="float32")
    group = parser.add_argument_group("what to compare")
    group.add_argument("--prompts", default=str(HERE / "prompts_eval.jsonl"), help="JSONL file with `turns`")
    group.add_argument("--limit", type=positive_int, metavar="N", help="only the first N prompts")
    group.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="prompts decoded together")
    group.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="length of the answers")
    group.add_argument("--output", default=str(HERE / "results" / "equality.json"), help="the JSON file")
    return parser.parse_args(argv)


def compare(
    pair: Pair, records: list[dict[str, Any]], settings: dict[str, Any], max_new_tokens: int
) -> list[dict[str, Any]]:
    """A batch assisted, its prompts plainly one by one: tokens, rounds, and the first difference if there is one."""
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
    """New tokens of each prompt of a batch, padding left out, and the statistics of the run."""
    target: Any = pair.target
    batch = left_padded(target, prompts)
    width = batch["input_ids"].shape[1]
    output = target.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, **arguments)
    run: Any = pair.drafter.last_run
    lengths = [1 + sum(request.new_tokens) for request in run.requests]  # the prefill gives the first token
    return [row[width : width + length] for row, length in zip(output.tolist(), lengths, strict=True)], run


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parse_options(argv)
    try:
        pair = load_pair(options.target, options.drafter, options.dtype)
        records = read_jsonl(options.prompts)[: options.limit]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []
    key = {
        "drafter": describe_drafter(pair.drafter, options.drafter),
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "settings": SETTINGS,
    }
    path = Path(options.output)
    if path.is_file():
        earlier = json.loads(path.read_text())
        if {name: earlier.get(name) for name in key} == key:
            results = earlier["prompts"][: len(records)]
    report = {**key, "environment": environment(options.dtype)}
    size = options.batch_size
    results = results[: len(results) // size * size]
    for first in tqdm(range(len(results), len(records), size), unit="batch"):
        settings = SETTINGS[first // size % len(SETTINGS)]
        results += compare(pair, records[first : first + size], settings, options.max_new_tokens)
        write_json(path, {**report, "num_equal": sum(r["equal"] for r in results), "prompts": results})
    different = [index for index, result in enumerate(results) if not result["equal"]]
    tokens = sum(result["new_tokens"] for result in results)
    print(f"{len(results) - len(different)} of {len(results)} outputs equal ({tokens} tokens); different: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
