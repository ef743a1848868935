"""A server whose directory of users does not answer for one user, until a file is there: `python -m` this, UID, FILE."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from gpu_worker_pool.host.users import User, user_name
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.logs import configure_logging
from gpu_worker_pool.server.serving import listen, run


def _end_with_the_caller() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    slow, pipe = int(sys.argv[1]), Path(sys.argv[2])

    def look_up(uid: int) -> User:
        if uid == slow:
            pipe.write_text("asked\n")  # which waits until it is read
            pipe.read_text()  # which waits until it is written to
        return User(user_name(uid))

    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    app = create_app(look_up_user=look_up)
    configure_logging(app.settings)
    sys.exit(run(app, listen(app.settings)))
