"""The CUDA source of the fused head, run on a CPU, against fp64 arithmetic and a Philox of its own.

What it gives may not depend on grid, launches, or the order in which threads run.
"""

import ctypes
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from modeling_dspark.fused_launch import HeadArguments
from tests.cuda.build import build_emulator, build_fake_driver
from tests.cuda.head import DTYPES, KINDS, LAUNCHES, Launch, check_block, load, reference, run
from tests.modeling.test_fused_head import first_of_the_highest, random_heads


# vocabulary, rank, rows, positions, hidden size: 9 rows take two tiles, 19 take eight, and 67 go through W2 twice
SHAPES = [
    (1, 1, 1, 1, 3),
    (7, 8, 8, 3, 16),
    (15, 31, 7, 2, 5),
    (16, 32, 6, 1, 8),
    (17, 33, 5, 2, 24),
    (63, 64, 3, 4, 9),
    (199, 130, 4, 1, 16),
    (333, 256, 2, 1, 16),
    (63, 33, 9, 3, 12),
    (31, 16, 19, 2, 8),
    (33, 8, 67, 2, 8),
]


@pytest.fixture(scope="module")
def library():
    return load(build_emulator())


def quarters(shape, dtype, *, seed=0):
    """A vanilla head and its inputs, in which every sum is exact in whatever order it is taken."""
    heads, (base, hidden, anchors) = random_heads("vanilla", shape, dtype, seed=seed, with_confidence=False)
    generator = torch.Generator().manual_seed(seed)
    for name in ("w1", "w2"):
        heads[name] = (torch.randint(-2, 3, heads[name].shape, generator=generator) / 4).to(dtype)
    base = (torch.randint(-8, 9, base.shape, generator=generator) / 4).to(dtype)
    return heads, (base, hidden, anchors)


def without_products(shape, dtype):
    """A vanilla head whose logits are the base logits."""
    heads, inputs = random_heads("vanilla", shape, dtype, with_confidence=False)
    heads["w2"].zero_()
    return heads, inputs


def philox(seed, counters):
    """Four arrays of words, by arithmetic of 64 bits on arrays of counters."""
    mask = np.uint64(0xFFFFFFFF)
    x = [np.asarray(counter, dtype=np.uint64) for counter in counters]
    for turn in range(10):
        keys = [np.uint64((seed + turn * 0x9E3779B9) % 2**32), np.uint64(((seed >> 32) + turn * 0xBB67AE85) % 2**32)]
        products = [x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)]
        high, low = zip(*((product >> np.uint64(32), product & mask) for product in products), strict=True)
        x = [high[1] ^ x[1] ^ keys[0], low[1], high[0] ^ x[3] ^ keys[1], low[0]]
    return x


def gumbel_noise(seed, rows, positions, vocabulary):
    """Noise [R, K, V] of a block. A counter serves two rows and two columns, eight apart."""
    row, position, column = np.meshgrid(*map(np.arange, (rows, positions, vocabulary)), indexing="ij")
    words = philox(seed, (column // 16 * 8 + column % 8, position, row // 2, np.ones_like(row)))
    word = np.choose(2 * (column % 16 // 8) + row % 2, words)
    level = (word.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-level))


class TestArithmetic:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_logits_tokens_and_confidences(self, kind, dtype, library):
        for seed, shape in enumerate(SHAPES):
            heads, inputs = random_heads(kind, shape, DTYPES[dtype], seed=seed, reduced=seed % 2 == 1)
            check_block(library, heads, inputs)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_exact_sums_give_exact_logits_and_tokens(self, dtype, library):
        """Token after token: none of those that follow from it is taken from the head."""
        for seed, shape in enumerate(SHAPES):
            heads, inputs = quarters(shape, DTYPES[dtype], seed=seed)
            tokens = torch.zeros(inputs[0].shape[:2], dtype=torch.long)
            for position in range(tokens.shape[1]):
                logits = reference(heads, inputs, tokens)[0].to(DTYPES[dtype])
                tokens[:, position] = first_of_the_highest(logits[:, position])
            for launch in LAUNCHES:
                block = run(library, heads, inputs, launch=launch)
                assert torch.equal(block.logits, logits)
                assert torch.equal(block.tokens, tokens)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_results_do_not_depend_on_tiles_and_alignment(self, dtype, library):
        heads, inputs = random_heads("gated", (63, 40, 9, 2, 8), DTYPES[dtype])
        launches = [Launch(2, tiles=tiles, aligned=aligned) for tiles in (1, 2, 8) for aligned in (True, False)]
        check_block(library, heads, inputs, launches)

    @pytest.mark.parametrize("kind", KINDS)
    def test_confidence_without_tokens_and_no_confidence(self, kind, library):
        for options in ({"reads_tokens": False}, {"with_confidence": False}):
            heads, inputs = random_heads(kind, SHAPES[2], torch.bfloat16, **options)
            check_block(library, heads, inputs, LAUNCHES[1:3])

    def test_anchors_that_are_no_tokens_are_taken_for_the_nearest(self, library):
        heads, (base, hidden, _) = random_heads("rnn", (17, 8, 4, 2, 8), torch.float32)
        anchors = torch.tensor([-1, -(2**60), 17, 2**60])
        block = check_block(library, heads, (base, hidden, anchors))
        clamped = run(library, heads, (base, hidden, torch.tensor([0, 0, 16, 16])))
        assert torch.equal(block.logits, clamped.logits)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(40))
    def test_more_schedules(self, seed, library):
        kind, dtype = list(KINDS)[seed % 3], list(DTYPES.values())[seed // 3 % 3]
        heads, inputs = random_heads(kind, (199, 40, 11, 4, 8), dtype, seed=seed)
        launches = [Launch(1 + turn, 1 + turn % 4, schedule=10 * seed + turn, tiles=1) for turn in range(6)]
        check_block(library, heads, inputs, launches)


class TestChoice:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nan_loses_and_ties_go_to_the_lowest_column(self, dtype, library):
        inf, nan = math.inf, math.nan
        expected = {  # column, and what is in place of -1
            0: dict.fromkeys(range(40), nan),
            3: {**dict.fromkeys(range(40), nan), 3: -inf, 30: -inf},
            5: {5: 2.0, 13: 2.0, 21: 2.0, 39: 2.0},
            7: {0: nan, 6: nan, 7: inf, 8: inf, 39: -nan},
            39: {0: -inf, 38: nan, 39: -0.5},
        }
        heads, (base, *rest) = without_products((40, 8, len(expected), 1, 3), DTYPES[dtype])
        base.fill_(-1)
        for row, changes in enumerate(expected.values()):
            for column, value in changes.items():
                base[row, 0, column] = value
        for launch in LAUNCHES:
            assert run(library, heads, (base, *rest), launch=launch).columns.flatten().tolist() == list(expected)
        base.fill_(-inf)
        assert not run(library, heads, (base, *rest)).columns.any()

    def test_zeros_of_both_signs_are_equal(self, library):
        """A negative zero comes from a product that is too small for fp16."""
        heads, (base, *rest) = without_products((40, 8, 1, 1, 3), torch.float16)
        heads["w1"].fill_(2.0**-14)
        heads["w2"][5, 0] = -(2.0**-14)
        base.fill_(-1)
        base[..., [5, 20]] = 0
        block = run(library, heads, (base, *rest))
        assert block.logits[0, 0, 5].signbit()
        assert not block.logits[0, 0, 20].signbit()
        assert block.columns.item() == 5


class TestDraws:
    def test_known_numbers_of_the_generator(self, library):
        """From the authors' table of known answers."""
        answers = {
            (0, (0, 0, 0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
            (2**64 - 1, (2**32 - 1,) * 4): "408f276d 41c83b0e a20bc7c6 6d5451fd",
            (
                0x299F31D0A4093822,
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            ): "d16cfe09 94fdcceb 5001e420 24126ea1",
        }
        for (seed, counter), words in answers.items():
            found = (ctypes.c_uint32 * 4)()
            library.emulate_philox(ctypes.c_uint64(seed), (ctypes.c_uint32 * 4)(*counter), found)
            assert " ".join(f"{word:08x}" for word in found) == words
            assert " ".join(f"{int(word):08x}" for word in philox(seed, counter)) == words

    def test_noise_is_finite_and_keeps_the_last_bit_of_small_words(self, library):
        """A noise of minus infinity would make a column equal to those that weigh nothing."""
        words = np.array([0, 1, 2, 3, 1000, 2**20 + 1, 2**31, 2**32 - 2**20])
        found = np.array([library.emulate_gumbel(int(word)) for word in words])
        np.testing.assert_allclose(found, -np.log(-np.log1p(-(words + 0.5) * 2.0**-32)), rtol=1e-5)
        lowest = library.emulate_gumbel(2**32 - 1)
        assert -3.2 < lowest < found.min()

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_highest_of_logit_and_noise_is_drawn(self, dtype, temperature, library):
        for turn, shape in enumerate(SHAPES[1::2]):
            heads, inputs = random_heads(list(KINDS)[turn % 3], shape, DTYPES[dtype], seed=turn)
            seed = 0x0123456789ABCDEF * (turn + 1) % 2**64
            block = check_block(library, heads, inputs, LAUNCHES[1:3], temperature=temperature, seed=seed)
            levels = block.logits.double().numpy() / temperature
            levels += gumbel_noise(seed, len(levels), levels.shape[1], levels.shape[2])
            drawn = np.take_along_axis(levels, block.columns[..., None].numpy(), axis=2)[..., 0]
            assert (drawn >= levels.max(axis=2) - 1e-4).all()  # fp32 rounds levels of up to 30 or so

    @pytest.mark.parametrize("temperature", [0.5, 1.5])
    def test_draws_follow_the_logits(self, temperature, library):
        """6 columns, 16 rows of equal contents, 250 seeds."""
        heads, (base, hidden, anchors) = random_heads(
            "vanilla", (6, 4, 1, 1, 8), torch.bfloat16, with_confidence=False
        )
        inputs = (base.expand(16, -1, -1), hidden.expand(16, -1, -1), anchors.expand(16))
        blocks = [run(library, heads, inputs, temperature=temperature, seed=seed) for seed in range(250)]
        counts = torch.stack([block.columns for block in blocks]).flatten().bincount(minlength=6)
        shares = (blocks[0].logits[0, 0].double() / temperature).softmax(0)
        assert stats.chisquare(counts, 4000 * shares).pvalue > 1e-3

    def test_what_weighs_nothing_is_never_drawn(self, library):
        heads, (base, *rest) = without_products((40, 8, 5, 2, 3), torch.float32)
        base.fill_(-math.inf)
        base[..., [7, 33]] = 0.0
        drawn = {
            column
            for seed in range(30)
            for column in run(library, heads, (base, *rest), temperature=1.0, seed=seed).columns.unique().tolist()
        }
        assert drawn == {7, 33}


class TestFakeDriver:
    def test_it_refuses_what_a_device_would(self):
        driver = ctypes.CDLL(str(build_fake_driver()))
        driver.fake_driver_log.restype = ctypes.c_char_p
        driver.fake_driver_clear()
        module, function, other = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuInit(0) == 0
        assert driver.cuModuleLoadData(ctypes.byref(module), b"// PTX") == 200
        assert driver.cuModuleLoadData(ctypes.byref(module), b"\x7fELF") == 0
        assert driver.cuModuleGetFunction(ctypes.byref(other), module, b"dspark_head_fp32_8") == 500
        assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"dspark_head_bf16_2") == 0

        arguments, first, last = HeadArguments(rows=0, positions=1, vocabulary=0), ctypes.c_int32(1), ctypes.c_int32(2)
        pointers = [ctypes.addressof(value) for value in (arguments, first, last)]
        parameters = (ctypes.c_void_p * 3)(*pointers)

        def start(blocks, shared_bytes, *, cooperative=False):
            call = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
            return call(function, blocks, 1, 1, 64, 1, 1, shared_bytes, None, parameters, None)

        assert start(9, 49152) == 0
        assert start(9, 1024, cooperative=True) == 720
        assert start(8, 1024, cooperative=True) == 0
        assert start(1, 49153) == 1
        assert driver.cuFuncSetAttribute(function, 8, 227 * 1024 + 1) == 1
        assert driver.cuFuncSetAttribute(function, 8, 227 * 1024) == 0
        assert start(1, 227 * 1024) == 0
        assert driver.cuModuleUnload(module) == 0
        assert start(1, 1024) == 400

        log = [call for call in json.loads(driver.fake_driver_log()) if "Launch" in call["call"]]
        assert [call["error"] for call in log] == [0, 720, 0, 1, 0, 400]
        assert log[0] == {
            "call": "cuLaunchKernel", "error": 0, "kernel": "dspark_head_bf16_2", "grid": 9, "block": 64,
            "shared_bytes": 49152, "stream": 0, "first": 1, "last": 2,
        }  # fmt: skip
