"""The rules of an operator, or of a job's user: which occasions go where."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gpu_worker_pool.core.model.bounds import check_number

from .notice import Notice, Occasion

DEFAULT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL that notices are posted to. `secret` signs them; None: they are not signed."""

    url: str
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its arguments, which are passed on as they are: no shell reads them. `env` is its environment, as pairs;
    None: only what any program needs.
    """

    arguments: tuple[str, ...]
    cwd: str = "/"
    env: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Mail:
    """An address that the system's sendmail sends to."""

    address: str


Target = Webhook | Program | Mail


@dataclass(frozen=True, slots=True)
class Rule:
    """`owner` and `node` are patterns, such as `gpu-*`; None: all. `number` is its place in the operator's file, from 1."""

    occasions: frozenset[Occasion]
    target: Target
    owner: str | None = None
    node: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    number: int | None = None

    def __post_init__(self) -> None:
        if not self.occasions:
            raise ValueError(f"on names no occasion; name at least one of {', '.join(Occasion)}")
        check_number("timeout_s", self.timeout_s, 0.1, MAX_TIMEOUT_S)

    @property
    def is_tried_again(self) -> bool:
        """Whether it is tried again after a failure. A program may have done something by the time it fails: it may page twice."""
        return not isinstance(self.target, Program)

    def applies_to(self, notice: Notice) -> bool:
        if notice.occasion not in self.occasions:
            return False
        if self.owner is not None and not fnmatchcase(notice.owner or "", self.owner):
            return False
        return self.node is None or any(fnmatchcase(node, self.node) for node in notice.nodes)
