"""Errors of the Hub in one line with a way out, and another attempt after those that may pass."""

import json
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


logger = logging.getLogger(__name__)
Result = TypeVar("Result")
# The base class of all errors of the HTTP library under huggingface_hub, whichever that is.
HTTPError: type[Exception] = HfHubHTTPError.__mro__[1]
HUB_ERRORS = (HTTPError, OfflineModeIsEnabled, LocalTokenNotFoundError, HFValidationError)
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt

GARBLED = (KeyError, TypeError, AttributeError)  # raised by huggingface_hub for an answer in an unexpected form
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_BY_STATUS = {
    401: f"the Hub does not accept the token: {_LOGIN} to a valid one",
    403: "the token may not do this: you and the token need write access to `{repo_id}`",
    404: "`{repo_id}` does not exist, or the token may not see it: check the name",
    409: "`{repo_id}` is in use for something else: {detail}; choose another name",
    412: "`{repo_id}` was changed by somebody else meanwhile; look at the change, then run the command again",
    413: "a file is too large for the Hub: {detail}",
    429: "the Hub asks for fewer requests; wait some minutes, then run the command again",
}


def explain(error: Exception, repo_id: str) -> str:
    """One line for an error of `huggingface_hub`, with what to do about it."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, which forbids access to the Hub; unset it"
    if isinstance(error, LocalTokenNotFoundError):
        return f"you are not logged in to the Hub: {_LOGIN}"
    if isinstance(error, HFValidationError):
        return f"`{repo_id}` is not the name of a repository (`owner/name`): {_first_line(error)}"
    if isinstance(error, RevisionNotFoundError):
        return f"`{repo_id}` has no such revision: pass a branch, a tag or the full id of a commit (40 digits)"
    if isinstance(error, GatedRepoError):
        return f"`{repo_id}` is gated: ask for access on its page, then {_LOGIN}"
    if isinstance(error, RepositoryNotFoundError):
        return _BY_STATUS[404].format(repo_id=repo_id) + (
            f"; if it is private, {_LOGIN}" if _status(error) == 401 else ""
        )
    status = _status(error)
    if status is None:
        return (
            f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {_first_line(error)}); check the network"
        )
    if status >= 500:
        return f"the Hub has a problem of its own (HTTP {status}); run the command again later"
    return _BY_STATUS.get(status, "the Hub refused (HTTP {status}): {detail}").format(
        repo_id=repo_id, status=status, detail=_first_line(getattr(error, "server_message", None) or error)
    )


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a little later: no answer, too many requests, or an error of the server."""
    status = _status(error)
    return status in _TRANSIENT if status is not None else isinstance(error, (HTTPError, json.JSONDecodeError))


def patiently(call: Callable[[], Result]) -> Result:
    """Call an idempotent function, and again after each transient error, up to `len(WAITS)` more times."""
    for wait in WAITS:
        try:
            return call()
        except GARBLED as error:
            raise garbled(error) from error
        except (HTTPError, json.JSONDecodeError) as error:
            if not is_transient(error):
                raise
            announce(error, wait)
        time.sleep(wait)
    try:
        return call()
    except (*GARBLED, json.JSONDecodeError) as error:
        raise garbled(error) from error


def garbled(error: Exception) -> ValueError:
    """The error for an answer that did not come from the Hub."""
    return ValueError(
        f"{constants.ENDPOINT} answers, but not as the Hub does ({type(error).__name__}: {_first_line(error)}); check "
        "HF_ENDPOINT, and whether a proxy or a login page is in between"
    )


def announce(error: Exception, wait: float) -> None:
    """Log that there will be another attempt."""
    status = _status(error)
    logger.warning(f"{f'HTTP {status}' if status else _first_line(error)}: trying again in {wait:.0f} s")


def _status(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else response.status_code


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


__all__ = [
    "GARBLED",
    "HUB_ERRORS",
    "WAITS",
    "HTTPError",
    "announce",
    "explain",
    "garbled",
    "is_transient",
    "patiently",
]
