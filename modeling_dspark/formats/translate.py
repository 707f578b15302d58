"""A config of another format as this project's: fields, ids of tapped layers, layout of positions; what cannot be represented.

What a config leaves out is taken from the shapes of the tensors. Nothing is read from files here.
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
    """What the tensors say of fields that a config need not have; that they agree with those is seen from their shapes."""
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
    """What a config asks for that cannot be represented, each said in a phrase."""
    problems = [
        f"`{place}={value!r}` (supported: {', '.join(map(repr, allowed))})"
        for place, allowed in kind.neutral.items()
        if (value := look_up(raw, place)) is not None and value not in allowed
    ]
    layers = look_up(raw, kind.layers) if kind.layers else raw
    types = sorted(set(layers.get("layer_types") or ["full_attention"]))
    if types != ["full_attention"]:
        problems.append(f"`layer_types` are {types}, and only `full_attention` is supported")
    if raw.get("quantization_config"):
        problems.append("the weights are quantised (`quantization_config`)")
    named = raw.get("architectures") or []
    if kind.architectures and named and not set(named) & set(kind.architectures):
        problems.append(f"`architectures` are {named} (supported: {list(kind.architectures)})")
    if unknown := sorted((look_up(raw, kind.heads) or {}).keys() - set(kind.known)) if kind.known else []:
        problems.append(f"`{kind.heads}` has fields that are not known here: {unknown}")
    return problems + _unsupported_targets(raw, layers) + _contradictory_positions(kind, raw)


def _contradictory_positions(kind: Format, raw: Mapping[str, Any]) -> list[str]:
    """A block that is said to draft as many tokens as it has positions, in the layout whose anchor drafts none.

    Read in the wrong layout, each draft is one position off: no error, and few drafts are kept.
    """
    positions = kind.read(raw, "block_size")
    methods = look_up(raw, "speculators_config.proposal_methods") or ()
    if _anchor_drafts(kind, raw) or positions not in [look_up(method, "speculative_tokens") for method in methods]:
        return []
    return [
        f"`speculative_tokens` is {positions}, as is `block_size`, and without `{kind.anchor_position}=true` one position of these drafts "
        "none; write into its config.json which of the two layouts it was trained in"
    ]


def _unsupported_targets(raw: Mapping[str, Any], layers: Mapping[str, Any]) -> list[str]:
    size = raw.get("target_hidden_size")
    problems = []
    if size is not None and size != layers.get("hidden_size"):
        problems.append(f"`target_hidden_size` is {size}, and the drafter's `hidden_size` {layers.get('hidden_size')}")
    verifiers = look_up(raw, "speculators_config.verifier.architectures") or []
    if scales(verifiers):
        problems.append(
            f"the verifier is {verifiers}: speculators trains on its embedding and LM head as they are stored, without the "
            "scales and the soft cap that the target applies"
        )
    return problems


def scales(architectures: Iterable[Any]) -> bool:
    """Whether a target with one of these names does more with its embedding or its LM head than multiply by it."""
    return any(family in str(name).lower() for family in _SCALED for name in architectures)


__all__ = ["scales", "to_config_fields", "unsupported"]
