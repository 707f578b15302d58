"""DeepSpec's checkpoints for Gemma 4: recorded numbers, strict loading, what is refused, and a package of one (fp32)."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import training.objective.attention  # noqa: F401 - registers `dspark_chunked`
from hub_upload.package import package
from modeling_dspark import DSparkModel
from modeling_dspark.configuration_dspark import GEMMA4_TRAITS
from modeling_dspark.model_cache import DSparkCache
from tests.builders import cache_with_kernels, propose_with_block, tiny_drafter, tiny_target
from tests.conftest import FIXTURES
from training.data.blocks import make_blocks
from training.objective.forward import forward_blocks


FOLDER = FIXTURES / "gemma4_deepspec"
GOLDEN = {name: torch.from_numpy(array) for name, array in np.load(FOLDER / "golden.npz").items()}


@pytest.fixture(scope="module")
def drafter():
    return DSparkModel.from_pretrained(FOLDER / "draft").eval()


@pytest.fixture(scope="module", params=["gemma4", "gemma4_unified"])
def target(request):
    """A target with the embedding and the LM head that the checkpoint carries copies of."""
    untied = {"tie_word_embeddings": False}
    target = tiny_target(request.param, **untied)
    copies = load_file(FOLDER / "draft" / "model.safetensors")
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(copies["embed_tokens.weight"])
        target.get_output_embeddings().weight.copy_(copies["lm_head.weight"])
    return target


@torch.no_grad()
def test_rounds(drafter, target):
    """Hidden states and base logits: the embedding's scale and the soft cap are the target's."""
    binding, cache, done = drafter.bind(target), DSparkCache(), 0
    for index, (start, anchor) in enumerate([(7, 9), (11, 40)]):
        new, anchors = GOLDEN["features"][None, done:start], torch.tensor([anchor])
        block, _ = propose_with_block(binding, new, anchor_tokens=anchors, cache=cache)
        assert_close(block.hidden_states[0], GOLDEN[f"round{index}.hidden"], atol=2e-5, rtol=0)
        assert_close(block.base_logits[0], GOLDEN[f"round{index}.base"], atol=5e-5, rtol=0)
        done = start


@pytest.mark.parametrize("attention", ["sdpa", "eager", "dspark_chunked"])
def test_training_blocks(target, attention):
    drafter = DSparkModel.from_pretrained(FOLDER / "draft", attn_implementation=attention)
    ids, anchors = GOLDEN["input_ids"][None], GOLDEN["anchors"][None]
    kept = torch.ones_like(anchors, dtype=torch.bool)
    blocks = make_blocks(ids, torch.ones_like(ids, dtype=torch.bool), anchors=anchors, keep=kept, block_size=4)
    assert blocks.supervised.all()
    features = GOLDEN["features"][None]
    outputs = forward_blocks(drafter, drafter.bind(target), blocks, input_ids=ids, features=features)
    assert_close(outputs.hidden, GOLDEN["training.hidden"], atol=2e-5, rtol=0)


def test_the_configuration(drafter):
    config = drafter.config
    assert {name: getattr(config, name) for name in GEMMA4_TRAITS} == GEMMA4_TRAITS
    assert (config.attention_k_eq_v, config.hidden_act) == (True, "gelu_pytorch_tanh")
    assert (config.num_key_value_heads, config.head_dim) == (1, 16)
    assert config.rope_parameters == {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}
    assert [float(layer.layer_scalar) for layer in drafter.layers] == [0.75, 1.25]


def test_values_of_their_own(tmp_path):
    """Without `attention_k_eq_v` there is a `v_proj`, and the number of key/value heads is the other field."""
    fields = GEMMA4_TRAITS | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 16, "num_key_value_heads": 2}
    made = tiny_drafter(tiny_target("gemma4"), **fields)
    path = copied(tmp_path, change_config=lambda config: config.update(attention_k_eq_v=False))
    save_file(made.state_dict(), path / "model.safetensors")
    loaded = DSparkModel.from_pretrained(path)
    assert loaded.config.num_key_value_heads == 2
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def copied(tmp_path, change_tensors=None, change_config=None):
    path = tmp_path / "draft"
    shutil.copytree(FOLDER / "draft", path)
    if change_tensors:
        tensors = load_file(path / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, path / "model.safetensors")
    if change_config:
        config = json.loads((path / "config.json").read_text())
        change_config(config)
        (path / "config.json").write_text(json.dumps(config))
    return path


V_PROJ = "layers.0.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.layer_scalar"), r"missing: layers\.1\.layer_scalar"),
        (lambda t: t.pop("layers.0.pre_feedforward_layernorm.weight"), r"missing: .*pre_feedforward_layernorm"),
        (lambda t: t.update({V_PROJ: torch.ones(16, 32)}), rf"unexpected: {V_PROJ}"),
        (lambda t: t.update({"layers.0.per_layer_input_gate.weight": torch.ones(2, 2)}), "per_layer_input_gate"),
        (lambda t: t.update({"layers.0.layer_scalar": torch.ones(32)}), r"mismatched: .*layer_scalar"),
        (lambda t: t.update({"layers.0.self_attn.k_proj.weight": torch.ones(32, 32)}), r"mismatched: .*k_proj"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        DSparkModel.from_pretrained(copied(tmp_path, change_tensors=change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(enable_moe_block=True), "enable_moe_block=True"),
        (lambda c: c.update(hidden_size_per_layer_input=256), "hidden_size_per_layer_input=256"),
        (lambda c: c.update(use_double_wide_mlp=True), "use_double_wide_mlp=True"),
        (lambda c: c.update(layer_types=["sliding_attention", "full_attention"]), "sliding_attention"),
        (lambda c: c.update(hidden_activation="bogus"), "hidden_act.*bogus"),
        (lambda c: c.pop("global_head_dim"), r"lacks \['global_head_dim'\]"),
        (lambda c: c.pop("num_global_key_value_heads"), r"lacks \['num_global_key_value_heads'\]"),
        (lambda c: c.pop("attention_k_eq_v"), r"lacks \['attention_k_eq_v'\]"),
        (lambda c: c.update(architectures=["Gemma4DFlashModel"]), "Gemma4DFlashModel"),
    ],
)
def test_configs_that_do_not_fit(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        DSparkModel.from_pretrained(copied(tmp_path, change_config=change))


CLEAN_PROCESS = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM

drafter = AutoModel.from_pretrained("package", trust_remote_code=True).eval()
target = AutoModelForCausalLM.from_pretrained("target").eval()
assert type(drafter).__module__.startswith("transformers_modules."), type(drafter)
assert "modeling_dspark" not in sys.modules
prompt = {"input_ids": torch.tensor([[7, 11, 13]]), "max_new_tokens": 12, "do_sample": False}
texts = [target.generate(**prompt, **door) for door in ({}, {"assistant_model": drafter, "num_assistant_tokens_schedule": "fixed"})]
assert texts[0].tolist() == texts[1].tolist(), texts
assert drafter.last_run.rounds > 0
torch.save(drafter.state_dict(), "state.pt")
"""


@pytest.mark.parametrize("target", ["gemma4"], indirect=True)
def test_package(drafter, target, tmp_path):
    """Saved in our format, packaged, and loaded as remote code where this repository is not: the same tensors and text."""
    drafter.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "README.md").write_text("A card.\n")
    package(tmp_path / "ours", tmp_path / "package")
    target.save_pretrained(tmp_path / "target")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    environment |= {"DSPARK_CACHE": str(cache_with_kernels(tmp_path / "cache"))}
    command = [sys.executable, "-c", CLEAN_PROCESS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = torch.load(tmp_path / "state.pt")
    assert set(again) == set(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again[name], tensor), name
