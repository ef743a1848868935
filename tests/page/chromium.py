"""The browser that the tests of the page look through: one that is installed on this machine. None is ever downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The same engine without what a window needs: it takes half the processor time.
HEADLESS_NAMES = ("chromium-headless-shell", *NAMES)
NONE_FOUND = "no Chromium: apt-get install chromium-headless-shell, or name one with CHROMIUM=/path/to/it"

ARGUMENTS = [
    "--disable-gpu",
    # Wherever a page or the browser itself wants to go, there is nothing but this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def find_chromium(environ: Mapping[str, str] = os.environ, names: Sequence[str] = HEADLESS_NAMES) -> str | None:
    """The path of the one that CHROMIUM names, else of the first on the PATH; None where there is none."""
    named, path = environ.get("CHROMIUM"), environ.get("PATH", "")
    if named:
        found = shutil.which(named, path=path)
        if found is None:
            raise FileNotFoundError(f"CHROMIUM={named} is not a program; name one that is, or unset it")
        return found
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def launch_options(*, headless: bool = True) -> dict[str, Any]:
    """For Playwright's launch()."""
    found = find_chromium(names=HEADLESS_NAMES if headless else NAMES)
    # Chromium does not start as root with its sandbox.
    return {"executable_path": found, "args": ARGUMENTS, "chromium_sandbox": os.geteuid() != 0}
