"""Prompts: read from JSONL, Parquet or `datasets`, and put through the target's chat template.

A prompt is a record with `turns` (a list of user turns) or `text` (one turn). It may carry its own `temperature`, `top_p`,
`seed` and `max_new_tokens`, and say where it is from (`source`, `license`). No model here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from training.common.files import read_jsonl


Thinking = Literal["default", "on", "off"]


def read_prompts(source: str, *, split: str = "train", column: str | None = None) -> list[dict]:
    """Prompts of a JSONL or Parquet file, of a folder saved by `datasets`, or of a dataset on the Hub.

    Args:
        source (`str`): `*.jsonl`, `*.parquet`, a folder, or a name for `datasets.load_dataset`.
        split (`str`, *optional*, defaults to `"train"`): Split of a dataset that has several.
        column (`str`, *optional*): Column that holds the prompt, a text or a list of user turns, if it is neither
            `turns` nor `text`.

    Raises:
        ValueError: if there is no such file, split or column.
    """
    if not source:
        raise ValueError("`prompts` must name a file, a folder or a dataset; it is not given.")
    path = Path(source)
    if path.suffix == ".jsonl" or (path.is_file() and path.suffix != ".parquet"):
        records = read_jsonl(path)
    elif path.suffix == ".parquet":
        records = _read_parquet(path)
    else:
        records = _read_dataset(source, split)
    if not records:
        raise ValueError(f'`prompts`: `{source}` holds no prompts; a line is `{{"turns": ["a question"]}}`.')
    return records if column is None else [_with_turns(record, column, source) for record in records]


def _read_parquet(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`.")
    from pyarrow import ArrowInvalid, parquet  # comes with `datasets`, of the training extra

    try:
        return parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"`{path}` is not a Parquet file: {error}") from error


def _read_dataset(source: str, split: str) -> list[dict]:
    from datasets import DatasetDict, load_dataset, load_from_disk  # the training extra; needed for datasets only
    from datasets.exceptions import DatasetGenerationError

    try:
        saved = (Path(source) / "state.json").is_file() or (Path(source) / "dataset_dict.json").is_file()
        data: Any = load_from_disk(source) if saved else load_dataset(source, split=split)
    except (OSError, ValueError, DatasetGenerationError) as error:  # missing, no network, no such split, other files
        raise ValueError(
            f"`prompts`: `{source}` is neither an existing `.jsonl` or `.parquet` file nor a dataset that can be "
            f"loaded with split `{split}` ({type(error).__name__}: {error})."
        ) from error
    if isinstance(data, DatasetDict):
        if split not in data:
            raise ValueError(
                f"`{source}` has the splits {sorted(data)}, not {split!r}; choose one with `prompts_split`."
            )
        data = data[split]
    return data.to_list()


def _with_turns(record: Any, column: str, source: str) -> dict:
    value = record.get(column) if isinstance(record, dict) else None
    if not isinstance(value, (str, list)):
        raise ValueError(f"`prompts_column`: `{source}` has no text or list in `{column}` of {str(record)[:120]}.")
    return record | {"turns": [value] if isinstance(value, str) else value}


def user_turns(record: Any) -> list[str]:
    """The user turns of a prompt.

    Raises:
        ValueError: if the record has neither `turns` nor `text`, or a turn is not text.
    """
    turns = record.get("turns") if isinstance(record, dict) else None
    if not turns and isinstance(record, dict):
        turns = [record.get("text")]
    if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
        raise ValueError(f"A prompt needs `turns` (a list of strings) or `text`, got {str(record)[:120]}.")
    return turns


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False
    return True


def check_thinking(thinking: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a thinking mode that the chat template does not know: it would be recorded without effect.

    Raises:
        ValueError: if `thinking` is not a mode, or the template does not mention `enable_thinking`.
    """
    if thinking not in get_args(Thinking):
        raise ValueError(f"`thinking` must be one of {list(get_args(Thinking))}, got {thinking!r}.")
    if thinking != "default" and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError(
            f"`thinking={thinking}`: the target's chat template does not know `enable_thinking`; leave it at `default`."
        )


def template_options(thinking: Thinking) -> dict[str, Any]:
    """Arguments of the chat template for a thinking mode."""
    return {} if thinking == "default" else {"enable_thinking": thinking == "on"}


def chat(turns: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """Messages of a conversation: user turns, with the answers to all but the last."""
    messages = [{"role": "user", "content": turns[0]}]
    for turn, answer in zip(turns[1:], answers, strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return messages


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], thinking: Thinking = "default"
) -> str:
    """Text of a conversation up to where the assistant answers (plain text where there is no template).

    Raises:
        ValueError: if several messages are to be rendered without a chat template.
    """
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ValueError("The target has no chat template, so only one turn can be answered: set `max_turns=1`.")
        return messages[0]["content"]
    options = template_options(thinking)
    return apply_template(tokenizer, messages, add_generation_prompt=True, tokenize=False, **options)


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    """`apply_chat_template`, with what a template refuses as a `ValueError`."""
    from jinja2 import TemplateError  # comes with what applies templates

    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"The target's chat template refuses {str(messages)[:120]}: {error}.") from error


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text; only plain text gets the tokenizer's own special tokens."""
    return tokenizer(text, add_special_tokens=tokenizer.chat_template is None).input_ids


def continuation_ids(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Token ids of `text` as it follows the rendered conversation `before`.

    Some tokenizers begin a text with a space that is not there in the middle of one.
    """
    alone, whole = text_ids(tokenizer, before), text_ids(tokenizer, before + text)
    if whole[: len(alone)] == alone:
        return whole[len(alone) :]
    # A token reaches across the border, which it cannot in what a target writes after a prompt.
    return tokenizer(text, add_special_tokens=False).input_ids


def prompt_ids(tokenizer: PreTrainedTokenizerBase, record: Any, thinking: Thinking = "default") -> list[int]:
    """Token ids of the first turn of a prompt, through the target's chat template.

    Raises:
        ValueError: if the record is no prompt, or the tokenizer has no token for it.
    """
    ids = text_ids(tokenizer, render_chat(tokenizer, chat(user_turns(record)[:1], []), thinking))
    if not ids:
        raise ValueError(f"The target's tokenizer makes no token of the prompt {str(record)[:120]}; leave it out.")
    return ids


__all__ = [
    *("Thinking", "apply_template", "chat", "check_thinking", "continuation_ids", "prompt_ids"),
    *("read_prompts", "render_chat", "template_options", "text_ids", "user_turns"),
]
