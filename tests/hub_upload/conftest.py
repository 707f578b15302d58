"""A tiny pair, its package, and a double of the Hub that this process takes for the Hub."""

import shutil

import huggingface_hub
import pytest

from hub_upload.package import package
from tests.builders import tiny_drafter, tiny_target
from tests.hub_upload.hub_double import WRITER, HubDouble


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """Folders of a tiny target and of a package of its drafter; not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    (folder / "drafter" / "README.md").write_text("---\nlibrary_name: transformers\n---\n\nA card.\n")
    package(folder / "drafter", folder / "package")
    return folder


@pytest.fixture
def packaged(tiny_pair, tmp_path):
    """A package of one's own."""
    return shutil.copytree(tiny_pair / "package", tmp_path / "package")


@pytest.fixture
def small(packaged):
    """The same with as little code as passes for a package: a file that nobody runs is as good as another here."""
    for path in packaged.glob("*.py"):
        path.unlink() if path.stem not in ("modeling_dspark", "configuration_dspark") else path.write_text("# code\n")
    return packaged


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running double; `huggingface_hub` in this process talks to it as a writer of `org`, and waits for nothing."""
    with HubDouble() as double:
        huggingface_hub.close_session()
        settings = {
            "ENDPOINT": double.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": double.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "home" / "token"),
        }
        for (
            name,
            value,
        ) in settings.items():  # as the variables of these names would, had they been set before the import
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield double
        huggingface_hub.close_session()
