"""A Hugging Face Hub on this machine: the part of its API that pushing and loading use, repositories in memory.

What it answers was written down from the requests and expectations of huggingface_hub's client. Faults can be injected.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

# huggingface_hub 2.4, of the way in which it sends large files
uploads_warn = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes/text content:DeprecationWarning")
TOKEN = "hf_of_somebody"
USER = "somebody"
NAMESPACES = (USER, "me")


@dataclass
class Repository:
    """Every commit is a whole set of files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""

    def commit(self, files: dict[str, bytes]) -> str:
        content = repr([(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())])
        self.head = hashlib.sha1(f"{content} {len(self.commits)}".encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]


@dataclass
class FakeHub:
    """The state of the server, and its faults.

    :param repositories: by ``"user/name"``
    :param requests: method and path of each request
    :param drop: paths that match lose the connection: half of a body is sent, or, for requests that upload, no answer
    :param drops: how often; the client tries several times
    :param fail: status to answer with, by a pattern of the path
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    drop: str | None = None
    drops: int = 0
    fail: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def add(self, repo_id: str, files: dict[str, bytes]) -> Repository:
        """A repository as somebody else might have made it, with any names."""
        repository = self.repositories.setdefault(repo_id, Repository())
        repository.commit(files)
        return repository

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)


class Refusal(Exception):  # noqa: N818  # an answer, as far as HTTP is concerned
    """What a request is answered with instead of 200."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    dropping = False

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self._body()
        try:
            for pattern, status in self.hub.fail.items():
                if re.search(pattern, f"{self.command} {path}"):
                    raise Refusal(status, message="as the test asks for")
            self.dropping = self._drops(path)
            if self.dropping and self.command in ("POST", "PUT"):
                return
            self._route(path, body)
        except Refusal as answer:
            headers = {"X-Error-Code": answer.code, "X-Error-Message": answer.message}
            content = json.dumps({"error": answer.message}).encode()
            self._send(answer.status, content, {key: value for key, value in headers.items() if value})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _drops(self, path: str) -> bool:
        if self.hub.drop is None or self.hub.drops < 1 or not re.search(self.hub.drop, f"{self.command} {path}"):
            return False
        self.hub.drops -= 1
        self.close_connection = True
        return True

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _route(self, path: str, body: bytes) -> None:
        routes = [
            (r"/api/whoami-v2", self._whoami),
            (r"/api/validate-yaml", self._validate),
            (r"/api/repos/create", self._create),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            (r"/api/models/([^/]+/[^/]+)/preupload/main", self._preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._lfs_batch),
            (r"/lfs/([0-9a-f]{64})", self._lfs_object),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ]
        for pattern, handle in routes:
            found = re.fullmatch(pattern, path)
            if found:
                handle(*found.groups(), body=body)
                return
        raise Refusal(404, message=f"no such route: {path}")

    def _require_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, message="Invalid credentials in Authorization header")

    def _repository(self, repo_id: str) -> Repository:
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, message="Invalid credentials in Authorization header")
        if repo_id not in self.hub.repositories:
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return self.hub.repositories[repo_id]

    def _files(self, repo_id: str, revision: str | None) -> tuple[str, dict[str, bytes]]:
        repository = self._repository(repo_id)
        commit = repository.head if revision in (None, "main") else revision
        if commit not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _whoami(self, body: bytes) -> None:
        self._require_token()
        self._json({"type": "user", "name": USER})

    def _validate(self, body: bytes) -> None:
        header = json.loads(body)["content"].split("---\n")[1]
        self._json({"errors": [], "warnings": []} if isinstance(yaml.safe_load(header), dict) else {"errors": ["no YAML"]})

    def _create(self, body: bytes) -> None:
        self._require_token()
        request = json.loads(body)
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        if not repo_id.startswith(tuple(f"{name}/" for name in NAMESPACES)):
            raise Refusal(403, message="You don't have the rights to create a model under this namespace")
        if repo_id in self.hub.repositories:
            self._json({"url": f"{self.hub.url}/{repo_id}", "error": "You already created this model repo"}, 409)
            return
        self.hub.add(repo_id, {".gitattributes": b"*.zip filter=lfs\n"})
        self._json({"url": f"{self.hub.url}/{repo_id}"})

    def _info(self, repo_id: str, revision: str | None, body: bytes) -> None:
        commit, files = self._files(repo_id, revision)
        sizes = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [{"rfilename": name, **({"size": len(data)} if sizes else {})} for name, data in files.items()]
        self._json({"id": repo_id, "sha": commit, "siblings": siblings})

    def _preupload(self, repo_id: str, body: bytes) -> None:
        self._require_token()
        files = json.loads(body)["files"]
        lfs = (".zip", ".safetensors", ".pkl", ".mp4", ".png")
        modes = [{"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(lfs) else "regular"} for file in files]
        self._json({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})

    def _lfs_batch(self, repo_id: str, body: bytes) -> None:
        self._require_token()
        objects = json.loads(body)["objects"]
        answers = [{**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}} for one in objects]
        self._json({"transfer": "basic", "objects": answers})

    def _lfs_object(self, oid: str, body: bytes) -> None:
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refusal(400, message="the checksum is another one")
            self.hub.uploads[oid] = body
            self._send(200, b"")
        else:
            self._send_file(self.hub.uploads[oid], {})

    def _commit(self, repo_id: str, body: bytes) -> None:
        self._require_token()
        repository = self._repository(repo_id)
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, repository.head):
                raise Refusal(412, message="A commit has happened since. Please refresh and try again.")
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            if line["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files)
        self._json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}", "commitOid": commit})

    def _resolve(self, repo_id: str, revision: str, name: str, body: bytes) -> None:
        commit, files = self._files(repo_id, revision)
        if name not in files:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        oid = hashlib.sha256(files[name]).hexdigest()
        headers = {"ETag": f'"{oid}"', "X-Repo-Commit": commit}
        if oid in self.hub.uploads:  # large files are on another host
            store = self.hub.url.replace("127.0.0.1", "localhost")
            linked = {"X-Linked-Size": str(len(files[name])), "X-Linked-ETag": f'"{oid}"'}
            self._send(302, b"", {**headers, **linked, "Location": f"{store}/lfs/{oid}"})
        else:
            self._send_file(files[name], headers)

    def _send_file(self, content: bytes, headers: dict[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        status, start = (206, int(found[1])) if found else (200, 0)
        if found:
            headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        half = (len(content) - start) // 2 if self.dropping else None
        self._send(status, content[start:], headers, sent=half)


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    """A Hub that answers at ``url`` until the context ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
