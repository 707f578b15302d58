"""Provenance of answers: the `.meta.json` file beside them, and the dataset card of a folder.

A run continues only with its own settings: answers that were made differently never share a file.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData
from transformers import PreTrainedTokenizerBase

from training.answers.arguments import RegenerateArguments
from training.common.files import read_jsonl, write_atomically
from training.common.settings import check_same_settings
from training.common.tables import compact_table
from training.common.targets import chat_template_hash, target_revision


# The values before these settings existed. Other settings that an earlier version did not record count as unchanged.
_EARLIER: dict[str, Any] = {"top_p": 1.0, "thinking": "default", "max_turns": 1, "served_model": None}


def settings_of(arguments: RegenerateArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The settings that the answers depend on, apart from the prompts."""
    served = None if arguments.server is None else arguments.model or arguments.target
    return {
        "target": arguments.target,
        "target_revision": target_revision(arguments.target),
        "dtype": arguments.dtype if served is None else None,  # a server's is not known
        "served_model": served,
        "chat_template_sha256": chat_template_hash(tokenizer),
        "thinking": arguments.thinking,
        "temperatures": arguments.temperatures,
        "top_p": arguments.top_p,
        "max_new_tokens": arguments.max_new_tokens,
        "max_turns": arguments.max_turns,
        "seed": arguments.seed,
    }


def write_provenance(answers: Path, settings: dict[str, Any], counts: dict[str, Any], prompts: Sequence[Any]) -> None:
    """Write the settings next to the answers; a run that continues must have the same ones.

    Raises:
        ValueError: names the settings that differ, with both values; or says that the prompts differ (more may follow).
    """
    path = answers.with_suffix(".meta.json")
    if answers.is_file() and answers.stat().st_size and path.is_file():
        earlier = settings | _EARLIER | json.loads(path.read_text(encoding="utf-8"))
        way_out = "Continue with the same ones, or choose another `output`."
        check_same_settings(earlier, settings, subject=f"`{answers}` was made", way_out=way_out)
        count = earlier.get("num_prompts")
        if count is not None and _digest(prompts[:count]) != earlier.get("prompts_sha256"):
            raise ValueError(
                f"`{answers}` answers other prompts: the first {count} of `{counts['prompts']}` are not those of then. "
                "Continue with the same ones (more may follow them), or choose another `output`."
            )
    asked = {"num_prompts": len(prompts), "prompts_sha256": _digest(prompts)}
    write_atomically(path, json.dumps(settings | counts | asked, indent=2) + "\n")


def _digest(prompts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(prompts), sort_keys=True, default=str).encode()).hexdigest()


def write_dataset(answers: Path, prompts: list[dict], settings: dict[str, Any], counts: dict[str, Any]) -> None:
    """Save the answers as a `datasets` dataset in `dataset/`, with a card `README.md` for the folder."""
    from datasets import Dataset  # the training extra; needed for this output only

    records = read_jsonl(answers)
    columns = {name: None for record in records for name in record}  # files begun before a column existed
    Dataset.from_list([columns | record for record in records]).save_to_disk(str(answers.parent / "dataset"))
    write_atomically(answers.parent / "README.md", dataset_card(records, prompts, settings, counts))


def dataset_card(records: list[dict], prompts: list[dict], settings: dict[str, Any], counts: dict[str, Any]) -> str:
    """Card of a folder of answers: the prompts, the target, the settings, and counts."""
    used = [prompts[index] for index in sorted({record["prompt"] for record in records})]
    licenses = _count(record.get("license", record.get("licence")) for record in used)
    data = DatasetCardData(
        license=next(iter(licenses)).lower() if len(licenses) == 1 and "not stated" not in licenses else None,
        task_categories=["text-generation"],
        tags=["dspark", "speculative-decoding", "regenerated"],
        configs=[{"config_name": "default", "data_files": "answers.jsonl"}],
    )
    source = "the target itself, in process" if settings["served_model"] is None else "an OpenAI-compatible server"
    return "\n".join(
        [
            f"---\n{data.to_yaml()}\n---\n",
            f"# Answers of {settings['target']}\n",
            f"Prompts answered by `{settings['target']}`, to train a drafter for it. Each line of `answers.jsonl` is one turn "
            "of a conversation: `prompt` (index of the prompt in the source, from 0), `sample`, `turn`, the sampling "
            "parameters, `prompt_ids` (what the target saw) and `answer_ids` (what it wrote; it ends with the "
            "end-of-turn token if `finish_reason` is `stop`).\n",
            f"## Provenance\n\nMade with `python -m training.regenerate` by {source}. Where a prompt had its "
            "own sampling parameters, they won; each line has the ones that were used.\n",
            _table(("setting", "value"), settings.items()),
            "\n## Counts\n",
            _table(("count", "value"), _counts(records, counts).items()),
            f"\n## Prompts\n\nRead from `{counts['prompts']}`.\n",
            _table(("source", "prompts"), _count(record.get("source") for record in used).items()),
            "",
            _table(("license of the prompts", "prompts"), licenses.items()),
            "",
        ]
    )


def _counts(records: list[dict], counts: dict[str, Any]) -> dict[str, Any]:
    finished = [record["finish_reason"] for record in records if record.get("finish_reason")]
    return {
        "conversations": len({(record["prompt"], record.get("sample", 0)) for record in records}),
        "answers": len(records),
        "answers cut at `max_new_tokens`": finished.count("length"),
        "answer tokens": sum(len(record["answer_ids"]) for record in records),
    } | {name.replace("_", " "): value for name, value in counts.items() if name != "prompts"}


def _count(values: Iterable[Any]) -> dict[str, int]:
    return dict(Counter(str(value) if value else "not stated" for value in values).most_common())


def _table(header: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    return compact_table(header, [(name, f"`{value}`" if isinstance(value, str) else value) for name, value in rows])


__all__ = ["dataset_card", "settings_of", "write_dataset", "write_provenance"]
