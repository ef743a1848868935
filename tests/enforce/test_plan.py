"""Who may open which device, decided without one."""

from __future__ import annotations

import pytest

from gpu_worker_pool.cli.doctor.machine import judge_enforcement
from gpu_worker_pool.enforce.plan import Device, DeviceGrant, acl_for, plan, resets_devices
from gpu_worker_pool.host.enforcement import Enforcement
from gpu_worker_pool.host.processes import PROC, read_process

SERVER, ALICE, BOB = 990, 1001, 1002


def test_a_device_is_open_to_its_holders_and_the_server_and_to_nobody_else() -> None:
    devices = [Device("GPU-a", "/dev/nvidia1"), Device("GPU-b", "/dev/nvidia0"), Device("GPU-c", "/dev/nvidia2")]
    grants = [DeviceGrant("GPU-a", ALICE), DeviceGrant("GPU-a", BOB), DeviceGrant("MIG-x", BOB)]
    changes = plan(devices, grants, handed_out={"GPU-a", "GPU-b"}, always={SERVER})
    # GPU-c is not the pool's.
    assert {change.device.path: set(change.uids) for change in changes} == {
        "/dev/nvidia1": {SERVER, ALICE, BOB},
        "/dev/nvidia0": {SERVER},
    }


def test_what_is_as_it_should_be_is_not_changed_and_what_was_reset_is() -> None:
    wanted = acl_for({SERVER, ALICE})
    set_before, reset = Device("GPU-a", "/dev/nvidia0", acl=wanted), Device("GPU-b", "/dev/nvidia1", acl=wanted[:-4])
    grants = [DeviceGrant("GPU-a", ALICE), DeviceGrant("GPU-b", ALICE)]
    changes = plan([set_before, reset], grants, handed_out={"GPU-a", "GPU-b"}, always={SERVER})
    assert [change.device for change in changes] == [reset]


def test_a_list_has_no_way_in_for_the_group_and_others_nor_for_the_user_of_the_file() -> None:
    entries = acl_for({SERVER}, owner=BOB)[4:]
    rights = {entries[at]: entries[at + 2] for at in range(0, len(entries), 8)}
    assert rights == {0x01: 0, 0x02: 6, 0x04: 0, 0x10: 6, 0x20: 0}


@pytest.mark.parametrize(
    ("parameters", "resets"),
    [
        ({"ModifyDeviceFiles": "1", "DeviceFileMode": str(0o666)}, True),
        ({"ModifyDeviceFiles": "1", "DeviceFileMode": str(0o660)}, False),
        ({"ModifyDeviceFiles": "0", "DeviceFileMode": str(0o666)}, False),
        ({}, True),
    ],
)
def test_the_drivers_parameters_say_whether_it_opens_devices_again(parameters: dict[str, str], resets: bool) -> None:
    assert resets_devices(parameters) is resets


# --- what doctor says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pid", "mode", "driver_mode", "status", "words"),
    [
        (None, "deny", 0o660, "skipped", "every user can open every GPU"),
        (0, "deny", 0o660, "problem", "does not run"),
        (1, "deny", 0o660, "ok", "mode deny, 1 device"),
        (1, "deny", 0o666, "warning", "the NVIDIA driver undoes it"),
        (1, "observe", 0o666, "ok", "mode observe"),
    ],
)
def test_doctor_says_whether_it_runs_and_whether_the_driver_undoes_it(
    pid: int | None, mode: str, driver_mode: int, status: str, words: str
) -> None:
    seen = read_process(PROC, pid or 0)
    found = None if pid is None else Enforcement(mode, pid, seen and seen.id.started, {"GPU-a": "/dev/nvidia0"})
    (finding,) = judge_enforcement(found, {"ModifyDeviceFiles": "1", "DeviceFileMode": str(driver_mode)})
    assert (finding.status, words in finding.message) == (status, True), finding
