"""The announcement of a server that has become ready, for the person who started it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpu_worker_pool.wire.service import FleetView

DEFAULT_URL = "http://localhost:8000"


@dataclass(frozen=True, slots=True)
class GpusShown:
    """The GPUs that the server grants. `source` is "simulated", "nvml", "nvidia-smi", or "none" where no GPU can be
    read. `installed` includes the GPUs that CUDA_VISIBLE_DEVICES hides.
    """

    count: int
    installed: int
    models: Mapping[str, int]
    source: str
    error: str | None

    @classmethod
    def of(cls, names: Sequence[str], installed: int, source: str, error: str | None) -> GpusShown:
        return cls(len(names), installed, dict(Counter(names)), source, error)

    def __str__(self) -> str:
        if not self.count and self.installed:
            return f"none of {self.installed}: CUDA_VISIBLE_DEVICES hides them all"
        if not self.count:
            return f"none ({self.error or 'none was found'})"
        which = ", ".join(f"{number} x {name}" for name, number in self.models.items())
        hidden = f" of {self.installed}, by CUDA_VISIBLE_DEVICES" if self.installed != self.count else ""
        kind = "SIMULATED, not hardware" if self.source == "simulated" else f"by {self.source}"
        return f"{self.count}{hidden}: {which} ({kind})" + (f"; {self.error}" if self.error else "")


@dataclass(frozen=True, slots=True)
class Writing:
    """Who may request and release GPUs. `tokens` are the names of the tokens, never the tokens themselves. `only_on` is the
    loopback address of a server that no other machine can reach. `local_url` leads to the server from this machine, also if
    only its Unix socket does.
    """

    tokens_are: Literal["set", "none", "broken"]
    tokens: tuple[str, ...]
    is_open_here: bool
    only_on: str | None = None
    local_url: str = DEFAULT_URL

    def text(self, *, is_default: bool = True) -> str:
        """In words. `is_default`: commands without settings ask the default URL."""
        here = (
            "every user of this machine, for their own leases"
            if self.is_open_here
            else "only callers with a token, also on this machine"
        )
        said = [here]
        if self.tokens:
            said.append(f"from anywhere with a token: {', '.join(self.tokens)}")
        if self.tokens_are == "broken":
            said.append("GPU_POOL_TOKENS cannot be used, so none of its tokens is accepted: see the log")
        if self.only_on is not None:
            said.append(f"no other machine can reach {self.only_on}; --host 0.0.0.0 changes that")
        elif not self.tokens:
            option = "" if is_default and self.local_url == DEFAULT_URL else f" --endpoint {self.local_url}"
            how = f"run gpu-pool token add NAME{option}" if self.is_open_here else "set GPU_POOL_TOKENS_FILE"
            said.append(f"other machines can view but not request GPUs; to allow a user, {how}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is announced. `docs` and `page` are URLs. `trouble` is the reason why nothing can be granted, if any.
    `is_default`: a client without settings finds the server. `fleet` is as in /health. `join` is the command that other boxes
    start with.
    """

    version: str
    pid: int
    urls: tuple[str, ...]
    docs: str | None
    page: str
    gpus: GpusShown
    state: str
    trouble: str | None
    writing: Writing
    is_default: bool
    socket: str | None = None
    fleet: FleetView | None = None
    join: str | None = None

    def lines(self) -> list[tuple[str, str]]:
        """Each line as a heading and its text. A line with an empty heading continues the one before."""
        fleet = self.fleet
        is_found = self.is_default and DEFAULT_URL in self.urls
        endpoint = "" if is_found else f"--endpoint {self.urls[0]} "
        lines = [("address", "  ".join(self.urls)), ("live page", self.page)]
        if self.socket:
            lines.append(("Unix socket", self.socket))
        if self.docs:
            lines.append(("try it out", self.docs))
        lines.append(("GPUs", str(self.gpus)))
        if not self.gpus.count:
            lines.append(("", "`gpu-pool doctor` says what is missing; --simulated-gpus 4 tries it without any"))
        lines.append(("state", self.state))
        if fleet is not None and fleet.role == "leader":
            lines.append(("fleet", "this server leads"))
            if self.join is not None:
                lines.append(("", f"on each other box: {self.join}"))
        elif fleet is not None and fleet.leader_url is not None:
            lines.append(("fleet", f"{fleet.leader} leads and grants: {fleet.leader_url}"))
        is_trouble = self.trouble is not None
        if is_trouble:
            lines.append(("TROUBLE", f"nothing can be granted: {self.trouble}"))
        lines.append(("may ask", self.writing.text(is_default=self.is_default)))
        if not is_trouble:
            lines.append(("use it", f"gpu-pool run {endpoint}-- CMD"))
        return lines

    def as_json(self) -> dict[str, Any]:
        shown = {name: value for name, value in asdict(self).items() if name not in {"is_default", "writing", "join"}}
        may = self.writing
        writing = {"without_token_here": may.is_open_here, "tokens": may.tokens_are, "names": may.tokens}
        return {**shown, "can_grant": self.trouble is None, "writing": writing}
