"""Samples the GPUs in a thread of its own, so that no HTTP call waits for a GPU."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.gpus.probe import Probe, ProbeResult, ProbeUnavailable
from gpu_worker_pool.host.gpu_lock import GpuLocks
from gpu_worker_pool.host.pauses import Backoff
from gpu_worker_pool.host.visible_devices import InstalledGpu, VisibleDevices, select_visible

from .snapshot import Snapshot

logger = logging.getLogger(__name__)

# How soon to try for a driver again if there is none; every attempt loads libraries or starts a process.
TRY_AGAIN = Backoff(first_s=2.0, max_s=30.0)


class Sampler:
    """Keeps the latest snapshot, which is replaced as a whole, so any thread can read it, and those before it."""

    def __init__(
        self,
        make_probe: Callable[[], Probe],
        *,
        interval_s: float,
        max_history: int,
        visible_devices: str | None,
        clock: Callable[[], float] = time.monotonic,
        on_sample: Callable[[Snapshot, bool], None] | None = None,
        locks: GpuLocks | None = None,
    ) -> None:
        self._make_probe = make_probe
        self._interval_s = interval_s
        self._visible_devices = visible_devices
        self._clock = clock
        self._on_sample = on_sample
        self._locks = locks
        self._probe: Probe | None = None
        self._attempts = 0
        self._last_error: str | None = None
        self._next_attempt_at = float("-inf")
        self._unavailable_because = "the GPUs have not been read yet"
        self._is_stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._first_sample = threading.Event()
        self.visibility = VisibleDevices((), is_filtering=False)
        self.snapshot = Snapshot(clock(), _now(), (), "none", 0, self._unavailable_because)
        self.history: deque[Snapshot] = deque(maxlen=max_history)
        self.samples = 0
        self.failed_samples = 0
        self.last_sample_s = 0.0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. A probe that hangs is not waited for: the thread is a daemon."""
        self._is_stopping = True
        self._wake.set()

    def sample_soon(self) -> None:
        """Take a sample that begins after this call, without waiting for the interval. Several calls share one sample."""
        self._wake.set()

    def wait_for_first_sample(self, timeout_s: float) -> bool:
        return self._first_sample.wait(timeout_s)

    @property
    def has_sampled(self) -> bool:
        return self._first_sample.is_set()

    def age_s(self) -> float:
        return max(self._clock() - self.snapshot.at, 0.0)

    def sample(self, *, for_history: bool = True) -> None:
        """Take one sample. Only the thread calls this, and tests without a thread."""
        began = self._clock()
        probe = self._probe or self._try_to_get_a_probe(began)
        found = probe.read(began) if probe else ProbeResult((), self._unavailable_because)
        if found.error is not None and not found.readings and self.snapshot.readings:
            # The GPUs exist and cannot be read now: the last readings stay, and their age grows.
            self.snapshot = replace(self.snapshot, error=found.error)
        else:
            visible = self._visible_of(found.readings)
            source = probe.source if probe else "none"
            if source != "simulated" or (self._locks is not None and self._locks.is_for_simulated):
                visible = tuple(map(self._locked, visible))
            snapshot = Snapshot(began, _now(), visible, source, len(found.readings), found.error)
            self.snapshot = snapshot
            if for_history:
                self.history.append(snapshot)
            if self._on_sample is not None:
                self._on_sample(self.snapshot, for_history)
        self.samples += 1
        self.failed_samples += found.error is not None
        self.last_sample_s = self._clock() - began
        if found.error != self._last_error:
            if found.error is None:
                logger.info("the GPUs can be read again")
            elif probe is not None:
                logger.warning("reading the GPUs: %s", found.error)
            self._last_error = found.error
        logger.debug("read %d GPUs in %.3f s", len(found.readings), self.last_sample_s)

    def _run(self) -> None:
        due_at = self._clock()
        while not self._is_stopping:
            began = self._clock()
            is_due = began >= due_at
            self._wake.clear()  # calls from here on ask for a later sample than this one
            try:
                self.sample(for_history=is_due)
            except Exception:  # a probe of another author may raise anything, and the thread must go on
                logger.exception("reading the GPUs failed")
            self._first_sample.set()
            if is_due:
                due_at = began + self._interval_s
            # However many leases are released, the driver gets a pause as long as its answer took.
            ended = self._clock()
            if not self._is_stopping:
                time.sleep(min(ended - began, max(due_at - ended, 0.0)))
            self._wake.wait(max(due_at - self._clock(), 0.0))
        if self._probe is not None:
            self._probe.close()

    def _try_to_get_a_probe(self, now: float) -> Probe | None:
        if now < self._next_attempt_at:
            return None
        try:
            self._probe = self._make_probe()
        except ProbeUnavailable as unavailable:
            if self._unavailable_because != str(unavailable):
                logger.warning("no GPU can be read: %s", unavailable)
            self._unavailable_because = str(unavailable)
            self._next_attempt_at = now + TRY_AGAIN.delay_s(self._attempts, 0.5)
            self._attempts += 1
            return None
        logger.info("reading GPUs with %s", self._probe.source)
        return self._probe

    def _locked(self, reading: Reading) -> Reading:
        """The reading, with the other server that has this GPU, if there is one."""
        holder = self._locks.take(reading.gpu.key.uuid) if self._locks else None
        return replace(reading, other_server=str(holder)) if holder else reading

    def _visible_of(self, readings: Sequence[Reading]) -> tuple[Reading, ...]:
        installed = [InstalledGpu(reading.gpu.index, reading.gpu.key.uuid) for reading in readings]
        visibility = select_visible(self._visible_devices, installed)
        if readings and visibility != self.visibility:
            logger.debug("CUDA_VISIBLE_DEVICES=%r among the installed %s", self._visible_devices, installed)
            logger.debug("the indices %s are shown, filtering: %s", visibility.indices, visibility.is_filtering)
            for warning in visibility.warnings:
                logger.warning("%s", warning)
            if visibility.is_filtering:
                shown = ", ".join(map(str, visibility.indices)) or "none"
                text = "CUDA_VISIBLE_DEVICES=%r: of %d GPUs these are shown: %s"
                logger.info(text, self._visible_devices, len(readings), shown)
            self.visibility = visibility
        return tuple(reading for reading in readings if reading.gpu.index in visibility.indices)


def _now() -> datetime:
    return datetime.now()  # noqa: DTZ005 - the documents show local time without a zone
