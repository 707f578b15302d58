"""Gemma 4 with a drafter like its own layers: fp32 greedy output equals plain `generate`, in both loops, one text or several."""

import pytest
import torch
from transformers import DynamicCache

from modeling_dspark import generate_mixin
from modeling_dspark.compat_transformers import cache_keyword
from modeling_dspark.generate_call import AssistedCall, why_not_packed
from tests.builders import GEMMA4_DRAFTER, script, script_rows, tiny_drafter, varied_target


PROMPTS = [[7, 11, 13, 17, 19], [23, 29], [31, 37, 41, 43, 47, 53, 59, 5, 6, 8]]
CALL = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
FIXED = {"num_assistant_tokens_schedule": "fixed"}


@pytest.fixture(scope="module", params=["gemma4", "gemma4_unified"])
def target(request):
    return varied_target(request.param)


@pytest.fixture(scope="module")
def texts(target):
    """Plain texts, prompts included; together they vary, so that wrong attention cannot go unseen."""
    texts = [target.generate(torch.tensor([prompt]), **CALL)[0].tolist() for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    return texts


def drafter_of(target, **fields):
    return tiny_drafter(target, **(GEMMA4_DRAFTER | fields))


@pytest.fixture
def loops(monkeypatch):
    """Names of the loops that ran."""
    ran, packed, own = [], generate_mixin.decode, generate_mixin.AssistedRun
    monkeypatch.setattr(
        generate_mixin, "decode", lambda *args, **kwargs: (ran.append("packed"), packed(*args, **kwargs))[1]
    )
    monkeypatch.setattr(
        generate_mixin, "AssistedRun", lambda *args, **kwargs: (ran.append("own"), own(*args, **kwargs))[1]
    )
    return ran


@pytest.mark.parametrize("wrong_every", [2, 1000])
@pytest.mark.parametrize("loop", ["packed", "own"])
def test_one_text(target, texts, loops, loop, wrong_every):
    cache = {cache_keyword(): DynamicCache(config=target.config.get_text_config())} if loop == "own" else {}
    for prompt, text in zip(PROMPTS, texts, strict=True):
        drafter = script(drafter_of(target), text, wrong_every)
        output = target.generate(torch.tensor([prompt]), assistant_model=drafter, **CALL, **FIXED, **cache)
        assert output[0].tolist() == text
        assert sum(drafter.last_run.accepted) >= (16 if wrong_every == 1000 else 6)
        cache = {name: DynamicCache(config=target.config.get_text_config()) for name in cache}
    assert loops == [loop] * 3


@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
@pytest.mark.parametrize("fields", [{}, {"draft_token_ids": list(range(4, 61, 2))}], ids=["whole", "reduced"])
def test_several_texts(target, texts, loops, schedule, fields):
    drafter = drafter_of(target, **fields)
    script_rows(drafter, target, texts, wrong_every=5, confidence_logit=3.0)
    width = max(map(len, PROMPTS))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    settings = CALL | {"num_assistant_tokens_schedule": schedule}
    output = target.generate(rows, attention_mask=mask, assistant_model=drafter, **settings)
    new = [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert output[:, width:].tolist() == new
    assert sum(drafter.last_run.accepted) > 10
    assert loops == ["packed"]


def test_random_drafts(target, texts, loops):
    """Drafts that nobody planted, of both kinds of values."""
    for fields in ({}, {"attention_k_eq_v": False, "num_key_value_heads": 2}):
        drafter = drafter_of(target, **fields)
        output = target.generate(torch.tensor(PROMPTS[:1]), assistant_model=drafter, **CALL, **FIXED)
        assert output[0].tolist() == texts[0]
        assert drafter.last_run.rounds > 0
    assert loops == ["packed"] * 2


VARIANTS = {
    "per-layer inputs, shared keys and values": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 61,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
    },
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_targets_with_what_their_drafters_have_not(loops, fields):
    target = varied_target("gemma4", **fields)
    text = target.generate(torch.tensor(PROMPTS[:1]), **CALL)[0].tolist()
    drafter = script(drafter_of(target), text, wrong_every=4)
    assert target.generate(torch.tensor(PROMPTS[:1]), assistant_model=drafter, **CALL, **FIXED)[0].tolist() == text
    assert sum(drafter.last_run.accepted) > 10
    assert loops == ["packed"]


def test_what_a_text_only_call_of_a_multimodal_target_passes():
    """Transformers passes it an empty dictionary, which is nothing; images are something."""
    target = varied_target("gemma4_unified")
    cache = DynamicCache(config=target.config.get_text_config())
    ids = torch.tensor(PROMPTS[:1])
    for value, expected in (({}, None), (None, None), ({"image": torch.ones(1)}, "mm_encoder_outputs")):
        keywords = {cache_keyword(): cache, "mm_encoder_outputs": value}
        call = AssistedCall(target, ids, target.generation_config, [], [], model_kwargs=keywords)
        reason = why_not_packed(call)
        assert reason == expected or expected in reason
