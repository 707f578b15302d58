"""Builders of tiny random models: one target a family, and a drafter that fits any of them."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_dspark import DSparkConfig, DSparkModel, fused_build
from modeling_dspark.configuration_dspark import GEMMA4_TRAITS
from modeling_dspark.draft_propose import draft_tokens, encode_block, score_block
from modeling_dspark.draft_tokens import DraftSampling
from modeling_dspark.target_binding import tapped_features
from training.run.initialization import set_draft_vocabulary


VOCAB = 61
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA4 = _COMMON | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 4.0,
    "use_bidirectional_attention": "vision",
}
# A drafter whose layers are like Gemma 4's full-attention layers, as DeepSpec makes them.
GEMMA4_DRAFTER = GEMMA4_TRAITS | {
    "attention_k_eq_v": True,
    "hidden_act": "gelu_pytorch_tanh",
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
FAMILIES = {
    "llama": ("llama", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON),
    "qwen3_moe": ("qwen3_moe", _COMMON | _MOE),
    "mistral": ("mistral", _COMMON | {"sliding_window": 6}),
    "gemma3": ("gemma3_text", _COMMON | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma2": ("gemma2", _COMMON | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "text_config": _GEMMA4 | {"model_type": "gemma4_unified_text", "tie_word_embeddings": False},
            "vision_config": None,
            "audio_config": None,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("phi3", _COMMON),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
HYBRIDS = {
    "qwen3_next": (
        "qwen3_next",
        _COMMON
        | _MOE
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 1.0,
        },
    ),
    "lfm2": (
        "lfm2",
        {k: v for k, v in _COMMON.items() if k != "head_dim"}
        | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_multiple_of": 8},
    ),
}


def tiny_target(family: str, seed: int = 0, **overrides):
    """A random target of a family, with weights large enough that its greedy text varies."""
    model_type, fields = (FAMILIES | HYBRIDS)[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(fields | overrides))
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.6 if "embed" in name or "wte" in name or "lm_head" in name else 0.25)
        _draw_layer_scalars(target)
    target.generation_config.pad_token_id = 0
    return target


def tiny_drafter(target, seed: int = 1, *, draft_token_ids=None, **fields) -> DSparkModel:
    """A random drafter that fits `target`; every tensor is random, so no branch is silently zero."""
    text = target.config.get_text_config()
    config = DSparkConfig(
        **(
            {
                "vocab_size": text.vocab_size,
                "hidden_size": text.hidden_size,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "block_size": 4,
                "target_layer_ids": [0, 1, 2],
                "num_target_layers": text.num_hidden_layers,
                "mask_token_id": 3,
                "markov_rank": 8,
                "draft_vocab_size": None if draft_token_ids is None else len(draft_token_ids),
                "pad_token_id": text.pad_token_id,
                "bos_token_id": text.bos_token_id,
                "eos_token_id": text.eos_token_id,
                "max_position_embeddings": 256,
            }
            | fields
        )
    )
    torch.manual_seed(seed)
    drafter = DSparkModel(config).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.normal_(1.0, 0.1)
        _draw_layer_scalars(drafter)
    if draft_token_ids is not None:
        set_draft_vocabulary(drafter, torch.tensor(draft_token_ids))
    return drafter


def _draw_layer_scalars(model) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 0.9)


def script(drafter: DSparkModel, reference: list[int], wrong_every: int = 3) -> DSparkModel:
    """Make a batch-1 drafter propose `reference` (the text without padding), every `wrong_every`-th draft spoilt.

    Random drafts are almost always rejected; a scripted drafter exercises long accepted blocks.
    """
    real_forward, real_step = drafter.forward, drafter.head_step
    state = {"index": 0, "calls": 0}

    def forward(*args, cache=None, context_lengths=None, **kwargs):
        state["index"] = cache.lengths[0] + context_lengths[0] + 1  # of the token that position 0 predicts
        return real_forward(*args, cache=cache, context_lengths=context_lengths, **kwargs)

    def head_step(*args, **kwargs):
        step = real_step(*args, **kwargs)
        token = reference[state["index"]] if state["index"] < len(reference) else 5
        state["index"] += 1
        state["calls"] += 1
        if state["calls"] % wrong_every == 0:
            token = (token + 1) % VOCAB
        boost = torch.zeros_like(step.logits)
        boost[..., token] = 100.0
        return step._replace(logits=step.logits + boost)

    drafter.forward, drafter.head_step = forward, head_step
    return drafter


# Where a batch can go wrong that one text cannot: sliding and full layers together, attention sinks, partial rotary.
FAMILIES |= {
    "gemma3_mixed": (
        "gemma3_text",
        _COMMON
        | {
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        _COMMON
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmo2": ("olmo2", {name: value for name, value in _COMMON.items() if name != "head_dim"}),
    "glm4": ("glm4", _COMMON),
}


def varied_target(family: str, seed: int = 0, **overrides):
    """A random target whose text varies and shows what attention does.

    Embeddings that are scaled up would drown what attention adds; soft caps and attention sinks are of the scores' size.
    """
    if family == "gemma2":
        overrides = {"attn_logit_softcapping": 1.5} | overrides
    target = tiny_target(family, seed, **overrides)
    with torch.no_grad():
        if family.startswith("gemma"):
            target.get_input_embeddings().weight.mul_(0.07)
        for name, parameter in target.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
    return target


def script_rows(
    drafter: DSparkModel, target, references, *, wrong_every: int = 3, confidence_logit: float | None = None
):
    """Make a drafter propose the texts `references` (prompts without padding included) in a batch of any order.

    The text that a row is in is found by the place and token of its anchor and by the features before it. The draft of
    every place that is a multiple of `wrong_every` is spoilt. `confidence_logit` replaces the confidence head's logits.
    """
    real_forward, real_step = drafter.forward, drafter.head_step
    with torch.no_grad():
        states = [target(torch.tensor([text]), output_hidden_states=True).hidden_states for text in references]
    features = [tapped_features(item, drafter.config.target_layer_ids)[0] for item in states]
    ids = drafter.draft_token_ids
    columns = {token: column for column, token in enumerate(range(VOCAB) if ids is None else ids.tolist())}
    state = {}

    def text_of(place, token, before):
        fitting = [index for index, text in enumerate(references) if text[place : place + 1] == [token]]
        return (
            references[min(fitting, key=lambda index: (features[index][place - 1] - before).norm())] if fitting else []
        )

    def forward(*args, context_hidden_states, cache=None, context_lengths=None, **kwargs):
        lasts = [row[length - 1] for row, length in zip(context_hidden_states, context_lengths, strict=True)]
        places = [length + new for length, new in zip(cache.lengths, context_lengths, strict=False)]
        state.update(lasts=lasts, places=places, texts=None)  # of the anchors
        kwargs |= {"context_hidden_states": context_hidden_states, "context_lengths": context_lengths, "cache": cache}
        return real_forward(*args, **kwargs)

    def head_step(hidden, base_logits, previous_tokens, head_state=None):
        step = real_step(hidden, base_logits, previous_tokens, head_state)
        if state["texts"] is None:
            state["texts"] = list(map(text_of, state["places"], previous_tokens.tolist(), state["lasts"]))
        state["places"] = [place + 1 for place in state["places"]]
        boost = torch.zeros_like(step.logits)
        for row, (place, text) in enumerate(zip(state["places"], state["texts"], strict=True)):
            token = text[place] if place < len(text) else 5
            token = (token + 1) % VOCAB if place % wrong_every == 0 else token
            if token in columns:
                boost[row, columns[token]] = 100.0
        step = step._replace(logits=step.logits + boost)
        if confidence_logit is not None and step.confidence_logits is not None:
            step = step._replace(confidence_logits=torch.full_like(step.confidence_logits, confidence_logit))
        return step

    drafter.forward, drafter.head_step = forward, head_step
    return drafter


def propose_with_block(binding, features, *, anchor_tokens, cache, num_tokens=None, sampling=None, **lengths):
    """`propose`, and the block of hidden states and base logits that its tokens were chosen from."""
    with torch.no_grad():
        hidden = encode_block(binding, features, anchor_tokens=anchor_tokens, cache=cache, **lengths)
        block = score_block(binding, hidden, anchor_tokens, num_tokens)
        return block, draft_tokens(binding, block, sampling or DraftSampling())


def cache_with_kernels(folder: Path) -> Path:
    """A cache folder of a test's own, but for what has been compiled, which takes seconds."""
    folder.mkdir(exist_ok=True)
    if not (folder / "kernels").exists():
        (folder / "kernels").symlink_to(fused_build._writable_folder())
    return folder
