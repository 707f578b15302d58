"""Packed attention and its cache against slow references, and which targets and calls the packed loop does not serve."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from modeling_dspark import Engine
from modeling_dspark.compat_transformers import cache_keyword, loop_takes_embeddings
from modeling_dspark.model_cache import DSparkCache, RaggedCache
from modeling_dspark.schedule_settings import DraftSettings
from modeling_dspark.target_attention import packed_attention, packed_forward
from modeling_dspark.target_packed import why_not_packable
from modeling_dspark.target_packing import NotPackableError, PackedCache, PackedPlan
from tests.builders import FAMILIES, HYBRIDS, tiny_drafter, tiny_target
from tests.generation.test_greedy_equality import PROMPT, scripted


CPU = torch.device("cpu")


def attend_slowly(queries, keys, values, *, start, scaling=None, window=None, softcap=None, sinks=None):
    """One row: queries `[Q, heads, d]` from position `start` on, keys and values `[S, kv heads, d]`, in fp64."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    groups = queries.shape[1] // keys.shape[1]
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.zeros_like(queries)
    for offset, head in itertools.product(range(queries.shape[0]), range(queries.shape[1])):
        position = start + offset
        first = 0 if window is None else max(0, position - window + 1)
        scores = keys[first : position + 1, head // groups] @ queries[offset, head] * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double()[None]])
        weights = scores.softmax(0)[: position + 1 - first]
        output[offset, head] = weights @ values[first : position + 1, head // groups]
    return output


def attend_packed(starts, counts, *, heads=4, kv_heads=2, first_row=0, capacity_of_others=0, **options):
    """Outputs of two packed forwards over random rows, the second from `starts` on, and of the slow reference."""
    generator = torch.Generator().manual_seed(sum(starts) + sum(counts))
    sizes = [start + count for start, count in zip(starts, counts, strict=True)]
    rows = [
        tuple(torch.randn(size, number, 8, generator=generator) for number in (heads, kv_heads, kv_heads))
        for size in sizes
    ]
    cache = PackedCache()
    for _ in range(first_row + len(rows) + 2):
        cache.rows.add_row()
    cache.rows.lengths = [9] * first_row + [0] * len(rows) + [5, 7]
    module = nn.Module()

    def forward(begins, ends):
        plan = PackedPlan(begins, [e - b for b, e in zip(begins, ends, strict=True)], CPU, first_row=first_row)
        cache.rows.reserve(max(plan.stop, capacity_of_others))
        pieces = [
            torch.cat([row[part][b:e] for row, b, e in zip(rows, begins, ends, strict=True)]).transpose(0, 1)[None]
            for part in range(3)
        ]
        with packed_forward([], plan):
            keys, values = cache.update(pieces[1], pieces[2], 0)
            buffers = cache.rows._buffers[0]
            assert [view.data_ptr() for view in (keys, values)] == [
                buffer[first_row].data_ptr() for buffer in buffers
            ]  # views: the context is never copied
            keys_before = keys.clone()
            output, weights = packed_attention(module, pieces[0], keys, values, None, dropout=0.0, **options)
        assert weights is None
        assert torch.equal(keys, keys_before)
        return output, plan

    if any(starts):
        nonzero = [max(start, 1) for start in starts]  # a plan has at least one token a row; it is written again below
        forward([0] * len(rows), nonzero)
        # A rejected draft stays in the buffers behind the end of its row, and may hold anything finite.
        for buffer in cache.rows._buffers[0]:
            for row, start in enumerate(starts, first_row):
                buffer[row, start:] = 1e4
    output, plan = forward(starts, sizes)
    slow = {"sliding_window": "window", "s_aux": "sinks"}
    named = {slow.get(name, name): value for name, value in options.items()}
    expected = [
        attend_slowly(q[start:], k, v, start=start, **named) for (q, k, v), start in zip(rows, starts, strict=True)
    ]
    return output, torch.cat(expected)[None], plan


SHAPES = {
    "one token a row": ([5, 5, 5], [1, 1, 1]),
    "ragged": ([3, 11, 1, 7], [2, 5, 1, 3]),
    "one row": ([6], [4]),
    "beginnings": ([0, 0, 0], [4, 1, 9]),
    "a long prompt beside short ones": ([0, 0, 0], [40, 3, 33]),
    "chunks": ([20, 3, 0], [35, 40, 34]),
    "as many as are padded": ([4, 0], [32, 31]),
}
OPTIONS = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"sliding_window": 4},
    "wide window": {"sliding_window": 64},
    "window of one": {"sliding_window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"s_aux": torch.tensor([-1.0, 0.5, 2.0, 4.0])},
    "all": {
        "scaling": 0.5,
        "sliding_window": 5,
        "softcap": 1.5,
        "s_aux": torch.tensor([1.0, 0.0, 3.0, -2.0]),
    },
}


class TestAttention:
    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_packed_attention_is_that_of_each_row_alone(self, shape, options):
        output, expected, _ = attend_packed(*SHAPES[shape], **OPTIONS[options])
        # fp32 against fp64: sums of at most 75 products of order one.
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("shape", ["ragged", "chunks"])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 2)])
    def test_groups_of_query_heads(self, shape, heads, kv_heads):
        output, expected, _ = attend_packed(*SHAPES[shape], heads=heads, kv_heads=kv_heads, softcap=3.0)
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("options", ["plain", "window", "all"])
    @pytest.mark.parametrize("shape", ["ragged", "chunks", "one token a row"])
    def test_rows_in_the_middle_of_the_cache(self, shape, options):
        output, expected, plan = attend_packed(*SHAPES[shape], first_row=3, capacity_of_others=100, **OPTIONS[options])
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)
        assert plan.windows == [OPTIONS[options].get("sliding_window")]

    @pytest.mark.parametrize(
        ("argument", "name"),
        [
            ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask"),
            ({"dropout": 0.1}, "dropout"),
            ({"is_causal": False}, "causality"),
            ({"position_bias": torch.zeros(3)}, "position_bias"),
            ({"chunk": 3, "alibi": True}, "alibi, chunk"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_arguments_that_change_what_is_attended_to_are_refused(self, argument, name):
        plan = PackedPlan([0], [3], CPU)
        states = torch.zeros(1, 2, 3, 8)
        with packed_forward([], plan), pytest.raises(NotPackableError, match=name):
            packed_attention(nn.Module(), states, states.transpose(1, 2), states.transpose(1, 2), **argument)

    def test_arguments_that_say_nothing_are_not_refused(self):
        plan = PackedPlan([0], [3], CPU)
        states = torch.randn(1, 2, 3, 8)
        neutral = {"position_ids": torch.arange(3)[None], "use_cache": True, "is_causal": True, "alibi": None}
        with packed_forward([], plan):
            output, _ = packed_attention(
                nn.Module(), states, states.transpose(1, 2), states.transpose(1, 2), **neutral
            )
        expected = attend_slowly(*(states[0].transpose(0, 1),) * 3, start=0)
        torch.testing.assert_close(output[0].double(), expected, atol=1e-5, rtol=1e-5)


class TestPlan:
    STARTS, COUNTS = [4, 0, 2], [2, 1, 3]

    def test_positions_and_slots(self):
        plan = PackedPlan(self.STARTS, self.COUNTS, CPU, first_row=5)
        assert plan.positions.tolist() == [4, 5, 0, 2, 3, 4]
        assert plan.offsets == [0, 2, 3, 6]
        assert plan.stop == 6
        assert plan.slot_mapping(10, CPU).tolist() == [54, 55, 60, 72, 73, 74]

    def test_unpack_repeats_the_last_entry_and_pack_undoes_it(self):
        plan = PackedPlan(self.STARTS, self.COUNTS, CPU)
        padded = plan.unpack(torch.arange(6))
        assert padded.tolist() == [[0, 1, 1], [2, 2, 2], [3, 4, 5]]
        assert plan.pack(padded).tolist() == list(range(6))

    def test_rows_of_equal_length_are_views(self):
        plan = PackedPlan([1, 2], [3, 3], CPU)
        assert plan.unpack(torch.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert plan.pack(torch.arange(6).view(2, 3)).tolist() == list(range(6))

    def test_forwards_can_be_nested(self):
        """The plan and the attention implementation that were there before come back, whatever happens inside."""
        target = tiny_target("llama")
        configs = [target.config]
        outer, inner = PackedPlan([0], [1], CPU), PackedPlan([0], [2], CPU)
        states = torch.zeros(1, 2, 1, 8)
        with packed_forward(configs, outer):
            name = target.config._attn_implementation
            with pytest.raises(NotPackableError), packed_forward(configs, inner):
                packed_attention(nn.Module(), states, states, states, attention_mask=states)
            assert target.config._attn_implementation == name
            packed_attention(nn.Module(), states, states.transpose(1, 2), states.transpose(1, 2))
        assert target.config._attn_implementation == "sdpa"
        assert (len(outer.windows), len(inner.windows)) == (1, 0)


class TestRaggedCache:
    """Rows that join, grow, are cut, trade places and leave, against a list of lists."""

    @pytest.mark.parametrize("max_length", [None, 40])
    @pytest.mark.parametrize("seed", range(6))
    def test_random_operations(self, seed, max_length):
        generator = torch.Generator().manual_seed(seed)

        def draw(limit):
            return int(torch.randint(limit, (1,), generator=generator))

        cache, rows, value = RaggedCache(max_length=max_length), [], 0.0
        for _ in range(150):
            action = draw(6)
            if action == 0 or not rows:
                assert cache.add_row() == len(rows)
                rows.append([])
            elif action == 1 and len(rows) > 1:
                one, other = draw(len(rows)), draw(len(rows))
                cache.swap_rows(one, other)
                rows[one], rows[other] = rows[other], rows[one]
            elif action == 2:
                row = draw(len(rows))
                cache.drop_row(row)
                rows[row] = rows[-1]
                rows.pop()
            elif action == 3:
                row = draw(len(rows))
                rows[row] = rows[row][: draw(len(rows[row]) + 1)]
                cache.lengths[row] = len(rows[row])
            else:
                row = draw(len(rows))
                new = [value + step for step in range(draw(min(7, 41 - len(rows[row]))))]
                value += len(new)
                start = len(rows[row])
                cache.reserve(max(map(len, rows)) + len(new))
                like = torch.zeros(1, 2, 3)
                for layer in range(2):
                    keys, values = cache.buffers(layer, like, like)
                    for step, number in enumerate(new):
                        keys[row, start + step], values[row, start + step] = number + layer / 4, -number - layer / 4
                cache.lengths[row] += len(new)
                rows[row] += new
            self.check(cache, rows, max_length)

    def check(self, cache, rows, max_length):
        assert cache.lengths == [len(row) for row in rows]
        if max_length is not None:
            assert cache.capacity <= max_length
        for layer, (keys, values) in cache._buffers.items():
            for row, content in enumerate(rows):
                if content:  # a row that never held anything has no place yet
                    expected = torch.tensor(content) + layer / 4
                    assert torch.equal(keys[row, : len(content)], expected[:, None, None].expand(-1, 2, 3))
                    assert torch.equal(values[row, : len(content)], -expected[:, None, None].expand(-1, 2, 3))

    def test_growth_is_geometric(self):
        """A text of 2000 tokens moves the buffers a few dozen times, not once a token."""
        cache, sizes = RaggedCache(num_rows=1), set()
        for length in range(1, 2000):
            cache.reserve(length)
            sizes.add(cache.capacity)
        assert len(sizes) < 40
        assert max(sizes) < 2600

    def test_a_known_longest_length_is_never_exceeded(self):
        cache = RaggedCache(num_rows=1, max_length=100)
        for length in range(1, 101):
            cache.reserve(length)
        assert cache.capacity == 100

    def test_a_row_without_a_place_trades_places_with_one_that_holds_something(self):
        cache = self.filled()
        cache.add_row()  # has no place in the buffers yet
        cache.swap_rows(0, 1)
        cache.reserve(3)
        keys, _ = cache.buffers(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        assert cache.lengths == [0, 3]
        assert keys[1, :3].flatten().tolist() == [1.0, 2.0, 3.0]

    def test_a_row_without_a_place_takes_that_of_one_that_leaves(self):
        cache = self.filled()
        cache.add_row()
        cache.drop_row(0)
        assert cache.lengths == [0]

    def filled(self):
        cache = RaggedCache(num_rows=1)
        cache.reserve(3)
        keys, _ = cache.buffers(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        keys[0, :3, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
        cache.lengths[0] = 3
        return cache

    def test_the_drafters_cache_pads_ragged_rows_out_of_sight(self):
        """Two rows of different length take 1 and 3 new positions and a block; nothing else may be read."""
        cache = DSparkCache(num_rows=2)
        cache.lengths = [4, 2]
        plan = cache.begin([1, 3], 3, num_block=2, device=CPU)
        readable = plan.mask[:, 0, 0].int().tolist()
        assert readable == [[1] * 7, [1] * 7]
        assert plan.positions.tolist() == [[4, 7, 7, 5, 6], [2, 3, 4, 5, 6]]
        cache.advance([1, 3])
        assert cache.lengths == [5, 5]
        plan = cache.begin([2, 2], 2, num_block=2, device=CPU)  # rows of one length need no mask
        assert plan.mask is None
        assert plan.stop == 9


class TestPackableTargets:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_families_are_packed(self, family):
        target = tiny_target(family)
        assert why_not_packable(target) is None
        assert not any(module.training for module in target.modules())

    @pytest.mark.parametrize("size", [1, 3])
    def test_embedding_rows_beyond_the_vocabulary(self, size):
        """Padded for tensor cores: a token that is none never comes out, and the text is plain `generate`'s."""
        target = tiny_target("llama", tie_word_embeddings=False)
        vocabulary = target.config.vocab_size
        target.resize_token_embeddings(vocabulary, pad_to_multiple_of=64)
        target.config.vocab_size = vocabulary
        drafter = tiny_drafter(target)
        with torch.no_grad():
            target.lm_head.weight[vocabulary:] = 0
        inputs = {"input_ids": torch.tensor(PROMPT * size), "max_new_tokens": 12, "do_sample": False}
        expected = target.generate(**inputs, eos_token_id=None)
        assert torch.equal(target.generate(**inputs, eos_token_id=None, assistant_model=drafter), expected)

    def test_a_target_that_was_placed_by_a_device_map(self, tmp_path):
        """Hooks of accelerate move tensors; text and placement stay."""
        tiny_target("llama").save_pretrained(tmp_path)
        placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}).eval()
        inputs = {"input_ids": torch.tensor(PROMPT * 2), "max_new_tokens": 9, "do_sample": False}
        expected = placed.generate(**inputs, eos_token_id=None)
        assert torch.equal(
            placed.generate(**inputs, eos_token_id=None, assistant_model=tiny_drafter(placed)), expected
        )

    def test_a_failure_of_the_moment_is_not_remembered(self):
        target = tiny_target("llama")

        def fails(*_):
            raise RuntimeError("transient")

        hook = target.model.layers[0].register_forward_hook(fails)
        assert "transient" in why_not_packable(target)
        hook.remove()
        assert why_not_packable(target) is None

    def test_inputs_that_the_target_prepares_itself(self):
        """Prompt tuning puts virtual tokens before the text: served one text at a time, or not at all."""
        peft = pytest.importorskip("peft")
        target = tiny_target("llama")
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        tuned = peft.get_peft_model(target, config).eval()
        call = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
        with pytest.raises(ValueError, match="prepare_inputs_for_generation"):
            tuned.generate(input_ids=torch.tensor(PROMPT * 2), assistant_model=tiny_drafter(target), **call)

    def test_running_out_of_memory_says_nothing_about_a_target(self):
        target = tiny_target("llama")
        forward, target.forward = target.forward, _out_of_memory
        with pytest.raises(torch.OutOfMemoryError):
            why_not_packable(target)
        target.forward = forward
        assert why_not_packable(target) is None

    def test_the_answer_does_not_depend_on_dropout(self):
        target = tiny_target("gpt2").train()
        assert why_not_packable(target) is None
        assert all(module.training for module in target.modules())

    @pytest.mark.parametrize("family", HYBRIDS)
    def test_recurrent_layers_are_refused(self, family):
        assert "layers of type" in why_not_packable(tiny_target(family))

    @pytest.mark.parametrize("kind", ["attention_chunk_size", "layer_types"])
    def test_attention_in_chunks_is_refused(self, kind):
        target = tiny_target("qwen3")
        value = {"attention_chunk_size": 4, "layer_types": ["chunked_attention"] * 4}[kind]
        target.config.__dict__[kind] = value
        assert "chunk" in why_not_packable(target)

    @pytest.mark.parametrize(
        ("model_type", "fields"),
        [
            ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 61}),
            ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
            ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 61, "max_seq_len": 64}),
            (
                "falcon",
                {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "alibi": True},
            ),
            (
                "gpt_neo",
                {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 61, "window_size": 4}
                | {"attention_types": [[["global", "local"], 1]]},
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_architectures_without_the_attention_interface_are_refused(self, model_type, fields):
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
        assert why_not_packable(target)

    def test_attention_that_counts_by_the_length_of_the_cache_is_refused(self):
        """Llama 4 scales queries by their place behind what the cache says it holds; in short texts by one."""
        sizes = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 32,
            "intermediate_size_mlp": 32,
            "head_dim": 8,
        }
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
        layers = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attention_chunk_size": None}
        config = AutoConfig.for_model("llama4_text", **sizes, **layers, attn_temperature_tuning=True)
        reason = why_not_packable(AutoModelForCausalLM.from_config(config).eval())
        if "attention_chunk_size" in reason:
            pytest.skip("this Transformers cannot run Llama 4 without chunks")
        assert "length of the cache" in reason
        config.attn_temperature_tuning = False
        assert why_not_packable(AutoModelForCausalLM.from_config(config).eval()) is None

    def test_attention_of_its_own_is_refused(self):
        """Scores with a bias on distance, made without Transformers' attention interface."""
        target = tiny_target("llama")
        for layer in target.model.layers:
            layer.self_attn.forward = _DistanceAttention(layer.self_attn)
        assert "attention interface" in why_not_packable(target)

    @pytest.mark.parametrize("weight", [1.0, 0.2], ids=["heavy", "light"])
    def test_attention_of_its_own_in_one_layer_is_refused(self, weight):
        """However little the layer adds: in a deep target no single layer adds much."""
        target = tiny_target("llama")
        attention = target.model.layers[2].self_attn
        with torch.no_grad():
            attention.o_proj.weight.mul_(weight)
        attention.forward = _DistanceAttention(attention)
        assert why_not_packable(target)

    def test_scores_with_a_bias_in_the_mask_are_refused(self):
        """Attention that goes through the interface, with a bias on distance as its mask."""
        target = tiny_target("llama")
        for layer in target.model.layers:
            forward = layer.self_attn.forward

            def biased(hidden_states, *args, real=forward, attention_mask=None, **kwargs):
                size = hidden_states.shape[1]
                distance = torch.arange(size)[None] - torch.arange(size)[:, None]
                bias = torch.where(distance > 0, -torch.inf, 0.1 * distance)[None, None]
                return real(hidden_states, *args, attention_mask=bias, **kwargs)

            layer.self_attn.forward = biased
        assert "mask" in why_not_packable(target)

    def test_a_target_that_counts_its_tokens_itself_is_refused(self):
        """Positions that come from the place in the input, and not from `position_ids`."""
        target = tiny_target("llama")
        rotary = target.model.rotary_emb
        forward = rotary.forward
        rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
        assert "differ" in why_not_packable(target)

    def test_a_window_that_only_the_mask_knows_of_is_refused(self):
        fields = {"sliding_window": 6, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}
        target = tiny_target("qwen3", **fields)
        assert why_not_packable(target) is None
        target = tiny_target("qwen3", **fields)
        target.model.layers[2].self_attn.sliding_window = None
        assert "sliding window" in why_not_packable(target)

    def test_a_target_that_fails_is_refused_with_its_error(self):
        target = tiny_target("llama")

        def fails(*args, **kwargs):
            raise ArithmeticError("no more")

        target.model.layers[1].mlp.forward = fails
        assert "no more" in why_not_packable(target)
        assert target.config._attn_implementation == "sdpa"

    def test_the_engine_gives_the_reason(self):
        target = tiny_target("lfm2")
        with pytest.raises(ValueError, match="Lfm2ForCausalLM cannot be decoded.*conv"):
            Engine(tiny_drafter(target), target, settings=DraftSettings(4, "fixed", 0.5))


def _out_of_memory(input_ids=None, position_ids=None, **_):
    raise torch.OutOfMemoryError("no")


class _DistanceAttention:
    """Attention with a bias on distance (as in ALiBi), without cache and attention interface."""

    def __init__(self, attention):
        self.attention = attention

    def __call__(self, hidden_states, *_, **__):
        attention = self.attention
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        query, key, value = (
            getattr(attention, name)(hidden_states).view(shape).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
        size = hidden_states.shape[1]
        distance = torch.arange(size)[None] - torch.arange(size)[:, None]
        bias = torch.where(distance > 0, -torch.inf, 0.3 * distance)
        weights = (query @ key.transpose(2, 3) / math.sqrt(attention.head_dim) + bias).softmax(-1)
        output = (weights @ value).transpose(1, 2).flatten(2)
        return attention.o_proj(output), None


def other_loop_calls(target):
    """Arguments of calls that the packed loop does not serve, by what they are; the last says what a batch is told."""
    embed = target.get_input_embeddings()

    def cache(_):
        return {cache_keyword(): DynamicCache(config=target.config)}

    def attentions(_):
        return {"output_attentions": True, "return_dict_in_generate": True}

    def hidden_states(_):
        return {"output_hidden_states": True, "return_dict_in_generate": True}

    def positions(ids):
        return {"position_ids": torch.arange(5, 5 + ids.shape[1]).expand(len(ids), -1)}

    def embeddings(ids):
        return {"inputs_embeds": embed(ids).detach()}

    return {
        "cache": (cache, "its own cache"),
        "attentions": (attentions, "output_attentions"),
        "hidden states": (hidden_states, "output_hidden_states"),
        "positions": (positions, "position_ids"),
        "embeddings": (embeddings, "inputs_embeds"),
    }


class TestOtherLoop:
    """What the packed loop does not serve: Transformers' own loop for one text, an error for several."""

    NAMES = ("cache", "attentions", "hidden states", "positions", "embeddings")

    def target_and_call(self, name):
        target = tiny_target("llama")
        if name == "attentions":
            target.set_attn_implementation("eager")
        if name == "embeddings" and not loop_takes_embeddings():
            pytest.skip("the assisted loop of this Transformers is wrong with `inputs_embeds`")
        return target, *other_loop_calls(target)[name]

    @pytest.mark.parametrize("name", NAMES)
    def test_one_text(self, name, caplog):
        target, arguments, _ = self.target_and_call(name)
        ids = torch.tensor(PROMPT)
        kwargs = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        inputs = {} if name == "embeddings" else {"input_ids": ids}
        expected = target.generate(**inputs, **arguments(ids), **kwargs)
        expected = getattr(expected, "sequences", expected).tolist()
        logging.get_logger("modeling_dspark.generate_mixin").warning_once.cache_clear()
        drafter = scripted(target, wrong_every=1000)
        for _ in range(2):
            output = target.generate(**inputs, **arguments(ids), assistant_model=drafter, **kwargs)
            assert getattr(output, "sequences", output).tolist() == expected
        assert sum(drafter.last_run.new_tokens) == 19
        assert drafter.last_run.requests == [drafter.last_run]  # of one text only
        warnings = [record for record in caplog.records if "serves this call" in record.message]
        assert len(warnings) == 1

    @pytest.mark.parametrize("name", NAMES)
    def test_several_texts(self, name):
        target, arguments, message = self.target_and_call(name)
        ids = torch.tensor(PROMPT * 3)
        inputs = {} if name == "embeddings" else {"input_ids": ids}
        with pytest.raises(ValueError, match=f"batch of 3.*{message}.*each prompt"):
            target.generate(**inputs, **arguments(ids), assistant_model=tiny_drafter(target), max_new_tokens=4)

    @pytest.mark.parametrize("name", ["cache", "positions", "embeddings"])
    def test_the_drafter_as_a_decoding_method_is_the_packed_loop_only(self, name):
        target, arguments, message = self.target_and_call(name)
        ids = torch.tensor(PROMPT)
        inputs = {} if name == "embeddings" else {"input_ids": ids}
        with pytest.raises(ValueError, match=f"does not serve.*{message}"):
            target.generate(**inputs, **arguments(ids), custom_generate=tiny_drafter(target).decode, max_new_tokens=4)

    def test_positions_that_are_the_usual_ones_are_packed(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        ids, mask = torch.tensor([[0, 0, 7, 11], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        positions = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])  # what is at padding does not matter
        expected = target.generate(ids, **kwargs)
        output = target.generate(ids, position_ids=positions, assistant_model=drafter, **kwargs)
        assert output.tolist() == expected.tolist()
        assert len(drafter.last_run.requests) == 2

    def test_a_target_that_cannot_be_packed(self, caplog):
        target = tiny_target("lfm2")
        logging.get_logger("modeling_dspark.generate_mixin").warning_once.cache_clear()
        drafter = tiny_drafter(target)
        with pytest.raises(ValueError, match=r"batch of 2.*conv.*each prompt"):
            target.generate(torch.tensor(PROMPT * 2), assistant_model=drafter, max_new_tokens=4)
        assert "serves this call" not in caplog.text

    @pytest.mark.parametrize("rope", ["longrope", "dynamic"])
    def test_rotary_embeddings_that_change_with_the_longest_text(self, rope):
        """Texts of one batch would change each other's positions, so only those short enough are packed."""
        fields = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16}
        if rope == "longrope":
            fields |= {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
        target = tiny_target("llama", rope_parameters=fields)
        drafter = tiny_drafter(target)
        kwargs = {"do_sample": False, "eos_token_id": None}
        expected = target.generate(torch.tensor(PROMPT * 2), max_new_tokens=9, **kwargs)
        output = target.generate(torch.tensor(PROMPT * 2), assistant_model=drafter, max_new_tokens=9, **kwargs)
        assert output.tolist() == expected.tolist()
        with pytest.raises(ValueError, match=f"batch of 2.*{rope}"):
            target.generate(torch.tensor(PROMPT * 2), assistant_model=drafter, max_new_tokens=11, **kwargs)

    @pytest.mark.parametrize("rows", [1, 2])
    def test_ranks_in_step_are_refused(self, rows):
        target = tiny_target("llama")
        before = copy.deepcopy(target.config.to_dict())
        with pytest.raises(ValueError, match="synced_gpus"):
            target.generate(
                torch.tensor(PROMPT * rows), assistant_model=tiny_drafter(target), max_new_tokens=4, synced_gpus=True
            )
        assert target.config.to_dict() == before
