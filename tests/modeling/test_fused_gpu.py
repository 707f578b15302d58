"""The fused head on a real GPU: results, draws, graph capture, streams, and no complaint of `compute-sanitizer`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats

from modeling_dspark.fused_backends import GpuBackend
from modeling_dspark.fused_build import BuildError
from modeling_dspark.fused_head import BlockTokens, fused_block
from modeling_dspark.fused_nvcc import NvccKernels
from modeling_dspark.fused_nvrtc import NvrtcKernels
from modeling_dspark.fused_torch import HeadInputs
from tests.modeling.test_fused_head import DTYPES, KINDS, check, first_of_the_highest, random_heads


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
MAKERS = {"cuda": NvccKernels, "nvrtc": NvrtcKernels}
# vocabulary, rank, rows, positions, hidden size
SHAPES = [
    (1, 1, 1, 1, 3),
    (63, 8, 2, 3, 16),
    (199, 33, 9, 5, 24),
    (4097, 64, 5, 7, 64),
    (49152, 256, 1, 7, 576),
    (49152, 256, 17, 3, 576),
    (20000, 128, 70, 2, 64),
    (3000, 1536, 4, 3, 64),
]


@pytest.fixture(scope="module", params=MAKERS)
def backend(request):
    try:
        return GpuBackend(MAKERS[request.param], torch.device("cuda", 0))
    except BuildError as error:
        pytest.skip(str(error))


def on_gpu(heads, inputs):
    heads = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in heads.items()}
    return heads, tuple(value.cuda() for value in inputs)


def run(backend, heads, inputs, *, temperature=0.0, seed=0, keep_logits=True):
    call = {"temperature": temperature, "seed": seed, "keep_logits": keep_logits}
    return BlockTokens(*backend(HeadInputs(*inputs, **heads, **call)))


def on_cpu(block):
    return BlockTokens(*(part.cpu() for part in block))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_tokens_and_confidences(kind, dtype, backend):
    for seed, shape in enumerate(SHAPES):
        heads, inputs = random_heads(kind, shape, DTYPES[dtype], seed=seed, reduced=seed % 2 == 1)
        block = run(backend, *on_gpu(heads, inputs))
        check(heads, inputs, on_cpu(block))
        again = run(backend, *on_gpu(heads, inputs), keep_logits=False)
        assert torch.equal(block.tokens, again.tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(dtype, backend):
    heads, (base, hidden, anchors) = random_heads("vanilla", (7777, 8, 3, 5, 8), DTYPES[dtype])
    heads["w2"].zero_()
    base = torch.randint(4, base.shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    block = run(backend, *on_gpu(heads, (base, hidden, anchors)))
    assert torch.equal(block.columns.cpu(), first_of_the_highest(base))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_follow_the_logits_as_returned(temperature, backend):
    heads, (base, hidden, anchors) = random_heads("vanilla", (40, 16, 1, 1, 8), torch.bfloat16, with_confidence=False)
    inputs = (base.expand(64, -1, -1), hidden.expand(64, -1, -1), anchors.expand(64))
    heads, inputs = on_gpu(heads, inputs)
    blocks = [run(backend, heads, inputs, temperature=temperature, seed=seed) for seed in range(500)]
    drawn = torch.cat([block.columns.flatten() for block in blocks]).cpu()
    expected = len(drawn) * (blocks[0].logits[0, 0].double().cpu() / temperature).softmax(0)
    assert stats.chisquare(torch.bincount(drawn, minlength=40), expected).pvalue > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_the_block(kind, backend):
    heads, inputs = on_gpu(*random_heads(kind, SHAPES[3], torch.bfloat16))
    eager = run(backend, heads, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(backend, heads, inputs)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for ours, expected in zip(captured, eager, strict=True):
        assert torch.equal(ours, expected)


def test_work_is_queued_on_the_current_stream(backend):
    heads, (base, hidden, anchors) = on_gpu(*random_heads("vanilla", SHAPES[4], torch.bfloat16))
    expected = run(backend, heads, (base, hidden, anchors))
    stream, late = torch.cuda.Stream(), torch.zeros_like(base)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(base)
        block = run(backend, heads, (late, hidden, anchors))
    stream.synchronize()
    assert torch.equal(block.tokens, expected.tokens)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_is_that_of_the_tensors():
    heads, inputs = random_heads("vanilla", SHAPES[3], torch.bfloat16)
    heads = {name: value.to("cuda:1") if isinstance(value, torch.Tensor) else value for name, value in heads.items()}
    block = fused_block(heads, *(value.to("cuda:1") for value in inputs))
    assert block.tokens.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


SANITIZED = """
import torch
from tests.modeling.test_fused_gpu import KINDS, MAKERS, GpuBackend, on_gpu, random_heads, run
backend = GpuBackend(MAKERS["nvrtc"], torch.device("cuda", 0))
for kind in KINDS:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((199, 33, 9, 3, 24), (333, 64, 18, 2, 16)):
            run(backend, *on_gpu(*random_heads(kind, shape, dtype)))
            run(backend, *on_gpu(*random_heads(kind, shape, dtype)), temperature=1.0)
torch.cuda.synchronize()
"""


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of a CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=dspark_head"]
    result = subprocess.run(
        [*command, sys.executable, "-c", SANITIZED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
