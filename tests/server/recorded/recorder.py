"""Records what a server answers, byte for byte, and compares it with what it answered before.

Everything goes over plain sockets to a server in a process of its own. This module knows the server by its settings and
its answers only.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple, Self

from gpu_worker_pool.testing import ServerProcess

RECORDINGS = Path(__file__).parent / "answers"
IS_RECORDING = os.environ.get("RECORD") == "1"
TIMEOUT_S = 30.0
# A body that is longer is shown with a line for each of its fields.
SHORT = 200


class Server(ServerProcess):
    """It looks at the GPUs once, and then only at those that are given back: so nothing moves while it is asked."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        plain = {
            "PATH": "/nowhere",  # no nvidia-smi there, whatever this machine has
            "SIMULATED_GPUS": "2xA100-80GB,2xT4",
            "REFRESH_INTERVAL": "3600",
            "GPU_POOL_NODE": "box1",
            "GPU_POOL_LOCK_SCOPE": "",
        }
        # Of a fixed length: what is said of a file in it has a length, too.
        self._own_folder = TemporaryDirectory(prefix="recorded-")
        super().__init__({**plain, **(settings or {})}, folder=Path(self._own_folder.name))

    def close(self) -> None:
        super().close()
        self._own_folder.cleanup()


class Answer(NamedTuple):
    head: bytes
    body: bytes


def read_answer(file: BinaryIO, *, has_body: bool = True) -> Answer:
    """One answer, by its own word on where it ends. What is chunked is put together."""
    lines = [file.readline()]
    while lines[-1] not in {b"\r\n", b""}:
        lines.append(file.readline())
    head = b"".join(lines)
    assert head.endswith(b"\r\n\r\n"), head
    length = re.search(rb"\ncontent-length: (\d+)\r", head, re.IGNORECASE)
    status = head.split(b" ", 2)[1]
    if not has_body or status.startswith(b"1") or status in {b"204", b"304"}:
        return Answer(head, b"")
    if length is not None:
        body = file.read(int(length[1]))
        assert len(body) == int(length[1]), "the body is shorter than it was said to be"
        return Answer(head, body)
    assert b"transfer-encoding: chunked\r\n" in head.lower(), head
    return Answer(head, b"".join(iter(lambda: read_chunk(file), b"")))


def read_chunk(file: BinaryIO) -> bytes:
    chunk = file.read(int(file.readline(), 16))
    assert file.read(2) == b"\r\n"
    return chunk


class Connection:
    """An open connection, to send bytes over and to read from."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()


class Stream(Connection):
    """Events as they come."""

    def __init__(self, server: Server, path: str, *headers: str) -> None:
        super().__init__(server)
        self.request = make_request(f"GET {path}", b"", headers)
        self.socket.sendall(self.request)
        lines = [self.file.readline()]
        while lines[-1] != b"\r\n":
            lines.append(self.file.readline())
        self.head = b"".join(lines)
        self.events: list[bytes] = []
        self._rest = b""

    def until(self, text: bytes) -> None:
        """Read on to the end of the next event in which this text is."""
        while True:
            event, end, rest = self._rest.partition(b"\n\n")
            if not end:
                self._rest += read_chunk(self.file)
                continue
            self._rest = rest
            self.events.append(event + end)
            if text in event:
                return


def make_request(call: str, body: bytes, headers: tuple[str, ...]) -> bytes:
    method, _, target = call.partition(" ")
    lines = [f"{method} {target} HTTP/1.1", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.insert(1, "Host: 127.0.0.1:8000")
    if (body or method in {"PUT", "POST"}) and not any("content-length:" in line.lower() for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


# --- what really varies --------------------------------------------------------------------------------------------

_TIME_KEYS = "requested_at|granted_at|ended_at|now|since|until|complete_since|started_at|at"
_MEASURED_KEYS = (
    "used_mb|free_mb|usage_percent|memory_usage_percent|utilization_percent|temperature_c|draw_w|power_draw_w|score|"
    "memory_used_mb|memory_committed_mb|memory_outside_mb|committed_mb|total_used_memory_mb|memory_percent|"
    "total_memory_usage_percent|average_utilization_percent|"
    "expires_in_s|reading_age_s|age_s|measured_at|since_at|gpu_hours|shared_gpu_hours|longest_hours|wait_hours|"
    "measured_gpu_hours|busy_gpu_hours"
)
_VARYING = re.compile(
    r'(?P<kept>"thresholds":\{[^}]*\}|"memory_threshold_percent":[^,]*)'
    rf'|"(?P<time_key>{_TIME_KEYS})":"(?P<time>\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z)"'
    r'|"timestamp":"(?P<local>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})"'
    rf'|"(?P<key>{_MEASURED_KEYS})":(?P<open>\[?)(?P<number>\d+(?P<fraction>\.\d+(e-?\d+)?|e-\d+)?)(?P<close>\]?)'
    # Whether there was a reading while the lease lasted is a matter of milliseconds.
    r'|"(?P<use_key>peak_memory_mb|mean_utilization_percent)":(?:null|\d+\.\d+)'
    r'|"(?P<id_key>server_id|pool_id|machine)":"[0-9a-f]{16}"'
    r'|"port":(?P<port>\d+)'
    r'|"version":"(?P<version>[^"]+)"\}$'
    r"|left: (?P<room>[\d.]+ [MG]B) of (?P<limit>[\d.]+ [MG]B)",
    re.MULTILINE,
)


def _without(found: re.Match[str]) -> str:
    if found["kept"]:
        return found[0]
    if found["time_key"]:
        # A time that was asked for stays as it is; one of these days is the server's.
        age = datetime.now().astimezone() - datetime.fromisoformat(found["time"])
        return f'"{found["time_key"]}":"<time>"' if abs(age) < timedelta(days=8) else found[0]
    if found["local"]:
        return '"timestamp":"<local time>"'
    if found["key"]:
        kind = "<fraction>" if found["fraction"] else "<whole number>"
        return f'"{found["key"]}":{found["open"]}{kind}{found["close"]}'
    if found["use_key"]:
        return f'"{found["use_key"]}":<fraction or null>'
    if found["id_key"]:
        return f'"{found["id_key"]}":"<id>"'
    if found["port"]:
        return '"port":<port>'
    if found["version"]:
        return '"version":"<version>"}'
    return f"left: <room> of {found['limit']}"


_HEADERS = (
    (re.compile(r"^date: .+", re.MULTILINE), "date: <date>"),
    (re.compile(r'^etag: "[0-9a-f]{32}"', re.MULTILINE), 'etag: "<etag>"'),
    (re.compile(r"^last-modified: .+", re.MULTILINE), "last-modified: <date>"),
)
_LENGTH = re.compile(r"^content-length: \d+", re.MULTILINE)
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{.*\})?) \S+$", re.MULTILINE)


class Scene:
    """Calls and what was answered, as they stand in one recording. `varying` are texts of this run, and what stands for
    them.
    """

    def __init__(self, server: Server, varying: Mapping[str, str] | None = None) -> None:
        self.server = server
        self.varying = {str(server.folder / "state"): "<state>", **(varying or {})}
        self.text = ""

    def note(self, words: str) -> None:
        self.text += f"### {words}\n\n"

    def ask(self, call: str, body: bytes | str = b"", *headers: str, like: str | None = None) -> str:
        """Send this, and record all of it; of a body that is `like` another one, only that. Returns the body as it was
        recorded.
        """
        return self.send(make_request(call, body.encode() if isinstance(body, str) else body, headers), like)

    def file(self, call: str, *headers: str) -> bytes:
        """The same for a file, of which the content is not recorded. Returns the content."""
        request = make_request(call, b"", headers)
        with Connection(self.server) as connection:
            connection.socket.sendall(request)
            answer = read_answer(connection.file, has_body=not call.startswith("HEAD"))
        what = "<a body>" if answer.body else "<no body>"
        self._put(request, _LENGTH.sub("content-length: <length>", self._head(answer.head)), what)
        return answer.body

    def send(self, request: bytes, like: str | None = None) -> str:
        """Send these very bytes, and record them and the answer."""
        with Connection(self.server) as connection:
            connection.socket.sendall(request)
            return self.receive(connection, request, like)

    def receive(self, connection: Connection, request: bytes, like: str | None = None) -> str:
        """Record the answer to what was sent over this connection."""
        is_head = request.startswith(b"HEAD ")
        answer = read_answer(connection.file, has_body=not is_head)
        answer = _in_known_words(answer)
        head = self._head(answer.head)
        plain = answer.body.decode("utf-8", "backslashreplace")
        body = self.shown(plain)
        if b"content-type: text/plain; version=" in answer.head:
            body = _SAMPLE.sub(r"\1", plain)  # metrics: what there is, without the values
        if body != plain or (is_head and head.startswith("HTTP/1.1 200")):
            head = _LENGTH.sub("content-length: <length>", head)
        shown = _in_lines(body) if "json" in head else body
        self._put(request, head, "<the same body>" if body and body == like else shown)
        return body

    def stream(self, stream: Stream) -> None:
        """Record what a stream has told so far."""
        body = self.shown(b"".join(stream.events).decode())
        self._put(stream.request, self._head(stream.head), re.sub(',(?=")', ",\n ", body))

    def shown(self, text: str) -> str:
        """Without what varies."""
        text = _VARYING.sub(_without, text)
        for varying, name in self.varying.items():
            text = text.replace(varying, name)
        return text

    def _head(self, head: bytes) -> str:
        text = head.decode("latin-1").replace("\r\n", "\n")
        assert "\r" not in text
        for pattern, name in _HEADERS:
            text = pattern.sub(name, text)
        # The order of fields with different names means nothing (RFC 9110, 5.3).
        status, *fields = self.shown(text).rstrip("\n").split("\n")
        return "\n".join([status, *sorted(fields)]) + "\n\n"

    def _put(self, request: bytes, head: str, body: str) -> None:
        asked, _, sent = request.partition(b"\r\n\r\n")
        lines = self.shown(asked.decode("latin-1")).split("\r\n")
        lines = [line if len(line) <= 500 else f"{line[:40]}... ({len(line)} signs)" for line in lines]
        if sent:
            plain = sent.decode("utf-8", "backslashreplace")
            text = self.shown(plain)
            if text != plain:
                lines[-1] = "Content-Length: <length>"
            lines += ["", text if len(text) <= 500 else f"{text[:40]}... ({len(text)} signs)"]
        asked_text = "\n".join(lines).replace("\n", "\n> ")
        self.text += f"> {asked_text}\n\n{head}{body}\n\n\n"


def _in_known_words(answer: Answer) -> Answer:
    """With the names of statuses that Python had before 3.13, and with GET before HEAD: a framework keeps them in a set,
    which has another order each time.
    """
    head = answer.head.replace(b"\r\nallow: HEAD, GET\r\n", b"\r\nallow: GET, HEAD\r\n")
    body = answer.body.replace(b"; use HEAD, GET.", b"; use GET, HEAD.")
    for new, old in (
        (b"Content Too Large", b"Request Entity Too Large"),
        (b"Unprocessable Content", b"Unprocessable Entity"),
    ):
        if new in head.partition(b"\r\n")[0]:
            head = head.replace(new, old)
            if b"problem+json" in head:
                body = body.replace(b'"title":"%b"' % new, b'"title":"%b"' % old)
                shift = len(old) - len(new)
                head = re.sub(rb"(?<=content-length: )\d+", lambda found: b"%d" % (int(found[0]) + shift), head)  # noqa: B023
    return Answer(head, body)


def _in_lines(body: str) -> str:
    """JSON with a line for each field, where it is long. Line ends of its own would be seen."""
    if len(body) <= SHORT:
        return body
    return re.sub(r',(?=\{|"[^":,]*":)', ",\n", body.replace("\n", "<line end>"))


class Book:
    """The recordings of one server: compared, or written again, when all are there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: dict[str, str] = {}
        self.scenes: dict[str, Scene] = {}

    def scene(self, name: str, server: Server, varying: Mapping[str, str] | None = None) -> Scene:
        self.scenes[f"{self.name}-{name}.txt"] = scene = Scene(server, varying)
        return scene

    def close(self) -> None:
        """AssertionError with the difference of each recording that differs."""
        files = {**{name: scene.text for name, scene in self.scenes.items()}, **self.files}
        known = {path.name for path in RECORDINGS.glob(f"{self.name}-*")}
        if IS_RECORDING:
            for name in known - files.keys():
                (RECORDINGS / name).unlink()
            for name, text in files.items():
                (RECORDINGS / name).write_bytes(text.encode())
            return
        differences = [difference for name, text in files.items() if (difference := _difference(name, text))]
        assert not differences, "the server answers otherwise than recorded:\n" + "\n".join(differences)
        assert known == files.keys(), "recordings of no scene; RECORD=1 removes them"


def _difference(name: str, text: str) -> str:
    path = RECORDINGS / name
    recorded = path.read_bytes().decode() if path.exists() else ""
    if recorded == text:
        return ""
    lines = difflib.unified_diff(
        recorded.splitlines(), text.splitlines(), f"{name}, recorded", f"{name}, answered", n=12, lineterm=""
    )
    return "\n".join(lines) or f"{name}: line ends differ"


def as_json(text: object) -> str:
    return json.dumps(text, indent=1, sort_keys=True) + "\n"
