"""Let the target answer prompts: the first step of training a drafter for it.

    dspark regenerate --target smollm2-135m-instruct --prompts prompts.jsonl --output answers.jsonl
    dspark regenerate --target Qwen/Qwen3-4B --prompts prompts.parquet --output runs/answers \\
        --temperatures 0.0 0.7 1.0 --samples-per-prompt 2 --thinking off
    dspark regenerate --target Qwen/Qwen3-4B --prompts my-org/prompts --output runs/answers \\
        --server http://localhost:8000/v1 --concurrency 64

A prompt is a record with `turns` (a list of user turns, all of which are answered) or `text`; its own `temperature`,
`top_p`, `seed` and `max_new_tokens` win over the flags. Each line of the output is one answer, a JSON object: `prompt` (its
index among the prompts, from 0), `sample`, `turn`, how it was sampled, `prompt_ids` (what the target saw) and `answer_ids`.

Answers are appended as they come: the same command continues a run that was stopped or killed, and makes no answer twice.
With an `--output` that does not end in `.jsonl`, the folder also receives the answers as a `datasets` dataset and a
dataset card.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from training.answers.arguments import RegenerateArguments
from training.answers.regeneration import regenerate
from training.common.commands import exit_status, parse_command_line


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the command; returns the path of the answers file."""
    return regenerate(parse_command_line(RegenerateArguments, argv, command="regenerate", description=__doc__))


if __name__ == "__main__":
    sys.exit(
        exit_status(main, when_interrupted="finished answers are kept, and the same command continues after them.")
    )
