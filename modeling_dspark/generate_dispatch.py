"""How `target.generate(assistant_model=drafter)` reaches the code of a DSpark drafter.

Transformers picks candidate generators in a closed chain, so loading a drafter installs, once, a thin dispatcher around
four functions of its generation code. It acts only for assistants whose `config.model_type` is `"dspark"`, leaves every
decision to the code that came with that drafter, and passes all other calls through unchanged. `remove_dispatcher`
takes it out again.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import transformers
from transformers import GenerationMixin
from transformers.generation import utils as generation_utils


SUPPORTED_TRANSFORMERS = "5.17 to 5.24"
_MARK = "_dspark_original"
_active_run: ContextVar[Any] = ContextVar("dspark_active_run", default=None)


def install_dispatcher() -> None:
    """Install the dispatcher unless it is there already (from this or another copy of the code).

    Raises:
        RuntimeError: if the installed Transformers has other signatures than the supported versions.
    """
    for owner, name, wrap, parameters in _PATCHES:
        original: Any = getattr(owner, name, None)
        if hasattr(original, _MARK):
            continue
        actual = [] if original is None else list(inspect.signature(original).parameters)
        if not set(parameters) <= set(actual):
            raise RuntimeError(
                f"This DSpark code supports Transformers {SUPPORTED_TRANSFORMERS}; version {transformers.__version__} "
                f"has another `{name}` (parameters {actual}). Install a supported version."
            )
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _MARK, original)
        setattr(owner, name, wrapper)


def remove_dispatcher() -> None:
    """Restore Transformers' own functions; loading a drafter installs the dispatcher again."""
    for owner, name, _, _ in _PATCHES:
        original = getattr(getattr(owner, name), _MARK, None)
        if original is not None:
            setattr(owner, name, original)


def _is_dspark(model: Any) -> bool:
    # Not `isinstance`: remote code may have loaded another copy of the class.
    return getattr(getattr(model, "config", None), "model_type", None) == "dspark"


def _wrap_validation(original: Callable) -> Callable:
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> Any:
        assistant = generation_mode_kwargs.get("assistant_model")
        if _is_dspark(assistant):
            assistant.check_call(self, generation_mode, generation_config)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_decoding(original: Callable) -> Callable:
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        def assisted(run: Any, kwargs: dict[str, Any]) -> Any:
            """Transformers' own loop with `run`; `None` shields a plain assistant that is called inside ours."""
            token = _active_run.set(run)
            try:
                return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
            finally:
                _active_run.reset(token)

        if not _is_dspark(assistant_model):
            return assisted(None, kwargs)
        bound = inspect.signature(original).bind_partial(self, input_ids, *args, **kwargs).arguments
        return assistant_model.serve(self, input_ids, bound, kwargs, assisted)

    return _assisted_decoding


def _wrap_candidates(original: Callable) -> Callable:
    def _get_candidate_generator(self: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        run = _active_run.get()
        if run is not None and _is_dspark(assistant_model):
            return run.candidate_generator
        return original(self, *args, assistant_model=assistant_model, **kwargs)

    return _get_candidate_generator


def _wrap_sampling(original: Callable) -> Callable:
    # Transformers' version accepts on `<=` and divides by a residual mass that may be zero.
    def _speculative_sampling(
        candidate_input_ids: Any,
        candidate_logits: Any,
        candidate_length: Any,
        new_logits: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        run = _active_run.get()
        if run is None:
            return original(candidate_input_ids, candidate_logits, candidate_length, new_logits, *args, **kwargs)
        return run.accept(candidate_input_ids, candidate_logits, new_logits)

    return _speculative_sampling


_PATCHES: list[tuple[Any, str, Callable[[Callable], Callable], tuple[str, ...]]] = [
    (
        GenerationMixin,
        "_validate_generation_mode",
        _wrap_validation,
        ("generation_mode", "generation_config", "generation_mode_kwargs"),
    ),
    (
        GenerationMixin,
        "_assisted_decoding",
        _wrap_decoding,
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "assistant_model"),
    ),
    (
        GenerationMixin,
        "_get_candidate_generator",
        _wrap_candidates,
        ("generation_config", "input_ids", "logits_processor", "model_kwargs", "assistant_model"),
    ),
    (
        generation_utils,
        "_speculative_sampling",
        _wrap_sampling,
        ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits"),
    ),
]

__all__ = ["install_dispatcher", "remove_dispatcher"]
