"""The model: saving and loading, dtypes, attention implementations, ragged rows, heads against a plain reference."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from modeling_dspark import DraftSampling, DSparkModel
from modeling_dspark.draft_accept import accept_greedy
from modeling_dspark.model_backbone import attention_bias, attention_for
from modeling_dspark.model_cache import DSparkCache
from modeling_dspark.model_heads import calibrated_confidence
from modeling_dspark.target_binding import TargetBinding, hidden_state_indices, tapped_features
from tests.builders import VOCAB, propose_with_block, tiny_drafter, tiny_target
from tests.conftest import FIXTURES
from training.data.blocks import make_blocks
from training.objective.forward import forward_blocks


def context_of(target, drafter, ids):
    with torch.no_grad():
        hidden = target(torch.tensor(ids), output_hidden_states=True).hidden_states
    return tapped_features(hidden, drafter.config.target_layer_ids)


class TestCheckpoints:
    @pytest.mark.parametrize("fields", [{}, {"markov_head_type": "rnn"}, {"draft_token_ids": [1, 4, 9]}])
    def test_round_trip(self, tmp_path, fields):
        drafter = tiny_drafter(tiny_target("llama"), **fields)
        drafter.save_pretrained(tmp_path)
        again = DSparkModel.from_pretrained(tmp_path)
        for (name, one), (_, other) in zip(drafter.state_dict().items(), again.state_dict().items(), strict=True):
            assert torch.equal(one, other), name
        assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModel"].endswith("DSparkModel")

    def copy(self, tmp_path, change_tensors=None, change_config=None):
        shutil.copytree(FIXTURES / "a_vanilla_confM" / "draft", tmp_path / "draft")
        path = tmp_path / "draft" / "model.safetensors"
        tensors = load_file(path)
        if change_tensors:
            change_tensors(tensors)
        save_file(tensors, path)
        config = json.loads((tmp_path / "draft" / "config.json").read_text())
        if change_config:
            change_config(config)
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
        return tmp_path / "draft"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
            (lambda t: t.update(extra=torch.zeros(2)), "unexpected: extra"),
            (lambda t: t.update({"norm.weight": torch.ones(7)}), "norm.weight"),
        ],
    )
    def test_tensors_that_do_not_fit_are_listed(self, tmp_path, change, message):
        with pytest.raises(ValueError, match=message):
            DSparkModel.from_pretrained(self.copy(tmp_path, change_tensors=change))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c.pop("target_layer_ids"), "not a DSpark drafter.*target_layer_ids"),
            (lambda c: c.update(architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel"),
            (lambda c: c.update(layer_types=["sliding_attention", "full_attention"]), "sliding_attention"),
            (lambda c: c.update(target_layer_ids=[0, 4]), "target_layer_ids"),
        ],
    )
    def test_configs_that_do_not_fit(self, tmp_path, change, message):
        with pytest.raises(ValueError, match=message):
            DSparkModel.from_pretrained(self.copy(tmp_path, change_config=change))

    @pytest.mark.parametrize("ids", [[1, 1, 5], [1, 2, 61], [-1, 2, 3]])
    def test_a_draft_vocabulary_of_wrong_tokens(self, tmp_path, ids):
        drafter = tiny_drafter(tiny_target("llama"), draft_token_ids=[1, 2, 3])
        drafter.d2t.copy_(torch.tensor(ids) - torch.arange(3))
        drafter.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="d2t"):
            DSparkModel.from_pretrained(tmp_path)

    def test_the_copied_embeddings_are_dropped(self):
        drafter = DSparkModel.from_pretrained(FIXTURES / "a_vanilla_confM" / "draft")
        assert not any("embed_tokens" in name or "lm_head" in name for name in drafter.state_dict())

    def test_another_model(self):
        with pytest.raises(ValueError, match="not a DSpark drafter.*qwen3"):
            DSparkModel.from_pretrained(FIXTURES / "target_qwen3")

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(ValueError, match="no config.json"):
            DSparkModel.from_pretrained(tmp_path)
        with pytest.raises((ValueError, OSError), match="config.json|not a local folder|Repo id"):
            DSparkModel.from_pretrained(str(tmp_path / "missing"))

    @pytest.mark.parametrize("size", [100, 20_000])
    def test_truncated_weights(self, tmp_path, size):
        folder = self.copy(tmp_path)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match="corrupt or truncated"):
            DSparkModel.from_pretrained(folder)

    def test_a_config_that_is_not_json(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises((ValueError, OSError), match=r"config.json|JSON"):
            DSparkModel.from_pretrained(tmp_path)


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_inverse_frequencies_stay_in_fp32(self, tmp_path, dtype):
        drafter = tiny_drafter(tiny_target("llama"))
        exact = drafter.rotary_emb.inv_freq.clone()
        drafter.save_pretrained(tmp_path)
        for cast in (drafter.to(dtype), DSparkModel.from_pretrained(tmp_path, dtype=dtype)):
            assert cast.dtype == dtype
            assert cast.rotary_emb.inv_freq.dtype == torch.float32
            assert torch.equal(cast.rotary_emb.inv_freq, exact)

    def test_confidences_are_fp32(self):
        target = tiny_target("llama").to(torch.bfloat16)
        drafter = tiny_drafter(target).to(torch.bfloat16)
        proposal = drafter.propose(
            drafter.bind(target),
            context_of(target, drafter, [[5, 6]]),
            anchor_tokens=torch.tensor([7]),
            cache=DSparkCache(),
        )
        assert proposal.confidence_logits.dtype == torch.float32

    def test_drafts_are_drawn_from_fp32_logits_whatever_a_processor_returns(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        proposal = drafter.propose(
            drafter.bind(target),
            context_of(target, drafter, [[5, 6]]),
            anchor_tokens=torch.tensor([7]),
            cache=DSparkCache(),
            sampling=DraftSampling(do_sample=True, processor=lambda _, scores: scores.bfloat16(), temperature=None),
        )
        assert proposal.logits.dtype == torch.float32


def test_attention_implementations_agree():
    target = tiny_target("llama")
    results = []
    for implementation in ("sdpa", "eager"):
        drafter = tiny_drafter(target)
        drafter.set_attn_implementation(implementation)
        features = context_of(target, drafter, [[5, 6, 7, 8], [9, 10, 11, 12]])
        block, _ = propose_with_block(
            drafter.bind(target),
            features,
            anchor_tokens=torch.tensor([4, 5]),
            cache=DSparkCache(2),
            context_lengths=[4, 2],
        )
        results.append(block.base_logits)
    assert_close(*results, atol=1e-5, rtol=1e-5)


def test_masks_for_each_attention_implementation():
    mask = torch.tensor([[[[True, False]]]])
    assert attention_bias(mask, "sdpa", torch.float32) is mask
    for implementation in ("eager", "flex_attention"):
        assert attention_bias(mask, implementation, torch.float32).tolist() == [
            [[[0.0, torch.finfo(torch.float32).min]]]
        ]
    assert attention_for("flash_attention_2", None) == "flash_attention_2"
    assert attention_for("flash_attention_2", mask) == "sdpa"
    assert attention_for("eager", mask) == "eager"


@pytest.mark.parametrize("fields", [{}, {"markov_head_type": "rnn"}, {"draft_token_ids": list(range(3, 30))}])
def test_ragged_rows_equal_single_rows(fields):
    """Any number of rows, contexts of different lengths, over several rounds."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, **fields)
    binding = drafter.bind(target)
    texts = torch.randint(4, VOCAB, (5, 40))
    features = context_of(target, drafter, texts.tolist())
    rounds = [[7, 3, 1, 9, 5], [1, 4, 2, 1, 3], [30, 1, 1, 2, 12], [1, 1, 1, 1, 1]]
    together, alone = DSparkCache(5), [DSparkCache() for _ in range(5)]
    start = [0] * 5
    for counts in rounds:
        width = max(counts)
        padded = torch.full((5, width, features.shape[-1]), 1e4)
        for row, (begin, count) in enumerate(zip(start, counts, strict=True)):
            padded[row, :count] = features[row, begin : begin + count][:count]
        counts = [min(count, 39 - begin) for begin, count in zip(start, counts, strict=True)]
        ends = [begin + count for begin, count in zip(start, counts, strict=True)]
        anchors = texts[torch.arange(5), torch.tensor(ends)]
        ragged, drafts = propose_with_block(
            binding, padded, anchor_tokens=anchors, cache=together, context_lengths=counts
        )
        for row in range(5):
            new = features[row : row + 1, start[row] : ends[row]]
            single, alone_drafts = propose_with_block(
                binding, new, anchor_tokens=anchors[row : row + 1], cache=alone[row]
            )
            assert_close(ragged.base_logits[row], single.base_logits[0], atol=1e-4, rtol=1e-4)
            assert drafts.tokens[row].tolist() == alone_drafts.tokens[0].tolist()
        start = ends
        assert together.lengths == ends


def test_packed_training_blocks_equal_decoded_blocks():
    """The same forward trains many packed blocks and decodes one."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, markov_head_type="rnn")
    binding = drafter.bind(target)
    ids = torch.randint(4, VOCAB, (1, 20))
    features = context_of(target, drafter, ids.tolist())
    anchors = torch.tensor([[4, 9, 13]])
    blocks = make_blocks(
        ids,
        torch.ones(1, 20, dtype=torch.bool),
        anchors=anchors,
        keep=torch.ones(1, 3, dtype=torch.bool),
        block_size=4,
    )
    with torch.no_grad():
        packed = forward_blocks(drafter, binding, blocks, input_ids=ids, features=features)
    hidden = packed.hidden.view(3, 4, -1)
    for index, anchor in enumerate(anchors[0].tolist()):
        single, _ = propose_with_block(
            binding, features[:, :anchor], anchor_tokens=ids[:, anchor], cache=DSparkCache()
        )
        assert_close(hidden[index], single.hidden_states[0], atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients():
    target = tiny_target("llama")
    ids = torch.randint(4, VOCAB, (1, 12))
    gradients = []
    for checkpointing in (False, True):
        drafter = tiny_drafter(target).train()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        features = context_of(target, drafter, ids.tolist())
        blocks = make_blocks(
            ids,
            torch.ones(1, 12, dtype=torch.bool),
            anchors=torch.tensor([[3, 6]]),
            keep=torch.ones(1, 2, dtype=torch.bool),
            block_size=4,
        )
        outputs = forward_blocks(drafter, drafter.bind(target), blocks, input_ids=ids, features=features)
        outputs.hidden.pow(2).sum().backward()
        gradients.append(drafter.fc.weight.grad)
    assert_close(*gradients)


class TestHeads:
    """Against the formulas of the design, written out for one position at a time."""

    @torch.no_grad()
    def test_gated_and_rnn(self):
        target = tiny_target("llama")
        hidden, previous = torch.randn(6, 32), torch.randint(0, VOCAB, (6,))
        for kind in ("gated", "rnn"):
            drafter = tiny_drafter(target, markov_head_type=kind)
            head = drafter.markov_head
            state, expected_state = None, torch.zeros(8)
            for position in range(6):
                latent, state = head.step(head.embed(previous[position]), hidden[position], state)
                w1 = head.markov_w1.weight[previous[position]]
                if kind == "gated":
                    weight, bias = head.gate_proj.weight, head.gate_proj.bias
                    gate = 1 / (1 + torch.exp(-(weight @ torch.cat([hidden[position], w1]) + bias)))
                    expected = gate * w1
                else:
                    weight, bias = head.joint_proj.weight, head.joint_proj.bias
                    g, c, o = (weight @ torch.cat([expected_state, w1, hidden[position]]) + bias).split(8)
                    g = 1 / (1 + torch.exp(-g))
                    expected_state = g * expected_state + (1 - g) * torch.tanh(c)
                    expected = torch.tanh(o)
                assert_close(latent, expected, atol=1e-5, rtol=1e-5)
                assert_close(head.bias(latent), head.markov_w2.weight @ expected, atol=1e-5, rtol=1e-5)

    def test_confidence_does_not_see_the_drafted_token(self):
        """Changing the token of position k leaves the confidences up to k as they are, and changes later ones."""
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        features = context_of(target, drafter, [[5, 6, 7]])
        results = []
        for forced in (10, 20):

            def processor(drafts, scores, forced=forced):
                if drafts.shape[1] == 2:  # position 2
                    scores = torch.full_like(scores, -torch.inf)
                    scores[:, forced] = 0.0
                return scores

            results.append(
                drafter.propose(
                    drafter.bind(target),
                    features,
                    anchor_tokens=torch.tensor([8]),
                    cache=DSparkCache(),
                    sampling=DraftSampling(processor=processor, temperature=None),
                )
            )
        first, second = results
        assert first.tokens[0, 2] != second.tokens[0, 2]
        assert torch.equal(first.confidence_logits[:, :3], second.confidence_logits[:, :3])
        assert not torch.equal(first.confidence_logits[:, 3:], second.confidence_logits[:, 3:])

    def test_temperatures(self):
        logits = torch.tensor([[2.0, -1.0, 0.5]])
        assert_close(
            calibrated_confidence(logits, [1.0, 2.0, 4.0, 8.0]), torch.sigmoid(torch.tensor([[2.0, -0.5, 0.125]]))
        )
        assert_close(calibrated_confidence(logits, None), torch.sigmoid(logits))


class TestBorrowing:
    def test_layer_ids(self):
        assert hidden_state_indices([-1, 0, 3]) == [0, 1, 4]

    @pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "gpt2"])
    @pytest.mark.parametrize("tie", [True, False])
    def test_embedding_and_head_are_the_targets_own(self, family, tie):
        """The embedding equals the first hidden state, and the head reproduces the target's logits."""
        target = tiny_target(family, tie_word_embeddings=tie)
        drafter = tiny_drafter(target)
        binding = drafter.bind(target)
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            outputs = target(ids, output_hidden_states=True)
        if family != "gpt2":  # GPT-2 adds its position embedding first
            assert_close(binding.embed(ids, like=drafter.norm.weight), outputs.hidden_states[0])
        assert_close(binding.target_logits(outputs.hidden_states[-1]), outputs.logits, atol=1e-5, rtol=1e-5)

    def test_soft_capping(self):
        """The base logits are capped as the target's are; the bias is added after."""
        target = tiny_target("gemma2", final_logit_softcapping=2.0)
        drafter = tiny_drafter(target, draft_token_ids=[3, 9, 27])
        with torch.no_grad():
            outputs = target(torch.tensor([[5, 6]]), output_hidden_states=True)
            logits = drafter.bind(target).draft_logits(outputs.hidden_states[-1])
        assert_close(logits, outputs.logits[..., [3, 9, 27]], atol=1e-5, rtol=1e-5)
        assert outputs.logits.abs().max() <= 2.0

    def test_rows_of_a_reduced_vocabulary(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target, draft_token_ids=[1, 5, 60])
        hidden = torch.randn(2, 32)
        binding = drafter.bind(target)
        with torch.no_grad():
            assert_close(binding.draft_logits(hidden), target.lm_head(hidden)[:, [1, 5, 60]])
            full = drafter.to_target_logits(torch.tensor([[1.0, 2.0, 3.0]]))
        assert torch.isfinite(full).nonzero()[:, 1].tolist() == [1, 5, 60]
        assert drafter.to_target_ids(torch.tensor([0, 1, 2])).tolist() == [1, 5, 60]

    def test_heads_that_are_not_plain_linear_layers(self, caplog):
        """Quantised or wrapped heads are called, not unwrapped; the reduced vocabulary is cut from their output."""

        class Wrapped(torch.nn.Linear):
            def forward(self, hidden):
                return super().forward(hidden) * 2

        target = tiny_target("llama")
        head = Wrapped(32, VOCAB, bias=False)
        head.weight = target.lm_head.weight
        target.lm_head = head
        drafter = tiny_drafter(target, draft_token_ids=[1, 5, 60])
        hidden = torch.randn(2, 32)
        with torch.no_grad():
            logits = drafter.bind(target).draft_logits(hidden)
            assert_close(logits, head(hidden)[:, [1, 5, 60]])

    def test_text_configs_inside_a_larger_config(self):
        """A target whose config nests a `text_config` (as vision-language models do)."""
        from transformers import Gemma3Config, Gemma3ForConditionalGeneration

        text = tiny_target("gemma3").config.to_dict()
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        target = Gemma3ForConditionalGeneration(config).eval()
        binding = TargetBinding(target, tiny_drafter(tiny_target("gemma3")).config)
        assert binding.lm_head is target.get_output_embeddings()


def test_accept_greedy_by_hand():
    target = torch.full((3, 4, 6), -1.0)
    for row, tokens in enumerate([[1, 2, 3, 4], [1, 2, 3, 4], [5, 0, 0, 0]]):
        for position, token in enumerate(tokens):
            target[row, position, token] = 1.0
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [5, 0, 0]])
    verdict = accept_greedy(drafts, target.argmax(dim=-1), torch.tensor([3, 3, 1]))
    assert verdict.num_accepted.tolist() == [3, 1, 1]
    assert verdict.next_tokens.tolist() == [4, 2, 0]


def test_target_forward_is_the_plain_one(golden_target):
    """The fixture's recorded greedy text, with the installed Transformers and no drafter."""
    golden = json.loads((FIXTURES / "a_vanilla_confM" / "golden.json").read_text())
    for name, prompt in golden["prompts"].items():
        output = golden_target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert output[0].tolist() == golden["target_greedy"][name]


def test_a_fresh_sequential_head_adds_nothing():
    """W2 is zero, so training starts from the plain backbone; W1 is not, or nothing could be learnt."""
    drafter = DSparkModel(tiny_drafter(tiny_target("llama")).config)
    assert not drafter.markov_head.markov_w2.weight.any()
    assert drafter.markov_head.markov_w1.weight.any()
