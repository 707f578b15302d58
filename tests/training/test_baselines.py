"""Baselines of a study: an autoregressive drafter, DFlash's two layouts, and the replay that measures all of them."""

import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.baselines.autoregressive import EagleConfig, EagleDrafter
from benchmarks.baselines.replay import kept_at_every_anchor, replay, replay_prompt_lookup
from modeling_dspark import DSparkConfig, DSparkModel
from modeling_dspark.model_backbone import rotate
from modeling_dspark.model_cache import DSparkCache, RaggedCache
from tests.builders import VOCAB, tiny_drafter, tiny_target
from training.data.blocks import make_blocks
from training.data.conversations import Conversation
from training.data.features import compute_features
from training.objective.forward import forward_blocks
from training.run.initialization import warm_start


LAYERS = [0, 2]


def eagle(target, **fields):
    like = tiny_drafter(target, target_layer_ids=LAYERS).config.to_dict()
    like |= {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False, "block_size": 4}
    for name in ("model_type", "confidence_head_with_markov", "default_num_assistant_tokens_schedule", "auto_map"):
        like.pop(name, None)
    torch.manual_seed(3)
    return EagleDrafter(EagleConfig(**(like | {"confidence_head_with_markov": False} | fields))).eval()


def features_of(target, drafter, ids):
    binding = drafter.bind(target)
    made = compute_features(
        target, binding, ids, target_layer_ids=LAYERS, needed=torch.zeros_like(ids, dtype=torch.bool)
    )
    return binding, made.features


@torch.no_grad()
def naive_states(drafter, binding, ids, features, anchor):
    """One block, one token after the other, each time with a whole causal pass over all that came before."""
    layer, attention = drafter.layers[0], drafter.layers[0].self_attn
    states = list(drafter.fc(features[0, :anchor]))
    tokens = ids[0, 1 : anchor + 1].tolist()
    found = []
    for position in range(drafter.config.block_size):
        embedded = drafter.embed_norm(binding.embed(torch.tensor(tokens), like=drafter.norm.weight))
        inputs = drafter.in_proj(torch.cat([embedded, drafter.hidden_norm(torch.stack(states))], dim=-1))[None]
        cos_sin = drafter.rotary_emb(inputs, torch.arange(inputs.shape[1])[None])
        normed = layer.input_layernorm(inputs)
        heads = (-1, attention.head_dim)
        queries = rotate(attention.q_norm(attention.q_proj(normed).unflatten(-1, heads)), *cos_sin).transpose(1, 2)
        keys = rotate(attention.k_norm(attention.k_proj(normed).unflatten(-1, heads)), *cos_sin).transpose(1, 2)
        values = attention.v_proj(normed).unflatten(-1, heads).transpose(1, 2)
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = (queries @ keys.transpose(2, 3) * attention.scaling).tril()
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
        output = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        hidden = inputs + attention.o_proj(output)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        found.append(drafter.norm(hidden[0, -1]))
        states.append(hidden[0, -1])
        tokens.append(int(ids[0, anchor + 1 + position]))
    return torch.stack(found)


def test_the_autoregressive_drafter_is_a_causal_layer_run_once_a_token():
    target = tiny_target("llama")
    drafter = eagle(target)
    ids = torch.randint(4, VOCAB, (1, 20))
    binding, features = features_of(target, drafter, ids)
    anchors = torch.tensor([[2, 3, 9, 14]])
    everything = torch.ones_like(ids, dtype=torch.bool)
    blocks = make_blocks(ids, everything, anchors=anchors, keep=torch.ones_like(anchors).bool(), block_size=4)
    with torch.no_grad():
        hidden = drafter(binding, blocks, input_ids=ids, features=features).hidden.view(4, 4, -1)
    for row, anchor in enumerate(anchors[0].tolist()):
        assert_close(hidden[row], naive_states(drafter, binding, ids, features, anchor), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_it_drafts_as_it_was_trained():
    """Rounds with a cache against whole causal passes over the drafts, whose tokens they must be."""
    target = tiny_target("llama")
    drafter = eagle(target)
    ids = torch.randint(4, VOCAB, (1, 20))
    binding, features = features_of(target, drafter, ids)
    cache, known = RaggedCache(1), 0
    for anchor in (3, 4, 9):  # what a round drafted is overwritten by the next
        new = slice(known, anchor)
        drafts = drafter.draft(binding, cache, ids[:, known + 1 : anchor + 1], features[:, new], num_tokens=4)
        known = cache.lengths[0]
        assert known == anchor
        text = torch.cat([ids[:, : anchor + 1], drafts], dim=1)
        states = naive_states(drafter, binding, text, features, anchor)
        assert drafts[0].tolist() == drafter.to_target_ids(binding.draft_logits(states).argmax(-1)).tolist()


@torch.no_grad()
def test_it_starts_from_a_target_layer_and_the_sum_of_state_and_embedding():
    target = tiny_target("llama")
    drafter = eagle(target)
    warm_start(drafter, target, [3])
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, target.model.layers[3].mlp.up_proj.weight)
    states, embedded = torch.randn(2, 3, 32)
    assert_close(drafter.in_proj(torch.cat([embedded, states], dim=-1)), embedded + states)
    features = torch.randn(3, 64)
    assert_close(drafter.fc(features), features[:, 32:])  # the last tapped layer


def test_packed_conversations_are_kept_apart():
    """Of two conversations in a row, the second has the hidden states that it has alone."""
    target = tiny_target("llama")
    drafter = eagle(target)
    ids = torch.randint(4, VOCAB, (1, 21))
    binding = drafter.bind(target)
    starts = torch.tensor([[0] * 9 + [9] * 12])
    anchors, everything = torch.tensor([[12, 15]]), torch.ones_like(ids, dtype=torch.bool)
    features = torch.cat([features_of(target, drafter, part)[1] for part in (ids[:, :9], ids[:, 9:])], dim=1)
    keep = torch.ones_like(anchors).bool()
    packed = make_blocks(ids, everything, anchors=anchors, keep=keep, block_size=4, starts=starts)
    alone = make_blocks(ids[:, 9:], everything[:, 9:], anchors=anchors - 9, keep=keep, block_size=4)
    hidden = drafter(binding, packed, input_ids=ids, features=features).hidden
    expected = drafter(binding, alone, input_ids=ids[:, 9:], features=features[:, 9:]).hidden
    assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_it_is_saved_and_loaded(tmp_path):
    target = tiny_target("llama")
    drafter = eagle(target)
    drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    again = EagleDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(drafter.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="num_hidden_layers=1"):
        EagleConfig(
            num_hidden_layers=2, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False
        )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"markov_head_type": "rnn"},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"markov_rank": 0, "confidence_head_with_markov": False, "sample_from_anchor": False},
        {"sample_from_anchor": False, "draft_token_ids": list(range(2, 13))},
        {"block_size": 1},
    ],
    ids=["vanilla", "rnn", "dflash", "dflash-old", "old-reduced", "one"],
)
def test_replay_gives_the_rounds_of_the_decoding_loop(fields):
    """The target has few tokens that it says, so that random drafts are kept now and then."""
    target = tiny_target("llama")
    with torch.no_grad():
        weight = target.get_output_embeddings().weight
        weight[:10].mul_(0.01), weight[12:].mul_(0.01)
    drafter = tiny_drafter(target, **fields)
    rounds, conversations = [], []
    for seed in range(4):
        prompt = torch.randint(4, VOCAB, (1, 5 + seed), generator=torch.Generator().manual_seed(seed))
        call = {"max_new_tokens": 40, "do_sample": False, "num_assistant_tokens_schedule": "fixed"}
        text = target.generate(prompt, assistant_model=drafter, **call)
        conversations.append(Conversation(tuple(text[0].tolist()), prompt.shape[1], 0.0))
        run = drafter.last_run
        rounds += zip(run.accepted, run.new_tokens, strict=True)
    found = replay(drafter, target, conversations)
    assert sum(found.accepted) > 8
    # The loop makes the last token of a text that is cut itself; the replay lets a draft stand for it.
    kept = [min(accepted, tokens - 1) for accepted, tokens in rounds]
    assert [
        min(accepted, tokens - 1) for accepted, tokens in zip(found.accepted, found.new_tokens, strict=True)
    ] == kept
    assert found.new_tokens == [tokens for _, tokens in rounds]
    assert found.acceptance_length == sum(tokens for _, tokens in rounds) / len(rounds)


def test_replay_of_a_drafter_that_knows_the_text(monkeypatch):
    """Everything is kept if drafts are the text: blocks of four and one token more."""
    target = tiny_target("llama")
    drafter = eagle(target)
    prompt = torch.tensor([[5, 6, 7]])
    text = target.generate(prompt, max_new_tokens=31, do_sample=False, eos_token_id=None)
    conversation = Conversation(tuple(text[0].tolist()), 3, 0.0)
    kept = kept_at_every_anchor(drafter, target, drafter.bind(target), conversation)
    assert kept.shape == (30,)
    monkeypatch.setattr(
        "benchmarks.baselines.replay.kept_at_every_anchor", lambda *_: torch.arange(30).flip(0).add(1).clamp(max=4)
    )
    rounds = replay(drafter, target, [conversation])
    assert rounds.new_tokens == [5] * 6
    assert rounds.acceptance_length == 5


def test_answers_that_end_at_once_have_no_rounds():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    for answer in ((), (2,)):
        assert replay(drafter, target, [Conversation((5, 6, *answer), 2)]).rounds == 0


def test_conditional_acceptance_by_hand(monkeypatch):
    """Rounds of two texts; the second ends behind the second draft of its only round."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=3)
    kept = iter([torch.tensor([2, 0, 0, 0, 1, 0, 0, 0, 0]), torch.tensor([2, 1])])
    monkeypatch.setattr("benchmarks.baselines.replay.kept_at_every_anchor", lambda *_: next(kept)[:6])
    rounds = replay(drafter, target, [None, None])
    assert (rounds.accepted, rounds.verified) == ([2, 0, 1, 2], [3, 3, 2, 2])
    assert rounds.new_tokens == [3, 1, 2, 2]
    assert rounds.acceptance_rate_by_position == [3 / 4, 2 / 3, 0.0]
    assert rounds.acceptance_length == 2


class TestOlderLayout:
    def test_the_anchor_has_a_position_and_no_position(self):
        config = DSparkConfig(sample_from_anchor=False, block_size=5, markov_rank=8)
        assert config.num_block_positions == 6

    def test_the_rnn_state_starts_at_the_anchor_in_training_as_in_decoding(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target, sample_from_anchor=False, target_layer_ids=LAYERS, markov_head_type="rnn")
        ids = torch.randint(4, VOCAB, (1, 7))
        binding, features = features_of(target, drafter, ids)
        proposal = drafter.propose(binding, features[:, :6], anchor_tokens=ids[:, 6], cache=DSparkCache())
        ids = torch.cat([ids, proposal.tokens], dim=1)
        anchors = torch.tensor([[6]])
        blocks = make_blocks(ids, ids >= 0, anchors=anchors, keep=anchors > 0, block_size=drafter.config.block_size)
        features = nn.functional.pad(features, (0, 0, 0, ids.shape[1] - features.shape[1]))
        with torch.no_grad():
            outputs = forward_blocks(drafter, binding, blocks, input_ids=ids, features=features)
            logits = binding.draft_logits(outputs.hidden) + drafter.markov_head.bias(outputs.latent)
        assert torch.equal(logits.argmax(-1), proposal.tokens[0])
        assert_close(outputs.confidence_logits, proposal.confidence_logits[0], atol=1e-4, rtol=1e-4)

    def test_a_position_reads_the_mask_at_its_own_position(self):
        """Training's blocks give the hidden states that decoding has, at the masks behind the anchor."""
        target = tiny_target("llama")
        drafter = tiny_drafter(target, sample_from_anchor=False, target_layer_ids=LAYERS)
        ids = torch.randint(4, VOCAB, (1, 12))
        binding, features = features_of(target, drafter, ids)
        noise = torch.full((1, 1 + drafter.config.block_size), drafter.config.mask_token_id)
        noise[0, 0] = ids[0, 6]
        with torch.no_grad():
            whole = drafter(
                noise_embeds=binding.embed(noise, like=drafter.norm.weight),
                context_hidden_states=features[:, :6],
                position_ids=torch.arange(6 + noise.shape[1])[None],
            ).last_hidden_state[0, 1:]

        everything = torch.ones_like(ids, dtype=torch.bool)
        anchors = torch.tensor([[6]])
        blocks = make_blocks(ids, everything, anchors=anchors, keep=anchors > 0, block_size=drafter.config.block_size)
        with torch.no_grad():
            hidden = forward_blocks(drafter, binding, blocks, input_ids=ids, features=features).hidden
        assert_close(hidden, whole[: len(hidden)], atol=1e-5, rtol=1e-5)
        assert len(hidden) == min(drafter.config.block_size, 5)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_greedy_decoding_is_exact(self, rows):
        target = tiny_target("qwen3")
        drafter = tiny_drafter(target, sample_from_anchor=False)
        prompts = torch.randint(4, VOCAB, (rows, 6))
        plain = target.generate(prompts, max_new_tokens=20, do_sample=False)
        assert torch.equal(
            target.generate(prompts, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain
        )


def test_json_of_a_config_keeps_the_layout(tmp_path):
    tiny_drafter(tiny_target("llama"), sample_from_anchor=False).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sample_from_anchor"] is False
    assert (
        DSparkModel.from_pretrained(tmp_path).config.num_block_positions
        == 1 + DSparkModel.from_pretrained(tmp_path).config.block_size
    )


def test_prompt_lookup_gives_the_rounds_of_transformers():
    """Text that repeats itself: as many target forwards as `generate` with `prompt_lookup_num_tokens` needs.

    Its first forward verifies drafts too, so it starts after the first token of the answer.
    """
    target = tiny_target("llama").eval()
    with torch.no_grad():
        weight = target.get_output_embeddings().weight
        weight[:10].mul_(0.01), weight[12:].mul_(0.01)
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    call = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(prompt, max_new_tokens=41, **call)
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    target.generate(text[:, :13], prompt_lookup_num_tokens=3, max_new_tokens=40, **call)
    handle.remove()
    rounds = replay_prompt_lookup([Conversation(tuple(text[0].tolist()), 12, 0.0)], num_tokens=3)
    assert sum(rounds.new_tokens) == 40
    assert max(rounds.accepted) == 2
    assert rounds.rounds == len(forwards)
    assert [answer.rounds for answer in rounds.requests] == [rounds.rounds]
