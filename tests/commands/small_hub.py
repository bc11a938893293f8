"""A small Hub: an HTTP server on this machine that answers huggingface_hub's calls of a push."""

import hashlib
import json
import threading
from base64 import b64decode
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_0123456789abcdefgh"
OWNER = "ann"


@dataclass
class SmallHub:
    """Repositories, files and requests so far. `refuses` maps a part of a path to a status."""

    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    refuses: dict[str, int] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)

    def __enter__(self) -> "SmallHub":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None: ...

            def do_POST(self) -> None:
                self._answer(*hub.answer(self.path, self._body(), self.headers.get("Authorization")))

            do_GET = do_POST

            def do_PUT(self) -> None:
                hub.large[self.path.rpartition("/")[2]] = self._body()
                hub.requests.append("PUT")
                self._answer(200, {})

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    chunks: list[bytes] = []
                    while size := int(self.rfile.readline(), 16):
                        chunks.append(self.rfile.read(size))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(chunks)
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
        self.requests.append(path)
        for part, status in self.refuses.items():
            if part in path:
                return status, {"error": f"refused, and the token was {authorization}"}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            return (200, {}) if text.startswith("---\n") else (400, {"errors": [{"message": "no YAML"}]})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or OWNER}/{asked['name']}"
            status = 409 if name in self.repositories else 200
            self.repositories.setdefault(name, asked)
            return status, {"url": f"{self.endpoint}/{name}", "name": name}
        if (found := self.repositories.get(path.removeprefix("/api/models/"))) is not None:
            return 200, {
                "id": path.removeprefix("/api/models/"),
                "private": found["visibility"] == "private",
            }
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {"files": [_uploaded(each["path"]) for each in files]}
        if path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            href = f"{self.endpoint}/large"
            return 200, {
                "transfer": "basic",
                "objects": [
                    {**each, "actions": {"upload": {"href": f"{href}/{each['oid']}"}}} for each in asked
                ],
            }
        if "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            self._commit(name, [json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"this small Hub has no {path}"}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files: dict[str, bytes] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = content
        self.files.setdefault(name, {}).update(files)


def _uploaded(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}
