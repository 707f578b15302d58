"""Compiling and launching the head's CUDA kernels, as far as that goes without a GPU: what nvcc and NVRTC make of them, and
launches through a stand-in for the driver that runs them on a CPU."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from modeling_dspark import fused_build, fused_nvcc, fused_nvrtc
from modeling_dspark.fused_build import BuildError
from modeling_dspark.fused_launch import (
    Grid,
    HeadArguments,
    LaunchError,
    architecture,
    kernel_macros,
    kernel_name,
    launch,
    scratch_bytes,
    shared_bytes,
    tiles_for,
)
from modeling_dspark.fused_nvcc import NvccKernels, find_toolkit
from modeling_dspark.fused_nvrtc import Nvrtc, NvrtcKernels
from tests.cuda.build import build_fake_driver
from tests.cuda.head import DTYPES, KINDS, Launch, check_block, run
from tests.modeling.test_fused_head import random_heads
from tests.modeling.test_fused_head_emulated import gumbel_noise


SOURCES = Path(__file__).parents[2] / "modeling_dspark" / "kernels"
SOURCE = (SOURCES / "head_cuda.cu").read_text()
KERNELS = [(0, 1), *((dtype, tiles) for dtype in (1, 2) for tiles in (1, 2, 8))]
ARCHITECTURES = [80, 90, 100, 120]
STUB = b"\x7fELF"
MULTIPROCESSORS, SHARED = 4, 227 * 1024  # of the stand-in


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A folder of this file's own for what is built."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("DSPARK_CACHE", str(folder))
        yield folder / "kernels"


@pytest.fixture(scope="module")
def nvrtc():
    try:
        return Nvrtc()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def toolkit():
    try:
        return find_toolkit()
    except BuildError as error:
        pytest.skip(str(error))


class TestArguments:
    """The structure of Python against those of the C++ sources."""

    TYPES = {
        "int64_t": ctypes.c_int64,
        "uint64_t": ctypes.c_uint64,
        "int32_t": ctypes.c_int32,
        "double": ctypes.c_double,
    }

    def structure(self, file):
        return re.search(r"^struct DsparkHeadArguments \{\n(.*?)^\};", (SOURCES / file).read_text(), re.M | re.S)[1]

    def fields(self, file):
        """Names and types, in order."""
        declarations = (part.strip() for part in re.sub(r"//.*", "", self.structure(file)).split(";"))
        for declaration in filter(None, declarations):
            kind, names = re.fullmatch(r"(?:const )?(\w+) (.*)", declaration, re.S).groups()
            for name in names.split(","):
                yield name.strip(" *\n"), ctypes.c_void_p if "*" in name else self.TYPES[kind]

    @pytest.mark.parametrize("file", ["head_cuda.cu", "head_cpu.cpp"])
    def test_fields_agree(self, file):
        assert list(self.fields(file)) == HeadArguments._fields_

    @pytest.mark.parametrize("file", ["head_cuda.cu", "head_cpu.cpp"])
    def test_a_compiler_puts_them_in_the_same_places(self, file, tmp_path):
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        names = [name for name, _ in HeadArguments._fields_]
        prints = "".join(f'std::printf("%zu ", offsetof(DsparkHeadArguments, {name}));' for name in names)
        (tmp_path / "main.cpp").write_text(
            "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n"
            f"struct DsparkHeadArguments {{\n{self.structure(file)}}};\n"
            f'int main() {{ {prints} std::printf("%zu", sizeof(DsparkHeadArguments)); }}\n'
        )
        subprocess.run(["g++", "-o", tmp_path / "main", tmp_path / "main.cpp"], check=True)
        *offsets, size = map(int, subprocess.check_output([tmp_path / "main"]).split())
        assert offsets == [getattr(HeadArguments, name).offset for name in names]
        assert size == ctypes.sizeof(HeadArguments)


class Recorder:
    """Kernels that write down what is asked of them."""

    def __init__(self, occupancy=2):
        self.blocks_each, self.asked, self.launches = occupancy, [], []

    def occupancy(self, *key):
        self.asked.append(key)
        return self.blocks_each

    def launch(self, dtype, tiles, arguments, first, last, grid):
        self.launches.append((dtype, tiles, first, last, grid._asdict()))


def launches(*, occupancy=2, multiprocessors=132, shared=SHARED, stepwise=False, **arguments):
    kernels = Recorder(occupancy)
    call = {"num_multiprocessors": multiprocessors, "max_shared_bytes": shared, "stream": 7, "stepwise": stepwise}
    arguments = {"rows": 1, "positions": 7, "vocabulary": 151936, "rank": 256, "dtype": 1} | arguments
    launch(kernels, HeadArguments(**arguments), **call)
    return kernels.launches


class TestPolicy:
    @pytest.mark.parametrize(
        ("dtype", "tiles", "rank", "expected"),
        [
            (0, 1, 256, 4 * (9 * 8 + 1024 + 64)),
            (0, 1, 1, 4 * (9 * 8 + 128 + 64)),
            (1, 1, 256, 8 * (9 * 8 + 512 + 64)),
            (1, 2, 65, 16 * (9 * 8 + 256 + 64)),
            (2, 8, 64, 64 * (9 * 8 + 128 + 64)),
        ],
    )
    def test_shared_memory_of_a_block(self, dtype, tiles, rank, expected):
        """Keys of eight warps and a token, eight bytes each, and a latent of whole 128 bytes and 64 more."""
        assert shared_bytes(dtype, tiles, rank) == expected

    @pytest.mark.parametrize(
        ("dtype", "rows", "rank", "tiles"),
        [(0, 1, 256, 1), (0, 99, 256, 1), (1, 1, 256, 1), (1, 8, 256, 1), (1, 9, 256, 2), (2, 16, 256, 2), (2, 17, 256, 8),
         (1, 64, 1600, 8), (1, 64, 1800, 2), (1, 64, 8000, 1), (1, 64, 20000, None), (0, 1, 20000, None)],
    )  # fmt: skip
    def test_tiles(self, dtype, rows, rank, tiles):
        assert tiles_for(dtype, rows, rank, SHARED) == tiles

    def test_scratch(self):
        assert scratch_bytes(3, 7, 64, "vanilla") == 8 * 22
        assert scratch_bytes(3, 7, 64, "gated") == scratch_bytes(3, 7, 64, "rnn") == 8 * 22 + 3 * 4 * 3 * 64

    def test_a_block_is_one_cooperative_launch(self):
        call = {"threads": 256, "shared_bytes": shared_bytes(1, 1, 256), "stream": 7, "cooperative": True}
        assert launches() == [(1, 1, 0, 8, {"blocks": 264, **call})]
        assert launches(kind=1)[0][2:4] == launches(kind=2)[0][2:4] == (0, 15)

    def test_stepwise_is_a_launch_a_phase(self):
        steps = launches(stepwise=True, kind=1, positions=2)
        assert [step[2:4] for step in steps] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
        assert not any(step[4]["cooperative"] for step in steps)

    @pytest.mark.parametrize(
        ("call", "blocks"),
        [({}, 264), ({"occupancy": 1}, 132), ({"vocabulary": 1000}, 8), ({"vocabulary": 1}, 1), ({"occupancy": 0}, 1)],
    )
    def test_blocks_are_those_that_fit_and_have_work(self, call, blocks):
        assert launches(**call)[0][4]["blocks"] == blocks

    def test_a_rank_that_does_not_fit_is_named(self):
        with pytest.raises(LaunchError, match=r"rank of 20000 needs 321600 bytes.*maximum of 232448"):
            launches(rank=20000)

    def test_old_gpus_are_refused(self):
        assert architecture((12, 1)) == 121
        with pytest.raises(BuildError, match=r"8\.0 or higher.*7\.5"):
            architecture((7, 5))


def write_nvcc(home, *, calls=None, version="12.9.41", header=True):
    """A toolkit with an nvcc that answers questions, or that is a script which calls another."""
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    if calls is not None:
        nvcc.write_text(f'#!/bin/sh\nexec {calls}/bin/nvcc "$@"\n')
    else:
        nvcc.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12, V{version}"; fi\n'
            f'if [ "$1" = --dryrun ]; then echo "#$ _HERE_={home}/bin" >&2; fi\n'
        )
    nvcc.chmod(0o755)
    if header:
        (home / "include").mkdir()
        (home / "include" / "cuda_runtime.h").touch()
    return home


class TestToolkit:
    @pytest.fixture(autouse=True)
    def bare_machine(self, monkeypatch, tmp_path):
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("PATH", "/bin")
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.setattr(fused_nvcc, "_USUAL_HOME", tmp_path / "usual")

    @pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
    def test_the_one_that_is_named(self, variable, tmp_path, monkeypatch):
        write_nvcc(tmp_path / "usual", version="1.1.1")
        monkeypatch.setenv(variable, str(write_nvcc(tmp_path / "named")))
        assert find_toolkit() == (tmp_path / "named", "12.9.41")

    def test_it_may_be_named_from_here(self, tmp_path, monkeypatch):
        write_nvcc(tmp_path / "named")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CUDA_HOME", "named")
        assert find_toolkit().home == tmp_path / "named"

    @pytest.mark.parametrize("named", [None, "missing", "no_header"])
    def test_that_of_an_nvcc_which_is_a_script(self, named, tmp_path, monkeypatch):
        """Whether CUDA_HOME is unset or wrong."""
        real = write_nvcc(tmp_path / "real")
        wrapper = write_nvcc(tmp_path / "local", calls=real, header=False)
        write_nvcc(tmp_path / "no_header", header=False)
        monkeypatch.setenv("PATH", f"{wrapper / 'bin'}:/bin")
        if named is not None:
            monkeypatch.setenv("CUDA_HOME", str(tmp_path / named))
        assert find_toolkit().home == real

    def test_that_of_a_link_on_the_path(self, tmp_path, monkeypatch):
        real = write_nvcc(tmp_path / "real")
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "nvcc").symlink_to(real / "bin" / "nvcc")
        monkeypatch.setenv("PATH", f"{tmp_path / 'links'}:/bin")
        assert find_toolkit().home == real

    def test_the_usual_place(self, tmp_path):
        home = write_nvcc(tmp_path / "usual")
        assert find_toolkit().home == home

    def test_that_of_wheels(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", ["", str(tmp_path / "site")])
        home = write_nvcc(tmp_path / "site" / "nvidia" / "cu13")
        (tmp_path / "site" / "nvidia" / "cudnn").mkdir()
        assert find_toolkit().home == home

    def test_wheels_are_linked_by_the_full_name_of_the_library(self, tmp_path):
        home = write_nvcc(tmp_path / "nvidia" / "cu13")
        (home / "lib").mkdir()
        (home / "lib" / "libcudart.so.13").touch()
        flags = fused_nvcc._link_flags(home, tmp_path / "link")
        assert (tmp_path / "link" / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"
        assert flags == [f"-L{tmp_path / 'link'}", "-Wl,--as-needed", f"-Wl,-rpath,{home / 'lib'}"]

    def test_places_are_named_where_there_is_none(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "wrong"))
        with pytest.raises(BuildError, match=r"bin/nvcc.*wrong, .*usual.*set CUDA_HOME"):
            find_toolkit()

    def test_an_nvcc_that_does_not_run_is_no_toolkit(self, tmp_path, monkeypatch):
        home = write_nvcc(tmp_path / "broken")
        (home / "bin" / "nvcc").write_text("#!/nowhere\n")
        monkeypatch.setenv("CUDA_HOME", str(home))
        with pytest.raises(BuildError, match="no CUDA toolkit"):
            find_toolkit()


class TestNvcc:
    @pytest.mark.parametrize("number", ARCHITECTURES)
    def test_no_kernel_spills_registers(self, number, toolkit, tmp_path):
        command = [
            toolkit.home / "bin" / "nvcc",
            *fused_nvcc._FLAGS,
            f"-arch=sm_{number}",
            "-Xptxas",
            "-v",
            "-cubin",
        ]
        done = subprocess.run(
            [*command, "-o", tmp_path / "out.cubin", SOURCES / "head_cuda.cu"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        spills = re.findall(r"(\w+) bytes spill stores, (\w+) bytes spill loads", done.stderr)
        assert spills == [("0", "0")] * len(KERNELS)
        assert set(re.findall(r"entry function '(\w+)'", done.stderr)) == {kernel_name(*each) for each in KERNELS}

    def test_a_library_is_built_without_a_gpu_or_a_torch_for_one(self, toolkit, monkeypatch, cache, caplog):
        from torch.utils import cpp_extension

        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", "before")
        kernels = NvccKernels(SOURCE, (9, 0))
        assert cpp_extension.CUDA_HOME == "before"
        assert caplog.text.count("Building dspark_head_cuda") == 1
        assert len(list(cache.glob("dspark_head_cuda-*.so"))) == 1
        NvccKernels(SOURCE, (9, 0))
        assert caplog.text.count("Building") == 1
        if not torch.cuda.is_available():
            with pytest.raises(LaunchError, match=r"dspark_head_bf16_1: .*driver.*\(CUDA error \d+\)"):
                kernels.occupancy(1, 1, 256, 5000)
            with pytest.raises(LaunchError, match=r"dspark_head_fp32_1: .*driver.*\(CUDA error \d+\)"):
                kernels.launch(0, 1, HeadArguments(), 0, 2, Grid(1, 256, 5000, stream=0, cooperative=True))

    @pytest.mark.slow
    def test_a_toolkit_of_wheels_will_do(self, toolkit, monkeypatch, tmp_path):
        """It has the run time under its full name only."""
        home = write_nvcc(tmp_path / "nvidia" / "cu13", calls=toolkit.home, header=False)
        (home / "include").symlink_to(toolkit.home / "include")
        (home / "lib").mkdir()
        (runtime,) = toolkit.home.glob("lib64/libcudart.so.[0-9][0-9]")
        (home / "lib" / runtime.name).symlink_to(runtime)
        monkeypatch.setenv("CUDA_HOME", str(home))
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
        assert find_toolkit().home == home
        NvccKernels(SOURCE, (8, 0))

    def test_the_librarys_errors_are_not_left_for_torch(self, monkeypatch):
        """The run time keeps an error until somebody asks for the last one, as torch does after each of its kernels."""
        library = mock.Mock(
            **{"dspark_head_launch.return_value": 9, "dspark_head_error.return_value": b"no such luck"}
        )
        monkeypatch.setattr(fused_nvcc, "build", lambda *_: library)
        grid = Grid(3, 256, 5, stream=6, cooperative=True)
        with pytest.raises(LaunchError, match=r"dspark_head_fp32_1: no such luck \(CUDA error 9\)"):
            NvccKernels("", (9, 0)).launch(0, 1, HeadArguments(), 0, 2, grid)
        library.cudaGetLastError.assert_called_once()
        assert library.dspark_head_launch.call_args.args[3:8] == (0, 2, 3, 256, 5)

    def test_less_shared_memory_takes_none_away(self, monkeypatch):
        library = mock.Mock(**{"dspark_head_occupancy.return_value": 0})
        monkeypatch.setattr(fused_nvcc, "build", lambda *_: library)
        kernels = NvccKernels("", (9, 0))
        for size in (500, 900, 700, 500, 900):
            kernels.occupancy(1, 2, 256, size)
        kernels.occupancy(1, 8, 256, 100)
        asked = [(call.args[1], call.args[3]) for call in library.dspark_head_occupancy.call_args_list]
        assert asked == [(2, 500), (2, 900), (2, 700), (2, 900), (8, 100)]

    def test_a_build_that_fails_says_why_and_what_to_do(self, toolkit, monkeypatch):
        from torch.utils import cpp_extension

        monkeypatch.setattr(cpp_extension, "CUDA_HOME", "before")
        with pytest.raises(BuildError, match=r"cuda\.cu\(1\): error: .*an nvcc that knows this GPU.*CUDA_HOME"):
            NvccKernels("nonsense;", (9, 0))
        assert cpp_extension.CUDA_HOME == "before"
        with pytest.raises(BuildError, match=r"compute_990.*an nvcc that knows this GPU"):
            NvccKernels(SOURCE, (99, 0))


class TestNvrtc:
    @pytest.mark.parametrize(("number", "dtype", "tiles"), [
        pytest.param(number, *kernel, marks=[] if number == 90 or kernel in KERNELS[:2] else pytest.mark.slow)
        for number in ARCHITECTURES for kernel in KERNELS
    ])  # fmt: skip
    def test_kernels_compile(self, number, dtype, tiles, nvrtc):
        image = nvrtc.compile_kept(SOURCE, kernel_macros(dtype, tiles), number)  # those of launches below are kept
        assert image.startswith(STUB)
        assert kernel_name(dtype, tiles).encode() in image

    def test_a_newer_gpu_gets_ptx(self, nvrtc):
        text = nvrtc.compile(SOURCE, kernel_macros(1, 1), 990)
        assert f".target sm_{max(nvrtc._architectures())}".encode() in text
        assert text.endswith(b"\0")

    def test_an_older_one_is_refused(self, nvrtc):
        with pytest.raises(BuildError, match=r"NVRTC \d+\.\d+ does not compile for sm_30"):
            nvrtc.compile(SOURCE, {}, 30)

    def test_errors_are_the_compilers(self, nvrtc):
        with pytest.raises(BuildError, match=r"head_cuda\.cu\(1\): error: "):
            nvrtc.compile("nonsense;", {}, 90)

    def test_a_kernel_is_compiled_once(self, nvrtc, monkeypatch, tmp_path):
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
        image = nvrtc.compile_kept(SOURCE, kernel_macros(0, 1), 90)
        (file,) = (tmp_path / "kernels").iterdir()
        assert re.fullmatch(r"nvrtc-fp32-1-sm90-\w{16}\.cubin", file.name)
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, "compile", None)
            assert nvrtc.compile_kept(SOURCE, kernel_macros(0, 1), 90) == image

    @pytest.mark.parametrize("damage", [b"", b"\x7fELF and so on", None])
    def test_a_damaged_file_is_written_again(self, damage, monkeypatch, tmp_path, stub_compiler):
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
        assert stub_compiler.compile_kept(SOURCE, {}, 90) == STUB
        (file,) = (tmp_path / "kernels").iterdir()
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + b"f" if damage is None else damage)
        assert stub_compiler.compile_kept(SOURCE, {}, 90) == STUB
        assert file.read_bytes() == whole
        assert len(stub_compiler.compiled) == 2

    def test_what_it_depends_on_is_in_the_key(self, monkeypatch, tmp_path, stub_compiler):
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
        for source, macros, number, version in [("a", {}, 80, 1), ("b", {}, 80, 1), ("a", {"c": "d"}, 80, 1), ("a", {}, 90, 1),
                                                ("a", {}, 80, 2)]:  # fmt: skip
            stub_compiler.version = (version, 0)
            stub_compiler.compile_kept(source, macros, number)
        assert len(list((tmp_path / "kernels").iterdir())) == len(stub_compiler.compiled) == 5

    def test_without_a_folder_to_write_to(self, monkeypatch, tmp_path, stub_compiler):
        (tmp_path / "file").touch()
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
        monkeypatch.setattr(fused_build.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
        for _ in range(2):
            assert stub_compiler.compile_kept(SOURCE, {}, 90) == STUB
        assert len(stub_compiler.compiled) == 2

    def test_what_others_could_have_written_is_not_used(self, monkeypatch, tmp_path, stub_compiler):
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
        monkeypatch.setattr(fused_build.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
        stub_compiler.compile_kept(SOURCE, {}, 90)
        (tmp_path / "kernels").chmod(0o777)
        stub_compiler.compile_kept(SOURCE, {}, 90)
        assert len(stub_compiler.compiled) == 2

    def test_it_is_named_where_it_is_missing(self, monkeypatch):
        monkeypatch.setattr(fused_nvrtc, "_candidates", lambda: [("libnothing.so", ctypes.DEFAULT_MODE)])
        with pytest.raises(BuildError, match=r"NVRTC.*libnothing\.so.*pip install nvidia-cuda-nvrtc"):
            Nvrtc()

    def test_wheels_of_torchs_cuda_come_first(self, monkeypatch, tmp_path):
        for file in ("cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc.alt.so.13", "cu13/lib/libnvrtc-builtins.so.13.0",
                     "cuda_nvrtc/lib/libnvrtc.so.12"):  # fmt: skip
            path = tmp_path / "nvidia" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        for version, first, second in (("12.8", 12, 13), ("13.0", 13, 12), (None, 13, 12)):
            monkeypatch.setattr(torch.version, "cuda", version)
            found = [Path(file).name for file, mode in fused_nvrtc._candidates() if os.sep in file]
            assert found == [f"libnvrtc.so.{first}", f"libnvrtc.so.{second}"]
            assert next(fused_nvrtc._candidates())[0] == f"libnvrtc.so.{first}"


class StubCompiler(Nvrtc):
    """Takes a few bytes for a cubin."""

    version = (13, 0)

    def __init__(self):
        self.compiled = []

    def compile(self, *key):
        self.compiled.append(key)
        return STUB


@pytest.fixture
def stub_compiler():
    return StubCompiler()


class FakeDriver:
    """The stand-in for the driver and what was called of it."""

    def __init__(self):
        self.library = ctypes.CDLL(str(build_fake_driver()))
        self.library.fake_driver_log.restype = ctypes.c_char_p

    def log(self, call=None):
        return [entry for entry in json.loads(self.library.fake_driver_log()) if call in (None, entry["call"])]


@pytest.fixture
def driver():
    fake = FakeDriver()
    fake.library.fake_driver_clear()
    return fake


@pytest.fixture
def kernels(driver, monkeypatch):
    """Compiled by NVRTC where it is installed."""
    try:
        return NvrtcKernels(SOURCE, (9, 0), driver.library)
    except BuildError:
        monkeypatch.setattr(fused_nvrtc, "Nvrtc", StubCompiler)
        return NvrtcKernels(SOURCE, (9, 0), driver.library)


class Launcher:
    """In the place of the emulator's library for `run`."""

    def __init__(self, kernels, *, stepwise=False, stream=0):
        self.kernels = kernels
        self.call = {
            "num_multiprocessors": MULTIPROCESSORS,
            "max_shared_bytes": SHARED,
            "stream": stream,
            "stepwise": stepwise,
        }

    def emulate_head(self, arguments, *_):
        launch(self.kernels, arguments, **self.call)
        return 0


class TestLaunches:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_block_is_that_of_fp64(self, kind, dtype, kernels, driver):
        heads, inputs = random_heads(kind, (333, 40, 3, 3, 24), DTYPES[dtype], reduced=True)
        blocks = [
            check_block(Launcher(kernels, stepwise=stepwise, stream=1234), heads, inputs, [Launch()])
            for stepwise in (False, True)
        ]
        assert torch.equal(blocks[0].logits, blocks[1].logits)
        phases = 4 if kind == "vanilla" else 7
        in_one, in_steps = driver.log("cuLaunchCooperativeKernel"), driver.log("cuLaunchKernel")
        assert [(entry["first"], entry["last"]) for entry in in_one] == [(0, phases)] * 2  # with and without logits
        assert [(entry["first"], entry["last"]) for entry in in_steps] == [(i, i + 1) for i in range(phases)] * 2
        size = shared_bytes(list(DTYPES).index(dtype), 1, 40)
        expected = {"kernel": f"dspark_head_{dtype}_1", "grid": 3, "block": 256, "shared_bytes": size, "stream": 1234}
        for entry in in_one + in_steps:
            assert entry.items() >= (expected | {"error": 0}).items()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("stepwise", [False, True])
    def test_draws_are_the_highest_of_logits_and_noise(self, stepwise, dtype, kernels):
        seed, shape = 2**40 + 5, (333, 40, 5, 3, 24)
        heads, inputs = random_heads("gated", shape, DTYPES[dtype])
        launcher = Launcher(kernels, stepwise=stepwise)
        block = check_block(launcher, heads, inputs, [Launch()], temperature=0.7, seed=seed)
        levels = block.logits.double() / 0.7 + torch.as_tensor(gumbel_noise(seed, *block.logits.shape))
        chosen = levels.gather(2, block.columns[..., None]).squeeze(2)
        torch.testing.assert_close(chosen, levels.max(dim=2).values, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("rows", "tiles"), [(9, 2), (17, 8), (65, 8)])
    def test_more_rows_take_more_tiles(self, rows, tiles, kernels, driver):
        heads, inputs = random_heads("vanilla", (100, 16, rows, 2, 8), torch.bfloat16)
        check_block(Launcher(kernels), heads, inputs, [Launch()])
        assert {entry["kernel"] for entry in driver.log("cuLaunchCooperativeKernel")} == {f"dspark_head_bf16_{tiles}"}

    def test_shared_memory_beyond_48_kib_is_allowed_and_stays_so(self, kernels, driver):
        """A smaller block afterwards takes nothing away."""
        for rank in (2600, 16, 2600):
            check_block(Launcher(kernels), *random_heads("vanilla", (40, rank, 16, 1, 8), torch.float16), [Launch()])
        sizes = [entry["shared_bytes"] for entry in driver.log("cuLaunchCooperativeKernel")][::2]
        assert sizes[0] == sizes[2] > 48 * 1024 > sizes[1]

    def test_a_kernel_is_loaded_once(self, kernels, driver):
        heads, inputs = random_heads("vanilla", (50, 16, 1, 2, 8), torch.float32)
        for _ in range(3):
            run(Launcher(kernels), heads, inputs)
        assert [entry["call"] for entry in driver.log()] == ["cuModuleLoadData"] + 3 * ["cuLaunchCooperativeKernel"]

    def test_the_drivers_errors_are_said_in_its_words(self, kernels, driver, monkeypatch):
        grid = Grid(99, 256, 1024, stream=0, cooperative=True)
        with pytest.raises(LaunchError, match=r"cuLaunchCooperativeKernel: too many blocks.*\(CUDA error 720\)"):
            kernels.launch(0, 1, HeadArguments(), 0, 2, grid)
        with pytest.raises(LaunchError, match=r"cuLaunchCooperativeKernel: invalid argument \(CUDA error 1\)"):
            kernels.launch(0, 1, HeadArguments(), 0, 2, grid._replace(blocks=1, shared_bytes=60000))
        with pytest.raises(LaunchError, match="cuFuncSetAttribute: invalid argument"):
            kernels.occupancy(0, 1, 256, 300_000)
        monkeypatch.setattr(StubCompiler, "compile", lambda *_: b"what is this")
        monkeypatch.setattr(fused_nvrtc, "Nvrtc", StubCompiler)
        with pytest.raises(LaunchError, match="cuModuleLoadData: device kernel image is invalid"):
            NvrtcKernels("another source", (9, 0), driver.library).occupancy(0, 1, 256, 1024)

    def test_a_missing_driver_is_named(self, monkeypatch):
        monkeypatch.setattr(fused_nvrtc, "Nvrtc", StubCompiler)
        with pytest.raises(LaunchError, match=r"NVIDIA's driver.*libnothing\.so\.1"):
            NvrtcKernels(SOURCE, (9, 0), "libnothing.so.1")
