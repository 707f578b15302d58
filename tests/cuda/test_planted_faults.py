"""Faults planted in the CUDA source of the fused head: the checks that it passes find each of them."""

import os
import shutil
import subprocess

import pytest
import torch

from tests.cuda.build import SANITIZED, build_emulator, replaced
from tests.cuda.head import EmulationError, Launch, check_block, load
from tests.modeling.test_fused_head import random_heads


KERNEL = ("bf16", 1)
# nine rows go through W2 twice; a second position reads what the first one left
CASES = [("vanilla", (63, 40, 9, 3, 8)), ("rnn", (63, 40, 9, 3, 8))]
LAUNCHES = [Launch(3, 2, schedule, tiles=1) for schedule in range(3)]

SYNC = "  __syncthreads();\n"
BARRIER = "if (number > first) grid_barrier"
FAULTS = {
    "tokens are read before they are there": (SYNC + "  constexpr int kCount", "  constexpr int kCount"),
    "latents are read before they are there": ("= loaded.vector;\n  }\n" + SYNC, "= loaded.vector;\n  }\n"),
    "bests of warps are read before they are there": ("= mine;\n  }\n" + SYNC, "= mine;\n  }\n"),
    "a step of a shuffle is dropped": ("offset >= 4;", "offset >= 8;"),
    "a lane is not at a shuffle": ("value += __shfl", "if (lane_id() != 5) value += __shfl"),
    "the grid waits for too few": ("gridDim.x * (uint32_t)(number - first)", "(uint32_t)(number - first)"),
    "the grid waits for too many": ("(uint32_t)(number - first)", "(uint32_t)(number - first) + 1"),
    "the grid does not wait": (BARRIER, "if (number < first) grid_barrier"),
    "a block does not wait with its first thread": (
        "    __threadfence();\n  }\n" + SYNC,
        "    __threadfence();\n  }\n",
    ),
    "columns of a fragment are swapped": ("{w[step][0].x, w[step][1].x,", "{w[step][1].x, w[step][0].x,"),
    "places of a fragment are swapped": ("late_x[2] = {x.z, x.w}", "late_x[2] = {x.w, x.z}"),
    "a state is overwritten while it is read": ("(1 + position % 2) * a.rows", "1 * a.rows"),
    "rows do not end": ("if (row >= a.rows) return best;", ""),
    "columns do not end": ("if (column + 8 * half < a.vocabulary) {", "{"),
    "shared memory of two kinds overlaps": ("(before + P::kRows)", "before"),
}
# Of those that the sanitizer is for, some show in the results as well; a fence is nothing that a CPU needs
RACES = {
    name: FAULTS[name]
    for name in (
        "latents are read before they are there",
        "bests of warps are read before they are there",
        "the grid does not wait",
        "a block does not wait with its first thread",
        "a state is overwritten while it is read",
    )
} | {
    "a block arrives before all of it is done": (SYNC + "  if (threadIdx.x == 0) {", "  if (threadIdx.x == 0) {"),
    "no fence before a block arrives": ("    __threadfence();\n    atomicAdd", "    atomicAdd"),
    "no fence after the grid has arrived": ("spin();\n    __threadfence();", "spin();"),
}
# kernel, kind, rows, positions, vocabulary, rank, blocks, warps, schedule
PROGRAMS = [
    "dspark_head_fp32_1 1 5 2 63 16 2 2 1",
    "dspark_head_bf16_1 2 9 3 63 40 3 2 0",
    "dspark_head_bf16_1 2 9 3 63 40 3 2 2",
    "dspark_head_bf16_2 0 12 3 63 33 3 3 1",
    "dspark_head_fp16_8 0 67 2 33 16 2 2 2",
]


def check_all(library):
    for kind, shape in CASES:
        heads, inputs = random_heads(kind, shape, torch.bfloat16)
        check_block(library, heads, inputs, LAUNCHES)


def check_races(program, arguments):
    options = {**os.environ, "TSAN_OPTIONS": "exitcode=66"}
    done = subprocess.run(
        [program, *arguments.split()], capture_output=True, text=True, timeout=60, check=False, env=options
    )
    assert done.returncode == 0, done.stderr[:4000]


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory):
    """Skips where there is no thread sanitizer, or it does not run under this kernel."""
    folder = tmp_path_factory.mktemp("sanitizer")
    (folder / "empty.cpp").write_text("int main() {}\n")
    command = [shutil.which("g++") or "false", *SANITIZED, "empty.cpp", "-o", "empty"]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("g++ has no thread sanitizer here")
    if subprocess.run([folder / "empty"], capture_output=True, check=False).returncode:
        pytest.skip("the thread sanitizer does not run here")


def test_there_is_no_fault():
    check_all(load(build_emulator(only=KERNEL)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    library = load(build_emulator(replaced(FAULTS[fault]), only=KERNEL))
    with pytest.raises((AssertionError, EmulationError)):
        check_all(library)


class TestRaces:
    @pytest.mark.parametrize("arguments", PROGRAMS)
    def test_there_is_none(self, arguments, sanitizer):
        check_races(build_emulator(sanitize=True), arguments)

    @pytest.mark.parametrize("fault", RACES)
    def test_one_is_found(self, fault, sanitizer):
        program = build_emulator(replaced(RACES[fault]), only=KERNEL, sanitize=True)
        with pytest.raises(AssertionError, match="data race"):
            check_races(program, PROGRAMS[1])

    def test_a_vector_that_is_not_aligned_is_found(self, sanitizer):
        source = replaced(("+ 127) / 128 * 128 + 64)", "+ 127) / 128 * 128 + 68)"))
        program = build_emulator(source, only=KERNEL, sanitize=True)
        with pytest.raises(AssertionError, match="misaligned address"):
            check_races(program, PROGRAMS[1])
