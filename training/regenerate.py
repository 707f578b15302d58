"""Let the target answer prompts: the first step of training a drafter for it.

    python -m training.regenerate --target smollm2-135m-instruct --prompts prompts.jsonl --output answers.jsonl
    python -m training.regenerate --target Qwen/Qwen3-4B --prompts prompts.jsonl --output answers.jsonl \\
        --temperatures 0.0 0.7 1.0 --samples_per_prompt 2 --dtype bfloat16

A prompt is one JSON object a line with `turns` (a list of user turns; the first one is answered) or `text`. An answer
is one JSON object a line: `prompt` (line number of the prompt, from 0), `temperature`, `seed` and `answer_ids`.
The output is appended batch by batch, so a run that was stopped goes on where it was when started again with the same
arguments; answers already there are never written again. With an `--output` that does not end in `.jsonl`, the
finished answers are also saved as a `datasets` folder.
"""

import json
import math
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from training.targets import EMBEDDED_TARGET, chat_template_hash, load_target, load_tokenizer


@dataclass
class RegenerateArguments:
    """Arguments of `python -m training.regenerate`."""

    prompts: str = field(metadata={"help": "JSONL file of prompts: `turns` (list of user turns) or `text`."})
    output: str = field(metadata={"help": "`*.jsonl`, or a folder that also receives a `datasets` dataset."})
    target: str = field(
        default=EMBEDDED_TARGET, metadata={"help": "The target: a local folder, a Hub id, or `smollm2-135m-instruct`."}
    )
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.8],
        metadata={"help": "Sampling temperatures, dealt out over the answers in turn; 0 is greedy."},
    )
    samples_per_prompt: int = field(
        default=1, metadata={"help": "Answers to each prompt (different temperatures/seeds)."}
    )
    max_new_tokens: int = field(default=192, metadata={"help": "Longest answer, in tokens."})
    max_prompt_tokens: int = field(default=512, metadata={"help": "Longer prompts are skipped and counted."})
    batch_size: int = field(default=64, metadata={"help": "Prompts answered at once, of similar length."})
    limit: int | None = field(default=None, metadata={"help": "Use only the first N prompts."})
    skip: int = field(default=0, metadata={"help": "Leave out the first N prompts."})
    skip_answered_in: str | None = field(
        default=None, metadata={"help": "An answers file whose prompts need no answer again."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Weights of the target: bfloat16, float16 or float32."})
    device: str = field(default="cpu", metadata={"help": "Where the target runs, e.g. `cuda`."})
    seed: int = field(default=0, metadata={"help": "Seed of the whole run; each batch derives its own."})

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1 or self.batch_size < 1 or self.max_new_tokens < 1:
            raise ValueError("`samples_per_prompt`, `batch_size` and `max_new_tokens` must be at least 1.")
        values: Any = self.temperatures
        numbers = isinstance(values, list) and all(isinstance(value, (int, float)) for value in values)
        if not numbers or not values or not all(0 <= value < math.inf for value in values):
            raise ValueError(f"`temperatures` must be a non-empty list of numbers >= 0, got {values}.")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"`dtype` must be bfloat16, float16 or float32, got {self.dtype!r}.")
        if self.skip < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError(f"`skip` must be at least 0 and `limit` at least 1, got {self.skip} and {self.limit}.")


@dataclass(frozen=True)
class Request:
    """One answer to be made."""

    prompt: int
    sample: int
    temperature: float
    input_ids: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt, self.sample


def read_jsonl(path: str | Path) -> list[dict]:
    """Read a JSONL file; a last line cut by a crash is dropped, any other broken line is an error."""
    if not Path(path).is_file():
        raise ValueError(f"There is no file `{path}`.")
    # Not `splitlines`, which also splits at separators that JSON strings may contain.
    lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"`{path}` line {number + 1} is not JSON: {error}.") from error
    return records


def from_command_line(arguments: type, command: str, doc: str) -> Any:
    """Arguments of `python -m training.<command>`, whose `--help` begins with the first sentence of its module's `doc`."""
    parser = HfArgumentParser(arguments, prog=f"python -m training.{command}", description=doc.split("\n\n")[0])  # type: ignore[arg-type]
    return parser.parse_args_into_dataclasses()[0]


def write_atomically(path: Path, text: str) -> None:
    """Write a file such that it has the old content or the new one, at any moment."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, record: Any) -> list[int]:
    """Token ids of a prompt through the target's chat template (plain text where there is no template)."""
    turns = record.get("turns") if isinstance(record, dict) else None
    text = turns[0] if isinstance(turns, list) and turns else record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A prompt needs `turns` (a list of strings) or `text`, got {str(record)[:120]}.")
    if tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False).input_ids


def plan_requests(arguments: RegenerateArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Request], int]:
    """All answers the arguments ask for, with temperatures dealt in turn, and the number of prompts left out."""
    records = read_jsonl(arguments.prompts)[: arguments.limit]
    answered = set()
    if arguments.skip_answered_in:
        answered = {record["prompt"] for record in read_jsonl(arguments.skip_answered_in)}
    requests, too_long = [], 0
    for prompt in range(arguments.skip, len(records)):
        if prompt in answered:
            continue
        ids = prompt_ids(tokenizer, records[prompt])
        if len(ids) > arguments.max_prompt_tokens:
            too_long += 1
            continue
        for sample in range(arguments.samples_per_prompt):
            temperature = arguments.temperatures[(prompt + sample) % len(arguments.temperatures)]
            requests.append(Request(prompt, sample, temperature, tuple(ids)))
    return requests, too_long


def plan_batches(requests: list[Request], batch_size: int, seed: int) -> list[list[Request]]:
    """Group requests of one temperature and similar length; the batches come in a seeded random order."""
    ordered = sorted(requests, key=lambda request: (request.temperature, len(request.input_ids), request.key))
    batches: list[list[Request]] = []
    current: list[Request] = []
    for request in ordered:
        if current and (len(current) == batch_size or current[0].temperature != request.temperature):
            batches.append(current)
            current = []
        current.append(request)
    if current:
        batches.append(current)
    random.Random(seed).shuffle(batches)
    return batches


@torch.inference_mode()
def answer_batch(
    target: PreTrainedModel, batch: list[Request], *, pad_token_id: int, max_new_tokens: int
) -> list[list[int]]:
    """Answers of one batch; each ends with the end-of-text token, or is cut at `max_new_tokens`."""
    width = max(len(request.input_ids) for request in batch)
    input_ids = torch.full((len(batch), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(batch):
        input_ids[row, width - len(request.input_ids) :] = torch.tensor(request.input_ids)
        attention_mask[row, width - len(request.input_ids) :] = 1
    temperature = batch[0].temperature
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    output = target.generate(  # type: ignore[operator]  # causal language models have it
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token_id,
        **sampling,
    )
    eos = target.generation_config.eos_token_id
    eos_ids = set(eos) if isinstance(eos, list) else {eos}
    return [_cut_after_eos(row, eos_ids) for row in output[:, width:].tolist()]


def _cut_after_eos(ids: list[int], eos_ids: set[int | None]) -> list[int]:
    end = next((index for index, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
    return ids[: end + 1]


def _answers_path(output: str) -> Path:
    path = Path(output)
    return path if path.suffix == ".jsonl" else path / "answers.jsonl"


def regenerate(arguments: RegenerateArguments) -> Path:
    """Run the command; returns the path of the answers file."""
    tokenizer = load_tokenizer(arguments.target)
    requests, too_long = plan_requests(arguments, tokenizer)
    path = _answers_path(arguments.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_provenance(path, arguments, tokenizer, too_long)
    done = {(record["prompt"], record.get("sample", 0)) for record in read_jsonl(path)} if path.is_file() else set()
    _drop_cut_line(path)
    batches = plan_batches(requests, arguments.batch_size, arguments.seed)
    target: Any = load_target(arguments.target, arguments.dtype)
    target.to(arguments.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    tokens = 0
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(requests), unit="answer", desc="regenerate") as bar:
        bar.update(sum(request.key in done for request in requests))
        for index, batch in enumerate(batches):
            pending = [request for request in batch if request.key not in done]
            if not pending:
                continue
            set_seed(arguments.seed * 1_000_003 + index)
            answers = answer_batch(target, pending, pad_token_id=pad, max_new_tokens=arguments.max_new_tokens)
            for request, answer in zip(pending, answers, strict=True):
                record: dict[str, Any] = {
                    "prompt": request.prompt,
                    "sample": request.sample,
                    "temperature": request.temperature,
                    "seed": arguments.seed * 1_000_003 + index,
                    "answer_ids": answer,
                }
                file.write(json.dumps(record) + "\n")
                tokens += len(answer)
            file.flush()
            bar.update(len(pending))
            bar.set_postfix(tokens=tokens, skipped_long_prompts=too_long)
    if not arguments.output.endswith(".jsonl"):
        from datasets import Dataset  # the training extra; needed for this output only

        Dataset.from_list(read_jsonl(path)).save_to_disk(str(path.parent / "dataset"))
    return path


def _drop_cut_line(path: Path) -> None:
    """A crash can leave half a line at the end; cut it off so that the next record starts on a line of its own."""
    if path.is_file():
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) != len(content):
            with path.open("r+b") as file:
                file.truncate(len(complete))


def _check_provenance(
    path: Path, arguments: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, too_long: int
) -> None:
    """Write how the answers are made next to them, or check that a resumed run makes them the same way."""
    details = {
        "target": arguments.target,
        "chat_template_sha256": chat_template_hash(tokenizer),
        "temperatures": arguments.temperatures,
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "skipped_long_prompts": too_long,
    }
    record = path.with_suffix(".meta.json")
    if path.is_file() and record.is_file():
        earlier = json.loads(record.read_text())
        different = {name: (earlier.get(name), value) for name, value in details.items() if earlier.get(name) != value}
        if different:
            raise ValueError(
                f"`{path}` was made with other arguments (then, now): {different}. Go on with the same ones, or choose "
                "another `output`."
            )
    record.write_text(json.dumps(details, indent=2) + "\n")


if __name__ == "__main__":
    try:
        regenerate(from_command_line(RegenerateArguments, "regenerate", __doc__))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
