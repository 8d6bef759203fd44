"""An HTTP server for tests of downloads: serves bytes, resumes like a real mirror, and fails on request."""

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mvngrad_lab.tasks.files import KnownFile


def known_file(name, content):
    return KnownFile(name, len(content), hashlib.sha256(content).hexdigest())


class Mirror(BaseHTTPRequestHandler):
    """`faults` has for each path one word a request: missing, altered, cut (after half), nothing, or no range."""

    files: dict[str, bytes]
    faults: dict[str, list[str]]
    requests: list[tuple[str, str | None]]
    url: str

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.requests.append((self.path, wanted))
        fault = self.faults[self.path].pop(0) if self.faults.get(self.path) else None
        data = self.files.get(self.path)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and fault != "no range" else 0
        if data is None or fault == "missing":
            self.send_error(404)
            return
        if start >= len(data):
            self.send_error(416)
            return
        if fault == "altered":
            data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        body = data[start:]
        self.wfile.write(body[: {"cut": len(body) // 2, "nothing": 0}.get(fault, len(body))])

    def log_message(self, *args):
        pass


@contextmanager
def serve():
    """A running mirror: put bytes into its `files` by path, its address is `url`."""
    handler = type("Handler", (Mirror,), {"files": {}, "faults": {}, "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield handler
        finally:
            server.shutdown()
            thread.join()
