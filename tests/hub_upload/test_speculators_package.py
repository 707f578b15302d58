"""A checkpoint that `convert` writes in speculators' format loads in the package of that name, with the same logits.

The package is an extra of its own (`pip install -e '.[test,speculators]'`), since it asks for `transformers<=5.19`.
"""

import pytest
import torch
from torch.testing import assert_close

from hub_upload.convert import convert, plan_conversion
from modeling_dspark import DSparkModel
from modeling_dspark.model_cache import DSparkCache
from modeling_dspark.target_binding import tapped_features
from tests.builders import VOCAB, tiny_drafter, tiny_target


speculators = pytest.importorskip("speculators", reason="the package `speculators` is not installed")

IDS = [2, 3, 5, 6, 9, 14, 20, 33, 47, 60]
ANCHOR = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    target = tiny_target("qwen3")
    target.save_pretrained(folder := tmp_path_factory.mktemp("target"))
    return target, str(folder)


def load(folder):
    from speculators import SpeculatorModelConfig
    from speculators.models.dspark import DSparkDraftModel

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the default is compiled
    return DSparkDraftModel.from_pretrained(folder, config=config).eval()


@torch.no_grad()
def their_block(model, ids, features, monkeypatch):
    """Logits and confidence logits `[Q, ...]` of the block at `ANCHOR`, by the package's own forward and heads."""
    from speculators.models.dflash import core

    anchors = (torch.tensor([ANCHOR]), torch.tensor([True]))
    monkeypatch.setattr(core, "select_anchors", lambda *_: anchors)
    hidden, logits, *_ = model._backbone_forward(
        features, ids, torch.ones_like(ids), features[..., :32], torch.zeros_like(ids), max_anchors=1
    )
    tokens = ids[:, ANCHOR : ANCHOR + model.block_size]
    if not model.config.sample_from_anchor:
        tokens = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
    logits, read = logits[0], hidden[0]
    if model.markov_head is not None:
        bias = model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden)
        logits = logits + bias[0]
        if model.config.confidence_head_with_markov:
            read = torch.cat([read, model.markov_head.prev_embeddings(tokens)[0]], dim=-1)
    return logits, None if model.confidence_head is None else model.confidence_head(read)


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
@pytest.mark.parametrize(
    "fields",
    [
        {"markov_head_type": "vanilla"},
        {"markov_head_type": "gated", "sample_from_anchor": False},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    ],
    ids=["vanilla", "gated-older", "rnn", "rnn-older", "none"],
)
def test_equal_logits(target, tmp_path, monkeypatch, ids, fields):
    target, name = target
    ours = tiny_drafter(target, draft_token_ids=ids, **fields)
    ours.save_pretrained(tmp_path / "ours")
    plan = plan_conversion(str(tmp_path / "ours"), "speculators", target=name)
    convert(plan, tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    prompt = torch.randint(4, VOCAB, (1, ANCHOR + 1))
    with torch.no_grad():
        states = target(prompt[:, :ANCHOR], output_hidden_states=True).hidden_states
    features = tapped_features(states, ours.config.target_layer_ids)
    proposal = ours.propose(
        ours.bind(target), features, anchor_tokens=prompt[:, ANCHOR], cache=DSparkCache(), do_sample=True
    )
    drafted = torch.cat([prompt, proposal.tokens, torch.zeros(1, 2, dtype=torch.long)], dim=1)
    padded = torch.nn.functional.pad(features, (0, 0, 0, drafted.shape[1] - ANCHOR))
    logits, confidence = their_block(model, drafted, padded, monkeypatch)
    first = ours.config.num_block_positions - ours.config.block_size
    assert_close(logits[first:], proposal.logits[0], atol=2e-4, rtol=1e-4)
    if confidence is not None:
        assert_close(confidence[first:], proposal.confidence_logits[0], atol=1e-4, rtol=1e-4)
    # And back: what the package saves, we read.
    model.save_pretrained(tmp_path / "again")
    again = DSparkModel.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.state_dict().items())
