"""A Hub on this machine: the endpoints that `get_kernel` asks for repositories of type kernel, and nothing else.

They are `/api/kernels/<repository>/refs` and `/tree/<revision>[/<directory>]`, and for each file HEAD and GET of
`/kernels/<repository>/resolve/<revision>/<path>`.
"""

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

STATISTICS = "/api/agent-harnesses"
"""What the client library asks once a day for its user agent, and does without."""


@dataclass(frozen=True)
class File:
    """One file of a branch."""

    content: bytes

    @property
    def etag(self) -> str:
        """As the Hub gives it for a file in large-file storage."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass
class Hub:
    """One kernel repository, with its branches."""

    repository: str
    branches: dict[str, dict[str, File]] = field(default_factory=dict)
    """Of each branch, the files by their path."""
    sent: int = 0
    """Bytes of files that were asked for with GET."""
    sending: Callable[["Request", str, bytes], bytes | None] = lambda request, path, content: content
    """Gives what is sent for a file that is asked for with GET; None ends the connection."""

    def add_variant(self, branch: str, directory: Path) -> None:
        """Adds a built variant to a branch."""
        files = self.branches.setdefault(branch, {})
        for path in sorted(directory.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"build/{directory.name}/{path.relative_to(directory).as_posix()}"] = File(path.read_bytes())

    def commit(self, branch: str) -> str:
        """Returns the commit at the tip of a branch, which is as good as a digest of the branch's files."""
        digest = hashlib.sha1(branch.encode())
        for path, file in sorted(self.branches[branch].items()):
            digest.update(f"{path} {file.etag}\n".encode())
        return digest.hexdigest()

    def files_at(self, revision: str) -> tuple[str, dict[str, File]] | None:
        """Returns commit and files of a branch, a ref or a commit, or None if there is no such revision."""
        for branch, files in self.branches.items():
            if revision in (branch, f"refs/heads/{branch}", self.commit(branch)):
                return self.commit(branch), files
        return None


class Request(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:
        """Keeps the test's output quiet; the server has a list."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        if path != STATISTICS:
            self.server.requests.append(f"{self.command} {self.path}")
        for hub in self.server.hubs:
            if path.startswith((f"/api/kernels/{hub.repository}/", f"/kernels/{hub.repository}/")):
                self._answer_of(hub, path)
                return
        self._refuse("RepoNotFound")

    def _answer_of(self, hub: Hub, path: str) -> None:
        api, page = f"/api/kernels/{hub.repository}/", f"/kernels/{hub.repository}/resolve/"
        if path == f"{api}refs":
            self._send_json(_refs(hub))
        elif path.startswith(f"{api}tree/"):
            revision, _, directory = path.removeprefix(f"{api}tree/").partition("/")
            recursive = "recursive=true" in self.path.lower()
            self._send_tree(hub.files_at(unquote(revision)), unquote(directory), recursive)
        elif path.startswith(page):
            revision, _, name = path.removeprefix(page).partition("/")
            self._send_file(hub, hub.files_at(unquote(revision)), unquote(name))
        else:
            self._refuse("EntryNotFound")

    def _send_tree(self, found: tuple[str, dict[str, File]] | None, directory: str, recursive: bool) -> None:
        if found is None:
            self._refuse("RevisionNotFound")
        elif entries := _tree(found[1], directory, recursive):
            self._send_json(entries)
        else:
            self._refuse("EntryNotFound")

    def _send_file(self, hub: Hub, found: tuple[str, dict[str, File]] | None, name: str) -> None:
        if found is None:
            self._refuse("RevisionNotFound")
            return
        commit, files = found
        if name not in files:
            self._refuse("EntryNotFound", commit)
            return
        content = files[name].content
        if self.command == "GET":
            sent = hub.sending(self, name, content)
            if sent is None:
                self.close_connection = True
                return
            content = sent
            hub.sent += len(content)
        self.send_response(200)
        self.send_header("ETag", f'"{files[name].etag}"')
        self.send_header("X-Repo-Commit", commit)
        self._send_body(content, "application/octet-stream")

    def _send_json(self, answer: object) -> None:
        self.send_response(200)
        self._send_body(json.dumps(answer).encode(), "application/json")

    def _refuse(self, code: str, commit: str = "") -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self._send_body(b"", "text/plain")

    def _send_body(self, content: bytes, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """Serves repositories on a free port of the loopback interface."""

    daemon_threads = True

    def __init__(self, hubs: Sequence[Hub]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.hubs = hubs
        self.requests: list[str] = []
        """Method and path, in order, but for `STATISTICS`."""
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def die(self) -> None:
        """Takes no connection any more, and ends those that are open."""
        for each in (self.socket, *self._connections):
            with contextlib.suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.socket.close()

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, address: object) -> None:
        """Says nothing of clients that hang up."""


@contextlib.contextmanager
def serving(*hubs: Hub) -> Iterator[Server]:
    """Serves until the end of the block."""
    with Server(hubs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _refs(hub: Hub) -> dict[str, object]:
    branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": hub.commit(name)} for name in hub.branches]
    return {"branches": branches, "tags": [], "converts": []}


def _tree(files: dict[str, File], directory: str, recursive: bool) -> list[dict[str, object]]:
    prefix = f"{directory}/" if directory else ""
    entries: dict[str, dict[str, object]] = {}
    for path, file in files.items():
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            name = prefix + "/".join(parts[:depth])
            entries[name] = {
                "type": "directory",
                "path": name,
                "oid": hashlib.sha1(name.encode()).hexdigest(),
                "size": 0,
            }
        if recursive or len(parts) == 1:
            oid = hashlib.sha1(file.content).hexdigest()
            entries[path] = {"type": "file", "path": path, "oid": oid, "size": len(file.content)}
    return list(entries.values())
