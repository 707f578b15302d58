"""Folders that hide something, and Hubs that answer nonsense or point elsewhere: nothing goes out, and no token does."""

import base64
import io
import os
import zipfile

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.hub.push import checked_files
from tests.hub_upload.hub_double import Fault
from tests.hub_upload.test_scan import SECRETS


REPO = "org/tiny"
TOKEN = SECRETS["a Hugging Face token"]


def zipped(content=b"x"):
    with zipfile.ZipFile(data := io.BytesIO(), "w") as file:
        file.writestr("data.pkl", content)
    return data.getvalue()


def test_links_are_not_followed(small, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "private.png").write_bytes(b"\x89PNG")
    (small / "images").symlink_to(tmp_path / "elsewhere")
    (small / "LICENSE").symlink_to("/etc/hostname")
    os.mkfifo(small / "calibration.json")
    with pytest.raises(ValueError, match="cannot be published") as caught:
        checked_files(small)
    for name in ("LICENSE", "images", "calibration.json"):
        assert f"{name}: a link, or not a regular file" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("plot.png", zipped(), "a pickle by its content"),
        ("plot.png", b"\x89PNG\r\n" + bytes(100) + zipped(), "a pickle by its content"),
        ("plot.png", b"\x7fELF" + bytes(100), "not a picture"),
        ("calibration.json", TOKEN.encode("utf-16"), "not a text"),
        ("calibration.json", b"{}\0" + b"/home/somebody/x", "not a text"),
        ("calibration.json", b'{"a": "' + base64.b64encode(TOKEN.encode()) + b'"}', "a Hugging Face token in base64"),
    ],
    ids=["zip", "zip at the end", "program", "UTF-16", "NUL", "base64"],
)
def test_what_is_not_what_it_is_called(small, name, data, said):
    (small / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}.*{said}") as caught:
        checked_files(small)
    assert TOKEN not in str(caught.value)


def test_a_secret_as_the_name_of_a_tensor(small):
    weights = load_file(small / "model.safetensors")
    save_file(weights | {TOKEN: weights["norm.weight"].clone()}, small / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors \(metadata\).*a Hugging Face token"):
        checked_files(small)


def push(folder):
    result = CliRunner().invoke(app, ["push", str(folder), REPO])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


@pytest.mark.parametrize("body", [b"<html>Log in first</html>", b"{}", b"[]", b"null"])
@pytest.mark.parametrize("request_line", ["GET /api/models/org/tiny$", "GET .*/tree/", "POST .*/commit/"])
def test_answers_that_are_none(hub, small, monkeypatch, request_line, body):
    monkeypatch.setattr("hub_upload.hub.errors.time.sleep", lambda _: None)
    hub.store.create(REPO, private=True)
    hub.faults.append(Fault(request_line, times=100, body=body, headers={"Content-Length": str(len(body))}))
    result = push(small)
    if result.exit_code == 0:  # the commit is there, as a look at the repository showed
        assert "POST" in request_line
        assert "README.md" in hub.store.repositories[REPO].files()
        return
    assert result.exit_code == 2
    empty = body in (b"{}", b"[]") and "tree" in request_line  # which says that there is no file
    assert ("is not what was pushed" if empty else "not as the Hub does") in result.stderr


@pytest.mark.parametrize(
    "request_line", ["GET /api/models/org/tiny$", "POST .*/preupload/", "POST .*/commit/", "PUT "]
)
def test_the_token_does_not_go_to_another_host(hub, small, request_line):
    hub.store.create(REPO, private=True)
    elsewhere = {"Location": f"{hub.storage}/elsewhere"}
    hub.faults.append(Fault(request_line, times=100, status=307, headers=elsewhere))
    assert push(small).exit_code == 2
    assert hub.was_asked("/elsewhere")
    assert not hub.leaked
