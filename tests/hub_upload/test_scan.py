"""What must stay private is found, wherever it hides; what a package holds is let through."""

import pickle

import pytest
from safetensors.torch import load_file, save_file

from hub_upload.hub.push import checked_files
from hub_upload.package.scan import is_pickle


# Put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "a Hugging Face token": "hf_" + "aB3" * 12,
    "an AWS key": "AKIA" + "Q7" * 8,
    "an API key": "sk-" + "proj-" + "x9Z" * 10,
    "a GitHub token": "ghp_" + "k2J" * 12,
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "a password in a URL": "https://me:" + "secret@example.org/x",
    "a path of this machine": "see /home/" + "somebody/models/x",
}


def test_a_package_is_clean(packaged):
    assert len(checked_files(packaged)) > 30


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("name", ["README.md", "modeling_dspark.py"])
def test_secrets_are_found_and_not_repeated(small, kind, name):
    path = small / name
    path.write_text(path.read_text() + f"\n# {SECRETS[kind]}\n")
    with pytest.raises(ValueError, match=f"{name}:\\d+: {kind}") as caught:
        checked_files(small)
    assert SECRETS[kind] not in str(caught.value)


def test_secrets_in_the_metadata_of_the_weights(small):
    weights = load_file(small / "model.safetensors")
    save_file(
        weights, small / "model.safetensors", metadata={"format": "pt", "from": SECRETS["a path of this machine"]}
    )
    with pytest.raises(ValueError, match=r"model\.safetensors \(metadata\)"):
        checked_files(small)


def test_secrets_in_a_picture(small):
    (small / "acceptance.png").write_bytes(b"\x89PNG\0" + SECRETS["an AWS key"].encode())
    with pytest.raises(ValueError, match=r"acceptance\.png:1: an AWS key"):
        checked_files(small)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_by_content(small, protocol):
    content = pickle.dumps({"weights": [1.0, 2.0], "name": "x"}, protocol)
    assert is_pickle(content)
    (small / "calibration.json").write_bytes(content)
    with pytest.raises(ValueError, match="calibration.json: a pickle by its content"):
        checked_files(small)


def test_a_pickle_under_the_name_of_the_weights(small):
    import torch

    torch.save({"w": torch.zeros(2)}, small / "model.safetensors")
    assert is_pickle((small / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="not a safetensors file"):
        checked_files(small)


def test_all_that_is_wrong_is_listed(small):
    for name in ("pytorch_model.bin", "optimizer.pt", "notes.txt", ".DS_Store"):
        (small / name).write_bytes(b"x")
    (small / "training").mkdir()
    (small / "training" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be published") as caught:
        checked_files(small)
    for name in ("pytorch_model.bin", "optimizer.pt", "notes.txt", ".DS_Store", "training/state.json"):
        assert f"{name}: not a file of a package" in str(caught.value)
    assert "optimizer.pt: a pickle by its name" in str(caught.value)


def test_a_drafter_that_was_not_packaged(small, tmp_path):
    (small / "modeling_dspark.py").unlink()
    with pytest.raises(ValueError, match=r"no modeling_dspark\.py.*dspark package"):
        checked_files(small)
    with pytest.raises(ValueError, match="there is no folder"):
        checked_files(tmp_path / "nowhere")
