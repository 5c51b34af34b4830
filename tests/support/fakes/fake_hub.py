"""A small Hugging Face hub on a port of this machine: its web interface, as far as huggingface_hub asks for it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """What it holds, and how it behaves.

    Attributes:
        files: Contents by name.
        revisions: Commits by branch or tag.
        gated: Whether files are for some only.
        cut: Bytes of a download after which its connection is closed, by name; once.
        said_size: Bytes that are said to be there, by name, where that is a lie.
    """

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    said_size: dict[str, int] = field(default_factory=dict)

    def size(self, name: str) -> int:
        """Bytes of a file, as it is said."""
        return self.said_size.get(name, len(self.files[name]))


class FakeHub(ThreadingHTTPServer):
    """Serves repositories, and remembers what was asked for."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.asked = repositories, list[str]()

    @property
    def address(self) -> str:
        """What HF_ENDPOINT has to be."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        paths = [line.split()[1] for line in self.asked if line.startswith("GET ") and "/resolve/" in line]
        return {path.rpartition("/")[2] for path in paths}


@contextmanager
def serving(**repositories: Repository) -> Iterator[FakeHub]:
    """A hub with repositories `org/KEY`."""
    hub = FakeHub({f"org/{name}": repository for name, repository in repositories.items()})
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        assert isinstance(self.server, FakeHub)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        of_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if of_api else parts
        self.hub.asked.append(f"{self.command} {urlsplit(self.path).path} {self.headers.get('Range', '')}".strip())
        repository = self.hub.repositories.get("/".join(parts[:2]))
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        verb, revision, *rest = parts[2:] or ("revision", "main")
        commit = repository.revisions.get(revision, revision if revision in repository.revisions.values() else None)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if of_api:
            return self._json(self._tree(repository) if verb == "tree" else self._info(repository, parts, commit))
        return self._file(repository, "/".join(rest), commit)

    def _info(self, repository: Repository, parts: list[str], commit: str) -> object:
        siblings = [
            {"rfilename": name, "size": repository.size(name), "blobId": _sha1(content)}
            for name, content in repository.files.items()
        ]
        return {"id": "/".join(parts[:2]), "sha": commit, "siblings": siblings, "gated": repository.gated}

    def _tree(self, repository: Repository) -> object:
        return [
            {"type": "file", "path": name, "size": repository.size(name), "oid": _sha1(content)}
            for name, content in repository.files.items()
        ]

    def _file(self, repository: Repository, name: str, commit: str) -> None:
        if repository.gated:
            return self._refuse(403, "GatedRepo")
        if name not in repository.files:
            return self._refuse(404, "EntryNotFound")
        content = repository.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_sha1(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._send(content[start:], repository.cut.pop(name, None))

    def _send(self, content: bytes, cut: int | None) -> None:
        self.wfile.write(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
