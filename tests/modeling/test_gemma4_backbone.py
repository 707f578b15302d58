"""A backbone with Gemma 4's traits against its formulas, written out naively, and against Transformers' own layers (fp32)."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.configuration_dspark import BACKBONE_TRAITS
from modeling_dspark.model_backbone import DSparkDecoderLayer
from modeling_dspark.model_cache import DSparkCache
from tests.builders import GEMMA4_DRAFTER, tiny_drafter, tiny_target


ONE_TRAIT = {
    "scale": {"attention_scale": 0.3},
    "keys are values": {"attention_k_eq_v": True},
    "value norm": {"value_norm": True},
    "sandwich norms": {"sandwich_norms": True},
    "layer scalar": {"layer_scalar": True},
    "activation": {"hidden_act": "gelu_pytorch_tanh"},
    "partial rotation": {"rope_parameters": GEMMA4_DRAFTER["rope_parameters"]},
    "all": GEMMA4_DRAFTER,
    "all, with values of their own": GEMMA4_DRAFTER | {"attention_k_eq_v": False, "num_key_value_heads": 2},
}


def normed(row, scale=None):
    row = row / math.sqrt(sum(float(value) ** 2 for value in row) / len(row) + 1e-6)
    return row if scale is None else row * scale


def rotated(row, position, config):
    """Halves of a head are the real and the imaginary part; the first pairs turn by `position * theta ** (-2 i / d)`."""
    half, rope = len(row) // 2, config.rope_parameters
    turning = int(rope.get("partial_rotary_factor", 1.0) * half)
    angles = [position * rope["rope_theta"] ** (-2 * i / len(row)) if i < turning else 0.0 for i in range(half)]
    turn = torch.polar(torch.ones(half), torch.tensor(angles))
    pairs = torch.complex(row[:half], row[half:]) * turn
    return torch.cat([pairs.real, pairs.imag])


def activation(x, name):
    if name == "silu":
        return x / (1 + torch.exp(-x))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attended(w, config, block, context, positions):
    """One query and one head at a time."""
    d, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    sources = torch.cat([context, block])
    scale = d**-0.5 if config.attention_scale is None else config.attention_scale
    keys, values = [], []
    for row, position in zip(sources, positions, strict=True):
        projected = (w["self_attn.k_proj.weight"] @ row).view(-1, d)
        value = projected if config.attention_k_eq_v else (w["self_attn.v_proj.weight"] @ row).view(-1, d)
        values.append([normed(head) if config.value_norm else head for head in value])
        keys.append([rotated(normed(head, w["self_attn.k_norm.weight"]), position, config) for head in projected])
    output = []
    for row, position in zip(block, positions[len(context) :], strict=True):
        heads = []
        for head, query in enumerate((w["self_attn.q_proj.weight"] @ row).view(-1, d)):
            query = rotated(normed(query, w["self_attn.q_norm.weight"]), position, config)
            scores = torch.stack([query @ key[head // groups] * scale for key in keys])
            chances = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(chance * value[head // groups] for chance, value in zip(chances, values, strict=True)))
        output.append(w["self_attn.o_proj.weight"] @ torch.cat(heads))
    return torch.stack(output)


def fed_forward(w, config, rows):
    gate = activation(rows @ w["mlp.gate_proj.weight"].T, config.hidden_act)
    return (gate * (rows @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def norm_rows(rows, scale):
    return torch.stack([normed(row, scale) for row in rows])


def naive_layer(w, config, rows, context, positions):
    attention = attended(w, config, norm_rows(rows, w["input_layernorm.weight"]), context, positions)
    if config.sandwich_norms:
        rows = rows + norm_rows(attention, w["post_attention_layernorm.weight"])
        output = fed_forward(w, config, norm_rows(rows, w["pre_feedforward_layernorm.weight"]))
        rows = rows + norm_rows(output, w["post_feedforward_layernorm.weight"])
    else:
        rows = rows + attention
        rows = rows + fed_forward(w, config, norm_rows(rows, w["post_attention_layernorm.weight"]))
    return rows * w["layer_scalar"] if config.layer_scalar else rows


@torch.no_grad()
def naive(drafter, noise, features, positions):
    """Hidden states `[Q, D]` of a block `[Q, D]` over features `[C, L * D]`."""
    weights, config = drafter.state_dict(), drafter.config
    context = norm_rows(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    rows = noise
    for index in range(config.num_hidden_layers):
        prefix = f"layers.{index}."
        w = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
        rows = naive_layer(w, config, rows, context, positions)
    return norm_rows(rows, weights["norm.weight"])


@pytest.mark.parametrize("traits", ONE_TRAIT.values(), ids=ONE_TRAIT)
class TestAgainstTheFormulas:
    @pytest.fixture
    def case(self, traits):
        drafter = tiny_drafter(tiny_target("llama"), **traits)
        noise, features = torch.randn(1, 4, 32), torch.randn(1, 5, 96)
        return drafter, noise, features, naive(drafter, noise[0], features[0], list(range(9)))

    def test_one_forward(self, case):
        drafter, noise, features, expected = case
        for attention in ("sdpa", "eager"):
            drafter.set_attn_implementation(attention)
            hidden = drafter(noise, features, torch.arange(9)[None]).last_hidden_state
            assert_close(hidden[0], expected, atol=1e-5, rtol=1e-5)

    def test_a_trait_changes_the_result(self, case, traits):
        drafter, noise, features, expected = case
        defaults = DSparkConfig()
        changed = [name for name in traits if name in (*BACKBONE_TRAITS, "rope_parameters")]
        for name in changed:
            if traits[name] == getattr(defaults, name):
                continue
            fields = drafter.config.to_dict() | {name: getattr(defaults, name)}
            other = DSparkModel(DSparkConfig(**fields)).eval()
            other.load_state_dict(drafter.state_dict(), strict=False)
            hidden = other(noise, features, torch.arange(9)[None]).last_hidden_state
            assert (hidden[0] - expected).abs().max() > 1e-3, name

    @torch.no_grad()
    def test_context_in_the_cache_and_rows_of_different_lengths(self, case):
        """A prompt written ahead, then the rest with the block; beside it a shorter row."""
        drafter, noise, features, expected = case
        cache = DSparkCache(num_rows=2)
        drafter.extend_context(features[0, :3], cache, row=0)
        new = torch.stack([features[0, 3:], features[0, :2]])
        positions = torch.stack([torch.arange(3, 9), torch.arange(6)])
        hidden = drafter(noise.expand(2, -1, -1), new, positions, cache=cache).last_hidden_state
        assert_close(hidden[0], expected, atol=1e-5, rtol=1e-5)
        short = naive(drafter, noise[0], features[0, :2], list(range(6)))
        assert_close(hidden[1], short, atol=1e-5, rtol=1e-5)


class TestAgainstTransformers:
    """Layers of Transformers' Gemma 4, whose weights load into ours by name, and its rotary embedding."""

    @pytest.fixture(params=[True, False], ids=["keys are values", "values of their own"])
    def layers(self, request):
        torch.manual_seed(3)
        config = Gemma4TextConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            global_head_dim=16,
            attention_k_eq_v=request.param,
            hidden_size_per_layer_input=0,
            layer_types=["full_attention"] * 2,
            use_bidirectional_attention="all",
            attn_implementation="eager",
        )
        theirs = Gemma4TextDecoderLayer(config, 0).eval()
        for parameter in (*theirs.parameters(), theirs.layer_scalar):
            torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.3)
        traits = {"attention_k_eq_v": request.param, "num_key_value_heads": 1 if request.param else 2}
        rope = config.rope_parameters["full_attention"]
        drafter = tiny_drafter(tiny_target("llama"), **(GEMMA4_DRAFTER | traits | {"rope_parameters": rope}))
        ours: DSparkDecoderLayer = drafter.layers[0]
        ours.load_state_dict(theirs.state_dict())
        return theirs, Gemma4TextRotaryEmbedding(config), ours, drafter.rotary_emb

    @torch.no_grad()
    def test_a_block_without_context(self, layers):
        theirs, their_rotary, ours, rotary = layers
        rows, positions = torch.randn(2, 5, 32), torch.tensor([[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]])
        their_embeddings = their_rotary(rows, positions, layer_type="full_attention")
        embeddings = rotary(rows, positions)
        for one, other in zip(embeddings, their_embeddings, strict=True):
            assert_close(one, other, atol=1e-6, rtol=0)
        keywords = {"attention_mask": None, "position_ids": positions, "shared_kv_states": {}}
        expected = theirs(rows.clone(), position_embeddings=their_embeddings, **keywords)
        assert_close(ours(rows, rows[:, :0], embeddings, None, None), expected, atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_attention_to_a_context(self, layers):
        """Keys of their attention over context and block; of its rows, those of the block."""
        theirs, their_rotary, ours, rotary = layers
        context, block, positions = torch.randn(1, 6, 32), torch.randn(1, 4, 32), torch.arange(10)[None]
        sources = torch.cat([context, block], dim=1)
        embeddings = their_rotary(sources, positions, layer_type="full_attention")
        expected = theirs.self_attn(sources, embeddings, None, {})[0][:, 6:]
        keywords = {"position_embeddings": rotary(sources, positions), "attention_mask": None, "cache": None}
        assert_close(ours.self_attn(block, context, **keywords), expected, atol=1e-5, rtol=1e-5)


def test_drafters_without_traits_have_no_new_tensors():
    names = set(tiny_drafter(tiny_target("llama")).state_dict())
    assert not any("feedforward" in name or "layer_scalar" in name or "v_norm" in name for name in names)
    assert any("v_proj" in name for name in names)
    gemma = set(tiny_drafter(tiny_target("llama"), **GEMMA4_DRAFTER).state_dict())
    assert {name.split(".")[-1] for name in gemma - names} == {"weight", "layer_scalar"}
    assert names - gemma == {f"layers.{index}.self_attn.v_proj.weight" for index in (0, 1)}


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan")])
def test_scales_that_make_no_sense(scale):
    with pytest.raises(ValueError, match=r"`attention_scale`.*head_dim"):
        DSparkConfig(attention_scale=scale)


def test_rotary_parameters_of_several_kinds_of_layer():
    parameters = {"full_attention": GEMMA4_DRAFTER["rope_parameters"], "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match=r"`rope_parameters`.*full_attention.*sliding_attention"):
        DSparkConfig(rope_parameters=parameters)


def test_the_configuration_names_all_traits():
    defaults = DSparkConfig()
    assert {name: getattr(defaults, name) for name in BACKBONE_TRAITS} == {
        "hidden_act": "silu",
        "attention_scale": None,
        "attention_k_eq_v": False,
        "value_norm": False,
        "sandwich_norms": False,
        "layer_scalar": False,
    }


@torch.no_grad()
def test_a_scalar_that_was_left_in_fp32_does_not_widen_bf16():
    drafter = tiny_drafter(tiny_target("llama"), **GEMMA4_DRAFTER).bfloat16()
    for layer in drafter.layers:
        layer.layer_scalar = layer.layer_scalar.float()
    noise, features = torch.randn(1, 4, 32).bfloat16(), torch.randn(1, 5, 96).bfloat16()
    assert drafter(noise, features, torch.arange(9)[None]).last_hidden_state.dtype == torch.bfloat16


@pytest.mark.slow
def test_it_compiles_into_one_graph():
    drafter = tiny_drafter(tiny_target("llama"), **GEMMA4_DRAFTER)
    inputs = torch.randn(1, 4, 32), torch.randn(1, 5, 96), torch.arange(9)[None]
    compiled = torch.compile(drafter, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs).last_hidden_state, drafter(*inputs).last_hidden_state, atol=1e-5, rtol=1e-5)
