"""Which backend serves a device, and the GPU's from end to end: on a stand-in for the driver, which takes CPU tensors."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import logging

from modeling_dspark import fused_backends, fused_nvrtc
from modeling_dspark.fused_backends import GpuBackend, backend_for
from modeling_dspark.fused_build import BuildError
from modeling_dspark.fused_head import fused_block
from modeling_dspark.fused_launch import LaunchError
from modeling_dspark.fused_nvcc import NoToolkitError
from modeling_dspark.fused_nvrtc import NvrtcKernels
from tests.builders import tiny_drafter, tiny_target
from tests.modeling.test_fused_cuda import FakeDriver, StubCompiler
from tests.modeling.test_fused_head import DTYPES, KINDS, check, random_heads


CPU = torch.device("cpu")


@pytest.fixture
def no_backends(monkeypatch):
    """A process that has tried nothing yet."""
    logging.get_logger("modeling_dspark.fused_backends").warning_once.cache_clear()
    monkeypatch.setattr(fused_backends, "_made", {})
    monkeypatch.setattr(fused_backends, "_given_up", set())


@pytest.fixture
def driver():
    fake = FakeDriver()
    fake.library.fake_driver_clear()
    return fake


@pytest.fixture
def gpu(driver, no_backends, monkeypatch, tmp_path):
    """The GPU's backend in the place of the CPU's."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    properties = SimpleNamespace(multi_processor_count=4, shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused_nvrtc, "Nvrtc", StubCompiler)
    backend = GpuBackend(lambda source, capability: NvrtcKernels(source, capability, driver.library), CPU)
    monkeypatch.setitem(fused_backends._made, ("cpu", CPU), backend)
    return backend


class TestGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_block_is_that_of_fp64(self, kind, dtype, gpu, driver):
        for rank in (16, 9):  # whole vectors of 16 bytes, and not
            heads, inputs = random_heads(kind, (143, rank, 3, 3, 24), DTYPES[dtype], reduced=True)
            block = fused_block(heads, *inputs, keep_logits=True)
            check(heads, inputs, block)
            assert torch.equal(fused_block(heads, *inputs).tokens, block.tokens)
        launches = driver.log("cuLaunchCooperativeKernel")
        assert len(launches) == 4
        assert {entry["stream"] for entry in launches} == {77}

    def test_weights_that_are_not_aligned_are_read_one_by_one(self, gpu):
        heads, inputs = random_heads("vanilla", (40, 16, 2, 2, 8), torch.bfloat16)
        for name in ("w1", "w2"):
            shifted = torch.empty(heads[name].numel() + 1, dtype=torch.bfloat16)[1:].view_as(heads[name])
            heads[name] = shifted.copy_(heads[name])
        check(heads, inputs, fused_block(heads, *inputs, keep_logits=True))

    def test_while_a_stream_is_captured_each_phase_is_a_launch(self, gpu, driver, monkeypatch):
        heads, inputs = random_heads("gated", (40, 16, 2, 3, 8), torch.float32)
        expected = fused_block(heads, *inputs)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(fused_block(heads, *inputs).tokens, expected.tokens)
        assert len(driver.log("cuLaunchKernel")) == 2 * 3 + 1

    def test_where_not_all_blocks_fit_at_once_each_phase_is_a_launch(self, gpu, driver, caplog):
        heads, inputs = random_heads("vanilla", (4000, 8, 1, 2, 8), torch.float32)
        expected = fused_block(heads, *inputs, keep_logits=True)
        gpu._sizes["num_multiprocessors"] = 400  # more than the driver has
        for _ in range(2):
            block = fused_block(heads, *inputs, keep_logits=True)
            assert torch.equal(block.tokens, expected.tokens)
            assert torch.equal(block.logits, expected.logits)
        assert [entry["error"] for entry in driver.log("cuLaunchCooperativeKernel")] == [0, 720]  # tried once
        assert caplog.text.count("needs one launch per position") == 1

    def test_a_kernel_that_cannot_run_is_said_once_and_pytorch_goes_on(self, gpu, driver, caplog):
        heads, inputs = random_heads("vanilla", (40, 8, 2, 2, 8), torch.float32)
        gpu._sizes["max_shared_bytes"] = 100
        for _ in range(2):
            check(heads, inputs, fused_block(heads, *inputs, keep_logits=True))
        assert caplog.text.count("A Markov rank of 8 needs") == 1
        assert backend_for(CPU, torch.float32, 8) is None
        assert not driver.log()
        gpu._sizes["max_shared_bytes"] = 227 * 1024
        heads, inputs = random_heads("vanilla", (40, 16, 2, 2, 8), torch.float32)
        check(heads, inputs, fused_block(heads, *inputs, keep_logits=True))
        assert driver.log("cuLaunchCooperativeKernel")  # another rank may fit

    def test_an_error_that_is_no_matter_of_places_is_not_met_with_more_launches(
        self, gpu, driver, monkeypatch, caplog
    ):
        def fail(*_, **__):
            raise LaunchError("an illegal address", 700)

        monkeypatch.setattr(NvrtcKernels, "launch", fail)
        heads, inputs = random_heads("vanilla", (40, 8, 2, 2, 8), torch.float32)
        check(heads, inputs, fused_block(heads, *inputs, keep_logits=True))
        assert "an illegal address (CUDA error 700)" in caplog.text
        assert not gpu._stepwise

    @pytest.mark.parametrize("kind", KINDS)
    def test_generate_gives_the_targets_text(self, kind, gpu, driver):
        target = tiny_target("llama")
        drafter = tiny_drafter(target, markov_head_type=kind)
        prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
        plain = target.generate(prompts, max_new_tokens=8, do_sample=False)
        call = {"max_new_tokens": 8, "assistant_model": drafter, "num_assistant_tokens_schedule": "fixed"}
        assert torch.equal(target.generate(prompts, do_sample=False, **call), plain)
        assert target.generate(prompts, do_sample=True, top_k=0, **call).shape[0] == 2
        assert len(driver.log("cuLaunchCooperativeKernel")) > 4


class TestChoice:
    def choose(self, monkeypatch, choice, device, *, fails=(), error=BuildError):
        """What is tried, and what serves."""
        tried = []

        def make(name):
            def maker(_):
                tried.append(name)
                if name in fails:
                    raise error(f"no {name} here")
                return f"the {name} backend"

            return maker

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(fused_backends, "_makers", {name: make(name) for name in ("cpu", "cuda", "nvrtc")})
        first, again = (backend_for(torch.device(device), choice=choice) for _ in range(2))
        return first, again, tried

    @pytest.mark.parametrize(
        ("choice", "device", "expected"),
        [
            ("auto", "cpu", "cpu"),
            ("cpu", "cpu", "cpu"),
            ("cuda", "cpu", None),
            ("nvrtc", "cpu", None),
            ("torch", "cpu", None),
            ("auto", "cuda:0", "cuda"),
            ("cuda", "cuda:0", "cuda"),
            ("nvrtc", "cuda:0", "nvrtc"),
            ("cpu", "cuda:0", None),
            ("torch", "cuda:0", None),
            ("auto", "meta", None),
        ],
    )
    def test_what_serves(self, choice, device, expected, no_backends, monkeypatch):
        first, again, tried = self.choose(monkeypatch, choice, device)
        assert first == again == (expected and f"the {expected} backend")
        assert tried == ([expected] if expected else [])

    def test_without_a_toolkit_nvrtc_serves_and_nothing_is_said(self, no_backends, monkeypatch, caplog):
        first, again, tried = self.choose(monkeypatch, "auto", "cuda:0", fails=["cuda"], error=NoToolkitError)
        assert first == again == "the nvrtc backend"
        assert tried == ["cuda", "nvrtc"]
        assert not caplog.text

    def test_a_toolkit_that_cannot_build_is_named(self, no_backends, monkeypatch, caplog):
        first, again, _ = self.choose(monkeypatch, "auto", "cuda:0", fails=["cuda"])
        assert first == again == "the nvrtc backend"
        assert caplog.text.count("nvcc could not build it: no cuda here") == 1

    def test_all_reasons_are_said_once(self, no_backends, monkeypatch, caplog):
        first, again, tried = self.choose(monkeypatch, "auto", "cuda:0", fails=["cuda", "nvrtc"])
        assert first is again is None
        assert tried == ["cuda", "nvrtc"]
        assert caplog.text.count("no cuda here") == caplog.text.count("nvrtc: no nvrtc here") == 1

    def test_amds_gpus_have_none(self, no_backends, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert backend_for(torch.device("cuda", 0)) is None

    def test_an_error_of_the_driver_is_a_reason(self, no_backends, monkeypatch, caplog):
        def fail(_):
            raise LaunchError("no driver")

        monkeypatch.setattr(fused_backends, "_makers", {"cpu": fail})
        assert backend_for(CPU) is None
        assert "no driver" in caplog.text
