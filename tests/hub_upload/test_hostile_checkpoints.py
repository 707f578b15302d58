"""Checkpoints that were made to break a reader are refused in one line: by `from_pretrained` and by `convert` alike."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.convert import convert, plan_conversion
from hub_upload.package import package
from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target
from tests.conftest import FIXTURES


WEIGHT = "layers.0.mlp.down_proj.weight"
DEEP = '{"a":' + "[" * 100_000 + "}"


@pytest.fixture
def folder(tmp_path):
    """A copy of DeepSpec's drafter."""
    shutil.copytree(FIXTURES / "a_vanilla_confM" / "draft", tmp_path / "draft", copy_function=shutil.copyfile)
    return tmp_path / "draft"


def set_field(name, value):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: value}))

    return change


def set_dtype(dtype):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        save_file(weights | {WEIGHT: weights[WEIGHT].to(dtype)}, folder / "model.safetensors")

    return change


def set_header(change):
    def rewrite(folder):
        data = (folder / "model.safetensors").read_bytes()
        stop = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:stop])
        header = (change(header) or json.dumps(header)).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[stop:])

    return rewrite


def overlap(header):
    header[WEIGHT]["data_offsets"] = header[WEIGHT.replace("0", "1")]["data_offsets"]


def before_the_data(header):
    start, stop = header[WEIGHT]["data_offsets"]
    header[WEIGHT]["data_offsets"] = [-64, stop - start - 64]


def another_shape(header):
    header[WEIGHT]["shape"][0] += 1


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def shards(name="1.safetensors", *, twice=False):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(weights)
        parts = {name: names[:9], "2.safetensors": names[8:] if twice else names[9:]}
        for file, part in parts.items():
            save_file({key: weights[key] for key in part}, folder / file)
        index = {"metadata": {}, "weight_map": {key: file for file, part in parts.items() for key in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


HOSTILE = {
    "int8": (set_dtype(torch.int8), f"{WEIGHT} is I8"),
    "fp8": (set_dtype(torch.float8_e4m3fn), f"{WEIGHT} is F8_E4M3"),
    "overlapping": (set_header(overlap), "corrupt or truncated .*offset for tensor `layers"),
    "before the data": (set_header(before_the_data), "corrupt or truncated"),
    "another shape": (set_header(another_shape), "corrupt or truncated"),
    "cut": (cut, "corrupt or truncated"),
    "endless header": (write("model.safetensors", "\x7f" * 64), "corrupt or truncated"),
    "deep header": (set_header(lambda _: DEEP), "corrupt or truncated"),
    "deep config": (write("config.json", DEEP), "is not JSON"),
    "deep index": (write("model.safetensors.index.json", DEEP), "not an index of shards"),
    "outside": (shards("../1.safetensors"), r"outside of the checkpoint, \['\.\./1"),
    "twice": (shards(twice=True), "more than one of its files"),
    "no end of layers": (set_field("num_hidden_layers", 10**9), "there are 31 tensors in all"),
    "overflow": (set_field("hidden_size", 10**15), "no tensor can have the sizes"),
    "architectures": (set_field("architectures", [{}]), "not of the type expected"),
    "layer_types": (set_field("layer_types", 5), "not of the type expected"),
    "dtype": (set_field("dtype", "nope"), "not of the type expected"),
    "number as dtype": (set_field("dtype", 5), "`dtype` is 5"),
}


@pytest.mark.parametrize(("change", "said"), HOSTILE.values(), ids=HOSTILE)
def test_refused(folder, change, said):
    change(folder)
    with pytest.raises(ValueError, match=said):
        DSparkModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=said):
        plan_conversion(str(folder), "dspark")


def test_shards_load(folder):
    whole = DSparkModel.from_pretrained(folder).state_dict()
    shards()(folder)
    parts = DSparkModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("value", [[float("nan")] * 5, [-1.0] * 5, "12345", [10**400] * 5])
def test_temperatures_that_are_none(folder, value):
    (folder / "calibration.json").write_text(json.dumps({"temperatures": value}))
    with pytest.raises(ValueError, match=r"no list of `temperatures`"):
        plan_conversion(str(folder), "dspark")


def test_a_draft_vocabulary_beyond_the_targets(tmp_path):
    tiny_drafter(tiny_target("qwen3"), draft_token_ids=[2, 5, 6]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + 10**6}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="does not map its draft vocabulary"):
        plan_conversion(str(tmp_path), "dspark")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("norm.weight"), "missing: norm.weight"),
        (lambda weights: weights.update({"optimizer": torch.zeros(2)}), "unexpected: optimizer"),
        (lambda weights: weights["norm.weight"].fill_(float("nan")), r"in `norm\.weight` that are not numbers"),
    ],
)
def test_what_would_not_load_is_not_packaged(tmp_path, change, said):
    drafter = tiny_drafter(tiny_target("qwen3"))
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("A card.")
    package(tmp_path / "drafter", tmp_path / "package")
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "drafter" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        package(tmp_path / "drafter", tmp_path / "package", overwrite=True)
    assert DSparkModel.from_pretrained(tmp_path / "package")


def test_the_target_is_not_replaced(folder, tmp_path):
    """It has the files that a conversion writes, and no others."""
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / "target_qwen3" / name, target / name)
    with pytest.raises(ValueError, match="is a folder that is read"):
        convert(plan_conversion(str(folder), "deepspec", target=str(target)), target, overwrite=True)
    command = ["convert", str(folder), str(target), "--to", "dspark", "--overwrite"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "not written by this" in " ".join(result.output.split())
    assert (target / "model.safetensors").read_bytes() == (FIXTURES / "target_qwen3/model.safetensors").read_bytes()
