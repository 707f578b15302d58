"""Answers by a server as records: a bounded number of requests at a time, the turns of a conversation in order.

The target's tokenizer splits the returned text into tokens. An answer that the target ended itself gets its end-of-turn
token back, which servers do not return; an answer cut at `max_new_tokens` gets none.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from training.answers.arguments import RegenerateArguments
from training.answers.plan import Answers, Request, follow_up, follow_ups
from training.answers.server import ChatServer, Completion, RequestFailedError
from training.common.targets import resolve_target
from training.data.prompts import continuation_ids, render_chat, template_options


logger = logging.get_logger("training.regenerate")

_MARK = "ANSWER"


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase, target: str) -> int:
    """The token with which the target ends an answer.

    A target may stop at several tokens (Gemma: `<eos>`, `<end_of_turn>`); the chat template shows the right one.
    """
    stops = {tokenizer.eos_token_id}
    try:
        given = GenerationConfig.from_pretrained(resolve_target(target)).eos_token_id
    except OSError:  # a folder of a tokenizer only
        given = None
    stops |= set(given) if isinstance(given, list) else {given}
    stops -= {None}
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}]
        rendered: Any = tokenizer.apply_chat_template(messages, tokenize=False)
        after = tokenizer(rendered.rpartition(_MARK)[2], add_special_tokens=False).input_ids
        shown = [token for token in after if token in stops]
        if shown:
            return shown[0]
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of `{target}` has no end-of-text token, so finished answers cannot be marked."
        )
    return tokenizer.eos_token_id


def request_seed(seed: int, request: Request) -> int:
    """Seed of a request: the prompt's own, or else one that is unique in the run."""
    if request.seed is not None:
        return request.seed
    return (seed * 1_000_003 + request.prompt * 4_099 + request.sample * 61 + request.turn) % 2**31


class ServedAnswers:
    """Iterates over the records that `answers` lacks, as they arrive.

    Args:
        arguments ([`RegenerateArguments`]): Of the run.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Of the target.
        requests (`list[Request]`): First turns of all conversations.
        answers (`dict`): Answers that exist already.

    Attributes:
        num_failures (`int`): Requests that failed for good; the turns that would have followed them are not counted.
    """

    def __init__(
        self,
        arguments: RegenerateArguments,
        tokenizer: PreTrainedTokenizerBase,
        requests: list[Request],
        answers: Answers,
    ):
        self._arguments, self._tokenizer = arguments, tokenizer
        self._eos = end_of_turn_id(tokenizer, arguments.target)
        self._stopped = threading.Event()
        self._server = ChatServer(
            arguments.server or "",
            arguments.model or arguments.target,
            timeout=arguments.timeout,
            max_retries=arguments.max_retries,
            wait=self._stopped.wait,
        )
        self._queue = deque(self._open(requests, answers))
        self.num_failures = 0

    def _open(self, requests: list[Request], answers: Answers) -> list[Request]:
        """The first turn of each conversation that has no answer yet."""
        unanswered = []
        while requests:
            unanswered += [request for request in requests if request.key not in answers]
            requests = follow_ups(requests, answers, self._tokenizer, self._arguments)
        return unanswered

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for request, future in bounded(self._complete, self._queue, self._arguments.concurrency):
                try:
                    completion = future.result()
                except RequestFailedError as error:
                    self._count(request, error)
                    continue
                record = self._record(request, completion)
                yield record
                following = follow_up(request, record["answer_ids"], self._tokenizer, self._arguments)
                if following is not None:
                    self._queue.appendleft(following)
        finally:
            self._stopped.set()

    def _complete(self, request: Request) -> Completion:
        options = template_options(self._arguments.thinking)
        return self._server.complete(
            request.messages,
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_new_tokens,
            seed=request_seed(self._arguments.seed, request),
            **({"chat_template_kwargs": options} if options else {}),
        )

    def _record(self, request: Request, completion: Completion) -> dict[str, Any]:
        text = render_chat(self._tokenizer, request.messages, self._arguments.thinking)
        counted, expected = completion.prompt_tokens, len(request.input_ids)
        if self._arguments.check_prompt_tokens and request.turn == 0 and counted not in (None, expected):
            raise ValueError(
                f"The server counts {counted} prompt tokens where the chat template of `{self._arguments.target}` gives "
                f"{expected} ({text[:80]!r}...): it serves another model or template. Serve the target with its own "
                "template, or pass `--check-prompt-tokens false` if the server counts differently."
            )
        ids = continuation_ids(self._tokenizer, text, completion.text)
        if completion.finish_reason == "stop":
            ids = [*ids, self._eos]
        seed = request_seed(self._arguments.seed, request)
        return request.record(ids, seed=seed, finish_reason=completion.finish_reason)

    def _count(self, request: Request, error: RequestFailedError) -> None:
        self.num_failures += 1
        logger.warning(f"Prompt {request.prompt}, sample {request.sample}, turn {request.turn} failed: {error}")
        if self.num_failures > self._arguments.max_failures:
            raise ValueError(
                f"{self.num_failures} requests failed for good, more than `max_failures={self._arguments.max_failures}`; "
                f"the last one: {error}. Finished answers are kept: start again with the same arguments."
            ) from error


def bounded(
    function: Callable[[Request], Completion], queue: deque[Request], concurrency: int
) -> Iterator[tuple[Request, Future[Completion]]]:
    """Yield requests as they are done, at most `concurrency` under way; the consumer may add to the queue meanwhile."""
    finished: SimpleQueue[tuple[Request, Future[Completion]]] = SimpleQueue()

    def run(request: Request) -> None:
        future: Future[Completion] = Future()
        try:
            future.set_result(function(request))
        except Exception as error:
            future.set_exception(error)
        finished.put((request, future))

    num_running = 0
    while queue or num_running:
        while queue and num_running < concurrency:
            # Not of a pool, whose threads the interpreter waits for at its end: a silent server would hold up a Ctrl-C.
            threading.Thread(target=run, args=(queue.popleft(),), daemon=True).start()
            num_running += 1
        yield finished.get()
        num_running -= 1


__all__ = ["ServedAnswers", "bounded", "end_of_turn_id", "request_seed"]
