"""Training a drafter for Gemma 4: its configuration, the warm start from the target's layers, and a run that learns."""

import json

import pytest
import torch
from torch.testing import assert_close

from benchmarks.baselines.autoregressive import EagleConfig, EagleDrafter
from modeling_dspark import DSparkModel
from modeling_dspark.model_backbone import DSparkDecoderLayer
from tests.builders import GEMMA4_DRAFTER, tiny_drafter, tiny_target
from tests.modeling.test_gemma4_backbone import naive_layer, norm_rows
from tests.training.toy_run import flags, write_inputs
from training.data.blocks import make_blocks
from training.data.features import compute_features
from training.objective.forward import forward_blocks
from training.run.initialization import config_for_target, warm_start
from training.train import main


FAMILIES = ["gemma4", "gemma4_unified"]
CHOICES = {"num_hidden_layers": 2, "target_layer_ids": [0, 1, 2], "mask_token_id": 3, "markov_rank": 8}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_has_the_traits_of_the_targets_full_attention_layers(family):
    config = config_for_target(tiny_target(family), None, "name", **CHOICES)
    assert {name: getattr(config, name) for name in GEMMA4_DRAFTER} == GEMMA4_DRAFTER
    plain = config_for_target(tiny_target(family), None, "name", **CHOICES, value_norm=False, hidden_act="silu")
    assert (plain.value_norm, plain.hidden_act, plain.sandwich_norms) == (False, "silu", True)


def test_drafters_for_other_families_have_none():
    config = config_for_target(tiny_target("gemma3"), None, "name", **CHOICES)
    assert (config.hidden_act, config.attention_scale, config.sandwich_norms) == ("silu", None, False)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_start_is_the_targets_layer(family):
    """At a position without context, a draft layer is the target's layer: weights, norms, values, scalar and all."""
    target = tiny_target(family)
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.3)
    drafter = DSparkModel(config_for_target(target, None, "name", **CHOICES)).eval()
    warm_start(drafter, target, [1, 3])
    states = target(torch.tensor([[7]]), output_hidden_states=True).hidden_states
    embeddings = drafter.rotary_emb(states[0], torch.zeros(1, 1, dtype=torch.long))
    layer: DSparkDecoderLayer = drafter.layers[0]
    output = layer(states[1], states[1][:, :0], embeddings, None, None)
    assert_close(output, states[2], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_norms_of_gemma_3_add_one_to_their_weight():
    target = tiny_target("gemma3")
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.normal_(0.0, 0.3)
    drafter = tiny_drafter(target, sandwich_norms=True, hidden_act="gelu_pytorch_tanh")
    warm_start(drafter, target, [2, 3])
    source, rows = target.model.layers[2], torch.randn(5, 32)
    for name in ("input_layernorm", "post_feedforward_layernorm"):
        norm = getattr(drafter.layers[0], name)
        assert_close(norm(rows), getattr(source, name)(rows), atol=1e-5, rtol=1e-5)
    assert_close(drafter.hidden_norm(rows), source.input_layernorm(rows), atol=1e-5, rtol=1e-5)
    assert_close(drafter.norm(rows), target.model.norm(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "layers", "message"),
    [
        ({}, [1, 2], r"layer 2 .*'attention_k_eq_v': \(False, True\)"),  # a sliding layer
        ({"value_norm": False}, [1, 3], r"'value_norm': \(True, False\)"),
        ({"sandwich_norms": False, "layer_scalar": False}, [1, 3], "'sandwich_norms'.*'layer_scalar'"),
        ({"attention_scale": None}, [1, 3], r"'attention_scale': \(1.0, 0.25\)"),
        ({"hidden_act": "silu"}, [1, 3], "'hidden_act': .*gelu"),
        ({"head_dim": 8}, [1, 3], "other shapes.*k_proj"),
    ],
)
def test_layers_of_another_kind_are_not_copied(fields, layers, message):
    target = tiny_target("gemma4")
    drafter = tiny_drafter(target, **(GEMMA4_DRAFTER | fields))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        warm_start(drafter, target, layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


@torch.no_grad()
def test_the_autoregressive_baseline_has_the_traits_too():
    """One position of one block: the last position of a causal pass, by the formulas of a layer."""
    target = tiny_target("gemma4")
    heads = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    config = tiny_drafter(target, **GEMMA4_DRAFTER, **heads, num_hidden_layers=1, block_size=1).config
    drafter = EagleDrafter(EagleConfig(**config.to_dict())).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.3)
    drafter.layers[0].layer_scalar.fill_(0.7)
    ids, anchor = torch.randint(4, 61, (1, 9)), 6
    binding = drafter.bind(target)
    features = compute_features(target, binding, ids, target_layer_ids=[0, 1, 2]).features
    kept = torch.ones(1, 1, dtype=torch.bool)
    mask = torch.ones_like(ids, dtype=torch.bool)
    blocks = make_blocks(ids, mask, anchors=torch.tensor([[anchor]]), keep=kept, block_size=1)
    hidden = drafter(binding, blocks, input_ids=ids, features=features).hidden
    embedded = drafter.embed_norm(binding.embed(ids[0, 1 : anchor + 1], like=drafter.norm.weight))
    states = drafter.hidden_norm(drafter.fc(features[0, :anchor]))
    inputs = drafter.in_proj(torch.cat([embedded, states], dim=-1))
    weights = drafter.layers[0].state_dict()
    context = norm_rows(inputs[:-1], weights["input_layernorm.weight"])
    expected = naive_layer(weights, drafter.config, inputs[-1:], context, list(range(anchor)))
    assert_close(hidden, norm_rows(expected, drafter.norm.weight), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the name that all versions know
def test_gradients_do_not_depend_on_attention_or_checkpointing():
    """Packed blocks of two sequences; the layer scalar is a buffer, and takes none."""
    target = tiny_target("gemma4")
    ids = torch.randint(4, 61, (2, 12))
    anchors, kept = torch.tensor([[1, 6], [3, 5]]), torch.ones(2, 2, dtype=torch.bool)
    blocks = make_blocks(ids, torch.ones(2, 12, dtype=torch.bool), anchors=anchors, keep=kept, block_size=4)
    expected = None
    for attention, checkpointing in (("sdpa", False), ("eager", False), ("dspark_chunked", False), ("sdpa", True)):
        drafter = tiny_drafter(target, **GEMMA4_DRAFTER).train()
        drafter.set_attn_implementation(attention)
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        binding = drafter.bind(target)
        features = compute_features(target, binding, ids, target_layer_ids=[0, 1, 2]).features
        outputs = forward_blocks(drafter, binding, blocks, input_ids=ids, features=features)
        binding.draft_logits(outputs.hidden).pow(2).mean().backward()
        gradients = {name: one.grad for name, one in drafter.layers.named_parameters()}
        assert all(gradient.abs().max() > 0 for gradient in gradients.values())
        assert not any("layer_scalar" in name for name in gradients)
        expected = expected or gradients
        for name, gradient in gradients.items():
            assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_learns_and_its_drafter_loads(family, tmp_path, tiny_tokenizer):
    write_inputs(tmp_path, tiny_tokenizer, family=family)
    warm = {"num_draft_layers": 2, "init_from_target_layers": "1 3", "max_steps": 30, "logging_steps": 5}
    trained = main(flags(tmp_path, "run", **warm))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [entry["position_loss"] for entry in log if "position_loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    drafter = DSparkModel.from_pretrained(tmp_path / "run" / "drafter").eval()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    target = tiny_target(family)
    scalars = [target.get_decoder().layers[index].layer_scalar for index in (1, 3)]
    assert [layer.layer_scalar for layer in drafter.layers] == scalars
    prompt = {"input_ids": torch.tensor([[7, 8, 9], [5, 6, 4]]), "max_new_tokens": 8, "do_sample": False}
    expected = target.generate(**prompt)
    assert torch.equal(target.generate(**prompt, assistant_model=drafter), expected)


def test_traits_are_flags_and_a_run_resumes_with_the_same_ones(tmp_path, tiny_tokenizer):
    write_inputs(tmp_path, tiny_tokenizer)
    given = {"attention_scale": 0.5, "value_norm": "true", "sandwich_norms": "true", "hidden_act": "gelu"}
    saved = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    config = main(flags(tmp_path, "run", **given, **saved)).config
    assert (config.attention_scale, config.value_norm, config.sandwich_norms) == (0.5, True, True)
    assert (config.hidden_act, config.attention_k_eq_v, config.layer_scalar) == ("gelu", False, False)
    resumed = {"max_steps": 2, "resume_from_checkpoint": "true", **given}
    main(flags(tmp_path, "run", **(saved | resumed)))
    with pytest.raises(ValueError, match=r"'attention_scale': \(0.5, 0.25\)"):
        main(flags(tmp_path, "run", **(saved | resumed | {"attention_scale": 0.25})))


def test_the_dry_run_counts_what_there_is(tmp_path, tiny_tokenizer):
    write_inputs(tmp_path, tiny_tokenizer, family="gemma4")
    found = main([*flags(tmp_path, "run", num_draft_layers=2), "--dry_run"])
    drafter = tiny_drafter(
        tiny_target("gemma4"), **GEMMA4_DRAFTER, target_layer_ids=[0, 2], markov_rank=4, block_size=3
    )
    assert found.drafter_parameters == sum(parameter.numel() for parameter in drafter.parameters())
    assert found.trainable_parameters == found.drafter_parameters
