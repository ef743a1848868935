"""What a lease tells of its command, by labels in `status`, and a command of its lease, by its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Final

from gpu_worker_pool.client.inherited_lease import LEASE_ID_VARIABLE, LEASE_URL_VARIABLE
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.wire.bounds import is_printable

VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_MAX_LABEL: Final = 200


def command_env(environ: Mapping[str, str], assignment: Assignment) -> dict[str, str]:
    """`environ` with the variables that show the command its GPUs and no others, and that describe its lease."""
    lease = {
        LEASE_ID_VARIABLE: assignment.lease_id or "",
        LEASE_URL_VARIABLE: assignment.server_url or "",
        "GPU_POOL_LEASE_GPUS": ",".join(map(str, assignment.gpu_ids)),
        "GPU_POOL_LEASE_ENDPOINT": assignment.endpoint_id or "",
        "GPU_POOL_LEASE_FENCE": "" if assignment.fence is None else str(assignment.fence),
    }
    return {**environ, **assignment.env, **lease}


def command_label(command: Sequence[str]) -> str:
    """Program and script, `python train.py`. Options are left out: there may be secrets in them."""
    words = [PurePath(word).name for word in command[:2] if not word.startswith("-")]
    return label_text(" ".join(words if len(words) == len(command[:2]) else words[:1]))


def label_text(text: str) -> str:
    """`text` as a server accepts it in a label: each run of characters that it refuses becomes a blank."""
    # A name on the command line need not be UTF-8.
    readable = text.encode("utf-8", "replace").decode("utf-8")
    runs = groupby(readable, is_printable)
    return "".join("".join(run) if is_accepted else " " for is_accepted, run in runs)[:_MAX_LABEL].strip()
