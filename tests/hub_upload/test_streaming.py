"""A checkpoint is streamed: the bytes of safetensors itself, in less memory than the file has."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hub_upload.convert.streaming import small_piece, stored_piece, write_safetensors
from modeling_dspark import DSparkModel
from modeling_dspark.formats.tensors import read_header
from tests.builders import tiny_drafter, tiny_target


ROOT = Path(__file__).parents[2]


def test_the_file_is_that_of_safetensors(tmp_path):
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(4),
        "é": torch.tensor([True, False, True]),
        "half": torch.randn(2, 2).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours.safetensors", [small_piece(*item) for item in tensors.items()])
    theirs = (tmp_path / "theirs.safetensors").read_bytes()
    assert (tmp_path / "ours.safetensors").read_bytes() == theirs
    stored = read_header(tmp_path / "theirs.safetensors")
    assert all(torch.equal(stored[name].read(), tensor) for name, tensor in tensors.items())
    write_safetensors(tmp_path / "again.safetensors", [stored_piece(*item) for item in stored.items()])
    assert (tmp_path / "again.safetensors").read_bytes() == theirs
    piece = stored_piece("b", stored["b"], [2, 0])
    write_safetensors(tmp_path / "rows.safetensors", [piece])
    assert torch.equal(load_file(tmp_path / "rows.safetensors")["b"], tensors["b"][[2, 0]])


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: data[:-1], lambda data: b"\xff" * 9 + data])
def test_damaged_files(tmp_path, damage):
    save_file({"a": torch.ones(4)}, path := tmp_path / "a.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="corrupt or truncated"):
        read_header(path)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """After a tiny drafter, one of 100 MB raises the peak of the process by less than a quarter of that."""
    for name, vocabulary in (("small", 61), ("large", 400_000)):
        config = tiny_drafter(tiny_target("qwen3")).config
        config.vocab_size, config.markov_rank = vocabulary, 64
        sparse_checkpoint(tmp_path / name, config)
    small, large = peaks_of(tmp_path, "small", "large")
    size = (tmp_path / "large-out" / "model.safetensors").stat().st_size
    assert size > 100e6
    assert large - small < size / 4


@pytest.mark.slow
def test_three_gigabytes_in_less_than_one(tmp_path):
    """A checkpoint of the size of one for Qwen3-8B, in three shards; each tensor comes out where it belongs."""
    config = tiny_drafter(tiny_target("qwen3")).config
    sizes = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 8}
    for name, value in (sizes | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}).items():
        setattr(config, name, value)
    config.markov_rank = 256
    sparse_checkpoint(tmp_path / "large", config, num_shards=3)
    (peak,) = peaks_of(tmp_path, "large")
    path = tmp_path / "large-out" / "model.safetensors"
    size, marks = path.stat().st_size, {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            marks[name] = bytes(file.get_tensor(name).flatten()[-1:].view(torch.uint8).tolist())
    path.unlink()
    assert size > 3e9
    assert peak < 1e9, peak
    assert len(marks) == 8 * 11 + 7
    assert marks == {name: mark_of(name) for name in marks}


def mark_of(name):
    """The last number of a tensor of a sparse checkpoint."""
    return hashlib.sha256(name.encode()).digest()[:2]


def sparse_checkpoint(folder, config, num_shards=1):
    """A bf16 checkpoint that takes no disk: zeros, but for the last number of each tensor."""
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = DSparkModel(config).to(torch.bfloat16).state_dict()
    index = {"metadata": {}, "weight_map": {}}
    for number in range(num_shards):
        file = "model.safetensors" if num_shards == 1 else f"model-{number}.safetensors"
        part = dict(list(state.items())[number::num_shards])
        index["weight_map"] |= dict.fromkeys(part, file)
        sparse_file(folder / file, {name: list(tensor.shape) for name, tensor in part.items()})
    if num_shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sparse_file(path, shapes):
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        stop = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.seek(8 + len(text) + header[name]["data_offsets"][1] - 2)
            file.write(mark_of(name))


def peaks_of(folder, *names):
    """Peak memory of a process in bytes after each of some conversions, one after the other."""
    code = (
        "import resource, sys; from hub_upload.convert import convert, plan_conversion\n"
        "for name in sys.argv[1:]:\n"
        "    convert(plan_conversion(name, 'dspark'), name + '-out')\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return [int(line) * (1 if sys.platform == "darwin" else 1024) for line in run.stdout.split()]
