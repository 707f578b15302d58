"""Every number of the DeepSpec fixture: decoding round by round, thresholds, training loss and gradients (fp32).

Tolerances are those of the fixture: 2e-4 for features, hidden states and logits, 1e-4 for confidence logits, 1e-5 for
losses and gradients, 1e-3 relative for gradient norms; integers are equal.
"""

import json

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import training.objective.attention  # noqa: F401 - registers `dspark_chunked`
from modeling_dspark.model_cache import DSparkCache
from modeling_dspark.target_binding import TargetBinding, tapped_features
from tests.builders import propose_with_block
from tests.conftest import FIXTURES
from training.data.blocks import make_blocks
from training.objective.forward import forward_blocks
from training.run.arguments import DSparkTrainingArguments
from training.run.trainer import DSparkTrainer


FOLDER = FIXTURES / "a_vanilla_confM"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
ARRAYS = np.load(FOLDER / "golden.npz")
TRAIN = json.loads((FOLDER / "train_golden.json").read_text())
TRAIN_ARRAYS = np.load(FOLDER / "train_golden.npz")
RUNS = list(GOLDEN["runs"])


def features_of(target, drafter, ids):
    with torch.no_grad():
        outputs = target(torch.tensor([ids]), output_hidden_states=True)
    return tapped_features(outputs.hidden_states, drafter.config.target_layer_ids)


def array(name):
    return torch.from_numpy(ARRAYS[name])


@pytest.mark.parametrize("run", RUNS)
def test_rounds(golden_target, golden_drafter, run):
    """Tokens, hidden states, base and corrected logits and confidences of each recorded round."""
    record = GOLDEN["runs"][run]
    features = features_of(golden_target, golden_drafter, record["output_ids"])
    binding, cache, done = golden_drafter.bind(golden_target), DSparkCache(), 0
    for index, round_ in enumerate(record["rounds"]):
        start = round_["start"]
        assert (start - done, cache.lengths[0]) == (round_["num_new_context"], round_["draft_cache_len_before"])
        anchor = torch.tensor([round_["anchor_token"]])
        new = features[:, done:start]
        block, proposal = propose_with_block(binding, new, anchor_tokens=anchor, cache=cache)
        assert cache.lengths[0] == round_["draft_cache_len_after"]
        assert proposal.tokens[0].tolist() == round_["sampled_tokens"]
        expected = torch.tensor(round_["confidence_logits"])
        assert_close(proposal.confidence_logits[0], expected, atol=1e-4, rtol=0)
        _check_arrays(golden_drafter, block, proposal, f"{run}.round{index}", round_["anchor_token"])
        if f"{run}.round{index}.ctx" in ARRAYS:
            assert_close(new[0], array(f"{run}.round{index}.ctx"), atol=2e-4, rtol=0)
        done = start


def _check_arrays(drafter, block, proposal, key, anchor):
    if f"{key}.hidden" not in ARRAYS:
        return
    assert_close(block.hidden_states[0], array(f"{key}.hidden"), atol=2e-4, rtol=0)
    if f"{key}.base" in ARRAYS:
        assert_close(block.base_logits[0], array(f"{key}.base"), atol=2e-4, rtol=0)
    previous = torch.cat([torch.tensor([anchor]), proposal.tokens[0, :-1]])
    step = drafter.head_step(block.hidden_states[0], block.base_logits[0], previous)
    assert_close(step.logits, array(f"{key}.corrected"), atol=2e-4, rtol=0)


def test_teacher_forced_heads(golden_drafter):
    hidden, base = array("seen_t0.round0.hidden"), array("seen_t0.round0.base")
    step = golden_drafter.head_step(hidden, base, array("teacher_forced.prev_token_ids"))
    assert_close(step.logits, array("teacher_forced.corrected"), atol=2e-4, rtol=0)
    assert_close(step.confidence_logits, array("teacher_forced.conf"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("run", RUNS)
def test_generate(golden_target, golden_drafter, run):
    """Output, accepted lengths and verified drafts of `generate`; the last round may verify fewer, since drafts never
    run past the length limit or a stop token (the peer drafts and drops them)."""
    record = GOLDEN["runs"][run]
    settings = {"num_assistant_tokens_schedule": "fixed"}
    if record["confidence_threshold"] > 0:
        settings = {"assistant_confidence_threshold": record["confidence_threshold"]}
    if record["stop_token_ids"]:
        settings["eos_token_id"] = record["stop_token_ids"]
    prompt = torch.tensor([GOLDEN["prompts"][record["prompt"]]])
    output = golden_target.generate(
        prompt,
        assistant_model=golden_drafter,
        max_new_tokens=record["max_new_tokens"],
        do_sample=False,
        **settings,
    )
    assert output[0].tolist() == record["output_ids"]
    run_ = golden_drafter.last_run
    left = record["max_new_tokens"] - 1
    for index, new in enumerate(run_.new_tokens):
        expected = record["acceptance_lengths"][index]
        proposed = record["proposal_lengths"][index]
        if record["stop_token_ids"] is None:
            assert new == min(expected, left)
            assert run_.verified[index] == min(proposed, left - 1)
        else:
            assert new == expected
        left -= new
    assert left == 0 or record["stop_token_ids"] is not None
    assert run_.rounds == len(run_.new_tokens) <= record["verify_count"]


@pytest.fixture
def training_batch():
    def tensor(name):
        return torch.from_numpy(TRAIN_ARRAYS[name])

    anchors, keep = tensor("anchor_positions"), tensor("block_keep_mask")
    return {
        "input_ids": tensor("input_ids"),
        "response_mask": tensor("loss_mask").bool(),
        "anchors": anchors,
        "keep": keep,
        "features": tensor("target_hidden_states"),
        "last_hidden": tensor("target_last_hidden_states"),
    }


def test_training_forward(golden_target, golden_drafter, training_batch):
    batch = training_batch
    binding = TargetBinding(golden_target, golden_drafter.config)
    blocks = make_blocks(
        batch["input_ids"], batch["response_mask"], anchors=batch["anchors"], keep=batch["keep"], block_size=5
    )
    supervised = torch.from_numpy(TRAIN_ARRAYS["eval_mask"])
    assert torch.equal(blocks.supervised, supervised)
    assert torch.equal(blocks.labels[supervised], torch.from_numpy(TRAIN_ARRAYS["target_ids"])[supervised])
    outputs = forward_blocks(golden_drafter, binding, blocks, input_ids=batch["input_ids"], features=batch["features"])
    logits = binding.draft_logits(outputs.hidden) + golden_drafter.markov_head.bias(outputs.latent)
    expected = torch.from_numpy(TRAIN_ARRAYS["draft_logits"])[supervised]
    assert_close(logits, expected, atol=2e-4, rtol=0)
    confidence = torch.from_numpy(TRAIN_ARRAYS["confidence_pred"])[supervised]
    assert_close(outputs.confidence_logits, confidence, atol=1e-4, rtol=0)
    aligned = torch.from_numpy(TRAIN_ARRAYS["aligned_target_logits"])[supervised]
    rows = torch.arange(2)[:, None, None].expand_as(supervised)[supervised]
    sources = blocks.label_sources[supervised]
    assert_close(binding.target_logits(batch["last_hidden"][rows, sources]), aligned, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", list(TRAIN["losses"]))
@pytest.mark.parametrize("attention", ["sdpa", "eager", "dspark_chunked"])
def test_training_loss_and_gradients(golden_target, training_batch, tmp_path, case, attention):
    from modeling_dspark import DSparkModel

    drafter = DSparkModel.from_pretrained(FOLDER / "draft").train()
    drafter.set_attn_implementation(attention)
    expected = TRAIN["losses"][case]
    arguments = DSparkTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        ce_weight=expected["ce_loss_alpha"],
        l1_weight=expected["l1_loss_alpha"],
        confidence_weight=expected["confidence_head_alpha"],
        loss_decay=expected["loss_decay_gamma"],
    )
    trainer = DSparkTrainer(model=drafter, args=arguments, target=golden_target)
    logits = golden_target.lm_head(training_batch["last_hidden"])
    batch = training_batch | {"logsumexp": logits.logsumexp(dim=-1)}
    loss = trainer.compute_loss(drafter, batch)
    assert float(loss.detach()) == pytest.approx(expected["loss"], abs=1e-5)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    assert set(TRAIN["grad_norms"][case]) == set(gradients)
    for name, norm in TRAIN["grad_norms"][case].items():
        assert float(gradients[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-6), name
    if case == "default":
        stored = [name for name in TRAIN_ARRAYS if name.startswith("grad.")]
        assert len(stored) == 13
        for name in stored:
            assert_close(gradients[name[5:]], torch.from_numpy(TRAIN_ARRAYS[name]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("broken", "message"),
    [("missing_tensor", "markov_head.markov_w2.weight"), ("mask_token_id_out_of_range", "mask_token_id.*199")],
)
def test_broken_checkpoints_are_refused(broken, message):
    from modeling_dspark import DSparkModel

    with pytest.raises(ValueError, match=message):
        DSparkModel.from_pretrained(FIXTURES / "broken" / broken)
