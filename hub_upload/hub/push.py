"""Push a package to the Hub: check it, make one commit, compare what arrived, and set the tag last.

The commit is atomic and names its parent: a broken push leaves the branch as it was, and a push on top of somebody else's
commit is refused. Large files go first, and the next attempt does not send again what arrived. The token is that of
huggingface_hub's login; nothing here asks for a token, keeps or prints it.

`create_commit` and not `upload_folder`: with hf_xet, the latter (huggingface_hub 2.4) commits in batches, so a push that breaks
between two of them leaves half a package on the branch.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session, get_token
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from hub_upload.hub.errors import GARBLED, WAITS, HTTPError, announce, garbled, is_transient, patiently
from hub_upload.package.contents import REQUIRED, foreign_files, is_package_file
from hub_upload.package.scan import scan


STALLED = 120.0  # seconds without a byte before a connection counts as broken; huggingface_hub itself waits forever


@dataclass(frozen=True)
class PackageFile:
    """A file to push: its path, its name in the repository, its size in bytes, and the ids the Hub may give it.

    `oids` are git's id, which the Hub uses for small files, and the SHA-256, for large ones.
    """

    path: Path
    name: str
    size: int
    oids: tuple[str, str]

    @classmethod
    def read(cls, path: Path, name: str) -> "PackageFile":
        """Describe a file, read in pieces."""
        size = path.stat().st_size
        git, sha256 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(2**20):
                git.update(piece)
                sha256.update(piece)
        return cls(path, name, size, (git.hexdigest(), sha256.hexdigest()))


@dataclass(frozen=True)
class Remote:
    """A repository: its newest commit, the ids of its files, its tags, and whether it is private."""

    head: str
    files: dict[str, str]
    tags: dict[str, str]
    private: bool


@dataclass(frozen=True)
class Pushed:
    """The result of a push: the commit, whether it is new, and the files it removed."""

    commit: str
    url: str
    new: bool
    removed: tuple[str, ...]


def checked_files(folder: str | Path) -> list[PackageFile]:
    """The files of a package, once none of them is found to be private.

    Args:
        folder (`str` or `Path`): Made by `python -m hub_upload package`.

    Returns:
        `list[PackageFile]`: sorted by name.

    Raises:
        ValueError: if it is not a package, or holds files that no package has or that must not be published; lists them.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"`folder`: there is no folder `{root}`; `python -m hub_upload package` makes one.")
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    paths = {name: path for name, path in found.items() if path.is_symlink() or not path.is_dir()}
    names = sorted(paths)
    if missing := [name for name in REQUIRED if name not in names]:
        raise ValueError(
            f"`folder`: `{root}` is not a package, since it has no {', '.join(missing)}; make one with "
            f"`python -m hub_upload package {root} OUTPUT`."
        )
    problems = [f"{name}: not a file of a package" for name in foreign_files(names)]
    real = [name for name in names if paths[name].is_file() and not paths[name].is_symlink()]
    problems += [f"{name}: a link, or not a regular file" for name in names if name not in real]
    problems += [finding for name in real for finding in scan(paths[name], name)]
    if problems:
        raise ValueError(
            f"`folder`: `{root}` cannot be published as it is:\n  " + "\n  ".join(problems) + "\nNothing was sent."
        )
    return [PackageFile.read(paths[name], name) for name in names]


def push(
    files: Sequence[PackageFile],
    repo_id: str,
    *,
    public: bool = False,
    tag: str | None = None,
    keep_others: bool = False,
    message: str = "Push a DSpark drafter",
) -> Pushed:
    """Make a repository hold exactly these files.

    Args:
        files (`Sequence[PackageFile]`): From `checked_files`.
        repo_id (`str`): `owner/name`; created if it does not exist.
        public (`bool`, *optional*, defaults to `False`): Whether a new repository can be seen by everybody.
        tag (`str`, *optional*): A tag for the commit. Tags are not moved.
        keep_others (`bool`, *optional*, defaults to `False`): Push beside files that no package has.
        message (`str`, *optional*): The commit's message.

    Returns:
        `Pushed`: the commit. An earlier package's files that this one lacks are removed in it.

    Raises:
        ValueError: if the repository is not as expected; names the difference.
        HfHubHTTPError: for a refusal of the Hub; see `hub_upload.hub.errors.explain`.
    """
    check_repo_id(repo_id)
    if get_token() is None:
        raise LocalTokenNotFoundError("not logged in")
    get_session().timeout = STALLED
    api = HfApi(library_name="dspark")
    before = _existing(api, repo_id, public) or _create(api, repo_id, public)
    _check_tag(files, before, tag, repo_id)
    if (others := foreign_files(before.files)) and not keep_others:
        raise ValueError(
            f"`{repo_id}` holds files that no package has ({', '.join(others[:5])}{', ...' * (len(others) > 5)}); pass "
            "`--keep-others` to push beside them, or another name."
        )
    commit, removed = _commit(api, files, repo_id, before=before, message=message)
    _check_arrived(files, patiently(lambda: remote(api, repo_id, commit)), repo_id)
    if tag is not None and tag not in before.tags:
        patiently(lambda: api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True))
        if patiently(lambda: remote(api, repo_id, commit)).tags.get(tag) != commit:
            raise ValueError(f"`--tag`: `{repo_id}` has a tag `{tag}` of another commit; choose another one.")
    return Pushed(commit, f"{api.endpoint}/{repo_id}/commit/{commit}", commit != before.head, removed)


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError unless this is `owner/name`."""
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"`repo_id` must be `owner/name`, got `{repo_id}`.")


def remote(api: HfApi, repo_id: str, revision: str | None = None) -> Remote:
    """The repository at a revision (`main` by default).

    Raises:
        ValueError: if it has another name by now.
    """
    info = api.model_info(repo_id, revision=revision)
    if info.id != repo_id:
        raise ValueError(f"`{repo_id}` was renamed to `{info.id}`; use that name.")
    head = str(info.sha)
    entries = api.list_repo_tree(repo_id, recursive=True, revision=head)
    files = {e.path: e.lfs.sha256 if e.lfs else e.blob_id for e in entries if isinstance(e, RepoFile)}
    tags = {tag.name: tag.target_commit for tag in api.list_repo_refs(repo_id).tags}
    return Remote(head, files, tags, bool(info.private))


def _existing(api: HfApi, repo_id: str, public: bool) -> Remote | None:
    try:
        found = patiently(lambda: remote(api, repo_id))
    except RepositoryNotFoundError:
        return None
    if found.private and public:
        raise ValueError(
            f"`--public`: `{repo_id}` exists and is private; make it public in its settings, after a look."
        )
    if not found.private and not public:
        raise ValueError(f"`{repo_id}` exists and is public; pass `--public` to push for everybody to see.")
    return found


def _create(api: HfApi, repo_id: str, public: bool) -> Remote:
    # A lost answer makes the second attempt find the repository that the first one made.
    patiently(lambda: api.create_repo(repo_id, private=not public, exist_ok=True))
    return patiently(lambda: remote(api, repo_id))


def _check_tag(files: Sequence[PackageFile], before: Remote, tag: str | None, repo_id: str) -> None:
    if tag in before.tags and not (before.tags[tag] == before.head and _holds(files, before)):
        raise ValueError(
            f"`--tag`: `{repo_id}` has a tag `{tag}` already, of commit {before.tags[tag][:8]}; tags are not moved, so "
            "choose another one."
        )


def _holds(files: Sequence[PackageFile], found: Remote) -> bool:
    """Whether a repository holds these files, and no other that a package may have."""
    ours = {name for name in found.files if is_package_file(name)}
    return ours == {file.name for file in files} and all(found.files[file.name] in file.oids for file in files)


def _commit(
    api: HfApi, files: Sequence[PackageFile], repo_id: str, *, before: Remote, message: str
) -> tuple[str, tuple[str, ...]]:
    """Commit on top of `before`; after a lost answer, find out whether the commit is there before making it again."""
    names = {file.name for file in files}
    removed = tuple(sorted(name for name in before.files if is_package_file(name) and name not in names))
    if _holds(files, before):
        return before.head, ()
    waits = iter(WAITS)
    while True:
        additions = [CommitOperationAdd(file.name, file.path) for file in files]
        deletions = [CommitOperationDelete(name) for name in removed]
        try:
            info = api.create_commit(
                repo_id, [*additions, *deletions], commit_message=message, parent_commit=before.head
            )
            return info.oid, removed
        except GARBLED as error:
            raise garbled(error) from error
        except (HTTPError, json.JSONDecodeError) as error:
            wait = next(waits, None)
            if wait is None or not is_transient(error):
                raise
            announce(error, wait)
        except RuntimeError as error:  # raised by hf_xet, unknown to huggingface_hub
            raise OSError(f"the upload broke ({error}); run the command again, or set HF_HUB_DISABLE_XET=1") from error
        time.sleep(wait)
        now = patiently(lambda: remote(api, repo_id))
        if now.head != before.head:
            _check_arrived(files, now, repo_id)
            return now.head, removed


def _check_arrived(files: Sequence[PackageFile], found: Remote, repo_id: str) -> None:
    if not _holds(files, found):
        raise ValueError(
            f"`{repo_id}` at {found.head[:8]} is not what was pushed: somebody else changed it meanwhile. It was not tagged; "
            "look at the change, then run the command again."
        )


__all__ = ["PackageFile", "Pushed", "Remote", "check_repo_id", "checked_files", "push", "remote"]
