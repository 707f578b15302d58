"""Let the target answer prompts: the first step of training a drafter for it.

    python -m training.regenerate --target smollm2-135m-instruct --prompts prompts.jsonl --output answers.jsonl
    python -m training.regenerate --target Qwen/Qwen3-4B --prompts prompts.parquet --output runs/answers \\
        --temperatures 0.0 0.7 1.0 --samples_per_prompt 2 --thinking off
    python -m training.regenerate --target Qwen/Qwen3-4B --prompts my-org/prompts --output runs/answers \\
        --server http://localhost:8000/v1 --concurrency 64

A prompt is a record with `turns` (a list of user turns, all of which are answered) or `text`; its own `temperature`,
`top_p`, `seed` and `max_new_tokens` win over the flags. An answer is one JSON object a line: `prompt` (place of the prompt,
from 0), `sample`, `turn`, how it was sampled, `prompt_ids` (what the target saw) and `answer_ids`.

Answers are appended as they come, so a run that was stopped, or killed, goes on where it was when started again with the
same arguments; answers already there are never made again. With an `--output` that does not end in `.jsonl`, the folder
also receives the answers as a `datasets` dataset and a dataset card.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging

from training.answers.arguments import RegenerateArguments
from training.answers.local import answers_of_target
from training.answers.plan import Answers, Request, answers_in, key_of, plan_batches, plan_requests
from training.answers.provenance import settings_of, write_dataset, write_provenance
from training.answers.served import ServedAnswers
from training.common.commands import HelpFormatter, exit_status
from training.common.files import JsonlAppender, read_jsonl, write_atomically
from training.common.targets import check_device, load_tokenizer
from training.data.prompts import check_thinking, prompt_ids, read_prompts


logger = logging.get_logger("training.regenerate")


def from_command_line(arguments: type, command: str, doc: str) -> Any:
    """Arguments of `python -m training.<command>`, whose `--help` begins with its module's `doc`: use and examples."""
    parser = HfArgumentParser(
        arguments,  # type: ignore[arg-type]  # a dataclass
        prog=f"python -m training.{command}",
        description=doc,
        formatter_class=HelpFormatter,
    )
    return parser.parse_args_into_dataclasses()[0]


def _answers_path(output: str) -> Path:
    path = Path(output)
    return path if path.suffix == ".jsonl" else path / "answers.jsonl"


def _check_folder(output: str, answers: Path) -> None:
    """Refuse a folder of something else, whose files the card and the dataset would replace."""
    theirs = [name for name in ("README.md", "dataset") if (answers.parent / name).exists()]
    if not output.endswith(".jsonl") and theirs and not answers.exists():
        raise ValueError(
            f"`output` (`{output}`) has {theirs} and no answers.jsonl: it is not a folder of answers; choose another."
        )


def _write(file: JsonlAppender, made: Iterable[dict[str, Any]], requests: list[Request], answers: Answers) -> int:
    """Append answers as they come, with a progress bar over all turns; returns how many conversations did not get to
    their last turn, because a turn failed or would be longer than `max_prompt_tokens`."""
    turns = {(*request.key[:2], turn) for request in requests for turn in range(len(request.turns))}
    last = {(*request.key[:2], len(request.turns) - 1) for request in requests}
    present = turns & answers.keys()
    tokens = 0
    with tqdm(total=len(turns), initial=len(present), unit="answer", desc="regenerate") as bar:
        for record in made:
            file.write(record)
            present.add(key_of(record))
            tokens += len(record["answer_ids"])
            bar.update()
            bar.set_postfix(tokens=tokens, refresh=False)
    return len(last - present)


def regenerate(arguments: RegenerateArguments) -> Path:
    """Run the command; returns the path of the answers file."""
    if arguments.server is None:
        check_device(arguments.device)
    tokenizer = load_tokenizer(arguments.target)
    check_thinking(arguments.thinking, tokenizer)
    prompts = read_prompts(arguments.prompts, split=arguments.prompts_split, column=arguments.prompts_column)
    requests, too_long = plan_requests(arguments, tokenizer, prompts)
    path = _answers_path(arguments.output)
    _check_folder(arguments.output, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = settings_of(arguments, tokenizer)
    counts: dict[str, Any] = {"prompts": arguments.prompts, "skipped_long_prompts": too_long}
    with JsonlAppender(path) as file:  # opened first: what another run writes is not read
        answers = answers_in(path)
        write_provenance(path, settings, counts, prompts)
        made: Iterable[dict[str, Any]]
        if arguments.server is None:
            made = answers_of_target(arguments, tokenizer, requests, answers)
        else:
            made = ServedAnswers(arguments, tokenizer, requests, answers)
        counts["unfinished_conversations"] = _write(file, made, requests, answers)
    if isinstance(made, ServedAnswers):
        counts["failed_requests"] = made.num_failures
        if made.num_failures:
            logger.warning(f"{made.num_failures} requests failed; the same command tries them again.")
    logger.warning(f"{path}: {json.dumps(counts)}")
    write_provenance(path, settings, counts, prompts)
    if not arguments.output.endswith(".jsonl"):
        write_dataset(path, prompts, settings, counts)
    return path


__all__ = [
    "RegenerateArguments",
    "from_command_line",
    "plan_batches",
    "plan_requests",
    "prompt_ids",
    "read_jsonl",
    "regenerate",
    "write_atomically",
]


if __name__ == "__main__":
    sys.exit(
        exit_status(
            lambda: regenerate(from_command_line(RegenerateArguments, "regenerate", __doc__)),
            when_interrupted="finished answers are kept, and the same command goes on after them.",
        )
    )
