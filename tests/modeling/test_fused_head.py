"""The fused sequential head against fp64 arithmetic, its draws against their distribution, and its build against mishaps."""

import functools
import importlib
import itertools
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.utils import logging

from modeling_dspark import DraftSampling, draft_tokens, fused_backends, fused_build
from modeling_dspark.draft_propose import propose
from modeling_dspark.engine_profile import profile_key
from modeling_dspark.fused_backends import CpuBackend
from modeling_dspark.fused_build import load_library
from modeling_dspark.fused_head import BlockTokens, fused_block, why_not_fused
from modeling_dspark.fused_launch import LaunchError
from modeling_dspark.fused_torch import HeadInputs, head_in_torch, philox_uniform
from modeling_dspark.model_cache import DSparkCache
from modeling_dspark.modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target


ROOT = Path(__file__).parents[2]
KINDS = ["vanilla", "gated", "rnn"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEP = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place and more
# vocabulary, rank, rows, positions, hidden size: odd ones, ones below a vector, and multiples of everything
SHAPES = [
    (1, 1, 1, 1, 3),
    (63, 8, 2, 3, 16),
    (199, 64, 5, 7, 24),
    (1025, 33, 9, 2, 40),
    (4096, 256, 4, 16, 64),
    (2500, 48, 3, 4, 17),
    (311, 24, 8, 3, 12),
    (777, 16, 7, 9, 8),
    (49152, 8, 6, 2, 16),
]


@pytest.fixture(scope="module")
def library():
    try:
        return CpuBackend()
    except fused_build.BuildError as error:
        pytest.skip(str(error))


def random_heads(kind, shape, dtype, *, seed=0, with_confidence=True, reads_tokens=True, reduced=False):
    """Weights and inputs of one block."""
    vocabulary, rank, rows, positions, size = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    units, width = {"vanilla": (0, 0), "gated": (rank, size + rank), "rnn": (3 * rank, 2 * rank + size)}[kind]
    full = 2 * vocabulary if reduced else vocabulary
    heads = {
        "w1": draw(full, rank),
        "w2": draw(vocabulary, rank, scale=rank**-0.5),
        "mixer_weight": draw(units, width, scale=width**-0.5) if units else None,
        "mixer_bias": draw(units) if units else None,
        "confidence_weight": draw(size + rank * reads_tokens, scale=size**-0.5) if with_confidence else None,
        "confidence_bias": draw(1) if with_confidence else None,
        "draft_to_target": torch.arange(vocabulary) if reduced else None,  # token 2 i
        "kind": kind,
    }
    anchors = torch.randint(full, (rows,), generator=generator)
    return heads, (draw(rows, positions, vocabulary), draw(rows, positions, size), anchors)


def exactly(heads, base_logits, hidden, anchors, tokens):
    """Logits and confidences of a block in fp64, with the given tokens in their places."""
    weights = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
               for name, value in heads.items()}  # fmt: skip
    dtype, rank = base_logits.dtype, heads["w1"].shape[1]
    state = torch.zeros(len(anchors), rank, dtype=torch.double)
    all_logits, confidences = [], []
    for position in range(base_logits.shape[1]):
        previous = weights["w1"][anchors if position == 0 else tokens[:, position - 1]]
        here = hidden[:, position].double()
        latent = previous
        if heads["kind"] == "gated":
            mixed = torch.cat([here, previous], 1) @ weights["mixer_weight"].T + weights["mixer_bias"]
            latent = torch.sigmoid(mixed) * previous
        elif heads["kind"] == "rnn":
            mixed = torch.cat([state, previous, here], 1) @ weights["mixer_weight"].T + weights["mixer_bias"]
            gate, candidate, output = mixed.chunk(3, dim=1)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            latent = torch.tanh(output)
        all_logits.append(base_logits[:, position].double() + latent.to(dtype).double() @ weights["w2"].T)
        if weights["confidence_weight"] is not None:
            read = torch.cat([here, previous], 1)[:, : len(weights["confidence_weight"])]
            confidences.append(read @ weights["confidence_weight"] + weights["confidence_bias"])
    return torch.stack(all_logits, 1), torch.stack(confidences, 1) if confidences else None


def check(heads, inputs, block, *, temperature=0.0):
    dtype = inputs[0].dtype
    logits, confidence = exactly(heads, *inputs, block.tokens)
    tolerance = 4 * STEP[dtype] * (1 + logits.abs()) + 1e-5
    if dtype != torch.float32:  # a latent may be rounded to the other side
        tolerance = tolerance + 4 * STEP[dtype]
    assert block.logits.dtype == dtype
    assert ((block.logits.double() - logits).abs() <= tolerance).all()
    if temperature == 0:
        assert torch.equal(block.columns, first_of_the_highest(block.logits))
    if confidence is not None:
        torch.testing.assert_close(block.confidence_logits.double(), confidence, atol=2e-5, rtol=2e-5)
    offset = heads["draft_to_target"]
    assert torch.equal(block.tokens, block.columns if offset is None else block.columns + offset[block.columns])


def first_of_the_highest(logits):
    highest = logits == logits.max(dim=-1, keepdim=True).values
    return highest.int().argmax(dim=-1)  # of equal ones, `argmax` of 0 and 1 takes the first on a CPU


def run(library, heads, inputs, *, isa=-1, temperature=0.0, seed=0, keep_logits=True):
    backend = library if isa < 0 else CpuBackend(isa)
    call = {"temperature": temperature, "seed": seed, "keep_logits": keep_logits}
    return BlockTokens(*backend(HeadInputs(*inputs, **heads, **call)))


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512bf16"])
def isa(request, library):
    number = ["generic", "avx2", "avx512", "avx512bf16"].index(request.param)
    if number > library.best_isa:
        pytest.skip(f"this machine has no {request.param}")
    return number


class TestArithmetic:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_logits_tokens_and_confidences(self, kind, dtype, isa, library):
        for seed, shape in enumerate(SHAPES):
            heads, inputs = random_heads(kind, shape, DTYPES[dtype], seed=seed, reduced=seed % 2 == 1)
            check(heads, inputs, run(library, heads, inputs, isa=isa))

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_logits_of_draws(self, dtype, temperature, isa, library):
        for seed, shape in enumerate(SHAPES):
            heads, inputs = random_heads(KINDS[seed % 3], shape, DTYPES[dtype], seed=seed)
            block = run(library, heads, inputs, isa=isa, temperature=temperature, seed=seed)
            check(heads, inputs, block, temperature=temperature)

    @pytest.mark.parametrize("reads_tokens", [True, False])
    def test_without_confidence_and_without_its_tokens(self, reads_tokens, library):
        shape = SHAPES[2]
        heads, inputs = random_heads("gated", shape, torch.bfloat16, reads_tokens=reads_tokens)
        check(heads, inputs, run(library, heads, inputs))
        heads, inputs = random_heads("gated", shape, torch.bfloat16, with_confidence=False)
        block = run(library, heads, inputs)
        check(heads, inputs, block)
        assert block.confidence_logits.numel() == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_output_is_written(self, kind, dtype, library):
        """Memory that was not written would hold NaN, or the largest number."""
        heads, inputs = random_heads(kind, SHAPES[3], DTYPES[dtype])
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3).isnan().all()
            for keep_logits, temperature in itertools.product([True, False], [0.0, 1.0]):
                block = run(library, heads, inputs, keep_logits=keep_logits, temperature=temperature)
                assert (block.columns < SHAPES[3][0]).all()
                assert not block.confidence_logits.isnan().any()
                assert not block.logits.isnan().any()
        finally:
            torch.use_deterministic_algorithms(False)

    def test_logits_need_not_be_kept(self, library):
        heads, inputs = random_heads("vanilla", SHAPES[4], torch.bfloat16)
        for temperature in (0.0, 0.7):
            kept = run(library, heads, inputs, temperature=temperature, seed=3)
            block = run(library, heads, inputs, temperature=temperature, seed=3, keep_logits=False)
            assert torch.equal(block.tokens, kept.tokens)
            assert block.logits.numel() == 0

    def test_ties_go_to_the_lowest_index(self, isa, library):
        """bf16 logits of few values, many of them the highest."""
        heads, (base, hidden, anchors) = random_heads("vanilla", (777, 8, 3, 5, 8), torch.bfloat16)
        heads["w2"].zero_()
        generator = torch.Generator().manual_seed(1)
        base = torch.randint(4, base.shape, generator=generator).to(torch.bfloat16)
        block = run(library, heads, (base, hidden, anchors), isa=isa)
        assert torch.equal(block.columns, first_of_the_highest(base))
        base.fill_(-torch.inf)
        assert not run(library, heads, (base, hidden, anchors), isa=isa).columns.any()

    def test_views_are_read_where_they_are(self, library):
        heads, (base, hidden, anchors) = random_heads("gated", SHAPES[2], torch.float32)
        wide = torch.full((5, 9, 24), torch.nan)
        wide[:, :7] = hidden
        block = run(library, heads, (base, wide[:, :7], anchors))
        assert torch.equal(block.tokens, run(library, heads, (base, hidden, anchors)).tokens)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_results_do_not_depend_on_threads(self, temperature, kind, dtype, library):
        heads, inputs = random_heads(kind, (5003, 32, 6, 5, 16), DTYPES[dtype])
        before, blocks = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                blocks.append(run(library, heads, inputs, temperature=temperature, seed=5))
        finally:
            torch.set_num_threads(before)
        for block in blocks[1:]:
            for ours, first in zip(block, blocks[0], strict=True):
                assert torch.equal(ours, first)

    def test_an_instruction_set_that_is_not_there_is_refused(self, library):
        heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)
        with pytest.raises(LaunchError, match="instruction set 9"):
            run(library, heads, inputs, isa=9)


class TestDraws:
    def test_known_numbers_of_the_generator(self):
        """The first words for counter and key zero, from the authors' table of known answers."""
        words = (0x6627E8D5 << 21) ^ (0xE169C58D >> 11)
        assert philox_uniform(0, 1, 1).item() == words * 2.0**-53

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("temperature", [0.5, 1.0])
    def test_draws_follow_the_logits_as_returned(self, dtype, temperature, library):
        """8 rows of equal contents, 800 seeds: shares of the first position's tokens, and of the second's after each."""
        heads, (base, hidden, anchors) = random_heads("vanilla", (6, 4, 1, 2, 8), DTYPES[dtype], with_confidence=False)
        inputs = (base.expand(8, -1, -1), hidden.expand(8, -1, -1), anchors.expand(8))
        counts = torch.zeros(6, 6)
        exact: dict[int, torch.Tensor] = {}
        for seed in range(800):
            block = run(library, heads, inputs, temperature=temperature, seed=seed)
            for row in range(8):
                one, two = block.columns[row].tolist()
                counts[one, two] += 1
                exact[one] = (block.logits[row, 1].double() / temperature).softmax(0)
        first = (block.logits[0, 0].double() / temperature).softmax(0)
        assert stats.chisquare(counts.sum(1), 6400 * first).pvalue > 1e-3
        for token in exact:
            if counts[token].sum() > 100:
                expected = counts[token].sum() * exact[token]
                assert stats.chisquare(counts[token], expected).pvalue > 1e-4

    @pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
    def test_draws_are_the_inversion_of_the_generators_numbers(self, temperature, isa, library):
        """In fp64, but for levels within rounding of the border between two tokens."""
        heads, inputs = random_heads("vanilla", (3001, 16, 9, 16, 8), torch.bfloat16, with_confidence=False)
        block = run(library, heads, inputs, isa=isa, temperature=temperature, seed=-12345)
        uniform = philox_uniform(-12345, 9, 16)
        cumulative = (block.logits.double() / temperature).softmax(-1).cumsum(-1)
        place = torch.searchsorted(cumulative, uniform[..., None], right=True).squeeze(-1)
        assert (place == block.columns).float().mean() > 0.98
        assert ((place - block.columns).abs() <= 1).all()

    def test_what_weighs_nothing_is_never_drawn(self, library):
        heads, (base, hidden, anchors) = random_heads("vanilla", (2000, 4, 4, 8, 8), torch.float32)
        base.fill_(-torch.inf)
        base[..., 1234], base[..., 77] = 1.0, 0.5
        drawn = {
            token
            for seed in range(50)
            for token in run(library, heads, (base, hidden, anchors), temperature=1.0, seed=seed)
            .columns.unique()
            .tolist()
        }
        assert drawn == {77, 1234}


class TestOperation:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pytorch_does_the_same(self, kind, dtype, library):
        """fp32 tokens are equal; in reduced precision both hold to fp64 and to their own logits."""
        for temperature in (0.0, 1.0):
            heads, inputs = random_heads(kind, SHAPES[2], DTYPES[dtype], reduced=True)
            call = {"temperature": temperature, "seed": 11, "keep_logits": True}
            fused = fused_block(heads, *inputs, **call)
            plain = fused_block(heads, *inputs, **call, backend="torch")
            if dtype == "fp32":
                check(heads, inputs, plain, temperature=temperature)
                assert torch.equal(fused.tokens, plain.tokens)
            if temperature == 0:
                assert torch.equal(plain.columns, first_of_the_highest(plain.logits))

    def test_torch_library_finds_nothing_wrong(self, library):
        heads, inputs = random_heads("gated", SHAPES[1], torch.float32)
        for keep_logits in (True, False):
            torch.library.opcheck(torch.ops.dspark.sequential_head.default, inputs, heads | {
                "temperature": 1.0, "seed": 1, "keep_logits": keep_logits, "backend": "auto"
            }, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))  # fmt: skip

    def test_it_compiles_into_one_graph(self, library):
        heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)

        def block(*inputs):
            return fused_block(heads, *inputs, keep_logits=True).logits.softmax(-1)

        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), block(*inputs))

    def test_a_wrong_choice_is_named(self, monkeypatch):
        choices = r"`fused_head`.*DSPARK_FUSED_HEAD.*'auto', 'cpu', 'cuda', 'nvrtc', 'torch'.*'gpu'"
        heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)
        with pytest.raises(ValueError, match=choices):
            fused_block(heads, *inputs, backend="gpu")
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        with pytest.raises(ValueError, match=choices):
            drafter.bind(target, fused_head="gpu")
        monkeypatch.setenv("DSPARK_FUSED_HEAD", "gpu")
        with pytest.raises(ValueError, match=choices):
            drafter.bind(target)
        assert drafter.bind(target, fused_head="torch").heads is None  # an argument wins

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("hidden", lambda value: value[:, :-1]),
            ("anchors", lambda value: value[:-1]),
            ("w1", lambda value: value[:, :-1]),
            ("w2", lambda value: value[:-1]),
            ("mixer_weight", lambda value: value[:, :-1]),
            ("mixer_bias", lambda value: value[:-1]),
            ("confidence_weight", lambda value: value[:-1]),
            ("confidence_bias", lambda value: None),
            ("draft_to_target", lambda value: value[:-1]),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    @pytest.mark.parametrize("choice", ["auto", "torch"])
    def test_what_would_be_read_beyond_its_end_is_refused(self, name, change, choice):
        heads, inputs = random_heads("rnn", SHAPES[2], torch.float32, reduced=True)
        named = dict(zip(("base_logits", "hidden", "anchors"), inputs, strict=True)) | heads
        with pytest.raises(ValueError, match=f"`{name}"):
            torch.ops.dspark.sequential_head(
                **(named | {name: change(named[name])}), temperature=0.0, seed=0, keep_logits=False, backend=choice
            )

    def test_anchors_that_are_no_tokens_are_refused(self, library):
        heads, (base, hidden, _) = random_heads("vanilla", SHAPES[1], torch.float32)
        with pytest.raises(ValueError, match=r"`anchors` must be tokens from 0 to 62, got \[5, 63\]"):
            fused_block(heads, base, hidden, torch.tensor([5, 63]))

    @pytest.mark.parametrize("offset", [1000, 10**12, -5])
    def test_draft_tokens_that_are_not_the_targets_are_refused(self, offset, library):
        heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32, reduced=True)
        heads["draft_to_target"].fill_(offset)
        heads["w2"][4:] = 0
        inputs[0][..., 4:] = -1e9  # columns 0 to 3 win
        with pytest.raises(ValueError, match="`draft_to_target` must lead to tokens from 0 to 125"):
            fused_block(heads, *inputs)

    def test_sizes_that_make_no_sense_are_refused(self):
        heads, (base, hidden, anchors) = random_heads("vanilla", SHAPES[1], torch.float32)
        with pytest.raises(ValueError, match="`base_logits` must have columns"):
            fused_block(heads | {"w2": heads["w2"][:0]}, base[..., :0], hidden, anchors)
        with pytest.raises(ValueError, match="a row for each column"):
            fused_block(heads | {"w1": heads["w1"][:9]}, base, hidden, anchors)

    def test_choices_have_no_gradient(self, library):
        heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)
        heads["w2"].requires_grad_(True)
        assert not fused_block(heads, *inputs, keep_logits=True).logits.requires_grad

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_pytorch_draws_some_column_from_logits_that_are_no_numbers(self, value):
        heads, (base, hidden, anchors) = random_heads("vanilla", SHAPES[1], torch.float32)
        block = fused_block(heads, base.fill_(value), hidden, anchors, temperature=0.7, backend="torch")
        assert (block.columns < SHAPES[1][0]).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_other_dtypes_within_a_block_are_pytorchs_business(self, kind, library):
        """Weights of the confidence head in fp32; and autocast around fp32 weights."""
        heads, inputs = random_heads(kind, SHAPES[2], torch.bfloat16)
        expected = fused_block(heads, *inputs)
        mixed = heads | {name: heads[name].float() for name in ("confidence_weight", "confidence_bias")}
        torch.testing.assert_close(
            fused_block(mixed, *inputs).confidence_logits[:, 0], expected.confidence_logits[:, 0]
        )
        heads, inputs = random_heads(kind, SHAPES[2], torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            block = fused_block(heads, *inputs, keep_logits=True)
        assert (block.logits - fused_block(heads, *inputs, keep_logits=True).logits)[:, 0].abs().max() < 0.1

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("reduced", [False, True])
    @pytest.mark.parametrize("temperature", [None, 0.7])
    def test_a_drafters_blocks_are_those_made_position_by_position(
        self, kind, reduced, temperature, library, monkeypatch
    ):
        """In fp32: same tokens and confidences; with sampling, the logits are the target's business as before."""
        target = tiny_target("llama")
        ids = list(range(3, 40)) if reduced else None
        drafter = tiny_drafter(target, markov_head_type=kind, markov_rank=8, draft_token_ids=ids)
        features = torch.randn(3, 5, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)

        def block(step=None):
            if step is not None:
                drafter.head_step = step
            cache = DSparkCache(num_rows=3)
            torch.manual_seed(3)
            sampling = DraftSampling()
            if temperature is not None:
                sampling = DraftSampling(True, lambda _, logits: logits / temperature, temperature=temperature)
            anchors = torch.tensor([5, 6, 7])
            return propose(drafter.bind(target), features, anchor_tokens=anchors, cache=cache, sampling=sampling)

        calls = []
        monkeypatch.setattr(draft_tokens, "fused_block", lambda *a, **k: calls.append(1) or fused_block(*a, **k))
        fused, step = block(), drafter.head_step
        assert calls == [1]
        plain = block(lambda *args: step(*args))  # a user's own
        assert calls == [1]
        if temperature is None:
            assert torch.equal(fused.tokens, plain.tokens)
            assert fused.logits is None
            torch.testing.assert_close(fused.confidence, plain.confidence)
        else:
            torch.testing.assert_close(fused.logits[:, 0], plain.logits[:, 0], atol=1e-4, rtol=1e-4)
            assert fused.logits.gather(2, fused.columns[..., None]).isfinite().all()

    def test_a_processor_of_which_nothing_is_known_is_applied(self, library):
        """Heads that could be fused go position by position, unless the processor only divides."""
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        binding = drafter.bind(target)
        assert binding.heads is not None
        features = torch.randn(1, 5, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)

        def only_nine(_, logits):
            return torch.full_like(logits, -torch.inf).index_fill_(-1, torch.tensor([9]), 0.0)

        sampling = DraftSampling(processor=only_nine)
        arguments = {"anchor_tokens": torch.tensor([5]), "cache": DSparkCache(), "sampling": sampling}
        assert set(drafter.propose(binding, features, **arguments).tokens[0].tolist()) == {9}

    def test_a_binding_of_another_drafter_is_refused(self):
        target = tiny_target("llama")
        binding = tiny_drafter(target).bind(target)
        with pytest.raises(ValueError, match="`binding` belongs to another drafter"):
            tiny_drafter(target).propose(binding, None, anchor_tokens=None, cache=None)

    def test_binding_builds_nothing_until_something_is_drafted(self, monkeypatch):
        """Training binds a drafter, too, and runs the heads itself."""
        monkeypatch.setattr(fused_backends, "load_library", lambda *_: pytest.fail("built in vain"))
        monkeypatch.setattr(fused_backends, "_made", {})
        target = tiny_target("llama")
        tiny_drafter(target).bind(target)

    def test_costs_are_those_of_the_chosen_heads(self, library):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        assert profile_key(drafter, target, "auto")["fused_head"]
        assert not profile_key(drafter, target, "torch")["fused_head"]

    def test_heads_without_a_fused_form_go_position_by_position(self, library):
        target = tiny_target("llama")
        drafter, bare = tiny_drafter(target), tiny_drafter(target, markov_rank=0, confidence_head_with_markov=False)
        assert why_not_fused(drafter, torch.float32) is None
        assert why_not_fused(drafter, torch.float32, choice="torch") == "`fused_head='torch'`"
        assert why_not_fused(bare, torch.float32) == "the drafter has no Markov head"
        assert "in one dtype" in why_not_fused(drafter, torch.float64)
        binding = drafter.bind(target)
        assert (binding.reason, binding.heads["kind"]) == (None, "vanilla")
        with torch.autocast("cpu", torch.bfloat16):
            assert "leave out autocast" in drafter.bind(target).reason

    def test_other_dtypes_go_position_by_position_and_say_so(self, monkeypatch, caplog):
        monkeypatch.setattr(fused_backends, "load_library", lambda *_: pytest.fail("built in vain"))
        monkeypatch.setattr(fused_backends, "_made", {})
        logging.get_logger("modeling_dspark.fused_head").warning_once.cache_clear()
        target = tiny_target("llama")
        assert tiny_drafter(target).bind(target.to(torch.bfloat16)).heads is None
        assert "torch.bfloat16" in caplog.text
        assert "load both models with the same `dtype=`" in caplog.text

    def test_heads_that_are_more_than_their_weights_go_position_by_position(self, library):
        target = tiny_target("llama")

        peft = pytest.importorskip("peft")

        def adapter(drafter):
            peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["markov_w2"], r=2), drafter)

        def hook(drafter):
            drafter.markov_head.markov_w1.register_forward_hook(lambda *_: None)

        def parametrization(drafter):
            register_parametrization(drafter.confidence_head.proj, "weight", nn.Identity())

        def offloading(drafter):
            drafter.markov_head.markov_w2.forward = drafter.markov_head.markov_w2.forward

        def method_of_the_users_own(drafter):
            drafter.head_step = functools.wraps(drafter.head_step)(lambda *arguments: None)

        def step_of_the_users_own(drafter):
            drafter.markov_head.step = lambda *arguments: None

        def quantisation(drafter):
            weight = drafter.markov_head.markov_w2.weight
            drafter.markov_head.markov_w2._parameters["weight"] = type("Quantised", (nn.Parameter,), {})(weight.data)

        changes = (
            adapter,
            hook,
            parametrization,
            offloading,
            method_of_the_users_own,
            step_of_the_users_own,
            quantisation,
        )
        for change in changes:
            drafter = tiny_drafter(target)
            assert drafter.bind(target).heads is not None
            change(drafter)
            assert drafter.bind(target).heads is None, change.__name__

    def test_hooks_on_all_modules_and_tokens_of_the_users_own_go_position_by_position(self, library):
        class OwnTokens(DSparkModel):
            def to_target_ids(self, draft_ids):
                return draft_ids

        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        assert OwnTokens(drafter.config).bind(target).heads is None
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert drafter.bind(target).heads is None
        finally:
            handle.remove()
        assert drafter.bind(target).heads is not None

    def test_costs_hold_for_heads_as_they_are(self, library):
        """What was measured fused does not stand for heads position by position; for those, nothing is built."""
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        assert profile_key(drafter, target)["fused_head"]
        drafter.markov_head.markov_w2.register_forward_hook(lambda *_: None)
        assert not profile_key(drafter, target)["fused_head"]

    def test_without_heads_to_fuse_nothing_is_built(self, monkeypatch):
        monkeypatch.setattr(fused_backends, "load_library", lambda *_: pytest.fail("built in vain"))
        monkeypatch.setattr(fused_backends, "_made", {})
        target = tiny_target("llama")
        bare = tiny_drafter(target, markov_rank=0, confidence_head_with_markov=False)
        target.generate(torch.tensor([[3, 4, 5]]), assistant_model=bare, max_new_tokens=6)
        assert not profile_key(bare, target)["fused_head"]

    @pytest.mark.parametrize("use_cache", [None, "own loop"])
    @pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 0}])
    def test_every_loop_uses_it(self, use_cache, sampling, library, monkeypatch):
        """The packed loop, and Transformers' own, which serves a call that wants attentions."""
        target = tiny_target("llama", attn_implementation="eager")
        drafter = tiny_drafter(target)
        calls = []
        monkeypatch.setattr(draft_tokens, "fused_block", lambda *a, **k: calls.append(1) or fused_block(*a, **k))
        ours = {} if use_cache is None else {"output_attentions": True, "return_dict_in_generate": True}
        target.generate(torch.tensor([[3, 4, 5]]), assistant_model=drafter, max_new_tokens=8, **sampling, **ours)
        assert calls

    def test_logits_that_are_no_numbers_propose_the_first_token_for_certain(self, library):
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        with torch.no_grad():
            drafter.markov_head.markov_w2.weight[7] = torch.nan
        features = torch.randn(2, 5, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)
        arguments = {"anchor_tokens": torch.tensor([5, 6]), "cache": DSparkCache(num_rows=2)}
        proposal = propose(drafter.bind(target), features, **arguments, sampling=DraftSampling(do_sample=True))
        assert not proposal.tokens.any()
        assert (proposal.logits.softmax(-1)[..., 0] == 1).all()

    def test_a_second_copy_of_the_code_shares_the_operation_or_has_its_own(self, library, tmp_path, monkeypatch):
        """Remote code of two drafters, the second with another argument."""
        monkeypatch.syspath_prepend(tmp_path)
        heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)
        expected = fused_block(heads, *inputs)
        for name, argument in [("same_copy", ""), ("other_copy", "    speed: float = 1.0,\n")]:
            shutil.copytree(ROOT / "modeling_dspark", tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
            (tmp_path / name / "__init__.py").write_text(
                ""
            )  # or Transformers would take its classes for the drafter's
            code = (tmp_path / name / "fused_head.py").read_text()
            changed = code.replace("    backend: str,\n) ->", f"    backend: str,\n{argument}) ->")
            (tmp_path / name / "fused_head.py").write_text(changed)
            module = importlib.import_module(f"{name}.fused_head")
            assert torch.equal(module.fused_block(heads, *inputs).tokens, expected.tokens)
            assert torch.equal(fused_block(heads, *inputs).tokens, expected.tokens)
            is_shared = module._operation is torch.ops.dspark.sequential_head.default
            assert is_shared == (not argument)


# For one instruction set and without optimisation, which builds in a tenth of the time.
SCRIPT = """
import torch
from modeling_dspark import fused_backends, fused_build
from modeling_dspark.fused_head import fused_block
source = fused_backends.HEAD_CPU.replace("#if defined(__x86_64__) && defined(__GNUC__)", "#if 0")
assert source.count("#if 0") == 1
fused_backends.HEAD_CPU = source
fused_build._FLAGS[0] = "-O0"
heads = dict.fromkeys(["mixer_weight", "mixer_bias", "confidence_weight", "confidence_bias", "draft_to_target"])
heads |= {"w1": torch.ones(5, 2), "w2": torch.arange(10.0).view(5, 2), "kind": "vanilla"}
print(fused_block(heads, torch.zeros(1, 3, 5), torch.zeros(1, 3, 4), torch.tensor([2])).tokens.tolist())
"""


class TestBuilding:
    """In processes of their own, with folders of their own."""

    def process(self, folder, **environment):
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"DSPARK_CACHE": str(folder), "TMPDIR": str(folder.parent)} | environment,
        )  # fmt: skip

    def output(self, process):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == "[[4, 4, 4]]"
        return err

    def libraries(self, folder):
        return sorted(folder.glob("kernels/*.so"))

    def test_two_processes_at_once_build_once(self, tmp_path, library):
        folder = tmp_path / "cache"
        processes = [self.process(folder), self.process(folder)]
        said = [self.output(process) for process in processes]
        assert sum("Building dspark_head" in text for text in said) == 1
        assert len(self.libraries(folder)) == 1
        assert "Building" not in self.output(self.process(folder))

    def test_a_killed_build_is_no_obstacle(self, tmp_path, library):
        folder = tmp_path / "cache"
        process = self.process(folder)
        while not list(folder.glob("kernels/.build-*/*.cpp")):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not self.libraries(folder)
        assert "Building dspark_head" in self.output(self.process(folder))

    def test_a_folder_that_cannot_be_written_to(self, tmp_path, library):
        (tmp_path / "file").write_text("")
        said = self.output(self.process(tmp_path / "file" / "cache", TMPDIR=str(tmp_path)))
        assert "Building dspark_head" in said
        assert list(tmp_path.glob("dspark-kernels-*/*.so"))

    @pytest.mark.parametrize("environment", [{"CXX": "/nowhere/g++"}, {"PATH": "/nowhere"}], ids=["compiler", "ninja"])
    def test_without_tools_the_head_is_pytorchs(self, environment, tmp_path):
        said = self.output(self.process(tmp_path / "cache", **environment))
        assert "The fused sequential head is not used" in said
        assert "ninja" in said

    def test_what_others_can_write_to_is_not_trusted(self, tmp_path, monkeypatch, library):
        shared = tmp_path / "kernels"
        shared.mkdir()
        shared.chmod(0o777)
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
        assert all(folder != shared for folder in [fused_build._writable_folder()])


ONE = 'extern "C" int one() { return 1; }'


class TestSmallBuilds:
    """Of one line, in this process."""

    @pytest.fixture(autouse=True)
    def _fresh(self, library, monkeypatch, tmp_path):
        monkeypatch.setattr(fused_build, "_FLAGS", ["-O0"])
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        logging.get_logger("modeling_dspark.fused_build").warning_once.cache_clear()
        self.forget(monkeypatch)

    def forget(self, monkeypatch):
        """As a new process would."""
        monkeypatch.setattr(fused_build, "_loaded", {})
        monkeypatch.setattr(fused_build, "_failed", {})

    def test_a_library_that_is_cut_short_is_built_again(self, monkeypatch, tmp_path, caplog):
        """Loading it would end the process."""
        assert load_library("one", ONE).one() == 1
        (path,) = (tmp_path / "cache" / "kernels").glob("*.so")
        whole = path.read_bytes()
        for size in (0, 100, 4096, len(whole) - 1):
            path.unlink()  # it is in use
            path.write_bytes(whole[:size])
            self.forget(monkeypatch)
            assert load_library("one", ONE).one() == 1
            assert len(path.read_bytes()) == len(whole)
        assert "it is damaged" in caplog.text

    def test_a_folder_that_nothing_runs_from_is_passed_over(self, monkeypatch, tmp_path):
        real, noexec = os.statvfs, str(tmp_path / "cache")

        def statvfs(path):
            flags = os.ST_NOEXEC if str(path).startswith(noexec) else real(path).f_flag
            return SimpleNamespace(f_flag=flags)

        monkeypatch.setattr(os, "statvfs", statvfs)
        assert load_library("one", ONE).one() == 1
        assert list(tmp_path.glob("dspark-kernels-*/*.so"))
        assert not list((tmp_path / "cache").rglob("*.so"))

    @pytest.mark.parametrize("name", ["a:b", "a$b", "n" * 300])
    def test_a_path_that_ninja_or_the_system_does_not_take_is_passed_over(self, name, monkeypatch, tmp_path):
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / name))
        assert load_library("one", ONE).one() == 1
        assert list(tmp_path.glob("dspark-kernels-*/*.so"))

    def test_without_locks_each_process_builds(self, monkeypatch, tmp_path):
        def flock(*_):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(fused_build.fcntl, "flock", flock)
        (tmp_path / "cache" / "kernels").mkdir(parents=True, mode=0o700)
        assert load_library("one", ONE).one() == 1

    def test_who_waits_says_so(self, tmp_path, caplog):
        path = tmp_path / "one.so.lock"
        with path.open("a") as file:
            fused_build.fcntl.flock(file, fused_build.fcntl.LOCK_EX)
            released = threading.Timer(0.3, fused_build.fcntl.flock, (file, fused_build.fcntl.LOCK_UN))
            released.start()
            with fused_build._locked(path) as is_locked:
                assert is_locked
            released.join()
        assert "Waiting for another process that builds one.so" in caplog.text

    def test_what_a_killed_build_left_is_removed(self, tmp_path, monkeypatch):
        load_library("one", ONE)
        (path,) = (tmp_path / "cache" / "kernels").glob("*.so")
        path.unlink()
        (path.parent / f".build-{path.name}-killed").mkdir()
        (path.parent / ".build-another.so-running").mkdir()
        self.forget(monkeypatch)
        load_library("one", ONE)
        assert [folder.name for folder in path.parent.glob(".build-*")] == [".build-another.so-running"]

    def test_without_a_compiler_nothing_is_said_to_be_built(self, monkeypatch, caplog):
        monkeypatch.setenv("CXX", "g++ -fPIC")
        with pytest.raises(fused_build.BuildError, match=r"program `g\+\+ -fPIC` is missing.*g\+\+ 12"):
            load_library("one", ONE)
        assert "Building" not in caplog.text

    def test_another_compiler_makes_another_library(self, monkeypatch, tmp_path):
        load_library("one", ONE)
        monkeypatch.setenv("CXX", shutil.which("c++"))
        load_library("one", ONE)
        assert len(list((tmp_path / "cache" / "kernels").glob("*.so"))) == 2


def test_an_installed_package_has_the_kernels(tmp_path, library):
    for name in ("dspark", "modeling_dspark", "training", "hub_upload"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("repos", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(tmp_path / "source")], check=True, timeout=120)
    code = "import modeling_dspark.fused_backends as made; print(made.__file__, made.CpuBackend().best_isa)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, text=True,
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == [
        str(tmp_path / "site" / "modeling_dspark" / "fused_backends.py"), str(library.best_isa),
    ]  # fmt: skip
    assert (tmp_path / "site" / "modeling_dspark" / "kernels" / "head_cpu.cpp").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda heads, inputs: (heads, (*inputs[:2], inputs[2].to("meta"))), "`anchors` must be on cpu"),
        (lambda heads, inputs: (heads | {"w2": heads["w2"].to("meta")}, inputs), "`w2` must be on cpu"),
        (lambda heads, inputs: (heads, (*inputs[:2], inputs[2].float())), "`anchors` must be integers"),
        (lambda heads, inputs: (heads, (*inputs[:2], inputs[2].bool())), "`anchors` must be integers"),
    ],
)
def test_tensors_that_do_not_go_together_are_named(change, message):
    heads, inputs = change(*random_heads("vanilla", SHAPES[1], torch.float32))
    with pytest.raises(ValueError, match=message):
        fused_block(heads, *inputs)


@pytest.mark.parametrize("temperature", [1e-36, 1e36])
def test_temperatures_beyond_fp32s_inverses_are_pytorchs(temperature, library, monkeypatch):
    monkeypatch.setattr(CpuBackend, "__call__", lambda *_: pytest.fail("the kernel ran"))
    heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)
    block = fused_block(heads, *inputs, temperature=temperature, seed=4)
    expected = head_in_torch(HeadInputs(*inputs, **heads, temperature=temperature, seed=4, keep_logits=False))
    assert torch.equal(block.columns, expected[0])


def test_sources_are_those_of_the_files():
    write_sources = runpy.run_path(str(ROOT / "modeling_dspark" / "kernels" / "write_sources.py"))
    assert (ROOT / "modeling_dspark" / "fused_sources.py").read_text() == write_sources["module_text"]()


def test_a_failed_build_is_said_once(monkeypatch, caplog):
    def fail(*_):
        raise fused_build.BuildError("no compiler")

    logging.get_logger("modeling_dspark.fused_backends").warning_once.cache_clear()
    monkeypatch.setattr(fused_backends, "load_library", fail)
    monkeypatch.setattr(fused_backends, "_made", {})
    heads, inputs = random_heads("vanilla", SHAPES[1], torch.float32)
    for _ in range(2):
        check(heads, inputs, fused_block(heads, *inputs, keep_logits=True))
    assert caplog.text.count("no compiler") == 1
