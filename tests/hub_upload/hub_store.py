"""What a Hub keeps: repositories with commits, branches and tags, and the large files beside them. In memory; no network."""

import hashlib
import json
from dataclasses import dataclass, field


LARGE = 10 * 2**20


@dataclass(frozen=True)
class File:
    """A file of a commit; `large` ones are LFS files, of which git holds a pointer."""

    data: bytes
    large: bool

    @property
    def sha256(self):
        return hashlib.sha256(self.data).hexdigest()

    @property
    def pointer(self):
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()
        )

    @property
    def blob_id(self):
        """Git's name for what git holds."""
        content = self.pointer if self.large else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self):
        return self.sha256 if self.large else self.blob_id


@dataclass(frozen=True)
class Commit:
    """A snapshot of all files, and how it came about."""

    files: dict[str, File]
    message: str
    parent: str | None

    @property
    def oid(self):
        tree = {path: file.blob_id for path, file in sorted(self.files.items())}
        return hashlib.sha1(json.dumps([self.message, self.parent, tree]).encode()).hexdigest()


@dataclass
class Repository:
    """Commits by id, branches, tags, and whom it is for."""

    private: bool
    owner: str
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def find(self, revision):
        """The id of a commit by branch, tag or id; `None` if there is none."""
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)

    def files(self, revision="main"):
        """The files of a revision."""
        return self.commits[self.find(revision)].files

    def add(self, files, message, branch="main"):
        """Commit a snapshot to a branch; returns its id."""
        commit = Commit(files, message, self.branches.get(branch))
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit.oid


class HubStore:
    """Repositories by name, the large files that were uploaded, and the names that repositories had before."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}

    def create(self, name, *, private):
        """A repository with the first commit that the Hub makes."""
        repository = Repository(private=private, owner=name.split("/")[0])
        repository.add(
            {".gitattributes": File(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", False)}, "first"
        )
        self.repositories[name] = repository
        return repository

    def rename(self, old, new):
        self.repositories[new] = self.repositories.pop(old)
        self.moved[old] = new

    def put(self, name, files, message="by hand"):
        """Change files of `main` directly: bytes by path, `None` for one that goes. Returns the new commit's id."""
        repository = self.repositories[name]
        changed = dict(repository.files())
        for path, data in files.items():
            changed.pop(path, None)
            if data is not None:
                changed[path] = File(data, self.is_large(path, len(data), data[:512]))
        return repository.add(changed, message)

    @staticmethod
    def is_large(path, size, sample):
        """Whether the Hub wants a file in LFS: by name, by size, or since it is not text."""
        return path.endswith(".safetensors") or size > LARGE or b"\0" in sample
