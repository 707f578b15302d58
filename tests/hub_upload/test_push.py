"""A push is one commit of a checked folder; what breaks leaves nothing half there, and is told in one line."""

import os
import signal
import subprocess
import sys
import time

import huggingface_hub
import pytest
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.hub import push as push_module
from hub_upload.hub.push import checked_files, push
from tests.hub_upload.hub_double import READER, STRANGER, Fault, HubDouble


REPO = "org/tiny"


def names_of(hub, revision="main"):
    return set(hub.store.repositories[REPO].files(revision)) - {".gitattributes"}


def test_a_push_is_one_commit_that_holds_the_folder(hub, packaged):
    files = checked_files(packaged)
    pushed = push(files, REPO, tag="v1")
    repository = hub.store.repositories[REPO]
    assert (len(repository.commits), repository.private, pushed.new) == (2, True, True)
    assert names_of(hub) == {path.relative_to(packaged).as_posix() for path in packaged.rglob("*") if path.is_file()}
    for file in files:
        assert repository.files()[file.name].data == file.path.read_bytes()
    assert repository.files()["model.safetensors"].large
    assert repository.tags == {"v1": pushed.commit}
    assert pushed.url == f"{hub.url}/{REPO}/commit/{pushed.commit}"
    assert not hub.leaked  # the token stays with the Hub


def test_nothing_new_is_no_commit(hub, small):
    first = push(checked_files(small), REPO, tag="v1")
    again = push(checked_files(small), REPO, tag="v1")
    assert (again.commit, again.new) == (first.commit, False)
    (small / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nAnother card.\n")
    sent = hub.uploaded
    with pytest.raises(ValueError, match="tag `v1` already"):
        push(checked_files(small), REPO, tag="v1")
    second = push(checked_files(small), REPO, tag="v2")
    repository = hub.store.repositories[REPO]
    assert hub.uploaded == sent
    assert repository.commits[second.commit].parent == first.commit
    assert repository.tags == {"v1": first.commit, "v2": second.commit}


def test_files_of_an_earlier_package_go_with_the_commit(hub, small):
    (small / "calibration.json").write_text("{}")
    (small / "older_dspark.py").write_text("")
    push(checked_files(small), REPO)
    (small / "calibration.json").unlink()
    (small / "older_dspark.py").unlink()
    pushed = push(checked_files(small), REPO)
    assert pushed.removed == ("calibration.json", "older_dspark.py")
    assert names_of(hub) == {file.name for file in checked_files(small)}


def test_files_of_others_are_not_touched(hub, small):
    hub.store.create(REPO, private=True)
    hub.store.put(REPO, {"thesis.txt": b"years of work"})
    with pytest.raises(ValueError, match=r"thesis\.txt.*--keep-others"):
        push(checked_files(small), REPO)
    assert hub.uploaded == 0
    push(checked_files(small), REPO, keep_others=True)
    assert hub.store.repositories[REPO].files()["thesis.txt"].data == b"years of work"


def test_who_can_see_it_is_said_and_does_not_change(hub, small):
    push(checked_files(small), REPO, public=True)
    assert not hub.store.repositories[REPO].private
    with pytest.raises(ValueError, match="public; pass `--public`"):
        push(checked_files(small), REPO)
    hub.store.create("org/hidden", private=True)
    with pytest.raises(ValueError, match="exists and is private"):
        push(checked_files(small), "org/hidden", public=True)


def test_a_renamed_repository_is_named(hub, small):
    push(checked_files(small), REPO)
    hub.store.rename(REPO, "org/other")
    with pytest.raises(ValueError, match="renamed to `org/other`"):
        push(checked_files(small), REPO)


def test_what_arrived_is_not_sent_again(hub, small):
    """The weights arrive, the commit does not: nobody sees anything, and the next push sends the rest only."""
    size = (small / "model.safetensors").stat().st_size
    hub.faults.append(Fault("POST .*/commit/", times=100, status=503))
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        push(checked_files(small), REPO, tag="v1")
    assert hub.uploaded == size
    assert (names_of(hub), hub.store.repositories[REPO].tags) == (set(), {})
    hub.faults.clear()
    push(checked_files(small), REPO, tag="v1")
    assert hub.uploaded == size
    assert hub.store.repositories[REPO].tags


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT ", cut=1000),
        Fault("PUT ", times=2, status=500),
        Fault("POST .*/create", times=2, status=502),
        Fault("POST .*/create", lose_answer=True),
        Fault("POST .*/commit/", times=3, status=504),
        Fault("POST .*/commit/", stall=True),
        Fault("POST .*/tag/", lose_answer=True),
        Fault("POST .*/preupload/", status=429, headers={"Retry-After": "0"}),
        Fault("POST /api/validate-yaml", status=500),
    ],
    ids=lambda fault: f"{fault.pattern}-{fault.status or 'broken'}",
)
def test_what_passes_is_waited_for(hub, small, fault, monkeypatch):
    monkeypatch.setattr(push_module, "STALLED", 0.3)
    hub.faults.append(fault)
    pushed = push(checked_files(small), REPO, tag="v1")
    repository = hub.store.repositories[REPO]
    assert fault.times == 0
    assert (len(repository.commits), repository.tags) == (2, {"v1": pushed.commit})


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, small):
    hub.faults.append(Fault("POST .*/commit/", lose_answer=True))
    pushed = push(checked_files(small), REPO)
    assert hub.count("POST .*/commit/") == 1
    assert hub.store.repositories[REPO].branches["main"] == pushed.commit


def test_another_commit_in_between_is_not_buried(hub, small, monkeypatch):
    hub.store.create(REPO, private=True)
    monkeypatch.setattr(
        "hub_upload.hub.push.time.sleep", lambda seconds: hub.store.put(REPO, {"README.md": b"by somebody else"})
    )
    hub.faults.append(Fault("POST .*/commit/", status=503))
    with pytest.raises(ValueError, match="somebody else changed it"):
        push(checked_files(small), REPO, tag="v1")
    assert hub.store.repositories[REPO].files()["README.md"].data == b"by somebody else"
    assert hub.store.repositories[REPO].tags == {}


def run_command(*arguments):
    return CliRunner().invoke(app, ["push", *map(str, arguments)])


def test_a_dry_run_asks_nobody(hub, small):
    result = run_command(small, REPO, "--dry-run", "--tag", "v1")
    assert result.exit_code == 0
    size = (small / "model.safetensors").stat().st_size
    assert f"{size:>14,}  model.safetensors" in result.stdout
    assert "`org/tiny` (private)" in result.stdout
    assert "`v1`" in result.stdout
    assert hub.requests == []


@pytest.mark.parametrize(("named", "said"), [("org/other", True), (REPO, False)])
def test_a_card_that_loads_another_repository(hub, small, named, said):
    (small / "README.md").write_text(f'---\n---\n\ndrafter = AutoModel.from_pretrained("{named}", dtype="auto")\n')
    result = run_command(small, REPO, "--dry-run")
    assert result.exit_code == 0
    assert (f"the card loads `org/other`, not `{REPO}`" in result.stderr) == said


def test_the_command_prints_what_a_stranger_needs(hub, small):
    result = run_command(small, REPO, "--tag", "v1")
    commit = hub.store.repositories[REPO].branches["main"]
    assert result.exit_code == 0
    assert f"pushed: {hub.url}/{REPO}/commit/{commit} (tag v1)" in result.stdout
    assert f'AutoModel.from_pretrained("{REPO}", revision="v1", trust_remote_code=True)' in result.stdout
    assert "target.generate(**inputs, assistant_model=drafter)" in result.stdout


@pytest.mark.parametrize(
    ("token", "repo", "fault", "said"),
    [
        ("hf-double-expired", REPO, None, "does not accept the token"),
        (READER, REPO, None, "write access to `org/tiny`"),
        (STRANGER, REPO, None, "write access to `org/tiny`"),
        (None, REPO, None, "not logged in.*hf auth login"),
        (None, "org/a--b", None, "is not the name of a repository"),
        (None, "tiny", None, "must be `owner/name`"),
        (None, "a/b/c", None, "is not the name of a repository"),
        ("writer", REPO, Fault("POST .*/commit/", times=100, status=500), "problem of its own.*500"),
        ("writer", REPO, Fault("POST .*/commit/", status=413), "too large"),
        ("writer", REPO, Fault("POST .*/commit/", status=412), "somebody else"),
        ("writer", REPO, Fault("POST .*/create", status=418), r"HTTP 418.*told to answer"),
        ("writer", REPO, Fault("GET .*/models", times=100, status=429), "fewer requests"),
    ],
)
def test_errors_are_one_line(hub, small, monkeypatch, token, repo, fault, said):
    import re

    if token != "writer":
        monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    hub.faults += [fault] if fault else []
    result = run_command(small, repo)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert re.search(f"^error: .*{said}", last), result.stderr
    assert "Traceback" not in result.output
    assert not names_of(hub) if REPO in hub.store.repositories else True


def test_without_a_network(hub, small, monkeypatch):
    closed = HubDouble()
    closed.server.server_close()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", closed.url)
    result = run_command(small, REPO)
    assert result.exit_code == 2
    assert f"error: {closed.url} cannot be reached (ConnectError" in result.stderr
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in run_command(small, REPO).stderr


def hears_ctrl_c():
    """In a process that is about to begin: what a shell starts in the background ignores Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(process):
    """What a process that waits for an answer says on one Ctrl-C.

    Python sees a signal before a blocking call or while it lasts; one that comes in the microsecond between is seen when the
    call ends. The half second lets the process block.
    """
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=30)[1]
    finally:
        process.kill()


def test_ctrl_c_leaves_the_branch_as_it_was(hub, small, tmp_path):
    hub.faults.append(Fault("PUT ", stall=True))
    command = [sys.executable, "-m", "hub_upload", "push", str(small), REPO]
    environment = os.environ | hub.environment(tmp_path / "home")
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
    assert hub.stalled.wait(60)
    errors = interrupted(process)
    assert process.returncode == 130
    assert "Interrupted. The branch is as it was" in errors
    assert "Traceback" not in errors
    assert names_of(hub) == set()
