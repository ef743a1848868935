"""`gpu-pool service`: the server, `enforce`, or your keeper of jobs, as a service of systemd."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.output import complain, out
from gpu_worker_pool.enforce.enforcer import stop as stop_enforcing
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.host.enforcement import read_enforcement

_SERVER: Final = "gpu-worker-pool"
_KEEPER: Final = "gpu-pool-jobs"
_ENFORCE: Final = "gpu-pool-enforce"
_ACCOUNT: Final = "gpu-worker-pool"
_SETTINGS: Final = Path("/etc/gpu-worker-pool.env")
_HEAD: Final = (
    "# Written by `gpu-pool service install`, which overwrites it. Put your own changes into {name}.service.d/*.conf\n"
)

# What each unit says, for `str.format`, and more for the server as a service of the machine.
_UNITS: Final = Path(__file__).with_name("units")
_INSTALL_PART: Final = "\n[Install]\nWantedBy={target}\n"


class _Service(NamedTuple):
    """One unit: of the machine, or of one user."""

    name: str
    is_user: bool

    @property
    def file(self) -> Path:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        folder = config / "systemd/user" if self.is_user else Path("/etc/systemd/system")
        return _below(folder / f"{self.name}.service")

    @property
    def settings(self) -> Path:
        return Path("%E/gpu-worker-pool.env") if self.is_user else _SETTINGS

    @property
    def text(self) -> str:
        """The unit, for the Python that runs this command."""
        unit = "\n" + (_UNITS / f"{self.name}.service").read_text(encoding="utf-8")
        if self.name == _SERVER and not self.is_user:
            unit += (_UNITS / f"{self.name}.system.conf").read_text(encoding="utf-8")
        unit += _INSTALL_PART.format(target="default.target" if self.is_user else "multi-user.target")
        return _HEAD.format(name=self.name) + unit.format(
            settings=self.settings, python=sys.executable, account=_ACCOUNT
        )

    @property
    def has_systemd(self) -> bool:
        """Whether systemd runs here and can be told about this unit."""
        if _is_elsewhere() or shutil.which("systemctl") is None:
            return False
        return Path("/run/systemd/system").is_dir() and (not self.is_user or "XDG_RUNTIME_DIR" in os.environ)

    def command(self, *words: str) -> list[str]:
        return ["systemctl", *(["--user"] if self.is_user else []), *words]

    def systemctl(self, *words: str) -> None:
        _run(self.command(*words))

    def is_active(self) -> bool:
        return subprocess.run(self.command("is-active", "--quiet", self.name), check=False).returncode == 0  # noqa: S603


def _run(command: list[str]) -> None:
    """Run a program of the system; what it complains about ends this command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise Failure(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")


def _is_elsewhere() -> bool:
    """Whether files are written for another root of the file system (DESTDIR), as packagers do it: nothing is started there."""
    return bool(os.environ.get("DESTDIR"))


def _below(path: Path) -> Path:
    return Path(os.environ.get("DESTDIR") or "/") / path.relative_to("/")


OfUser = Annotated[
    bool, Option("--user", help="A service of yours, which needs no root, instead of one of the machine.")
]
Keeper = Annotated[
    bool,
    Option(
        "--keeper",
        help="Your keeper of submitted jobs instead of the server: jobs go on after a restart of the machine.",
    ),
]
Enforce = Annotated[
    bool,
    Option(
        "--enforce",
        help="`gpu-pool enforce` instead of the server, in the mode that GPU_POOL_ENFORCE has in its settings. [observe]",
    ),
]


def install(
    *,
    user: OfUser = False,
    keeper: Keeper = False,
    enforce: Enforce = False,
    show: Annotated[bool, Option("--print", help="Print the unit, and change nothing.")] = False,
) -> None:
    """Install the server as a systemd service, and start it. Run it again after an upgrade or a move.

    The service runs the Python that runs this command. Settings go into /etc/gpu-worker-pool.env, one NAME=value a line.
    """
    service = _service(is_user=user, is_keeper=keeper, is_enforce=enforce)
    if show:
        out().write(service.text)
        return
    if not service.is_user:
        _check_machine(service)
    _check_owned(service)
    _write(service.file, service.text, 0o644)
    complain(f"wrote {service.file}")
    if service.name == _SERVER and not service.is_user and not _is_elsewhere():
        _make_account()
    if not service.has_systemd:
        complain(f"systemd does not run here, so {service.name} was not started")
        return
    service.systemctl("daemon-reload")
    service.systemctl("enable", service.name)
    service.systemctl("restart", service.name)
    complain(f"{service.name} runs; `{' '.join(service.command('status', service.name))}` shows its log")
    if service.is_user:
        complain("`loginctl enable-linger` lets your services run while you are not logged in")


def status() -> int:
    """Show which services of the pool are installed, and whether they run."""
    every = [_Service(_SERVER, is_user=False), _Service(_ENFORCE, is_user=False)]
    every += [_Service(_SERVER, is_user=True), _Service(_KEEPER, is_user=True)]
    found = [service for service in every if service.file.exists()]
    for service in found:
        runs = "unknown: no systemd runs here"
        if service.has_systemd:
            runs = "runs" if service.is_active() else "stopped"
        is_old = service.file.read_text(encoding="utf-8") != service.text
        old = "; its unit differs, `install` writes it again" if is_old else ""
        whose = "of this user" if service.is_user else "of the machine"
        out().print(f"{service.name} ({whose}): {runs}{old}\n  {service.file}")
    if not found:
        complain("no service of the pool is installed; `gpu-pool service install` installs the server")
    return 0 if found else REFUSED


def remove(*, user: OfUser = False, keeper: Keeper = False, enforce: Enforce = False) -> None:
    """Stop a service, and remove its unit. The settings, the journal and the leases stay; devices are as before --enforce."""
    service = _service(is_user=user, is_keeper=keeper, is_enforce=enforce)
    if not service.file.exists():
        raise Failure(f"there is no {service.file}; `gpu-pool service status` shows what is installed", REFUSED)
    _check_owned(service)
    if service.has_systemd:
        service.systemctl("disable", "--now", service.name)
    if service.name == _ENFORCE and read_enforcement() is not None:
        stop_enforcing()
    try:
        service.file.unlink()
    except PermissionError:
        raise Failure(f"{service.file} cannot be removed: run this as root", REFUSED) from None
    if service.has_systemd:
        service.systemctl("daemon-reload")
    complain(f"removed {service.file}; settings and journal are kept")


def _service(*, is_user: bool, is_keeper: bool, is_enforce: bool) -> _Service:
    if is_enforce and (is_user or is_keeper):
        raise Failure("--enforce is a service of the machine, and one at a time: leave --user and --keeper out", USAGE)
    if is_enforce:
        return _Service(_ENFORCE, is_user=False)
    return _Service(_KEEPER if is_keeper else _SERVER, is_user or is_keeper)


def _check_machine(service: _Service) -> None:
    """A service of the machine needs root, and a Python that its own user can read."""
    if os.geteuid() != 0 and not _is_elsewhere():
        raise Failure("a service of the machine needs root: use sudo, or --user for a service of yours", REFUSED)
    if service.name == _ENFORCE:
        return  # it runs as root, who can read every Python
    homes = [Path("/root"), Path("/home"), *(Path(entry.pw_dir) for entry in pwd.getpwall() if entry.pw_uid >= 1000)]
    if home := next((home for home in homes if Path(sys.executable).is_relative_to(home) and home != Path("/")), None):
        raise Failure(
            f"this gpu-pool is in {home}, which the service cannot read. Install it where all users can read it, and run "
            "that one: python3 -m venv /opt/gpu-worker-pool && /opt/gpu-worker-pool/bin/pip install 'gpu-worker-pool[all]' "
            "&& /opt/gpu-worker-pool/bin/gpu-pool service install"
        )


def _check_owned(service: _Service) -> None:
    """A unit that another program or an operator wrote is not touched."""
    if service.file.exists() and not service.file.read_text(encoding="utf-8").startswith(
        _HEAD.format(name=service.name)
    ):
        raise Failure(f"{service.file} was not written by gpu-pool: move it away first", REFUSED)


def _write(file: Path, text: str, mode: int) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}") from None


def _make_account() -> None:
    """The user of the service, and its file of settings."""
    try:
        account = pwd.getpwnam(_ACCOUNT)
    except KeyError:
        command = ["useradd", "--system", "--home-dir=/var/lib/gpu-worker-pool", "--shell=/usr/sbin/nologin", _ACCOUNT]
        _run(command)
        account = pwd.getpwnam(_ACCOUNT)
        complain(f"made the user {_ACCOUNT}")
    if not _SETTINGS.exists():
        _write(_SETTINGS, "# Settings of the GPU server, one NAME=value a line.\n", 0o640)
        os.chown(_SETTINGS, 0, account.pw_gid)
        complain(f"wrote {_SETTINGS}, for settings")
