"""Packed rows: every conversation is in them what it is alone."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from torch.testing import assert_close

from tests.builders import VOCAB, tiny_drafter, tiny_target, varied_target
from tests.training.test_pipeline import arguments, train_flags, workspace  # noqa: F401 - a fixture
from training.answers.regeneration import regenerate
from training.data.batches import ConversationDataset, collate
from training.data.blocks import block_mask, block_positions, flex_block_mask, make_blocks
from training.data.conversations import Conversation
from training.data.features import compute_features
from training.data.packing import check_packing, pack
from training.objective.attention import CHUNKED_ATTENTION
from training.objective.forward import forward_blocks
from training.run.arguments import DSparkTrainingArguments
from training.train import main


TAPS = [0, 2]
# Full and sliding attention, learned positions, experts, soft caps.
FAMILIES = ["llama", "mistral", "gemma3_mixed", "gpt2", "qwen3", "qwen3_moe", "phi3"]
CASES = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")] + [("gemma2", "eager")]


def dataset_of(lengths, num_anchors=3):
    generator = torch.Generator().manual_seed(0)
    conversations = [
        Conversation(tuple(torch.randint(4, VOCAB, (length,), generator=generator).tolist()), 2) for length in lengths
    ]
    return ConversationDataset(conversations, num_anchors=num_anchors, seed=0)


def blocks_of(batch, block_size=4):
    return make_blocks(
        batch["input_ids"],
        batch["response_mask"],
        anchors=batch["anchors"],
        keep=batch["keep"],
        block_size=block_size,
        starts=batch.get("starts"),
    )


def features_of(target, binding, batch):
    starts, needed = batch.get("starts"), batch["response_mask"]
    return compute_features(target, binding, batch["input_ids"], target_layer_ids=TAPS, needed=needed, starts=starts)


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_everything_once_and_are_not_too_long(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (12,), generator=generator).tolist()
    rows = pack(lengths, 25)
    assert sorted(index for row in rows for index in row) == list(range(12))
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert all(size <= 25 or len(row) == 1 for size, row in zip(sizes, rows, strict=True))
    # First fit: what is in a later row did not fit into an earlier one when it was placed.
    for late in range(1, len(rows)):
        for early in range(late):
            longer = [lengths[i] for i in rows[early] if (-lengths[i], i) < (-lengths[rows[late][0]], rows[late][0])]
            assert sum(longer) + lengths[rows[late][0]] > 25


def test_a_packed_batch_has_the_content_of_an_unpacked_one():
    items = [dataset_of([9, 14, 5, 7, 11])[index] for index in range(5)]
    batch = collate(items, packed_length=24)
    assert batch["input_ids"].shape == (2, 23)
    place = {index: (row, start) for index, row, start in ((1, 0, 0), (0, 0, 14), (4, 1, 0), (3, 1, 11), (2, 1, 18))}
    for index, (row, start) in place.items():
        conversation = items[index]["conversation"]
        part = slice(start, start + len(conversation.input_ids))
        assert tuple(batch["input_ids"][row, part].tolist()) == conversation.input_ids
        assert torch.equal(batch["response_mask"][row, part], conversation.response_mask)
        assert set(batch["starts"][row, part].tolist()) == {start}
        inside = batch["anchors"][row][batch["keep"][row] & (batch["starts"][row][batch["anchors"][row]] == start)]
        assert (inside - start).tolist() == items[index]["anchors"].tolist()
    assert int(batch["keep"].sum()) == sum(len(item["anchors"]) for item in items)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_features_of_packed_rows_are_those_of_single_forwards(family, attention):
    target = varied_target(family)
    target.set_attn_implementation(attention)
    drafter = tiny_drafter(target, target_layer_ids=TAPS)
    binding = drafter.bind(target)
    check_packing(target, binding, TAPS)
    items = [dataset_of([13, 9, 14, 5, 7])[index] for index in range(5)]
    batch = collate(items, packed_length=30)
    packed = features_of(target, binding, batch)
    compared = 0
    for item in items:
        single = features_of(target, binding, collate([item]))
        ids = torch.tensor(item["conversation"].input_ids)
        for row, start in {(r, int(s)) for r in range(2) for s in batch["starts"][r].unique()}:
            part = slice(start, start + len(ids))
            if torch.equal(batch["input_ids"][row, part], ids):
                compared += 1
                for name in ("features", "last_hidden", "logsumexp"):
                    one, other = getattr(packed, name)[row, part], getattr(single, name)[0]
                    assert_close(one, other, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert compared == 5


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "gpt_oss"])
def test_targets_that_mix_packed_conversations_are_refused(family):
    """Layers with a state; and a model that makes its masks without regard to positions (`gpt_oss` of Transformers 5.24)."""
    target = tiny_target(family)
    binding = tiny_drafter(target, target_layer_ids=TAPS).bind(target)
    with pytest.raises(ValueError, match=f"`packing`.*`{family}`.*Set `packing` to false"):
        check_packing(target, binding, TAPS)


def test_half_precision_is_no_leak():
    target = varied_target("llama").to(torch.bfloat16)
    check_packing(target, tiny_drafter(target, target_layer_ids=TAPS).bind(target), TAPS)


def test_mask_and_positions_by_double_loop():
    """A block sees what is before its anchor in its own conversation, and itself; positions count from its start."""
    batch = collate([dataset_of([9, 14, 5, 7])[index] for index in range(4)], packed_length=24)
    blocks = blocks_of(batch)
    mask, positions = block_mask(blocks, 23, 4), block_positions(blocks, 23, 4)
    length = batch["input_ids"].shape[1]
    rule = flex_block_mask(blocks, 23, 4)
    assert torch.equal(create_mask(rule.mask_mod, len(mask), 1, *mask.shape[2:], device="cpu"), mask)
    for row in range(mask.shape[0]):
        for query in range(mask.shape[2]):
            anchor = int(blocks.anchors[row, query // 4])
            start = int(batch["starts"][row, anchor])
            assert int(positions[row, length + query]) == anchor - start + query % 4
            for key in range(mask.shape[3]):
                own = key >= length and (key - length) // 4 == query // 4
                assert bool(mask[row, 0, query, key]) == (own or (key < length and start <= key < anchor))
        assert positions[row, :length].tolist() == [t - int(batch["starts"][row, t]) for t in range(length)]


def test_blocks_end_where_their_conversation_ends():
    """Also where the next one begins with an answer, as one given as `messages` may."""
    data = [Conversation((5, 6, 7, 8), 1), Conversation((9, 10, 11), 0)]
    items = [{"conversation": c, "anchors": torch.tensor([1]), "features": None} for c in data]
    blocks = blocks_of(collate(items, packed_length=7))
    assert blocks.supervised[0].tolist() == [[True, True, False, False], [True, False, False, False]]
    assert blocks.labels[0, :, :2].tolist() == [[7, 8], [11, 0]]


@pytest.mark.parametrize("attention", ["sdpa", CHUNKED_ATTENTION])
def test_the_drafter_sees_of_a_packed_row_what_it_sees_of_a_single_one(attention):
    """Hidden states of all supervised positions, packed and alone, with more blocks than a chunk holds."""
    target = varied_target("llama")
    drafter = tiny_drafter(target, target_layer_ids=TAPS)
    drafter.set_attn_implementation(attention)
    binding = drafter.bind(target)
    items = [dataset_of([33, 29, 24, 25, 37], num_anchors=20)[index] for index in range(5)]

    def states(batch):
        blocks = blocks_of(batch)
        features = features_of(target, binding, batch).features
        with torch.no_grad():
            outputs = forward_blocks(drafter, binding, blocks, input_ids=batch["input_ids"], features=features)
        return outputs.hidden, outputs.confidence_logits

    hidden, confidence = states(collate(items, packed_length=100))
    order = [index for row in pack([33, 29, 24, 25, 37], 100) for index in row]
    singles = [states(collate([items[index]])) for index in order]
    assert_close(hidden, torch.cat([single[0] for single in singles]), atol=1e-4, rtol=1e-4)
    assert_close(confidence, torch.cat([single[1] for single in singles]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cached", [False, True], ids=["in the step", "cached"])
def test_training_with_packing_equals_training_without(workspace, cached):  # noqa: F811 - the fixture
    regenerate(arguments(workspace, temperatures=[0.0]))
    shared = {"max_steps": 2, "optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1}
    shared |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 8}
    if cached:
        shared["feature_cache"] = workspace / "features"
    plain = main(train_flags(workspace, "plain", **shared))
    packed = main(train_flags(workspace, "packed", packing="true", packed_length=40, **shared))
    for (name, one), (_, other) in zip(plain.state_dict().items(), packed.state_dict().items(), strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


def test_wrong_length():
    with pytest.raises(ValueError, match="`packed_length`"):
        DSparkTrainingArguments(packed_length=0, report_to="none", use_cpu=True)
