"""A Hugging Face Hub on this machine: the part of its API that pushing and loading use, repositories in memory.

The answers were written down from the requests and expectations of huggingface_hub's client. Faults can be injected.
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
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_somebody"
USER = "somebody"


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

    :param repositories: repositories by ``"user/name"``
    :param requests: method and path of each request
    :param drop: pattern of the requests that lose the connection: half of a file is sent, or there is no answer
    :param drops: number of requests to drop; the client tries several times
    :param fail: status to answer with, by a pattern of the request
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    drop: str | None = None
    drops: int = 0
    fail: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def add(self, repo_id: str, files: dict[str, bytes]) -> Repository:
        """Add a repository as somebody else might have made it, with any names."""
        repository = self.repositories.setdefault(repo_id, Repository())
        repository.commit(files)
        return repository

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)


class Refusal(Exception):  # noqa: N818  # an answer of the server
    """The answer to a request, instead of status 200."""

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
        path = unquote(urlsplit(self.path).path)
        request, body = f"{self.command} {path}", self._body()
        self.hub.requests.append(request)
        self.dropping = bool(self.hub.drop and self.hub.drops > 0 and re.search(self.hub.drop, request))
        if self.dropping:
            self.hub.drops -= 1
            self.close_connection = True
            if self.command in ("HEAD", "POST"):
                return
        try:
            for pattern, status in self.hub.fail.items():
                if re.search(pattern, request):
                    raise Refusal(status, message="as the test asks for")
            self._route(path, body)
        except Refusal as answer:
            headers = {"X-Error-Code": answer.code, "X-Error-Message": answer.message}
            content = json.dumps({"error": answer.message}).encode()
            self._send(answer.status, content, {key: value for key, value in headers.items() if value})

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, status: int, content: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _route(self, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            self._token(required=True)
            self._json({"type": "user", "name": USER})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            commit, files = self._files(found[1], found[2])
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._json({"id": found[1], "sha": commit, "siblings": siblings})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            self._token(required=True)
            names = [file["path"] for file in json.loads(body)["files"]]
            answers = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            self._json({"files": answers})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(found[1], body)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups())
        else:
            raise Refusal(404, message=f"no such route: {path}")

    def _token(self, required: bool = False) -> None:
        if self.headers.get("Authorization", "" if required else f"Bearer {TOKEN}") != f"Bearer {TOKEN}":
            raise Refusal(401, message="Invalid credentials in Authorization header")

    def _files(self, repo_id: str, revision: str | None = None) -> tuple[str, dict[str, bytes]]:
        self._token()
        if repo_id not in self.hub.repositories:
            raise Refusal(404, "RepoNotFound", "Repository not found")
        repository = self.hub.repositories[repo_id]
        commit = repository.head if revision in (None, "main") else revision
        if commit not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _create(self, request: dict[str, str]) -> None:
        self._token(required=True)
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        if not repo_id.startswith((f"{USER}/", "me/")):
            raise Refusal(403, message="You don't have the rights to create a model under this namespace")
        known = repo_id in self.hub.repositories
        if not known:
            self.hub.add(repo_id, {".gitattributes": b"*.zip filter=lfs\n"})
        self._json({"url": f"{self.hub.url}/{repo_id}"}, 409 if known else 200)

    def _commit(self, repo_id: str, body: bytes) -> None:
        self._token(required=True)
        head, files = self._files(repo_id)
        files = dict(files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, head):
                raise Refusal(412, message="A commit has happened since. Please refresh and try again.")
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.repositories[repo_id].commit(files)
        self._json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}", "commitOid": commit})

    def _resolve(self, repo_id: str, revision: str, name: str) -> None:
        commit, files = self._files(repo_id, revision)
        if name not in files:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        content, status = files[name], 200
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, start = 206, int(found[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self._send(status, content, headers, sent=len(content) // 2 if self.dropping else None)


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Run a Hub that answers at ``url`` until the context ends."""
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
