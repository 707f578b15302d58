"""Regeneration from end to end: plan the requests, append the answers as they come, and describe them beside the file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import logging

from training.answers.arguments import RegenerateArguments
from training.answers.local import answers_of_target
from training.answers.plan import Answers, Request, answers_in, key_of, plan_requests
from training.answers.provenance import settings_of, write_dataset, write_provenance
from training.answers.served import ServedAnswers
from training.common.files import JsonlAppender
from training.common.targets import check_device, load_tokenizer
from training.data.prompts import check_thinking, read_prompts


logger = logging.get_logger("training.regenerate")


def _answers_path(output: str) -> Path:
    path = Path(output)
    return path if path.suffix == ".jsonl" else path / "answers.jsonl"


def _check_folder(output: str, answers: Path) -> None:
    """Refuse a folder of something else, whose files the card and the dataset would replace."""
    present = [name for name in ("README.md", "dataset") if (answers.parent / name).exists()]
    if not output.endswith(".jsonl") and present and not answers.exists():
        raise ValueError(
            f"`output` (`{output}`) has {present} and no answers.jsonl: it is not a folder of answers; choose another."
        )


def _append(file: JsonlAppender, records: Iterable[dict[str, Any]], requests: list[Request], answers: Answers) -> int:
    """Append answers as they come; returns how many conversations did not reach their last turn.

    That is where a turn failed, or its prompt would be longer than `max_prompt_tokens`.
    """
    turns = {(*request.key[:2], turn) for request in requests for turn in range(len(request.turns))}
    last = {(*request.key[:2], len(request.turns) - 1) for request in requests}
    present = turns & answers.keys()
    tokens = 0
    with tqdm(total=len(turns), initial=len(present), unit="answer", desc="regenerate") as bar:
        for record in records:
            file.write(record)
            present.add(key_of(record))
            tokens += len(record["answer_ids"])
            bar.update()
            bar.set_postfix(tokens=tokens, refresh=False)
    return len(last - present)


def regenerate(arguments: RegenerateArguments) -> Path:
    """Answer what has no answer yet; returns the path of the answers file."""
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
    with JsonlAppender(path) as file:  # first: while another run appends, nothing is read
        answers = answers_in(path)
        write_provenance(path, settings, counts, prompts)
        records: Iterable[dict[str, Any]]
        if arguments.server is None:
            records = answers_of_target(arguments, tokenizer, requests, answers)
        else:
            records = ServedAnswers(arguments, tokenizer, requests, answers)
        counts["unfinished_conversations"] = _append(file, records, requests, answers)
    if isinstance(records, ServedAnswers):
        counts["failed_requests"] = records.num_failures
        if records.num_failures:
            logger.warning(f"{records.num_failures} requests failed; the same command tries them again.")
    logger.warning(f"{path}: {json.dumps(counts)}")
    write_provenance(path, settings, counts, prompts)
    if not arguments.output.endswith(".jsonl"):
        write_dataset(path, prompts, settings, counts)
    return path


__all__ = ["regenerate"]
