"""Conversions give back what went in, bit by bit; what a format cannot hold is refused; a folder is whole or not there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.convert import convert, plan_conversion
from modeling_dspark import DSparkModel
from modeling_dspark.configuration_dspark import GEMMA4_TRAITS
from tests.builders import tiny_drafter, tiny_target
from tests.conftest import FIXTURES


ROOT = Path(__file__).parents[2]
TARGET = FIXTURES / "target_qwen3"
IDS = [2, 5, 6, 9, 20, 33, 60]
PLAIN = {"markov_rank": 0, "confidence_head_with_markov": False}
TEMPERATURES = [1.5, 0.8, 1.1, 1.3]
DRAFTERS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_temperatures": TEMPERATURES},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "rank-0": PLAIN,
    "no-confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "dflash": PLAIN | {"enable_confidence_head": False, "sample_from_anchor": False},
    "rnn-older": {"markov_head_type": "rnn", "sample_from_anchor": False, "confidence_temperatures": TEMPERATURES},
    "reduced": {"draft_token_ids": IDS, "confidence_temperatures": TEMPERATURES},
    "reduced-gated-older": {"draft_token_ids": IDS, "markov_head_type": "gated", "sample_from_anchor": False},
}
OLDER = {name for name, fields in DRAFTERS.items() if not fields.get("sample_from_anchor", True)}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    tiny_target("qwen3").save_pretrained(folder := tmp_path_factory.mktemp("target"))
    return str(folder)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory, target):
    """Folders of drafters in this project's format, as `convert` writes it."""
    made = {}

    def folder(name, dtype=torch.float32):
        if (name, dtype) not in made:
            base = tmp_path_factory.mktemp(name)
            drafter = tiny_drafter(tiny_target("qwen3"), target_name_or_path=target, **DRAFTERS[name]).to(dtype)
            drafter.config.chat_template_sha256 = "ab" * 32
            drafter.save_pretrained(base / "saved")
            convert(plan_conversion(str(base / "saved"), "dspark"), base / "drafter")
            made[name, dtype] = base / "drafter"
        return made[name, dtype]

    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_our_format_is_what_save_pretrained_writes(drafters, dtype):
    folder = drafters("reduced", dtype)
    saved = folder.parent / "saved"
    assert (folder / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    raw, ours = (json.loads((path / "config.json").read_text()) for path in (saved, folder))
    assert ours == {name: value for name, value in raw.items() if name != "auto_map"}


@pytest.mark.parametrize("to", ["deepspec", "speculators"])
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_round_trip(drafters, target, tmp_path, name, to):
    """There and back: the same files, and in between a checkpoint that loads in one line as the same drafter."""
    folder = drafters(name)
    if to == "deepspec" and name in OLDER:
        with pytest.raises(ValueError, match="older layout"):
            plan_conversion(str(folder), to, target=target)
        return
    convert(plan_conversion(str(folder), to, target=target), tmp_path / "there")
    convert(plan_conversion(str(tmp_path / "there"), "dspark", target=target), tmp_path / "back")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (folder / file).read_bytes(), file
    loaded, ours = DSparkModel.from_pretrained(tmp_path / "there"), DSparkModel.from_pretrained(folder)
    for (key, one), (_, other) in zip(loaded.state_dict().items(), ours.state_dict().items(), strict=True):
        assert torch.equal(one, other), key
    left, right = loaded.config.to_dict(), ours.config.to_dict()
    assert {key: value for key, value in left.items() if right[key] != value}.keys() <= {
        "_name_or_path",
        "architectures",
    }


@pytest.mark.parametrize("to", ["deepspec", "speculators"])
def test_bf16_stays_bf16(drafters, target, tmp_path, to):
    folder = drafters("reduced", torch.bfloat16)
    convert(plan_conversion(str(folder), to, target=target), tmp_path / "there")
    tensors, ours = load_file(tmp_path / "there" / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, tensor in ours.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert tensors["lm_head.weight"].dtype == torch.float32, "a copy, so of the target's dtype"


def test_weights_in_another_dtype(drafters, target, tmp_path):
    """The bytes of a drafter that was cast and saved, and tables of tokens as they were; copies of the target too."""
    convert(plan_conversion(str(drafters("reduced")), "dspark", dtype="bfloat16"), tmp_path / "cast")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "cast" / file).read_bytes() == (drafters("reduced", torch.bfloat16) / file).read_bytes()
    plan = plan_conversion(str(drafters("reduced")), "speculators", target=target, dtype="float16")
    assert plan.config["dtype"] == "float16"
    convert(plan, tmp_path / "half")
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "half" / "model.safetensors").items()}
    assert dtypes["lm_head.weight"] == torch.float16
    assert {dtype for name, dtype in dtypes.items() if name not in ("d2t", "t2d")} == {torch.float16}
    assert (dtypes["t2d"], dtypes["d2t"]) == (torch.bool, torch.int64)


def test_numbers_that_a_dtype_cannot_hold_are_refused(drafters, tmp_path):
    shutil.copytree(drafters("vanilla"), tmp_path / "large")
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    tensors["norm.weight"][3] = 1e5
    save_file(tensors, tmp_path / "large" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="`norm.weight` has numbers that are too large for torch.float16"):
        convert(plan_conversion(str(tmp_path / "large"), "dspark", dtype="float16"), tmp_path / "half")
    assert not (tmp_path / "half").exists()
    convert(plan_conversion(str(tmp_path / "large"), "dspark", dtype="bfloat16"), tmp_path / "bf16")
    with pytest.raises(ValueError, match="`--dtype` must be one of bfloat16, float16, float32, got 'int8'"):
        plan_conversion(str(tmp_path / "large"), "dspark", dtype="int8")


def test_the_matrices_are_the_targets(drafters, target, tmp_path):
    matrices = load_file(Path(target) / "model.safetensors")
    embedding, head = matrices["model.embed_tokens.weight"], matrices["lm_head.weight"]
    for name, to in (("vanilla", "deepspec"), ("reduced", "deepspec"), ("reduced", "speculators")):
        out = tmp_path / f"{name}-{to}"
        convert(plan_conversion(str(drafters(name)), to, target=target), out)
        tensors = load_file(out / "model.safetensors")
        assert torch.equal(tensors["lm_head.weight"], head[IDS] if name == "reduced" else head)
        if to == "deepspec":
            assert torch.equal(tensors["embed_tokens.weight"], embedding)
        else:
            assert "embed_tokens.weight" not in tensors
            assert tensors["t2d"].nonzero().flatten().tolist() == IDS
    convert(plan_conversion(str(drafters("vanilla")), "speculators", target=target), tmp_path / "full")
    assert (
        load_file(tmp_path / "full" / "model.safetensors").keys()
        == load_file(drafters("vanilla") / "model.safetensors").keys()
    )


def test_a_tied_target_gives_its_embedding_as_the_head(drafters, tmp_path):
    tiny_target("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    convert(plan_conversion(str(drafters("vanilla")), "deepspec", target=str(tmp_path / "tied")), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])


@pytest.mark.parametrize("keys_as_values", [True, False])
def test_gemma4(tmp_path, keys_as_values):
    """DeepSpec's rows for Gemma 4 take what its layers have; the soft cap comes from the target. speculators has no place."""
    model = tiny_target("gemma4")
    model.save_pretrained(tmp_path / "target")
    fields = GEMMA4_TRAITS | {"attention_k_eq_v": keys_as_values, "hidden_act": "gelu_pytorch_tanh", "head_dim": 16}
    tiny_drafter(model, num_key_value_heads=1, target_name_or_path="t", **fields).save_pretrained(tmp_path / "saved")
    convert(plan_conversion(str(tmp_path / "saved"), "dspark"), tmp_path / "drafter")
    with pytest.raises(ValueError, match="final_logit_softcapping.*--target"):
        plan_conversion(str(tmp_path / "drafter"), "deepspec")
    with pytest.raises(ValueError, match=r"no place for `attention_scale=1\.0`"):
        plan_conversion(str(tmp_path / "drafter"), "speculators", target=str(tmp_path / "target"))
    plan = plan_conversion(str(tmp_path / "drafter"), "deepspec", target=str(tmp_path / "target"))
    softcap = model.config.get_text_config().final_logit_softcapping
    assert plan.config["architectures"] == ["Gemma4DSparkModel"]
    assert plan.config["final_logit_softcapping"] == softcap is not None
    convert(plan, tmp_path / "there")
    convert(plan_conversion(str(tmp_path / "there"), "dspark", target=str(tmp_path / "target")), tmp_path / "back")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "drafter" / file).read_bytes(), file
    assert AutoConfig.from_pretrained(tmp_path / "there").model_type == "gemma4_text"


def test_the_fixtures_become_each_other(tmp_path):
    """DeepSpec's fixture, read and written again, has the tensors and the fields that DeepSpec gave it."""
    source = FIXTURES / "a_vanilla_confM" / "draft"
    convert(plan_conversion(str(source), "deepspec", target=str(TARGET)), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    theirs, ours = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    left_out = {"max_window_layers", "num_anchors", "transformers_version"}
    assert {name: ours[name] for name in theirs.keys() - left_out} == {
        name: theirs[name] for name in theirs.keys() - left_out
    }
    assert "num_anchors" in ours, "DeepSpec asks for it"


def test_calibration_travels(drafters, target, tmp_path):
    """SGLang's file goes along as it is; where there is only the config's list, a file is made of it."""
    source = tmp_path / "source"
    shutil.copytree(drafters("gated"), source)
    convert(plan_conversion(str(source), "deepspec", target=target), tmp_path / "made")
    made = json.loads((tmp_path / "made" / "calibration.json").read_text())
    assert made["temperatures"] == TEMPERATURES
    text = json.dumps(
        {"temperatures": TEMPERATURES, "dataset": "d", "num_samples": 9, "ece_before": [0.1], "ece_after": [0.0]}
    )
    (source / "calibration.json").write_text(text)
    convert(plan_conversion(str(source), "speculators", target=target), tmp_path / "there")
    raw = json.loads((tmp_path / "there" / "config.json").read_text())
    (tmp_path / "there" / "config.json").write_text(json.dumps(raw | {"confidence_temperatures": None}))
    convert(plan_conversion(str(tmp_path / "there"), "dspark", target=target), tmp_path / "back")
    assert (tmp_path / "back" / "calibration.json").read_text() == text
    assert json.loads((tmp_path / "back" / "config.json").read_text())["confidence_temperatures"] == TEMPERATURES
    (source / "calibration.json").write_text(text.replace("1.5", "1.6"))
    with pytest.raises(ValueError, match="contradicts itself"):
        plan_conversion(str(source), "deepspec", target=target)


class TestRefusals:
    def test_what_a_format_cannot_hold(self, drafters, tmp_path):
        with pytest.raises(ValueError, match="reduced draft vocabulary.*--target"):
            plan_conversion(str(drafters("reduced")), "speculators")
        unordered = tiny_drafter(tiny_target("qwen3"), draft_token_ids=[5, 2, 9])
        unordered.save_pretrained(tmp_path / "unordered")
        with pytest.raises(ValueError, match=r"(?s)ascending.*|name of the target"):
            plan_conversion(str(tmp_path / "unordered"), "speculators")
        tiny_drafter(tiny_target("qwen3")).save_pretrained(tmp_path / "nameless")
        with pytest.raises(ValueError, match="name of the target"):
            plan_conversion(str(tmp_path / "nameless"), "speculators")
        with pytest.raises(ValueError, match="--to.*onnx"):
            plan_conversion(str(tmp_path / "nameless"), "onnx")

    def test_a_trained_head_or_another_target(self, tmp_path):
        source = FIXTURES / "a_vanilla_confM" / "draft"
        assert not any("compared" in note for note in plan_conversion(str(source), "dspark", target=str(TARGET)).notes)
        assert any("not compared" in note for note in plan_conversion(str(source), "dspark").notes)
        shutil.copytree(source, tmp_path / "trained")
        tensors = load_file(source / "model.safetensors")
        tensors["lm_head.weight"][198, 3] += 1e-3
        save_file(tensors, tmp_path / "trained" / "model.safetensors")
        with pytest.raises(ValueError, match="lm_head.weight.*trained"):
            plan_conversion(str(tmp_path / "trained"), "dspark", target=str(TARGET))

    def test_a_target_that_does_not_fit(self, drafters, tmp_path):
        with pytest.raises(ValueError, match="does not fit the drafter: its `hidden_size` is 64, expected 32"):
            plan_conversion(str(drafters("vanilla")), "deepspec", target=str(TARGET))
        tiny_target("qwen3", num_hidden_layers=5).save_pretrained(tmp_path / "deeper")
        with pytest.raises(ValueError, match="num_hidden_layers` is 5, expected 4"):
            plan_conversion(str(drafters("vanilla")), "deepspec", target=str(tmp_path / "deeper"))
        tiny_target("gemma3").save_pretrained(tmp_path / "gemma")
        with pytest.raises(ValueError, match="scales its embedding"):
            plan_conversion(str(drafters("vanilla")), "speculators", target=str(tmp_path / "gemma"))

    def test_fields_without_a_place(self, drafters, target, monkeypatch):
        """A field of ours that no row of the table knows is never dropped."""
        from hub_upload.convert import writers

        monkeypatch.setattr(writers, "OWN_FIELDS", tuple(set(writers.OWN_FIELDS) - {"chat_template_sha256"}))
        for to in ("deepspec", "speculators"):
            with pytest.raises(ValueError, match="no place for `chat_template_sha256"):
                plan_conversion(str(drafters("vanilla")), to, target=target)

    def test_a_layer_count_that_nobody_knows(self, target, tmp_path):
        source = FIXTURES / "d_full_anchor" / "draft"
        with pytest.raises(ValueError, match="num_target_layers"):
            plan_conversion(str(source), "deepspec")
        plan = plan_conversion(str(source), "deepspec", target=str(TARGET))
        assert plan.config["num_target_layers"] == 5
        assert any("num_target_layers" in note for note in plan.notes)

    def test_a_draft_vocabulary_of_wrong_tokens(self, drafters, target, tmp_path):
        shutil.copytree(drafters("reduced"), tmp_path / "wrong")
        tensors = load_file(tmp_path / "wrong" / "model.safetensors")
        tensors["d2t"][-1] = 100
        save_file(tensors, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="distinct tokens"):
            plan_conversion(str(tmp_path / "wrong"), "speculators", target=target)


class TestNotes:
    @pytest.mark.parametrize(
        ("name", "to", "part"),
        [
            ("no-confidence", "deepspec", "SGLang serves it in `static` mode only"),
            ("rank-0", "deepspec", "DeepSpec reads it"),
            ("gated", "deepspec", "vLLM reads only `vanilla`"),
            ("reduced", "deepspec", "vLLM reads that"),
            ("gated", "speculators", "calibration.json"),
        ],
    )
    def test_a_field_that_readers_ignore_is_noted_once(self, drafters, target, name, to, part):
        notes = plan_conversion(str(drafters(name)), to, target=target).notes
        assert len([note for note in notes if part in note]) == 1

    def test_a_drafter_for_all_readers_has_none(self, drafters, target):
        assert plan_conversion(str(drafters("vanilla")), "deepspec", target=target).notes == []
        assert "DeepSpec itself" in plan_conversion(str(drafters("vanilla")), "deepspec").notes[0]


class TestFolders:
    def test_overwrite_keeps_what_is_the_users(self, drafters, target, tmp_path):
        plan = plan_conversion(str(drafters("vanilla")), "deepspec", target=target)
        convert(plan, tmp_path / "out")
        with pytest.raises(ValueError, match="--overwrite"):
            convert(plan, tmp_path / "out")
        convert(plan, tmp_path / "out", overwrite=True)
        (tmp_path / "out" / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="notes.txt"):
            convert(plan, tmp_path / "out", overwrite=True)
        assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
        with pytest.raises(ValueError, match="inside of it"):
            convert(plan, drafters("vanilla") / "out")
        (tmp_path / "link").symlink_to(tmp_path / "out")
        with pytest.raises(ValueError, match="symbolic link"):
            convert(plan, tmp_path / "link", overwrite=True)

    @pytest.mark.parametrize("earlier", [True, False])
    def test_an_interrupted_conversion_leaves_what_was_there(self, drafters, target, tmp_path, earlier):
        plan, out = plan_conversion(str(drafters("vanilla")), "deepspec", target=target), tmp_path / "out"
        if earlier:
            convert(plan, out)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

        def stop(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(plan, out, overwrite=True, advance=stop)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class TestCommandLine:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["convert", *map(str, arguments)])

    def test_it_converts_and_says_what(self, drafters, target, tmp_path):
        result = self.run(drafters("gated"), tmp_path / "out", "--to", "deepspec", "--target", target)
        assert result.exit_code == 0, result.output
        assert "vLLM reads only `vanilla`" in result.output
        assert str(tmp_path / "out" / "model.safetensors") in result.output

    def test_a_dry_run_writes_nothing(self, drafters, target, tmp_path):
        result = self.run(
            drafters("reduced"), tmp_path / "out", "--to", "speculators", "--target", target, "--dry-run"
        )
        assert result.exit_code == 0
        for part in ("to   speculators", "aux_hidden_state_layer_ids: [1, 2, 3]", "lm_head.weight", "BOOL  [61]"):
            assert part in result.output
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("missing", "out", "--to", "dspark"), "missing"),
            ((FIXTURES / "broken" / "missing_tensor", "out", "--to", "dspark"), "markov_head.markov_w2.weight"),
            ((FIXTURES / "broken" / "mask_token_id_out_of_range", "out", "--to", "dspark"), "199"),
            ((TARGET, "out", "--to", "dspark"), "not a DSpark drafter"),
            ((FIXTURES / "a_vanilla_confM" / "draft", "out", "--to", "gguf"), "gguf"),
        ],
    )
    def test_mistakes(self, tmp_path, monkeypatch, arguments, part):
        monkeypatch.chdir(tmp_path)
        result = self.run(*arguments)
        assert result.exit_code == 2
        assert part in " ".join(result.output.replace("│", " ").split())
        assert list(tmp_path.iterdir()) == []
