"""A small stand-in for the Hub on http.server: models only, in memory, as huggingface_hub's client speaks to it.

Start it, then run a process with `HubServer.environment()`: HF_ENDPOINT has to be set before huggingface_hub is
imported.
"""

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """One model repository: its files, its head commit and whether only its owner sees it."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def head(self) -> str:
        return hashlib.sha1(str(self.commits).encode()).hexdigest()


class HubServer:
    """Use as a context manager; `repositories` can be read and filled by the test.

    Args:
        user: who the token belongs to.
        role: "write" or "read".
        failing: a path that contains this text is answered with status 500.
    """

    def __init__(self, user: str = "tester", role: str = "write", failing: str | None = None):
        self.user, self.role, self.failing = user, role, failing
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []

    def __enter__(self) -> "HubServer":
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def environment(self, cache: os.PathLike | str, token: str | None = "dummy") -> dict[str, str]:
        """This process's environment, changed so that a child process uses this Hub, with its cache in `cache`."""
        changed = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **({"HF_TOKEN": token} if token else {}),
        }
        dropped = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}
        return {**{name: value for name, value in os.environ.items() if name not in dropped}, **changed}

    # Each method below answers one request: (status, headers, body).

    def whoami(self):
        return _json({"type": "user", "name": self.user, "orgs": [], "auth": {"accessToken": {"role": self.role}}})

    def create(self, body: bytes):
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        status = 409 if name in self.repositories else 200
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.repositories.setdefault(name, Repository(private=private))
        return _json({"url": f"{self.url}/{name}", "name": name, "error": "exists"}, status)

    def preupload(self, body: bytes):
        files = json.loads(body)["files"]
        return _json({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})

    def commit(self, name: str, body: bytes):
        repository = self.repositories[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                repository.files.pop(value["path"], None)
        repository.commits += 1
        url = f"{self.url}/{name}/commit/{repository.head}"
        return _json({"commitUrl": url, "commitOid": repository.head, "success": True, "hookOutput": ""})

    def info(self, name: str):
        repository = self.repositories[name]
        return _json(
            {
                "_id": name,
                "id": name,
                "modelId": name,
                "private": repository.private,
                "sha": repository.head,
                "tags": [],
                "siblings": [{"rfilename": path} for path in sorted(repository.files)],
            }
        )

    def tree(self, name: str):
        files = self.repositories[name].files
        return _json(
            [
                {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
                for path, content in sorted(files.items())
            ]
        )

    def resolve(self, name: str, path: str):
        repository = self.repositories[name]
        headers = {"X-Repo-Commit": repository.head}
        if path not in repository.files:
            return 404, {**headers, "X-Error-Code": "EntryNotFound"}, b"Entry not found"
        content = repository.files[path]
        return 200, {**headers, "ETag": f'"{_blob_id(content)}"', "Content-Type": "application/octet-stream"}, content


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *arguments):
        """Quiet."""

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.hub.requests.append(f"{self.command} {path}")
        status, headers, content = self._route(path, body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _route(self, path: str, body: bytes):
        hub = self.hub
        if hub.failing and hub.failing in path:
            return _json({"error": "the stand-in was told to fail"}, 500)
        if path == "/api/whoami-v2":
            return hub.whoami() if self.headers.get("Authorization") else _json({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            return hub.create(body)
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(preupload|commit|tree|revision)/.+)?", path)
        resolved = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        name = (found or resolved).group(1) if found or resolved else None
        if name not in hub.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"Repository not found"
        if resolved:
            return hub.resolve(name, resolved.group(2))
        if found.group(2) == "preupload":
            return hub.preupload(body)
        if found.group(2) == "commit":
            return hub.commit(name, body)
        return hub.tree(name) if found.group(2) == "tree" else hub.info(name)


def _json(value, status: int = 200):
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _blob_id(content: bytes) -> str:
    """Git's id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
