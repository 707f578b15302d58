"""Anchors, the block mask and the chunked attention, against plain double loops."""

import pytest
import torch
from torch.testing import assert_close

from tests.builders import VOCAB, tiny_drafter, tiny_target
from training.data.blocks import (
    anchor_candidates,
    block_inputs,
    block_mask,
    block_positions,
    flex_block_mask,
    make_blocks,
    sample_anchors,
)
from training.data.features import compute_features
from training.objective.attention import chunked_attention
from training.objective.forward import forward_blocks


def random_blocks(seed=0, rows=3, length=17, num_blocks=4, block_size=5):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, VOCAB, (rows, length), generator=generator)
    response_mask = torch.rand(rows, length, generator=generator) > 0.25
    anchors = torch.randint(0, length, (rows, num_blocks), generator=generator).sort(dim=1).values
    keep = torch.rand(rows, num_blocks, generator=generator) > 0.2
    blocks = make_blocks(input_ids, response_mask, anchors=anchors * keep, keep=keep, block_size=block_size)
    return input_ids, response_mask, blocks


@pytest.mark.parametrize("seed", range(4))
def test_labels_and_supervision_by_double_loop(seed):
    input_ids, response_mask, blocks = random_blocks(seed)
    length = input_ids.shape[1]
    for row in range(3):
        for block in range(4):
            anchor, alive = int(blocks.anchors[row, block]), bool(blocks.keep[row, block])
            for draft_position in range(5):
                position = anchor + 1 + draft_position
                alive = alive and position < length and bool(response_mask[row, position])
                assert bool(blocks.supervised[row, block, draft_position]) == alive
                if alive:
                    assert blocks.labels[row, block, draft_position] == input_ids[row, position]
                    assert blocks.previous[row, block, draft_position] == input_ids[row, position - 1]


@pytest.mark.parametrize("seed", range(4))
def test_mask_by_double_loop(seed):
    """A block query sees context before its anchor, and its own block, and nothing else."""
    input_ids, _, blocks = random_blocks(seed)
    mask = block_mask(blocks, input_ids.shape[1], 5)
    length, block_size = input_ids.shape[1], 5
    assert mask.shape == (3, 1, 20, length + 20)
    for row in range(3):
        for query in range(20):
            anchor = int(blocks.anchors[row, query // block_size])
            for key in range(length + 20):
                own = key >= length and (key - length) // block_size == query // block_size
                assert bool(mask[row, 0, query, key]) == (own or (key < length and key < anchor))


@pytest.mark.parametrize("seed", range(4))
def test_the_rule_of_flex_attention_is_the_mask(seed):
    from torch.nn.attention.flex_attention import create_mask

    _, _, blocks = random_blocks(seed)
    made = flex_block_mask(blocks, 17, 5)
    dense = create_mask(made.mask_mod, 3, 1, 20, 17 + 20, device="cpu")
    assert torch.equal(dense, block_mask(blocks, 17, 5))
    assert made.shape == (3, 1, 20, 17 + 20)


@pytest.mark.slow
def test_flex_attention_equals_dense_attention():
    """On a CPU it has no gradient, so only the forward is compared."""
    input_ids, response_mask, blocks = random_blocks()
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=5)
    binding = drafter.bind(target)
    features = compute_features(
        target, binding, input_ids, target_layer_ids=drafter.config.target_layer_ids, needed=response_mask
    ).features
    with torch.no_grad():
        dense = forward_blocks(drafter, binding, blocks, input_ids=input_ids, features=features)
        drafter.set_attn_implementation("flex_attention")
        flex = forward_blocks(drafter, binding, blocks, input_ids=input_ids, features=features)
    assert_close(flex.hidden, dense.hidden, atol=1e-5, rtol=1e-5)
    assert_close(flex.confidence_logits, dense.confidence_logits, atol=1e-5, rtol=1e-5)


def test_positions_and_tokens():
    input_ids, _, blocks = random_blocks()
    positions = block_positions(blocks, 17, 5)
    assert positions[0, :17].tolist() == list(range(17))
    anchor = int(blocks.anchors[0, 1])
    assert positions[0, 17 + 5 : 17 + 10].tolist() == list(range(anchor, anchor + 5))
    tokens = block_inputs(blocks, input_ids, 3, 5).view(3, 4, 5)
    assert (tokens[..., 1:] == 3).all()
    expected = torch.where(blocks.keep, input_ids.gather(1, blocks.anchors), 3)
    assert torch.equal(tokens[..., 0], expected)


def test_anchors():
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert anchor_candidates(mask[None])[0].nonzero().flatten().tolist() == [2, 3, 6, 7, 8]
    everything = sample_anchors(mask, 100)
    assert everything.tolist() == [2, 3, 6, 7, 8]
    some = [sample_anchors(mask, 3, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(20)]
    assert all(chosen == sorted(set(chosen)) and len(chosen) == 3 for chosen in some)
    assert len({tuple(chosen) for chosen in some}) > 3
    assert some[4] == sample_anchors(mask, 3, generator=torch.Generator().manual_seed(4)).tolist()
    assert sample_anchors(torch.zeros(5, dtype=torch.bool), 3).tolist() == []


@pytest.mark.parametrize("num_blocks", [1, 16, 17, 40])
def test_chunked_attention_equals_dense_attention(num_blocks):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    drafter = tiny_drafter(tiny_target("llama"))
    module = drafter.layers[0].self_attn
    block_size, length = drafter.config.block_size, 30
    input_ids = torch.randint(4, VOCAB, (2, length))
    anchors = torch.randint(1, length - 1, (2, num_blocks)).sort(dim=1).values
    keep = torch.ones(2, num_blocks, dtype=torch.bool)
    blocks = make_blocks(
        input_ids, torch.ones(2, length, dtype=torch.bool), anchors=anchors, keep=keep, block_size=block_size
    )
    mask = block_mask(blocks, length, block_size)
    queries = torch.randn(2, 4, num_blocks * block_size, 8)
    keys, values = torch.randn(2, 2, 2, length + num_blocks * block_size, 8)
    kwargs = {"dropout": 0.0, "scaling": 0.3, "is_causal": False}
    ours, _ = chunked_attention(module, queries, keys, values, mask, **kwargs)
    dense, _ = sdpa_attention_forward(module, queries, keys, values, mask, **kwargs)
    assert_close(ours, dense, atol=1e-5, rtol=1e-5)
