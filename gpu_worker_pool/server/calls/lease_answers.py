"""Answers about one lease. What a lease has from its request is encoded once: a worker asks for the same again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.http.response import NULL, JsonFrame, encode
from gpu_worker_pool.wire.leases import LeaseView

from .lease_view import end_note, env_of, gpu_ref, lease_view, moving_of_active

MOST_FRAMES = 256
MOST_GPUS = 4096
# What does not follow from the request, in the order of the keys.
ACTIVE = ("id", "gpus", "fence", "requested_at", "granted_at", "expires_in_s", "env", "ends_at", "warning", "idle_s")
ENDED = ("id", "gpus", "fence", "requested_at", "granted_at", "ended_at", "ended_by", "end_note")


class _EncodedGpu(NamedTuple):
    """A GPU as leases name it, and the environment of a process that must see it only. `gpu` is None until it was read."""

    gpu: Gpu | None
    ref: bytes
    env: bytes
    env_by_uuid: bytes


class LeaseAnswers:
    """Keeps the last frames, by identity: of equal requests, the processes may differ."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Request, JsonFrame]] = {}
        self._gpus: dict[GpuKey, _EncodedGpu] = {}

    def __repr__(self) -> str:
        return f"<LeaseAnswers: {len(self._kept)} frames kept>"

    def active(
        self, state: PoolState, lease: ActiveLease, now: float, *, by_uuid: bool, pool_id: str | None, asked: str | None
    ) -> bytes:
        """As the view of the lease; `by_uuid`, `pool_id` and `asked` are as there."""

        def view() -> LeaseView:
            return lease_view(state, lease, now, by_uuid=by_uuid, pool_id=pool_id, asked=asked)

        if len(lease.gpus) > 1:
            return encode(view())  # it may be a gang, whose parts say more
        gpu, moving = self._gpu(state, lease.gpus[0]), moving_of_active(state, lease, now)
        own = (
            encode(lease.id),
            b"[%b]" % gpu.ref,
            b"%d" % lease.fence,
            _time(lease.requested_at),
            _time(lease.granted_at),
            _encode(moving["expires_in_s"]),
            gpu.env_by_uuid if by_uuid else gpu.env,
            _encode(moving["ends_at"]),
            _encode(moving["warning"]),
            _encode(moving["idle_s"]),
        )
        is_watched = lease.ttl_s is None
        return self._frame(lease.request, (is_watched, pool_id), ACTIVE, view).join(own)

    def ended(self, state: PoolState, lease: EndedLease, now: float) -> bytes:
        """As the view of the lease."""
        own = (
            encode(lease.id),
            b"[%b]" % b",".join([self._gpu(state, key).ref for key in lease.gpus]),
            _encode(lease.fence),
            _time(lease.requested_at),
            _time(lease.granted_at),
            _time(lease.ended_at),
            _encode(lease.by),
            _encode(end_note(lease)),
        )
        return self._frame(lease.request, lease.reason, ENDED, lambda: lease_view(state, lease, now)).join(own)

    def _gpu(self, state: PoolState, key: GpuKey) -> _EncodedGpu:
        slot = state.slots.get(key)
        gpu = slot.reading.gpu if slot and slot.reading else None
        kept = self._gpus.get(key)
        if kept is None or kept.gpu is not gpu:
            if len(self._gpus) >= MOST_GPUS:
                self._gpus.clear()
            ref = gpu_ref(state, key)
            envs = (encode(env_of((ref,), by_uuid=by_uuid)) for by_uuid in (False, True))
            kept = self._gpus[key] = _EncodedGpu(gpu, encode(ref), *envs)
        return kept

    def _frame(
        self, request: Request, shape: Hashable, keys: Sequence[str], view: Callable[[], LeaseView]
    ) -> JsonFrame:
        """The view without what these keys have. All else follows from the request and the shape."""
        kept = self._kept.get((id(request), shape))
        if kept is None:
            if len(self._kept) >= MOST_FRAMES:
                self._kept.clear()
            gaps: Any = dict.fromkeys(keys)
            kept = self._kept[id(request), shape] = request, JsonFrame(replace(view(), **gaps), keys)
        return kept[1]


def _encode(value: object) -> bytes:
    return NULL if value is None else encode(value)


@lru_cache(maxsize=1024)  # the times of a lease are shown several times in its life
def _time(wall_s: float | None) -> bytes:
    return encode(iso_time(wall_s))
