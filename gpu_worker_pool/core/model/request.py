"""What a request asks for, and who asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice

from .bounds import DEFAULT_TTL_S, MAX_TTL_S, check_number, check_whole, show_mb
from .gpu import ProcessId

MAX_GPUS = 1024
MAX_NODES = 1024
MAX_TIME_LIMIT_S = 366 * 24 * 3600.0
MAX_PRIORITY = 1_000_000
# The labels in which a request says what it is for; the first that is there counts.
TASK_LABELS = ("command", "name")
_MAX_TASK = 60
# The least part that the driver shows of the memory that a GPU is sold with: 15,360 MB of 16 GB, 23,034 MB of 24 GB.
SOLD_AND_SEEN = 0.93

# Names of GPUs: the index as nvidia-smi shows it, the UUID, or a prefix of the UUID.
MAX_NAMES = 128
MAX_NAME = 64
# The same characters as in CUDA_VISIBLE_DEVICES (see host/visible_devices.py).
GPU_NAME = r"[0-9]+|[Gg][Pp][Uu]-[A-Za-z0-9_./:-]+|[Mm][Ii][Gg]-[A-Za-z0-9_./:-]+"
_NAME = re.compile(GPU_NAME)
# What each wish must be from and to, if it is there.
_BOUNDS = (
    ("memory_mb", 1, 1e9),
    ("min_memory_mb", 1, 1e9),
    ("memory_threshold_percent", 0, 100),
    ("utilization_threshold_percent", 0, 100),
)
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the GPUs must be like. It is hashable: waiters with equal wishes are treated alike.

    With `memory_mb` the GPU is shared with other requests that say how much they need; without it, the GPU is
    exclusive. A threshold of None means the pool's own. `model` is one or several, separated by commas. `min_memory_mb` is what
    the GPU must be sold with. `among` restricts the choice to these GPUs by their names, and `exclude` leaves these out.
    With `nodes` it is a *gang*: `gpus` on each of this many different nodes, all or nothing. With `node`, only GPUs of that
    one node will do.
    """

    gpus: int = 1
    memory_mb: float | None = None
    model: str | None = None
    memory_threshold_percent: float | None = None
    utilization_threshold_percent: float | None = None
    among: tuple[str, ...] | None = None
    nodes: int = 1
    node: str | None = None
    min_memory_mb: float | None = None
    exclude: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_whole("gpus", self.gpus, 1, MAX_GPUS)
        check_whole("nodes", self.nodes, 1, MAX_NODES)
        if self.total_gpus > MAX_GPUS:
            raise ValueError(
                f"{self.nodes} nodes with {self.gpus} GPUs each are {self.total_gpus} GPUs; a request may have at most "
                f"{MAX_GPUS}"
            )
        if self.node is not None and self.nodes > 1:
            raise ValueError(f"{self.nodes} nodes are asked for, and only GPUs of {self.node}; ask for one of the two")
        for name, low, high in _BOUNDS:
            if (value := getattr(self, name)) is not None:
                check_number(name, value, low, high)
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"model is {self.model!r}; it must be a text, such as A100 or *80GB*")
        if self.model is not None and not all(part.strip() for part in self.model.split(",")):
            what = f"has an empty part: {self.model!r}" if self.model.strip() else "is empty"
            raise ValueError(f"model {what}; leave it out to take any model")
        for name in ("among", "exclude"):
            if (names := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_gpu_names(names, name))

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.nodes

    @property
    def is_shared(self) -> bool:
        return self.memory_mb is not None

    @property
    def named(self) -> str:
        """The GPUs that it names, as people read them; empty if it names none."""
        others = f"all but {shown(self.exclude)}" if self.exclude else ""
        return f"{shown(self.among)}{f', {others}' if others else ''}" if self.among else others

    def is_large_enough(self, total_mb: float) -> bool:
        """Whether a GPU is sold with as much memory as it must have. A part of it is taken by error correction and the driver."""
        return self.min_memory_mb is None or total_mb >= SOLD_AND_SEEN * self.min_memory_mb

    @property
    def has_thresholds(self) -> bool:
        return self.memory_threshold_percent is not None or self.utilization_threshold_percent is not None

    def __str__(self) -> str:
        what = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        if self.gpus > 1 and self.nodes == 1 and self.node is None:
            what += " on one node"
        if self.memory_mb is not None:
            what += f" with {show_mb(self.memory_mb)}{' each' if self.gpus > 1 else ''}"
        if self.model is not None:
            what += f" of model {' or '.join(part.strip() for part in self.model.split(','))}"
        if self.min_memory_mb is not None:
            what += f" of {show_mb(self.min_memory_mb)} or more"
        if self.named:
            what += f" among {self.named}"
        if self.nodes > 1:
            what += f" on each of {self.nodes} nodes"
        if self.node is not None:
            what += f" on {self.node}"
        return what


@dataclass(frozen=True, slots=True)
class Holder:
    """The client as it describes itself, and in `process` its process, if that is known to run on a node of the pool.
    That is `node`; None if the pool has only one.

    Only with `process` can the pool see the holder's death and attribute memory to it. Neither of the two is part of the
    comparison: the same request is the same, whatever the server found out about its client.
    """

    worker_id: str | None = None
    owner: str | None = None
    host: str | None = None
    pid: int | None = None
    pid_started: float | None = None
    boot_id: str | None = None
    pid_namespace: str | None = None
    process: ProcessId | None = field(default=None, compare=False)
    node: str | None = field(default=None, compare=False)

    @property
    def is_local(self) -> bool:
        return self.process is not None

    def process_on(self, node: str) -> ProcessId | None:
        """Its process, if that runs on this node."""
        return self.process if self.node in (None, node) else None

    def __str__(self) -> str:
        """The person; where the client does not say who that is, its worker or process."""
        process = None if self.pid is None else f"pid {self.pid}"
        return self.owner or self.worker_id or process or "an unnamed holder"


def task_of(labels: Mapping[str, str]) -> str | None:
    """What a request is for, as its labels say it."""
    return next((labels[name] for name in TASK_LABELS if labels.get(name)), None)


def person_and_task(holder: Holder, labels: Mapping[str, str]) -> str:
    """A holder as people know it: `carol (train.py)`."""
    task = task_of(labels)
    if task is None:
        return str(holder)
    return f"{holder} ({task if len(task) <= _MAX_TASK else f'{task[: _MAX_TASK - 1]}…'})"


@dataclass(frozen=True, slots=True)
class Request:
    """The lease ends `time_limit_s` after its grant. None: it declares no limit. A preemptible lease may be ended when
    another request needs its GPUs.
    """

    wishes: Wishes = Wishes()
    holder: Holder = Holder()
    priority: int = 0
    ttl_s: float = DEFAULT_TTL_S
    labels: tuple[tuple[str, str], ...] = ()
    time_limit_s: float | None = None
    preemptible: bool = False

    def __post_init__(self) -> None:
        check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_number("ttl_s", self.ttl_s, 0.1, MAX_TTL_S)
        if self.time_limit_s is not None:
            check_number("time_limit_s", self.time_limit_s, 1, MAX_TIME_LIMIT_S)

    @property
    def who(self) -> str:
        """The person and the task, for sentences."""
        return person_and_task(self.holder, dict(self.labels))


@lru_cache(maxsize=4096)
def matches_model(pattern: str | None, name: str) -> bool:
    """Whether a GPU's name matches a model pattern, ignoring case.

    One of several patterns, separated by commas, must match. A pattern with `*`, `?` or `[` must match the whole name. Any other
    pattern must be a whole word in the name, so that `A10` does not match an `A100`.
    """
    return pattern is None or any(_matches(part, name) for part in pattern.split(","))


def _matches(pattern: str, name: str) -> bool:
    wanted, actual = pattern.strip().lower(), name.lower()
    if any(sign in wanted for sign in "*?["):
        return fnmatchcase(actual, wanted)
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", actual) is not None


def is_gpu_name(text: str) -> bool:
    """Whether a text has the form of a GPU's index or UUID, or of the beginning of a UUID."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def as_gpu_names(names: object, wish: str = "among") -> tuple[str, ...]:
    """Sort the names and drop duplicates, so that the same GPUs make equal wishes. A ValueError says what is allowed; `wish` is
    what they were given for.

    Whole numbers stand for indices. Leading zeros of an index are dropped; UUIDs ignore case.
    """
    if not isinstance(names, Iterable) or isinstance(names, str | bytes):
        what = f"{wish} is {_quoted(names)}; it must be a list of GPU indices and UUIDs"
        raise ValueError(what)  # noqa: TRY004 - as for every other wish
    texts = list(islice((_as_text(name, wish) for name in names), MAX_NAMES + 1))
    if not texts:
        raise ValueError(f"{wish} is empty; leave it out to take any GPU")
    if len(texts) > MAX_NAMES:
        raise ValueError(f"{wish} has more than {MAX_NAMES} GPUs; it must be 1 to {MAX_NAMES}")
    by_spelling = {text.lower(): text for text in sorted(texts, reverse=True)}
    return tuple(sorted(by_spelling.values(), key=_order))


def _as_text(name: object, wish: str) -> str:
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) and abs(name) < 10**MAX_NAME else name
    if not isinstance(text, str) or not is_gpu_name(text):
        raise ValueError(
            f"{wish} has {_quoted(name)}; each must be a GPU's index, its UUID (GPU-... or MIG-...) or the beginning of "
            f"that, of at most {MAX_NAME} characters"
        )
    return (text.lstrip("0") or "0") if text.isdigit() else text


def _order(name: str) -> tuple[bool, int, str]:
    return (False, int(name), "") if name.isdigit() else (True, 0, name)


def _quoted(value: object) -> str:
    """Quote a value in a few characters, however large or deep it is."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else f"{value[:40]}...")
    is_short = value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**40)
    return repr(value) if is_short else f"a value of type {type(value).__name__}"


def shown(names: tuple[str, ...]) -> str:
    """The names as text, cut to a line's length."""
    left_out = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {left_out} more" if left_out > 0 else "")
