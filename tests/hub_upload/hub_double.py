"""A double of the Hub that the real `huggingface_hub` client talks to through `HF_ENDPOINT`, and that misbehaves as told.

It answers what the client asks when it creates a repository, uploads by LFS (basic transfer; `HF_HUB_DISABLE_XET=1`),
commits, tags, lists and downloads. Large files are served by another host (`localhost` instead of `127.0.0.1`), as the Hub's
are; it must not be sent a token. `faults` are tried in order, each as often as it says; `uploaded` counts the bytes of
large files that arrived.
"""

import base64
import contextlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_upload.hub_store import File, HubStore


WRITER, READER, STRANGER = "hf-double-writer", "hf-double-reader", "hf-double-stranger"
# token: (user, organisations, whether it may write)
USERS = {WRITER: ("ann", ("org", "my-org"), True), READER: ("bob", ("org",), False), STRANGER: ("eve", (), True)}


@dataclass
class Fault:
    """What happens to requests whose `METHOD path` a pattern matches.

    `status` answers with an error; `cut` closes the connection after so many bytes of the request's body (upload) or of the
    answer's (download); `stall` answers nothing until the double is closed; `lose_answer` does what was asked and closes the
    connection; `headers` are added to, or take the place of, those of the answer; `body` takes the place of its content.
    """

    pattern: str
    times: int = 1
    status: int | None = None
    cut: int | None = None
    stall: bool = False
    lose_answer: bool = False
    headers: dict = field(default_factory=dict)
    body: bytes | None = None


class RefusalError(Exception):
    """An answer that is an error, with the headers that the client tells errors apart by."""

    def __init__(self, status, message, code=None, **headers):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.headers |= {name.replace("_", "-"): value for name, value in headers.items()}


class HubDouble:
    """Serves a `HubStore` in threads; used as a context."""

    def __init__(self):
        self.store, self.faults = HubStore(), []
        self.requests, self.uploaded, self.leaked = [], 0, False
        self.lock, self.stalled, self.released = threading.Lock(), threading.Event(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"double": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = f"http://localhost:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def environment(self, folder, token=WRITER):
        """Variables for a process that takes this for the Hub, with caches and a login of its own in `folder`."""
        variables = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder)}
        return variables | {"HF_TOKEN_PATH": str(folder / "token")} | ({"HF_TOKEN": token} if token else {})

    def fault(self, line):
        """The fault that a request meets, if any."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None

    def count(self, pattern):
        """How many requests there were like this."""
        return sum(re.search(pattern, line) is not None for line in self.requests)

    def was_asked(self, pattern, seconds=10):
        """Whether there is a request like this, for whose head there is time: its client may have given up on the rest."""
        deadline = time.monotonic() + seconds
        while not self.count(pattern) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.count(pattern) > 0


class _Handler(BaseHTTPRequestHandler):
    """One connection: finds the answer to a request among `_ROUTES`, and sends it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or headers and body, written apart, take 40 ms
    double: HubDouble

    def log_message(self, *args):
        pass

    def _serve(self):
        line = f"{self.command} {unquote(self.path)}"
        if self.headers.get("Host", "").startswith("localhost"):  # the other host must not see a token
            self.double.leaked |= "Authorization" in self.headers
        self.double.requests.append(line)
        self.fate = self.double.fault(line) or Fault("")
        if self.fate.stall:
            self.double.stalled.set()
            self.double.released.wait(60)
            return self._hang_up()
        try:
            body = self._body()
            if self.fate.status is not None:
                raise RefusalError(self.fate.status, f"The double was told to answer {self.fate.status}.")
            self._answer(*self._route(body))
        except RefusalError as error:
            self._answer(error.status, {"error": error.message}, error.headers)
        except (ConnectionError, EOFError):
            self._hang_up()
        return None

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _body(self):
        length = int(self.headers.get("Content-Length") or 0)
        upload = self.command == "PUT"
        wanted = min(length, self.fate.cut) if upload and self.fate.cut is not None else length
        body = bytearray()
        while len(body) < wanted:
            chunk = self.rfile.read(min(wanted - len(body), 2**16))
            body += chunk
            self.double.uploaded += len(chunk) if upload else 0
            if not chunk:
                raise EOFError
        if wanted < length:
            raise EOFError
        return bytes(body)

    def _route(self, body):
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        for method, pattern, function in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return function(self, match, body, query)
        raise RefusalError(404, f"The double knows no {self.command} {path}.")

    def _answer(self, status, content, headers=None):
        if self.fate.lose_answer:
            return self._hang_up()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        data = data if self.fate.body is None else self.fate.body
        headers = {"Content-Length": str(len(data))} | (headers or {}) | self.fate.headers
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = self.fate.cut
            self.wfile.write(data if cut is None else data[:cut])
            if cut is not None and cut < len(data):
                return self._hang_up()
        return None

    def _hang_up(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(2)

    # Who asks, and what they may do

    def user(self):
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return None
        if authorization.removeprefix("Bearer ") not in USERS:
            raise RefusalError(401, "Invalid credentials in Authorization header")
        return USERS[authorization.removeprefix("Bearer ")]

    def repository(self, name, *, write=False):
        """The repository of a name, if the one who asks may see it, or write to it."""
        user = self.user()
        if name in self.double.store.moved:
            target = self.path.replace(name, self.double.store.moved[name], 1)
            raise RefusalError(307, "Moved", Location=target)
        found = self.double.store.repositories.get(name)
        member = user is not None and found is not None and found.owner in (user[0], *user[1])
        if found is None or (found.private and not member):
            raise RefusalError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if write and not (member and user[2]):
            raise RefusalError(403, f"you must have write access to {name}")
        return found

    def commit(self, repository, revision):
        oid = repository.find(revision)
        if oid is None:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repository.commits[oid]


def _whoami(request, match, body, query):
    user = request.user()
    if user is None:
        raise RefusalError(401, "Invalid username or password.")
    return 200, {"type": "user", "name": user[0], "orgs": [{"name": name} for name in user[1]]}


def _create(request, match, body, query):
    user, wanted = request.user(), json.loads(body)
    if user is None:
        raise RefusalError(401, "Invalid username or password.")
    owner = wanted["organization"] or user[0]
    if not user[2] or owner not in (user[0], *user[1]):
        raise RefusalError(403, f"You don't have the rights to create a model under the namespace {owner!r}.")
    name, store = f"{owner}/{wanted['name']}", request.double.store
    answer = {"url": f"{request.double.url}/{name}", "name": name}
    if name in store.repositories or name in store.moved:
        return 409, answer | {"error": "You already created this model repo"}
    store.create(name, private=wanted.get("visibility") == "private")
    return 200, answer


def _info(request, match, body, query):
    repository = request.repository(match["repo"])
    oid, commit = request.commit(repository, match["revision"] or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    return 200, {"_id": "0", "id": match["repo"], "sha": oid, "private": repository.private, "siblings": siblings}


def _tree(request, match, body, query):
    _, commit = request.commit(request.repository(match["repo"]), match["revision"])
    folder, recursive = (match["path"] or "").strip("/"), query.get("recursive") in (["true"], ["True"])
    inside = {path: file for path, file in commit.files.items() if not folder or path.startswith(folder + "/")}
    if folder and not inside:
        raise RefusalError(404, "Entry not found", "EntryNotFound")
    depth = len(folder.split("/")) if folder else 0
    folders = {"/".join(path.split("/")[: depth + 1]) for path in inside if path.count("/") > depth}
    listed = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]
    return 200, listed + [_entry(p, f) for p, f in sorted(inside.items()) if recursive or p.count("/") == depth]


def _entry(path, file):
    entry = {"type": "file", "oid": file.blob_id, "size": len(file.data), "path": path}
    large = {"oid": file.sha256, "size": len(file.data), "pointerSize": len(file.pointer)}
    return entry | ({"lfs": large} if file.large else {})


def _paths(request, match, body, query):
    _, commit = request.commit(request.repository(match["repo"]), match["revision"])
    wanted = parse_qs(body.decode()).get("paths", [])
    return 200, [_entry(path, commit.files[path]) for path in wanted if path in commit.files]


def _refs(request, match, body, query):
    repository = request.repository(match["repo"])
    named = {"heads": repository.branches, "tags": repository.tags}
    lists = {
        kind: [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in named[kind].items()]
        for kind in named
    }
    return 200, {"branches": lists["heads"], "tags": lists["tags"], "converts": []}


def _preupload(request, match, body, query):
    repository = request.repository(match["repo"], write=True)
    _, commit = request.commit(repository, match["revision"])
    answers = []
    for file in json.loads(body)["files"]:
        large = HubStore.is_large(file["path"], file["size"], base64.b64decode(file["sample"]))
        known = commit.files.get(file["path"])
        answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        answers.append(answer | ({"oid": known.etag} if known else {}))
    return 200, {"files": answers}


def _lfs_batch(request, match, body, query):
    request.repository(match["repo"], write=True)
    objects = []
    for wanted in json.loads(body)["objects"]:
        href = f"{request.double.storage}/storage/{wanted['oid']}"
        verify = f"{request.double.url}/{match['repo']}.git/info/lfs/objects/verify"
        actions = {"upload": {"href": href}, "verify": {"href": verify}}
        objects.append(wanted | ({} if wanted["oid"] in request.double.store.large else {"actions": actions}))
    return 200, {"transfer": "basic", "objects": objects}


def _lfs_verify(request, match, body, query):
    request.repository(match["repo"], write=True)
    wanted = json.loads(body)
    if len(request.double.store.large.get(wanted["oid"], b"")) != wanted["size"]:
        raise RefusalError(404, "The object is not there.")
    return 200, {}


def _storage(request, match, body, query):
    """Another host than the Hub: takes and gives large files by their hash."""
    large = request.double.store.large
    if request.command == "PUT":
        if File(body, True).sha256 != match["oid"]:
            raise RefusalError(400, "The content does not have this hash.")
        large[match["oid"]] = body
        return 200, b""
    held = [
        file
        for each in request.double.store.repositories.values()
        for c in each.commits.values()
        for file in c.files.values()
    ]
    return _ranged(request, next(file.data for file in held if file.sha256 == match["oid"]), {})


def _commit(request, match, body, query):
    repository, store = request.repository(match["repo"], write=True), request.double.store
    if match["revision"] not in repository.branches:
        raise RefusalError(404, "Only branches take commits.", "RevisionNotFound")
    lines = [json.loads(line) for line in body.splitlines()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    with request.double.lock:
        if (
            header.get("parentCommit", repository.branches[match["revision"]])
            != repository.branches[match["revision"]]
        ):
            raise RefusalError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.files(match["revision"]))
        for line in lines:
            _apply(files, line["key"], line["value"], store)
        oid = repository.add(files, header["summary"], match["revision"])
    return 200, {"commitUrl": f"{request.double.url}/{match['repo']}/commit/{oid}", "commitOid": oid, "success": True}


def _apply(files, key, value, store):
    if key == "file":
        files[value["path"]] = File(base64.b64decode(value["content"]), False)
    elif key == "lfsFile":
        if value["oid"] not in store.large:
            raise RefusalError(400, f"{value['path']} points to an object that was not uploaded.")
        files[value["path"]] = File(store.large[value["oid"]], True)
    elif key == "deletedFile" and files.pop(value["path"], None) is None:
        raise RefusalError(404, "A file with this name doesn't exist", "EntryNotFound")


def _tag(request, match, body, query):
    repository = request.repository(match["repo"], write=True)
    if request.command == "DELETE":
        repository.tags.pop(match["revision"])
        return 200, {}
    oid, _ = request.commit(repository, match["revision"])
    name = json.loads(body)["tag"]
    if name in repository.tags:
        raise RefusalError(409, f"Tag {name} already exists.")
    repository.tags[name] = oid
    return 200, {}


def _resolve(request, match, body, query):
    repository = request.repository(match["repo"])
    oid, commit = request.commit(repository, match["revision"])
    file = commit.files.get(match["path"])
    if file is None:
        raise RefusalError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=oid)
    headers = {"X-Repo-Commit": oid, "ETag": f'"{file.blob_id}"'}
    if file.large:
        linked = {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
        return 302, b"", headers | linked | {"Location": f"{request.double.storage}/storage/{file.sha256}"}
    return _ranged(request, file.data, headers)


def _ranged(request, data, headers):
    wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
    if not wanted:
        return 200, data, headers
    start = int(wanted[1])
    if start >= len(data):
        raise RefusalError(416, "Range not satisfiable", Content_Range=f"bytes */{len(data)}")
    return 206, data[start:], headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_MODEL = rf"/api/models/{_REPO}"
_ROUTES = [
    (("GET",), r"/api/whoami-v2", _whoami),
    (("POST",), r"/api/repos/create", _create),
    (("POST",), r"/api/validate-yaml", lambda *_: (200, {"errors": [], "warnings": []})),
    (("GET",), rf"{_MODEL}(/revision/(?P<revision>.+))?", _info),
    (("GET",), rf"{_MODEL}/tree/(?P<revision>[^/]+)(?P<path>/.+)?", _tree),
    (("POST",), rf"{_MODEL}/paths-info/(?P<revision>[^/]+)", _paths),
    (("GET",), rf"{_MODEL}/refs", _refs),
    (("POST",), rf"{_MODEL}/preupload/(?P<revision>[^/]+)", _preupload),
    (("POST",), rf"{_MODEL}/commit/(?P<revision>[^/]+)", _commit),
    (("POST", "DELETE"), rf"{_MODEL}/tag/(?P<revision>[^/]+)", _tag),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", _lfs_batch),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/verify", _lfs_verify),
    (("PUT", "GET"), r"/storage/(?P<oid>[0-9a-f]{64})", _storage),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _resolve),
]
