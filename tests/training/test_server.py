"""The client against a server that fails, stalls and truncates."""

import email.utils
import time

import pytest

from tests.training.chat_server import ChatDouble
from training.answers.server import ChatServer, RequestFailedError, back_off, retry_after


MESSAGES = [{"role": "user", "content": "x"}]


def client(double, waits, **fields):
    options = {"timeout": 5.0, "max_retries": 3} | fields
    return ChatServer(double.url, "m", wait=waits.append, **options)


def fails_first(*fates):
    return lambda number, body: fates[number] if number < len(fates) else None


@pytest.mark.parametrize(
    "fate",
    [
        {"status": 500},
        {"status": 503, "content": "not ready"},
        {"status": 429},
        {"status": 408},
        {"cut": "in the middle"},
        {"cut": "without a length"},
        {"content": "<html>a proxy's page</html>"},
    ],
    ids=str,
)
def test_what_may_pass_is_repeated(fate):
    waits = []
    with ChatDouble(fails_first(fate, fate)) as double:
        completion = client(double, waits).complete(MESSAGES, temperature=0.5, max_tokens=7)
    assert (completion.text, completion.finish_reason, completion.prompt_tokens) == ("abx", "stop", None)
    assert len(double.bodies) == 3
    assert all(body == double.bodies[0] for body in double.bodies)
    assert {"model": "m", "temperature": 0.5, "max_tokens": 7, "messages": MESSAGES}.items() <= double.bodies[
        0
    ].items()
    assert double.bodies[0]["path"] == "/v1/chat/completions"
    assert 0.5 <= waits[0] <= 1.0 <= waits[1] <= 2.0


def test_a_stalled_request_is_repeated():
    with ChatDouble(fails_first({"stall": True})) as double:
        assert client(double, [], timeout=0.3).complete(MESSAGES).text == "abx"


def test_a_server_that_is_not_there():
    with ChatDouble() as double:
        pass
    waits = []
    with pytest.raises(RequestFailedError, match="4 attempts.*refused"):
        client(double, waits).complete(MESSAGES)
    assert len(waits) == 3


def test_retry_after_is_honoured():
    waits = []
    with ChatDouble(fails_first({"status": 429, "headers": {"Retry-After": "17"}})) as double:
        client(double, waits).complete(MESSAGES)
    assert waits == [17.0]
    assert retry_after(email.utils.formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert [retry_after(value) for value in (None, "soon", "-3", "Thu, 01 Jan 1970 00:00:00 GMT")] == [0, 0, 0, 0]
    # Longer than any run, or than a lock can wait for.
    assert [retry_after(value) for value in ("inf", "1e300", "Fri, 31 Dec 9999 23:59:59 GMT")] == [3600] * 3


def test_back_off_doubles_up_to_a_bound():
    for attempt in range(5):
        assert all(2**attempt / 2 <= back_off(attempt) <= 2**attempt for _ in range(20))
    assert 30 <= back_off(50) <= 60
    assert len({back_off(0) for _ in range(5)}) > 1


@pytest.mark.parametrize(
    ("fate", "match"),
    [
        ({"status": 400, "content": "the context is too long"}, "400: the context is too long"),
        ({"status": 404}, "404"),
        ({"content": '{"choices": []}'}, "not a chat completion"),
        ({"content": "[1]"}, "not a chat completion"),
        ({"choice": {"finish_reason": "content_filter"}}, "content_filter"),
    ],
    ids=str,
)
def test_what_does_not_pass_is_not_repeated(fate, match):
    with ChatDouble(lambda number, body: fate) as double, pytest.raises(RequestFailedError, match=match):
        client(double, []).complete(MESSAGES)
    assert len(double.bodies) == 1


def test_no_more_attempts_after_the_run_has_ended():
    with ChatDouble(lambda number, body: {"status": 500}) as double:
        server = ChatServer(double.url, "m", timeout=5.0, max_retries=9, wait=lambda seconds: True)
        with pytest.raises(RequestFailedError, match="1 attempts"):
            server.complete(MESSAGES)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_that_is_separated_is_refused(field):
    message = {"message": {"content": "4", field: "2 + 2"}}
    with ChatDouble(lambda number, body: {"choice": message}) as double, pytest.raises(ValueError, match="reasoning"):
        client(double, []).complete(MESSAGES)


def test_cut_answers_say_so(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    fate = {
        "choice": {"finish_reason": "length", "message": {"content": None}},
        "fields": {"usage": {"prompt_tokens": 9}},
    }
    with ChatDouble(lambda number, body: fate) as double:
        completion = client(double, []).complete(MESSAGES)
    assert (completion.text, completion.finish_reason, completion.prompt_tokens) == ("", "length", 9)
    assert double.bodies[0]["authorization"] == "Bearer a-key"
