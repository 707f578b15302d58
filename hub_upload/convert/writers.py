"""The formats that a conversion writes: `config.json` and tensors, from a drafter's checkpoint.

A config inverts the reader's table (`modeling_dspark/formats/table.py`) and adds what the format requires. A field that a
format cannot represent is an error; a field that its readers ignore is noted.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from hub_upload.convert.sources import Checkpoint, Target
from hub_upload.convert.streaming import Piece, small_piece, stored_piece
from modeling_dspark import DSparkConfig
from modeling_dspark.formats.table import DEEPSPEC_ROWS, HEAD_FIELDS, LAYER_FIELDS, OWN_FIELDS, SPECULATORS, Format
from modeling_dspark.formats.translate import scales


SPECULATORS_VERSION = "0.9.0"  # the release that the tests read our files with
_QWEN3 = {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False}
_ELSEWHERE = {"block_size", "sample_from_anchor", "target_layer_ids", "tie_word_embeddings"}


@dataclass(frozen=True)
class Draft:
    """What to write: `config.json`, the tensors, and notes for the user."""

    config: Mapping[str, Any]
    pieces: list[Piece]
    notes: list[str] = field(default_factory=list)


def to_dspark(checkpoint: Checkpoint, _target: Target | None) -> Draft:
    """This project's format: the drafter's tensors alone."""
    config = json.loads(checkpoint.config.to_json_string())
    config.pop("auto_map", None)  # `package` adds that of its own code
    return Draft(config | {"architectures": ["DSparkModel"]}, _own_pieces(checkpoint))


def to_deepspec(checkpoint: Checkpoint, target: Target | None) -> Draft:
    """DeepSpec's format, which vLLM and SGLang load: a flat config, and copies of the target's matrices."""
    config, ids = checkpoint.config, checkpoint.draft_token_ids()
    kind = next((kind for kind in DEEPSPEC_ROWS if not _not_represented(config, kind)), DEEPSPEC_ROWS[-1])
    problems = _not_represented(config, kind)
    if kind.fixed and target is None:
        problems.append("it needs the target's `final_logit_softcapping`; give the target with `--target`")
    if not config.sample_from_anchor:
        problems.append(
            "the older layout (`sample_from_anchor=False`), since the anchor's position always drafts in it"
        )
    if config.num_target_layers is None:
        problems.append("`num_target_layers` is not known; give the target with `--target`")
    if ids is not None and target is None:
        problems.append("it needs the LM head's rows of a reduced draft vocabulary; give the target with `--target`")
    _refuse("DeepSpec", problems)
    raw = _inverse(kind, config) | _layers(config) | {"architectures": list(kind.architectures), "num_anchors": 512}
    raw |= _gemma4(config, target) if kind.fixed else _QWEN3
    pieces = _own_pieces(checkpoint)
    if target is not None:
        pieces += [stored_piece("embed_tokens.weight", target.embedding), _head(target, ids)]
    return Draft(raw, pieces, _deepspec_notes(config, with_copies=target is not None))


def to_speculators(checkpoint: Checkpoint, target: Target | None) -> Draft:
    """speculators' format: nested config; with a reduced vocabulary also the LM head's rows, `d2t` and `t2d`."""
    config, ids = checkpoint.config, checkpoint.draft_token_ids()
    problems = _not_represented(config, SPECULATORS)
    if config.target_name_or_path is None and target is None:
        problems.append("it needs the name of the target; give it with `--target`")
    if ids is not None and target is None:
        problems.append("it needs the LM head's rows of a reduced draft vocabulary; give the target with `--target`")
    if ids is not None and not torch.equal(ids, ids.sort().values):
        problems.append("the tokens of the draft vocabulary are not in ascending order, as `t2d` has them")
    if target is not None and scales(target.architectures):
        problems.append(
            "the target scales its embedding or its logits, and speculators' drafters read both as they are stored"
        )
    _refuse("speculators", problems)
    raw = _inverse(SPECULATORS, config)
    raw["transformer_layer_config"] |= _layers(config) | _QWEN3
    raw["draft_vocab_size"] = config.draft_vocab_size or config.vocab_size
    raw |= {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION,
        "transformers_version": transformers.__version__,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": raw["transformer_layer_config"]["dtype"],
        "speculators_config": _speculators_config(config, target),
    }
    pieces = _own_pieces(checkpoint)
    if ids is not None and target is not None:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        pieces += [_head(target, ids), small_piece("t2d", t2d)]
    return Draft(raw, pieces, _general_notes(config, "speculators and vLLM make no use of them"))


Writer = Callable[[Checkpoint, Target | None], Draft]
WRITERS: Mapping[str, Writer] = {"dspark": to_dspark, "deepspec": to_deepspec, "speculators": to_speculators}


def _refuse(name: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"This drafter cannot be written in {name}'s format: {'; '.join(problems)}.")


def _not_represented(config: DSparkConfig, kind: Format) -> list[str]:
    """Our fields that a format cannot represent and whose values differ from those it implies."""
    held = {*LAYER_FIELDS, *HEAD_FIELDS, *OWN_FIELDS, *_ELSEWHERE}
    granted = DSparkConfig().to_dict() | dict(kind.fixed)
    names = [name for name in DSparkConfig.__annotations__ if name not in held]
    return [
        f"there is no place for `{name}={getattr(config, name)!r}`"
        for name in names
        if getattr(config, name) != granted[name]
    ]


def _inverse(kind: Format, config: DSparkConfig) -> dict[str, Any]:
    """A config that the reader's table turns back into ours."""
    ids: list[int] = config.target_layer_ids  # type: ignore[assignment]  # filled in by the config
    raw: dict[str, Any] = {}
    for name in (*LAYER_FIELDS, *HEAD_FIELDS, *OWN_FIELDS):
        _put(raw, kind, name, getattr(config, name))
    _put(raw, kind, "target_layer_ids", [layer_id - kind.layer_shift for layer_id in ids])
    _put(raw, kind, "block_size", config.num_block_positions)
    return raw


def _put(raw: dict[str, Any], kind: Format, name: str, value: Any) -> None:
    *folders, last = kind.place(name).split(".")
    for folder in folders:
        raw = raw.setdefault(folder, {})
    raw[last] = value


def _layers(config: DSparkConfig) -> dict[str, Any]:
    """Further fields of a Transformers config, from which the other readers build their layers."""
    rope = config.rope_parameters or {}
    return {
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_theta": rope.get("rope_theta"),
        "use_cache": True,
        "tie_word_embeddings": False,
        "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch."),
    }


def _gemma4(config: DSparkConfig, target: Target | None) -> dict[str, Any]:
    """Further fields of a Gemma 4 config: equal layers, and the soft cap of the target's logits."""
    heads = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    absent = {"enable_moe_block": False, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
    return {
        **heads,
        **absent,
        "model_type": "gemma4_text",
        "attention_k_eq_v": config.attention_k_eq_v,
        "num_global_key_value_heads": config.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": None if target is None else target.softcap,
    }


def _speculators_config(config: DSparkConfig, target: Target | None) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    method |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {
            "name_or_path": config.target_name_or_path or (None if target is None else target.name),
            "architectures": [] if target is None else target.architectures,
        },
    }


def _own_pieces(checkpoint: Checkpoint) -> list[Piece]:
    return [stored_piece(name, tensor) for name, tensor in checkpoint.tensors.items()]


def _head(target: Target, ids: torch.Tensor | None) -> Piece:
    return stored_piece("lm_head.weight", target.head, None if ids is None else ids.tolist())


def _general_notes(config: DSparkConfig, who: str) -> list[str]:
    if config.confidence_temperatures is None:
        return []
    return [f"The confidence temperatures are in config.json and calibration.json; {who}."]


def _deepspec_notes(config: DSparkConfig, *, with_copies: bool) -> list[str]:
    notes = _general_notes(config, "SGLang reads the latter, DeepSpec and vLLM neither")
    if not with_copies:
        notes.append(
            "Without `--target` the target's embedding and LM head are not in it: vLLM and SGLang take them from the "
            "target, and DeepSpec itself does not load the drafter."
        )
    if config.markov_rank == 0:
        notes.append(
            "`markov_rank` is 0 (plain DFlash): DeepSpec reads it, vLLM may (docs/guides/serve_elsewhere.md), SGLang does not."
        )
    elif config.markov_head_type != "vanilla":
        notes.append(f"The sequential head is `{config.markov_head_type}`: vLLM reads only `vanilla`.")
    if not config.enable_confidence_head:
        notes.append(
            "There is no confidence head: SGLang serves it in `static` mode only; vLLM verifies whole blocks or estimates "
            "acceptance itself."
        )
    elif not config.confidence_head_with_markov:
        notes.append("The confidence head reads no Markov embedding: SGLang before 0.5.23 may refuse it.")
    if config.draft_vocab_size is not None:
        notes.append("The draft vocabulary is reduced: vLLM reads that, DeepSpec and SGLang do not.")
    return notes


__all__ = ["WRITERS", "Draft"]
