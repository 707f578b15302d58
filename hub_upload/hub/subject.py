"""The subject of `verify`: a local folder, or a repository at one commit, each file of which is the Hub's."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_session, snapshot_download

from hub_upload.hub.checks import FAIL, OK, Check
from hub_upload.hub.errors import patiently
from hub_upload.hub.push import STALLED, PackageFile, check_repo_id, remote


@dataclass(frozen=True)
class Subject:
    """Attributes:
    folder (`Path`): The folder with the files.
    name (`str`): The name for `from_pretrained`: the folder, or the repository.
    commit (`str`, *optional*): The commit of the repository.
    check (`Check`): Whether these are the files of that commit.
    """

    folder: Path
    name: str
    commit: str | None
    check: Check


def find_subject(name: str, revision: str | None) -> Subject:
    """A folder, or a repository whose files are fetched into the Hub's cache.

    Args:
        name (`str`): A folder, or `owner/name`.
        revision (`str`, *optional*): Branch, tag or commit of a repository; `main` by default.

    Raises:
        ValueError: if there is no such folder and this is not a repository's name, or if a folder comes with a revision.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise ValueError(f"`--revision`: `{name}` is a folder, which has none; leave it out.")
        return Subject(Path(name), str(Path(name).resolve()), None, Check("revision", OK, "a local folder"))
    if Path(name).exists() or name.startswith((".", "/", "~")) or "/" not in name:
        raise ValueError(f"There is no folder `{name}`, and the name of a repository is `owner/name`.")
    check_repo_id(name)
    get_session().timeout = STALLED
    found = patiently(lambda: remote(HfApi(library_name="dspark"), name, revision))
    folder = Path(snapshot_download(name, revision=found.head))
    return Subject(folder, name, found.head, _check_revision(folder, found.files, found.head, revision))


def _check_revision(folder: Path, listed: dict[str, str], head: str, revision: str | None) -> Check:
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) and revision != head:
        return Check("revision", FAIL, f"the Hub answers {revision[:12]} with {head[:12]}")
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    problems = [f"{name} is missing" for name in sorted(listed.keys() - present.keys())]
    problems += [f"{name} is not of this commit" for name in sorted(present.keys() - listed.keys())]
    for name in sorted(listed.keys() & present.keys()):
        if listed[name] not in PackageFile.read(present[name], name).oids:
            problems.append(f"{name} is not the Hub's (the copy in the cache is damaged: delete it)")
    return Check.of("revision", problems, f"{revision or 'main'} = {head}")


__all__ = ["Subject", "find_subject"]
