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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

TOKEN = "hf_of_somebody"
USER = "somebody"
#: Stands for a status in :attr:`FakeHub.fail`: the connection is lost before the answer.
DROP = 0


class Refusal(Exception):  # noqa: N818  # an answer of the server
    """Status, message and error code of an answer."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Stay silent."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(request)
        faults = [status for pattern, status in self.server.fail.items() if re.search(pattern, request)]
        if DROP in faults:
            return
        status, headers = 200, {}
        try:
            if faults:
                raise Refusal(faults[0], "as the test asks for")
            token = self.headers.get("Authorization")
            if token != f"Bearer {TOKEN}" and (token or re.match("POST /api/(repos|models)/", request)):
                raise Refusal(401, "Invalid credentials in Authorization header")
            answer = self._answer(path.removeprefix("/api/models").strip("/").split("/"), body)
            if isinstance(answer, tuple):
                content, commit = answer
                headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
            else:
                content = json.dumps(answer).encode()
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

    def _answer(self, path, body):
        """The answer as JSON, or the content of a file and its commit."""
        match path:
            case ["api", "validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["api", "repos", "create"]:
                options = json.loads(body)
                repo_id = f"{options.get('organization') or USER}/{options['name']}"
                url = f"{self.server.url}/{repo_id}"
                if repo_id in self.server.repositories:
                    raise Refusal(409, url)
                self.server.add(repo_id, {".gitattributes": b"*.zip filter=lfs\n"})
                self.server.visibility[repo_id] = options.get("visibility")
                return {"url": url}
        repo_id, request = "/".join(path[:2]), path[2:]
        if repo_id not in self.server.repositories:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        commits = {f"{number:040x}": files for number, files in enumerate(self.server.repositories[repo_id])}
        head = list(commits)[-1]
        match request:
            case ["preupload", _]:
                regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                return {"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]}
            case ["commit", _]:
                changes = [(line["key"], line["value"]) for line in map(json.loads, body.splitlines())]
                if changes[0][1].get("parentCommit", head) != head:
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
                files = dict(commits[head])
                for key, value in changes[1:]:
                    files[value["path"]] = base64.b64decode(value.get("content", ""))
                    if key == "deletedFile":
                        del files[value["path"]]
                self.server.add(repo_id, files)
                return {"commitUrl": f"{self.server.url}/{repo_id}/commit/{head}", "commitOid": head}
        kind, revision, *name = request if len(request) > 1 else ("", "main")
        commit = head if revision == "main" else revision
        if commit not in commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = commits[commit]
        if kind == "resolve":
            if "/".join(name) not in files:
                raise Refusal(404, "Entry not found", "EntryNotFound")
            return files["/".join(name)], commit
        if kind == "tree":  # which upload_folder asks for
            return [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        return {"id": repo_id, "sha": commit, "siblings": siblings}


class FakeHub(ThreadingHTTPServer):
    """The state of the server, and its faults."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, list[dict[str, bytes]]] = {}  # commits by "user/name", each a whole set of files
        self.visibility: dict[str, str] = {}
        self.requests: list[str] = []  # method and path of each
        self.fail: dict[str, int] = {}  # status to answer with, by a pattern of the request

    def add(self, repo_id, files):
        """Add a commit as somebody else might have made it, with any names."""
        self.repositories.setdefault(repo_id, []).append(files)

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


@contextlib.contextmanager
def running_hub():
    """Run a Hub that answers at ``url`` until the context ends."""
    with FakeHub() as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield hub
        finally:
            hub.shutdown()
