"""Checkpoints of other projects load in one line and give the numbers that were recorded with those projects (fp32).

Tolerances are those of the fixtures: 2e-4 for hidden states and logits, 1e-4 for confidence logits, 1e-5 for losses;
tokens are equal.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from modeling_dspark import DSparkModel
from modeling_dspark.model_cache import DSparkCache
from tests.builders import VOCAB, propose_with_block, tiny_drafter, tiny_target
from tests.conftest import FIXTURES


DEEPSPEC = FIXTURES / "a_vanilla_confM"
SPECULATORS = FIXTURES / "d_full_anchor"
MODEL_OPTIMIZER_NAMES = {
    "markov_head.markov_w1.": "markov_w1.",
    "markov_head.markov_w2.": "markov_w2.",
    "markov_head.gate_proj.": "gate_proj.",
    "markov_head.joint_proj.": "joint_proj.",
    "confidence_head.proj.": "confidence_proj.",
}
LAYERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *(
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "num_key_value_heads",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
    ),
)


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def layers_of(drafter):
    raw = drafter.config.to_dict()
    return {name: raw[name] for name in LAYERS} | {"model_type": "qwen3", "dtype": "float32"}


@pytest.fixture
def specforge(tmp_path):
    """The fixture's config, with the tensors that the checkpoint of DeepSpec has too, bit by bit."""
    tensors = load_file(DEEPSPEC / "draft" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    config = json.loads((FIXTURES / "pack_specforge" / "draft" / "config.json").read_text())
    return write(tmp_path / "specforge", config, kept)


def settings(drafter):
    return {name: value for name, value in drafter.config.to_dict().items() if name != "_name_or_path"}


@pytest.fixture(scope="module")
def drafter():
    return DSparkModel.from_pretrained(SPECULATORS / "draft").eval().requires_grad_(False)


@pytest.fixture(scope="module")
def arrays():
    return {name: torch.from_numpy(array) for name, array in np.load(SPECULATORS / "golden.npz").items()}


class TestSpeculatorsFixture:
    def propose(self, drafter, target, arrays, block):
        anchor = int(arrays["anchor_positions"][block])
        start = int((arrays["document_ids"][0] < arrays["document_ids"][0, anchor]).sum())
        features = arrays["hidden_states"][:, start:anchor]
        tokens = arrays["input_ids"][:, anchor]
        return propose_with_block(drafter.bind(target), features, anchor_tokens=tokens, cache=DSparkCache())

    def test_layer_ids_are_ours(self, drafter):
        assert json.loads((SPECULATORS / "draft" / "config.json").read_text())["aux_hidden_state_layer_ids"] == [
            1,
            3,
            4,
        ]
        assert drafter.config.target_layer_ids == [0, 2, 3]
        assert drafter.config.num_target_layers is None

    @pytest.mark.parametrize("block", range(6))
    def test_blocks(self, golden_target, drafter, arrays, block):
        """Hidden states, base logits and the greedy chain of a block, then the heads with given tokens."""
        scored, proposal = self.propose(drafter, golden_target, arrays, block)
        assert_close(scored.hidden_states[0], arrays["hidden"][block], atol=2e-4, rtol=0)
        assert_close(scored.base_logits[0], arrays["base_logits"][block], atol=2e-4, rtol=0)
        assert torch.equal(proposal.tokens[0], arrays["chain.target_ids"][block])
        assert_close(proposal.confidence_logits[0], arrays["chain.conf"][block], atol=1e-4, rtol=0)
        previous = arrays["prev_token_ids"][block]
        step = drafter.head_step(scored.hidden_states[0], scored.base_logits[0], previous)
        assert_close(step.logits, arrays["final_logits"][block], atol=2e-4, rtol=0)
        assert_close(step.confidence_logits, arrays["confidence_logits"][block], atol=1e-4, rtol=0)

    def test_loss(self, golden_target, drafter, arrays):
        """The recorded loss, by speculators' formula: hard labels, and a mean over the mask's count."""
        golden = json.loads((SPECULATORS / "golden.json").read_text())
        steps = []
        for block in range(6):
            scored, _ = self.propose(drafter, golden_target, arrays, block)
            hidden, base = scored.hidden_states[0], scored.base_logits[0]
            steps.append(drafter.head_step(hidden, base, arrays["prev_token_ids"][block]))
        q = torch.stack([step.logits for step in steps]).log_softmax(-1)
        confidence = torch.stack([step.confidence_logits for step in steps])
        p = arrays["targets"].softmax(-1)
        distance = (q.exp() - p).abs().sum(-1) / 2
        decay = torch.exp(-torch.arange(5) / golden["gamma"])
        accept = torch.nn.functional.binary_cross_entropy_with_logits(confidence, 1 - distance, reduction="none")
        label = arrays["targets"].argmax(-1, keepdim=True)
        terms = 0.1 * -q.gather(-1, label)[..., 0] + 0.9 * distance + golden["confidence_head_alpha"] * accept
        mask = arrays["aligned_loss_mask"].float()
        loss = float((terms * mask * decay).sum() / mask.sum())
        assert loss == pytest.approx(golden["loss"], abs=1e-5)


def test_specforge_fixture_is_the_drafter_of_deepspec(specforge, golden_drafter):
    drafter = DSparkModel.from_pretrained(specforge).eval()
    assert settings(drafter) == settings(golden_drafter)
    for (name, one), (_, other) in zip(drafter.state_dict().items(), golden_drafter.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


def model_optimizer(drafter, **nested):
    """A config with the fields that Model-Optimizer's `DSparkExporter` writes, and no others; and the tensors' names there."""
    config = drafter.config
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    names += ("intermediate_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range")
    raw = {name: getattr(config, name) for name in (*names, "attention_bias", "attention_dropout")}
    raw |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": config.block_size}
    raw |= {"rope_theta": config.rope_parameters["rope_theta"], "rope_scaling": None, "tie_word_embeddings": False}
    raw |= {
        "torch_dtype": "float32",
        "num_target_layers": 4,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
    }
    raw["dflash_config"] = {
        "mask_token_id": 3,
        "target_layer_ids": [0, 1, 2],
        "causal": False,
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": 8,
        "markov_head_type": config.markov_head_type,
        "use_confidence_head": config.enable_confidence_head,
    } | nested
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        for ours, theirs in MODEL_OPTIMIZER_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    return raw, tensors


UNSAID = {"dtype": "float32", "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confident", [True, False])
def test_model_optimizer(tmp_path, kind, confident):
    """Flat names of heads, `use_confidence_head`, `shift_label`; saved again, the tensors have our names."""
    heads = {"enable_confidence_head": confident, "confidence_head_with_markov": confident}
    drafter = tiny_drafter(tiny_target("qwen3"), markov_head_type=kind, **heads)
    loaded = DSparkModel.from_pretrained(write(tmp_path / "in", *model_optimizer(drafter)))
    assert settings(loaded) == settings(drafter) | UNSAID
    loaded.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert torch.equal(saved[name], tensor), name


def test_a_nested_config_with_our_names_of_tensors(tmp_path):
    """Model-Optimizer's config over heads below `markov_head.`, as NVIDIA has published some."""
    drafter = tiny_drafter(tiny_target("qwen3"))
    raw, _ = model_optimizer(drafter)
    loaded = DSparkModel.from_pretrained(write(tmp_path, raw, drafter.state_dict()))
    assert settings(loaded) == settings(drafter) | UNSAID
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 8,
    "rope_type": "yarn",
}
NOISE = {"partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [1, 1, 2], "rope_type": "default"}


@pytest.mark.parametrize("rope", [YARN, NOISE], ids=["yarn", "of the target's"])
@pytest.mark.parametrize("where", ["DeepSpec", "SpecForge", "Model-Optimizer"])
def test_rotary_embeddings_are_those_of_transformers(tmp_path, rope, where):
    """All of these trainers build Qwen3's class from the drafter's config, which scales (YaRN), but turns whole heads: a
    `partial_rotary_factor` was copied with the target's config and is none of the drafter's."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    drafter = tiny_drafter(tiny_target("qwen3"))
    raw, tensors = model_optimizer(drafter)
    heads = {"enable_confidence_head": True, "confidence_head_with_markov": True, "markov_head_type": "vanilla"}
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 1, 2], "markov_rank": 8} | heads
    if where != "Model-Optimizer":
        tensors = drafter.state_dict()
        del raw["dflash_config"]
        raw |= {"architectures": ["Qwen3DSparkModel"]} | nested if where == "DeepSpec" else {}
        raw |= {"dflash_config": nested | {"projector_type": "dspark"}} if where == "SpecForge" else {}
    if where == "Model-Optimizer":
        raw |= {"rope_scaling": rope}  # in the older form, `rope_theta` beside it
    else:
        del raw["rope_theta"], raw["rope_scaling"]
        raw["rope_parameters"] = rope | {"rope_theta": 1e6}
    loaded = DSparkModel.from_pretrained(write(tmp_path, raw, tensors))
    sizes = {name: raw[name] for name in ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")}
    theta = loaded.config.rope_parameters["rope_theta"]
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**sizes, rope_parameters=rope | {"rope_theta": theta}))
    positions = torch.tensor([[0, 3, 500]])
    like = torch.zeros(1)
    for ours, expected in zip(loaded.rotary_emb(like, positions), theirs(like, positions), strict=True):
        assert expected.shape[-1] == loaded.config.head_dim
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("where", ["top", "nested"])
def test_dflash_has_the_older_layout_and_no_heads(tmp_path, where):
    plain = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    drafter = tiny_drafter(tiny_target("qwen3"), sample_from_anchor=False, block_size=7, **plain)
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]}
    raw = layers_of(drafter) | {"architectures": ["DFlashDraftModel"], "num_target_layers": 4}
    raw, nested = (raw | {"block_size": 8}, nested) if where == "top" else (raw, nested | {"block_size": 8})
    loaded = DSparkModel.from_pretrained(write(tmp_path, raw | {"dflash_config": nested}, drafter.state_dict()))
    assert settings(loaded) == settings(drafter) | {"dtype": "float32"}
    assert (loaded.config.block_size, loaded.config.num_block_positions) == (7, 8)


def test_an_early_specforge_config_has_our_model_type(tmp_path):
    """Heads at the top, `logit_head.` as their prefix, and `model_type: dspark`."""
    drafter = tiny_drafter(tiny_target("qwen3"))
    raw = layers_of(drafter) | {"model_type": "dspark", "num_target_layers": 4, "block_size": 4, "markov_rank": 8}
    raw |= {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]}}
    tensors = {name.replace("markov_head.", "logit_head."): tensor for name, tensor in drafter.state_dict().items()}
    loaded = DSparkModel.from_pretrained(write(tmp_path, raw, tensors))
    assert loaded.config.sample_from_anchor
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def speculators(drafter, **fields):
    """A config and tensors as speculators writes them, made by hand."""
    config, tensors = drafter.config, drafter.state_dict()
    raw = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers_of(drafter),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.num_block_positions,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "markov_head_type": config.markov_head_type,
        "mask_token_id": 3,
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    if config.draft_vocab_size:
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[drafter.draft_token_ids] = True
        tensors |= {"t2d": t2d, "lm_head.weight": torch.randn(config.draft_vocab_size, 32)}
    return raw | fields, tensors


IDS = [2, 5, 6, 9, 20, 33, 60]


@pytest.mark.parametrize(
    ("kind", "ids", "said"),
    [("gated", None, True), ("vanilla", None, None), ("rnn", None, False), ("gated", IDS, None), ("rnn", IDS, True)],
)
def test_speculators_vocabularies_and_layouts(tmp_path, kind, ids, said):
    drafter = tiny_drafter(
        tiny_target("qwen3"), markov_head_type=kind, draft_token_ids=ids, sample_from_anchor=bool(said), block_size=5
    )
    fields = {} if said is None else {"sample_from_anchor": said}
    loaded = DSparkModel.from_pretrained(write(tmp_path, *speculators(drafter, **fields)))
    assert (loaded.config.sample_from_anchor, loaded.config.block_size) == (bool(said), 5)
    assert loaded.config.draft_vocab_size == (None if ids is None else len(ids))
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_rnn_state_passes_over_the_anchor():
    """In the older layout: fed with the anchor's embedding and hidden state, as the state of the first position."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, markov_head_type="rnn", sample_from_anchor=False)
    ids = torch.tensor([[4, 7, 9, 11, 8, 5]])
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in (0, 1, 2)], dim=-1)
        proposal = drafter.propose(
            drafter.bind(target), features[:, :5], anchor_tokens=torch.tensor([5]), cache=DSparkCache()
        )
        noise = torch.tensor([[5, 3, 3, 3, 3]])
        hidden = drafter(
            noise_embeds=target.get_input_embeddings()(noise),
            context_hidden_states=features[:, :5],
            position_ids=torch.arange(10)[None],
        ).last_hidden_state[0]
        weight, bias = drafter.markov_head.joint_proj.weight, drafter.markov_head.joint_proj.bias
        state, previous = torch.zeros(8), 5
        for position in range(5):
            embedded = drafter.markov_head.markov_w1.weight[previous]
            mixed = weight @ torch.cat([state, embedded, hidden[position]]) + bias
            gate, candidate, output = mixed.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            if position == 0:
                continue
            logits = target.lm_head(hidden[position]) + drafter.markov_head.markov_w2.weight @ output.tanh()
            previous = int(logits.argmax())
            assert previous == int(proposal.tokens[0, position - 1])


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"aux_hidden_state_layer_ids": None}, "not a DSpark drafter.*aux_hidden_state_layer_ids"),
            ({"speculators_model_type": "eagle3"}, "speculators_model_type.*eagle3"),
            ({"target_hidden_size": 64}, "target_hidden_size"),
            ({"quantization_config": {"bits": 4}}, "quantised"),
            ({"speculators_config": {"verifier": {"architectures": ["Gemma4ForConditionalGeneration"]}}}, "Gemma4"),
            ({"speculators_config": {"verifier": {"architectures": ["GraniteForCausalLM"]}}}, "Granite.*scales"),
            ({"rope_is_neox_style": False}, "rope_is_neox_style=False"),
            ({"markov_rank": 4}, r"mismatched: .*markov_w1.weight is \[61, 8\], expected \[61, 4\]"),
            ({"enable_confidence_head": False, "mask_token_id": 61}, "mask_token_id.*61"),
            ({"markov_head_type": "mlp"}, "markov_head_type.*mlp"),
            ({"block_size": "five"}, "`block_size` is 'five'"),
        ],
    )
    def test_fields(self, tmp_path, change, message):
        raw, tensors = speculators(tiny_drafter(tiny_target("qwen3")), sample_from_anchor=True)
        with pytest.raises(ValueError, match=message):
            DSparkModel.from_pretrained(write(tmp_path, raw | change, tensors))

    def test_everything_that_does_not_fit_is_listed(self, tmp_path):
        raw, tensors = speculators(tiny_drafter(tiny_target("qwen3")), sample_from_anchor=True)
        raw["transformer_layer_config"]["layer_types"] = ["sliding_attention", "full_attention"]
        tensors["layers.0.layer_scalar"] = torch.ones(1)
        tensors["norm.weight"] = torch.ones(3)
        del tensors["fc.weight"]
        with pytest.raises(ValueError, match="cannot be used") as refusal:
            DSparkModel.from_pretrained(write(tmp_path, raw, tensors))
        for part in ("sliding_attention", "missing: fc.weight", "layer_scalar", "norm.weight is [3], expected [32]"):
            assert part in str(refusal.value)

    @pytest.mark.parametrize("said", [{}, {"sample_from_anchor": False}])
    def test_more_drafts_than_the_layout_has(self, tmp_path, said):
        """Without `sample_from_anchor`, the number of drafts tells the layout; where both differ, one is wrong."""
        raw, tensors = speculators(tiny_drafter(tiny_target("qwen3")))
        methods = [{"proposal_type": "greedy", "speculative_tokens": 4}]
        with pytest.raises(ValueError, match="`speculative_tokens` and `block_size` are both 4.*set `sample_from_anchor`"):
            DSparkModel.from_pretrained(
                write(tmp_path, raw | said | {"speculators_config": {"proposal_methods": methods}}, tensors)
            )
        methods[0]["speculative_tokens"] = 3
        older = raw | said | {"speculators_config": {"proposal_methods": methods}}
        assert DSparkModel.from_pretrained(write(tmp_path, older, tensors)).config.block_size == 3

    @pytest.mark.parametrize(
        "trait",
        [
            *({"sample_from_anchor": False}, {"dflash_query_causal": True}, {"attention_sink_bias": True}),
            *({"rope_is_neox_style": False}, {"log_snr_conditioning": True}),
        ],
        ids=lambda trait: next(iter(trait)),
    )
    def test_what_no_tensor_tells(self, tmp_path, trait):
        """Fields with which others have published drafters in DeepSpec's form: read without them, few drafts are kept."""
        raw = json.loads((DEEPSPEC / "draft" / "config.json").read_text())
        tensors = load_file(DEEPSPEC / "draft" / "model.safetensors")
        DSparkModel.from_pretrained(write(tmp_path, raw, tensors))
        with pytest.raises(ValueError, match=f"{next(iter(trait))}="):
            DSparkModel.from_pretrained(write(tmp_path, raw | trait, tensors))

    def test_a_block_of_no_size(self, tmp_path):
        raw = layers_of(tiny_drafter(tiny_target("qwen3"))) | {
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}
        }
        with pytest.raises(ValueError, match=r"lacks \['block_size'\]"):
            DSparkModel.from_pretrained(write(tmp_path, raw, {"norm.weight": torch.ones(32)}))

    @pytest.mark.parametrize(
        "nested", [{"causal": True}, {"use_swa": True}, {"gru_hidden_dim": 8}, {"projector_type": "x"}]
    )
    def test_what_dflash_drafters_have_and_ours_have_not(self, tmp_path, nested):
        plain = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
        drafter = tiny_drafter(tiny_target("qwen3"), sample_from_anchor=False, **plain)
        nested = {"mask_token_id": 3, "target_layer_ids": [0, 1, 2], "block_size": 5} | nested
        raw = layers_of(drafter) | {"dflash_config": nested}
        with pytest.raises(ValueError, match=list(nested)[-1]):
            DSparkModel.from_pretrained(write(tmp_path, raw, drafter.state_dict()))

    def test_vocabularies_that_contradict_each_other(self, tmp_path):
        raw, tensors = speculators(tiny_drafter(tiny_target("qwen3"), draft_token_ids=IDS), sample_from_anchor=True)
        tensors["t2d"][[2, 3]] = torch.tensor([False, True])
        with pytest.raises(ValueError, match="d2t.*t2d"):
            DSparkModel.from_pretrained(write(tmp_path, raw, tensors))
        del tensors["d2t"]
        with pytest.raises(ValueError, match="missing: d2t"):
            DSparkModel.from_pretrained(write(tmp_path, raw, tensors))

    def test_pickled_weights(self, tmp_path):
        shutil.copytree(DEEPSPEC / "draft", tmp_path / "draft")
        (tmp_path / "draft" / "model.safetensors").rename(tmp_path / "draft" / "pytorch_model.bin")
        with pytest.raises(ValueError, match="safetensors"):
            DSparkModel.from_pretrained(tmp_path / "draft")

    def test_a_target_whose_layers_cannot_be_tapped(self, tmp_path):
        raw, tensors = speculators(tiny_drafter(tiny_target("qwen3")), sample_from_anchor=True)
        drafter = DSparkModel.from_pretrained(write(tmp_path, raw, tensors))
        with pytest.raises(ValueError, match=r"taps the layers \[0, 1, 2\].*3 the last.*is 1"):
            drafter.bind(tiny_target("qwen3", num_hidden_layers=3))


def test_shards(tmp_path, specforge):
    """A checkpoint in several files, with an index."""
    tensors = load_file(specforge / "model.safetensors")
    names, index = sorted(tensors), {"metadata": {}, "weight_map": {}}
    for number, part in enumerate((names[:10], names[10:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, specforge / file)
        index["weight_map"] |= dict.fromkeys(part, file)
    (specforge / "model.safetensors").unlink()
    (specforge / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = DSparkModel.from_pretrained(specforge).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    (specforge / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        DSparkModel.from_pretrained(specforge)


def test_a_repository_in_the_cache_loads_offline(tmp_path, specforge):
    """By its id, with what a download leaves: there is no connection that could say that there is no index of shards."""
    repository, commit = tmp_path / "hub" / "models--org--drafter", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(specforge, repository / "snapshots" / commit)
    loaded = DSparkModel.from_pretrained("org/drafter", cache_dir=tmp_path / "hub")
    assert loaded.config.target_layer_ids == [0, 2, 3]


def test_dflash_as_deepspec_trains_it(tmp_path):
    """Without heads, and so without the fields that say what they are like; in DeepSpec's layout, not in DFlash's."""
    plain = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    drafter = tiny_drafter(tiny_target("qwen3"), **plain)
    raw = layers_of(drafter) | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 4, "block_size": 4}
    raw |= {"target_layer_ids": [0, 1, 2], "mask_token_id": 3, "markov_rank": 0, "enable_confidence_head": False}
    copies = {"embed_tokens.weight": torch.randn(VOCAB, 32), "lm_head.weight": torch.randn(VOCAB, 32)}
    loaded = DSparkModel.from_pretrained(write(tmp_path, raw, drafter.state_dict() | copies))
    assert settings(loaded) == settings(drafter) | {"dtype": "float32"}
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
