"""A Hugging Face Hub on this machine: the part of its API that pushing and loading use, with repositories in memory.

The answers were written down from the requests and expectations of huggingface_hub's client. It is a server because other
processes, such as the RL Zoo's commands, need it, too.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

TOKEN = "hf_of_somebody"
USER = "somebody"
#: Stands for a status in :attr:`FakeHub.fail`: the connection is lost before the answer.
DROP = 0


@dataclass
class Repository:
    """A repository whose commits are whole sets of files, the newest last."""

    is_private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files):
        self.commits[f"{len(self.commits) + 1:040x}"] = files

    @property
    def head(self):
        return list(self.commits)[-1]

    @property
    def files(self):
        return self.commits[self.head]


@dataclass
class FakeHub:
    """The state of the server, and its faults.

    :param url: address of the server
    :param repositories: repositories by ``"user/name"``
    :param requests: method and path of each request
    :param fail: status to answer with, by a pattern of the request
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)

    def add(self, repo_id, files):
        """Add a commit as somebody else might have made it, with any names."""
        self.repositories.setdefault(repo_id, Repository()).commit(files)

    @property
    def fetched(self):
        """Names of the files that were asked for."""
        return {request.rsplit("/", 1)[1] for request in self.requests if "/resolve/" in request}

    @property
    def variables(self):
        """Variables by which other processes find the server, and may write to it."""
        switches = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY")
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, **dict.fromkeys(switches, "1")}

    def connect(self, patch, home):
        """Let this process and those that it starts use the server, with an empty cache."""
        for name, value in {**self.variables, "HF_HOME": str(home)}.items():
            patch.setenv(name, value)
        # huggingface_hub reads its variables when it is imported, which has happened in this process.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, self.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", self.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)


class Refusal(Exception):  # noqa: N818  # an answer of the server
    """Status, message and error code of an answer."""


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(request)
        faults = [status for pattern, status in self.hub.fail.items() if re.search(pattern, request)]
        if DROP in faults:
            return
        status, headers = 200, {}
        try:
            if faults:
                raise Refusal(faults[0], "as the test asks for")
            token = self.headers.get("Authorization")
            if token != f"Bearer {TOKEN}" and (token or re.match("POST /api/(repos|models)/", request)):
                raise Refusal(401, "Invalid credentials in Authorization header")
            if found := re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                content, headers = self._file(*found.groups())
            else:
                content = json.dumps(self._answer(path.removeprefix("/api/").split("/"), body)).encode()
        except Refusal as refusal:
            status, message, *code = refusal.args
            headers = {"X-Error-Message": message, "X-Error-Code": "".join(code)}
            content = json.dumps({"error": message, "url": message}).encode()  # of a repository that exists
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _file(self, repo_id, revision, name):
        commit, files = self._files(repo_id, revision)
        if name not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        return files[name], {"ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"', "X-Repo-Commit": commit}

    def _answer(self, path, body):
        match path:
            case ["whoami-v2"]:
                return {"type": "user", "name": USER}
            case ["validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["repos", "create"]:
                return self._create(**json.loads(body))
            case ["models", user, name, "preupload", _]:
                regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                return {"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]}
            case ["models", user, name, "commit", _]:
                return self._commit(f"{user}/{name}", body)
            case ["models", user, name, *revision]:
                commit, files = self._files(f"{user}/{name}", (revision or ["main"])[-1])
                if revision[:1] == ["tree"]:  # which upload_folder asks for
                    return [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                return {"id": f"{user}/{name}", "sha": commit, "siblings": siblings}
        raise Refusal(404, f"no such route: {path}")

    def _files(self, repo_id, revision):
        if repo_id not in self.hub.repositories:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        repository = self.hub.repositories[repo_id]
        commit = repository.head if revision == "main" else revision
        if commit not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repository.commits[commit]

    def _create(self, name, organization=None, visibility="public", **others):
        repo_id = f"{organization or USER}/{name}"
        if repo_id in self.hub.repositories:
            raise Refusal(409, f"{self.hub.url}/{repo_id}")
        self.hub.repositories[repo_id] = Repository(visibility == "private")
        self.hub.add(repo_id, {".gitattributes": b"*.zip filter=lfs\n"})
        return {"url": f"{self.hub.url}/{repo_id}"}

    def _commit(self, repo_id, body):
        head, files = self._files(repo_id, "main")
        changes = [(line["key"], line["value"]) for line in map(json.loads, body.splitlines())]
        if any(key == "header" and value.get("parentCommit", head) != head for key, value in changes):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        new = {value["path"]: base64.b64decode(value["content"]) for key, value in changes if key == "file"}
        deleted = {value["path"] for key, value in changes if key == "deletedFile"}
        self.hub.add(repo_id, {name: content for name, content in (files | new).items() if name not in deleted})
        head = self.hub.repositories[repo_id].head
        return {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{head}", "commitOid": head}


@contextlib.contextmanager
def running_hub():
    """Run a Hub that answers at ``url`` until the context ends."""
    hub = FakeHub()
    quiet = type("HubHandler", (Handler,), {"hub": hub, "log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield hub
        finally:
            server.shutdown()
