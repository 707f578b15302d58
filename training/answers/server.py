"""One request to an OpenAI-compatible server (vLLM, SGLang, ...), repeated where that may help.

Speaks `/chat/completions` with the standard library. `training.answers.served` decides what to request.
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any


_REPEATED = {408, 425, 429}  # and every 5xx
_LONGEST_BACK_OFF = 60.0
_LONGEST_WAIT = 3600.0  # however long the server asks for


class RequestFailedError(Exception):
    """A request that failed for good; the run may continue without it."""


class _TransientError(Exception):
    """A failure that may pass; `retry_after` is the wait that the server asked for, in seconds."""

    def __init__(self, reason: str, retry_after: float = 0.0):
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Completion:
    """Text of an answer, why it ended (`stop` or `length`), and the prompt tokens that the server counted."""

    text: str
    finish_reason: str
    prompt_tokens: int | None


class ChatServer:
    """One OpenAI-compatible server and model.

    Args:
        url (`str`): Base URL, e.g. `http://localhost:8000/v1`.
        model (`str`): Name of the model there.
        timeout (`float`): Seconds of silence after which a request counts as lost.
        max_retries (`int`): How often a request is repeated.
        wait (`Callable[[float], Any]`, *optional*, defaults to `time.sleep`): Waits for some seconds. A true result means
            that the run has ended, and nothing is repeated any more.
    """

    def __init__(
        self, url: str, model: str, *, timeout: float, max_retries: int, wait: Callable[[float], Any] = time.sleep
    ):
        self.url, self.model = f"{url.rstrip('/')}/chat/completions", model
        self.timeout, self.max_retries = timeout, max_retries
        self._wait = wait
        self._headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            self._headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"

    def complete(self, messages: list[dict[str, str]], **parameters: Any) -> Completion:
        """Answer a conversation.

        Args:
            messages (`list[dict[str, str]]`): The conversation, which ends with a user turn.
            parameters: Further fields of the request: `temperature`, `max_tokens`, ...

        Raises:
            RequestFailedError: if the server refuses the request, or all attempts failed.
            ValueError: if the server separates reasoning from the answer, so that the target's tokens are unknown.
        """
        body = json.dumps({"model": self.model, "messages": messages, "stream": False} | parameters).encode()
        for attempt in range(self.max_retries + 1):
            try:
                return _completion(self._post(body))
            except _TransientError as error:
                delay = max(back_off(attempt), error.retry_after)
                if attempt == self.max_retries or self._wait(delay):
                    raise RequestFailedError(f"{self.url}, {attempt + 1} attempts: {error}") from error
        raise RequestFailedError(f"{self.url}: no attempt was made.")

    def _post(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, data=body, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}: {_text_of(error)}"
            if error.code in _REPEATED or error.code >= 500:
                raise _TransientError(reason, retry_after(error.headers.get("Retry-After"))) from error
            raise RequestFailedError(f"{self.url}: {reason}") from error
        except (OSError, HTTPException) as error:  # timeouts, refused and lost connections, bodies cut short
            raise _TransientError(f"{type(error).__name__}: {error}") from error
        try:
            return json.loads(content)
        except ValueError as error:  # a body without a length, cut short
            raise _TransientError(f"a body of {len(content)} bytes that is not JSON") from error


def back_off(attempt: int) -> float:
    """Seconds before the next attempt: doubled each time, with jitter so that many clients do not come back at once."""
    return min(_LONGEST_BACK_OFF, 2.0**attempt) * random.uniform(0.5, 1.0)


def retry_after(value: str | None) -> float:
    """Seconds that a `Retry-After` header asks for, given as seconds or as a date; 0 for any other."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (OverflowError, ValueError):
            return 0.0
    return min(max(0.0, seconds), _LONGEST_WAIT)


def _text_of(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(300).decode(errors="replace")
    except (OSError, HTTPException):
        return str(error.reason)


def _completion(content: Any) -> Completion:
    try:
        choice = content["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        prompt_tokens = (content.get("usage") or {}).get("prompt_tokens")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise RequestFailedError(f"This is not a chat completion: {json.dumps(content)[:200]}") from error
    if reasoning:
        raise ValueError(
            "The server separates the reasoning from the answer, so the target's tokens are lost. Start "
            "the server without a reasoning parser, or pass `--thinking off`."
        )
    if reason not in ("stop", "length") or not isinstance(text, str):
        raise RequestFailedError(f"The answer ended with {reason!r}, not with `stop` or `length`.")
    if not text.isascii() and text.encode(errors="replace").decode() != text:
        raise RequestFailedError(f"The answer {text[:80]!r} is not text: it holds half of a surrogate pair.")
    return Completion(text, reason, prompt_tokens)


__all__ = ["ChatServer", "Completion", "RequestFailedError", "back_off", "retry_after"]
