"""Translate a config of another format: fields, ids of tapped layers, layout of positions; list what is unsupported.

Fields that a config leaves out follow from the shapes of the tensors. No file is read here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .table import HEAD_FIELDS, LAYER_FIELDS, OWN_FIELDS, Format, look_up
from .tensors import StoredTensor


# Families that scale their embedding or their logits, or soft-cap these, as the names of their architectures have them.
_SCALED = ("cohere", "falconh1", "gemma", "granite", "hyperclovax", "minicpm3", "nanochat")


def to_config_fields(kind: Format, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The fields of our config that a config of another format has or implies."""
    names = (*LAYER_FIELDS, *HEAD_FIELDS, *OWN_FIELDS, "target_layer_ids", "block_size", "dtype", "torch_dtype")
    fields = {name: value for name in names if (value := kind.read(raw, name)) is not None}
    fields |= {name: value for name, value in _implied(kind, tensors).items() if name not in fields}
    if "rope_theta" not in (fields.get("rope_parameters") or {}):
        old = {name: look_up(raw, f"{kind.layers}.{name}".lstrip(".")) for name in ("rope_theta", "rope_scaling")}
        fields |= {name: value for name, value in old.items() if value is not None}
    fields |= kind.fixed
    fields["target_layer_ids"] = [layer_id + kind.layer_shift for layer_id in fields["target_layer_ids"]]
    anchor, positions = _anchor_drafts(kind, raw), fields["block_size"]
    if not isinstance(positions, int):
        raise TypeError(f"`block_size` is {positions!r}")
    fields |= {"sample_from_anchor": anchor, "block_size": positions - (not anchor)}
    fields.setdefault("num_target_layers", None)
    if fields.get("draft_vocab_size") == fields["vocab_size"] and "d2t" not in tensors:
        del fields["draft_vocab_size"]
    if not fields["markov_rank"]:
        fields |= {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    return fields


def _anchor_drafts(kind: Format, raw: Mapping[str, Any]) -> bool:
    return kind.anchor_position if isinstance(kind.anchor_position, bool) else bool(look_up(raw, kind.anchor_position))


def _implied(kind: Format, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Optional fields as the tensors imply them; where the config has them too, `load` compares the shapes."""
    shapes = {kind.rename(name): tensor.shape for name, tensor in tensors.items()}
    *_, rank = shapes.get("markov_head.markov_w1.weight", (0,))
    *_, head_dim = shapes.get("layers.0.self_attn.q_norm.weight", (None,))
    gated, rnn = (f"markov_head.{name}.weight" in shapes for name in ("gate_proj", "joint_proj"))
    *_, reads = shapes.get("confidence_head.proj.weight", (0,))
    implied = {
        "markov_rank": rank,
        "markov_head_type": "rnn" if rnn else "gated" if gated else "vanilla",
        "enable_confidence_head": reads > 0,
        "confidence_head_with_markov": rank > 0 and reads not in (0, *shapes.get("hidden_norm.weight", ())),
        "head_dim": head_dim,
    }
    return {name: value for name, value in implied.items() if value is not None}


def unsupported(kind: Format, raw: Mapping[str, Any]) -> list[str]:
    """Unsupported settings of a config, a phrase each."""
    problems = [
        f"`{place}={value!r}` (supported: {', '.join(map(repr, allowed))})"
        for place, allowed in kind.neutral.items()
        if (value := look_up(raw, place)) is not None and value not in allowed
    ]
    layers = look_up(raw, kind.layers) if kind.layers else raw
    types = sorted(set(layers.get("layer_types") or ["full_attention"]))
    if types != ["full_attention"]:
        problems.append(f"`layer_types` are {types}; only `full_attention` is supported")
    if raw.get("quantization_config"):
        problems.append("the weights are quantized (`quantization_config`)")
    named = raw.get("architectures") or []
    if kind.architectures and named and not set(named) & set(kind.architectures):
        problems.append(f"`architectures` are {named} (supported: {list(kind.architectures)})")
    if unknown := sorted((look_up(raw, kind.heads) or {}).keys() - set(kind.known)) if kind.known else []:
        problems.append(f"`{kind.heads}` has unknown fields: {unknown}")
    return problems + _unsupported_targets(raw, layers) + _contradictory_positions(kind, raw)


def _contradictory_positions(kind: Format, raw: Mapping[str, Any]) -> list[str]:
    """A block said to draft as many tokens as it has positions, in the layout whose anchor does not draft.

    In the wrong layout each draft is one position off, without an error: few drafts are accepted.
    """
    positions = kind.read(raw, "block_size")
    methods = look_up(raw, "speculators_config.proposal_methods") or ()
    if _anchor_drafts(kind, raw) or positions not in [look_up(method, "speculative_tokens") for method in methods]:
        return []
    return [
        f"`speculative_tokens` and `block_size` are both {positions}, but without `{kind.anchor_position}=true` one of these "
        f"positions does not draft; set `{kind.anchor_position}` in its config.json as it was trained"
    ]


def _unsupported_targets(raw: Mapping[str, Any], layers: Mapping[str, Any]) -> list[str]:
    size = raw.get("target_hidden_size")
    problems = []
    if size is not None and size != layers.get("hidden_size"):
        problems.append(
            f"`target_hidden_size` is {size}, but the drafter's `hidden_size` is {layers.get('hidden_size')}"
        )
    verifiers = look_up(raw, "speculators_config.verifier.architectures") or []
    if scales(verifiers):
        problems.append(
            f"the verifier is {verifiers}: speculators trains on its embedding and LM head as stored, without the scales and "
            "the soft cap that the target applies"
        )
    return problems


def scales(architectures: Iterable[Any]) -> bool:
    """Whether a target with one of these names scales or soft-caps its embedding or logits."""
    return any(family in str(name).lower() for family in _SCALED for name in architectures)


__all__ = ["scales", "to_config_fields", "unsupported"]
