"""The arguments of `dspark regenerate`, checked on construction."""

import math
from dataclasses import dataclass, field
from typing import Any

from training.common.commands import check_choice
from training.common.targets import DTYPES, EMBEDDED_TARGET
from training.data.prompts import Thinking


@dataclass
class RegenerateArguments:
    """Arguments of `dspark regenerate`."""

    prompts: str = field(
        metadata={
            "help": "Prompts: a JSONL or Parquet file, a folder saved by `datasets`, or a dataset's name. A prompt has "
            "`turns` (list of user turns) or `text`, and may have `temperature`, `top_p`, `seed` and `max_new_tokens`, "
            "which win over the flags."
        }
    )
    output: str = field(
        metadata={"help": "`*.jsonl`, or a folder that also receives a `datasets` dataset and a dataset card."}
    )
    prompts_split: str = field(default="train", metadata={"help": "Split, for a dataset that has several."})
    prompts_column: str | None = field(
        default=None,
        metadata={"help": "Column with the prompt (text or list of user turns), if neither `turns` nor `text`."},
    )
    target: str = field(
        default=EMBEDDED_TARGET,
        metadata={
            "help": "The target: a local folder, a Hub id, or `smollm2-135m-instruct`. With `--server` only its "
            "tokenizer and its generation config are loaded here."
        },
    )
    server: str | None = field(
        default=None,
        metadata={
            "help": "Let an OpenAI-compatible server (vLLM, SGLang, ...) answer: its base URL, e.g. "
            "`http://localhost:8000/v1`. A key is taken from the environment variable OPENAI_API_KEY."
        },
    )
    model: str | None = field(
        default=None, metadata={"help": "The target's name on the server; the value of `target` if not given."}
    )
    concurrency: int = field(default=32, metadata={"help": "Requests to the server at a time."})
    timeout: float = field(default=300.0, metadata={"help": "Seconds of silence after which a request is repeated."})
    max_retries: int = field(
        default=6,
        metadata={
            "help": "How often a request is repeated after status 408, 429 or 5xx, a timeout or a lost connection, with "
            "exponential back-off and jitter, not before the server's Retry-After."
        },
    )
    max_failures: int = field(
        default=20, metadata={"help": "Stop when more requests than this have failed for good; fewer are reported."}
    )
    check_prompt_tokens: bool = field(
        default=True,
        metadata={"help": "Stop if the server's count of prompt tokens differs from that of the target's template."},
    )
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.8],
        metadata={"help": "Sampling temperatures, dealt out over the conversations in turn; 0 is greedy."},
    )
    top_p: float = field(
        default=1.0, metadata={"help": "Sample from the smallest set of tokens with this probability."}
    )
    samples_per_prompt: int = field(
        default=1, metadata={"help": "Answers to each prompt (different temperatures/seeds)."}
    )
    max_turns: int | None = field(default=None, metadata={"help": "Answer only the first N user turns of a prompt."})
    thinking: Thinking = field(
        default="default",
        metadata={"help": "`enable_thinking` of the chat template: `on`, `off`, or the template's default."},
    )
    max_new_tokens: int = field(default=192, metadata={"help": "Longest answer, in tokens."})
    max_prompt_tokens: int = field(
        default=512, metadata={"help": "Longer prompts (with the turns before) are skipped and counted."}
    )
    batch_size: int = field(default=64, metadata={"help": "Prompts the in-process target answers at once."})
    limit: int | None = field(default=None, metadata={"help": "Use only the first N prompts."})
    skip: int = field(default=0, metadata={"help": "Leave out the first N prompts."})
    skip_answered_in: str | None = field(
        default=None, metadata={"help": "An answers file whose prompts need no answer again."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Weights of the target: bfloat16, float16 or float32."})
    device: str = field(default="cpu", metadata={"help": "Where the in-process target runs, e.g. `cuda`."})
    seed: int = field(default=0, metadata={"help": "Seed of the whole run; batches and requests derive their own."})

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "batch_size", "max_new_tokens", "concurrency", "max_turns", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        for name in ("skip", "max_retries", "max_failures"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")
        check_choice("dtype", self.dtype, DTYPES)
        values: Any = self.temperatures
        are_temperatures = (
            isinstance(values, list) and values and all(valid_sampling("temperature", value) for value in values)
        )
        url = self.server is None or self.server.startswith(("http://", "https://"))
        checks = {
            "temperatures": (are_temperatures, "must be a non-empty list of numbers >= 0"),
            "seed": (0 <= self.seed < 2**32, "must lie in [0, 2**32)"),
            "top_p": (valid_sampling("top_p", self.top_p), "must lie in (0, 1]"),
            "timeout": (0 < self.timeout < math.inf, "must be a number of seconds above 0"),
            "server": (url, "must be a URL such as http://localhost:8000/v1"),
            "model": (
                self.model is None or self.server is not None,
                "is a name on a server, so `server` is needed too",
            ),
        }
        for name, (fine, rule) in checks.items():
            if not fine:
                raise ValueError(f"`{name}` {rule}, got {getattr(self, name)!r}.")


def valid_sampling(name: str, value: Any) -> bool:
    """Whether a sampling parameter has a value that can be sampled with."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or isinstance(value, float)
    checks = {
        "temperature": number and 0 <= value < math.inf,
        "top_p": number and 0 < value <= 1,
        "max_new_tokens": whole and value >= 1,
        "seed": whole and 0 <= value < 2**63,
    }
    return checks[name]


__all__ = ["RegenerateArguments", "valid_sampling"]
