"""A Hugging Face Hub on this machine: the part of its API that pushing and loading use, with repositories in memory.

The answers were written down from the requests and expectations of huggingface_hub's client. It is a server because other
processes, such as the RL Zoo's commands, need it, too. Werkzeug comes with TensorBoard.
"""

import base64
import contextlib
import hashlib
import json
import logging
import re
import threading

from huggingface_hub import constants
from werkzeug import Request, Response
from werkzeug.exceptions import abort
from werkzeug.serving import make_server

TOKEN = "hf_3kQ9vXb7LmZt"
USER = "somebody"
#: Stands for a status in :attr:`FakeHub.fail`: the connection is lost before the end of the answer.
DROP = 0


def refuse(status, message, code=""):
    headers = {"X-Error-Message": message, "X-Error-Code": code}
    abort(Response(json.dumps({"error": message, "url": message}), status, headers))  # the address of one that exists


class FakeHub:
    """The state of the server, and its faults.

    :param url: address of the server
    """

    def __init__(self, url):
        self.url = url
        self.repositories: dict[str, list[dict[str, bytes]]] = {}  # commits by "user/name", each a whole set of files
        self.branches: dict[str, dict[str, list[dict[str, bytes]]]] = {}  # the same of other branches, by their names
        self.tags: dict[str, dict[str, str]] = {}  # commits by name, by "user/name"
        self.lists_sizes = True
        self.visibility: dict[str, str] = {}
        self.requests: list[str] = []  # method and path of each
        self.fail: dict[str, int] = {}  # status to answer with, by a pattern of the request

    @Request.application
    def __call__(self, request):
        line = f"{request.method} {request.path}"
        self.requests.append(line)
        for status in [status for pattern, status in self.fail.items() if re.search(pattern, line)]:
            if status == DROP:
                return Response(headers={"Content-Length": "1"})
            refuse(status, "as the test asks for")
        token = request.headers.get("Authorization")
        if token != f"Bearer {TOKEN}" and (token or re.match("POST /api/(repos|models)/", line)):
            refuse(401, "Invalid credentials in Authorization header")
        answer = self._answer(request.path.removeprefix("/api/models").strip("/").split("/"), request)
        return answer if isinstance(answer, Response) else Response(json.dumps(answer))

    def _answer(self, path, request):
        match path:
            case ["api", "validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["api", "repos", "create"]:
                repo_id = f"{request.json.get('organization') or USER}/{request.json['name']}"
                url = f"{self.url}/{repo_id}"
                if repo_id in self.repositories:
                    refuse(409, url)
                self.add(repo_id, {".gitattributes": b"*.zip filter=lfs\n"})
                self.visibility[repo_id] = request.json.get("visibility")
                return {"url": url}
        repo_id, rest = "/".join(path[:2]), path[2:]
        if repo_id not in self.repositories:
            refuse(404, "Repository not found", "RepoNotFound")
        branches = {"main": self.repositories[repo_id], **self.branches.get(repo_id, {})}
        commits, heads = {}, dict(self.tags.get(repo_id, {}))
        for index, (name, history) in enumerate(branches.items()):
            for number, files in enumerate(history):
                heads[name] = f"{index:08x}{number:032x}"
                commits[heads[name]] = files
        match rest:
            case ["branch", name]:
                if name in branches:
                    refuse(409, "Reference already exists")
                self.branches.setdefault(repo_id, {})[name] = [dict(branches["main"][-1])]
                return {}
            case ["preupload", _]:
                regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                return {"files": [{"path": file["path"], **regular} for file in request.json["files"]]}
            case ["commit", branch]:
                head = heads[branch]
                changes = [(line["key"], line["value"]) for line in map(json.loads, request.data.splitlines())]
                if changes[0][1].get("parentCommit", head) != head:
                    refuse(412, "A commit has happened since. Please refresh and try again.")
                files = dict(commits[head])
                for key, value in changes[1:]:
                    files[value["path"]] = base64.b64decode(value.get("content", ""))
                    if key == "deletedFile":
                        del files[value["path"]]
                branches[branch].append(files)
                return {"commitUrl": f"{self.url}/{repo_id}/commit/{head}", "commitOid": head}
        kind, revision, *name = rest if len(rest) > 1 else ("", "main")
        commit = heads.get(revision, revision)
        if commit not in commits:
            refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = commits[commit]
        if kind == "resolve":
            if "/".join(name) not in files:
                refuse(404, "Entry not found", "EntryNotFound")
            content = files["/".join(name)]
            return Response(content, headers={"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit})
        if kind == "tree":  # which upload_folder asks for
            return [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]
        siblings = [{"rfilename": name, **({"size": len(data)} if self.lists_sizes else {})} for name, data in files.items()]
        return {"id": repo_id, "sha": commit, "siblings": siblings}

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
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with make_server("127.0.0.1", 0, lambda *arguments: hub(*arguments), threaded=True) as server:
        hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield hub
        finally:
            server.shutdown()
