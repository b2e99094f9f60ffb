"""A Ray cluster of this machine alone, in processes that end with the server that started them, however it ends.

Its ports are open on this machine only, and every connection to Ray needs a token that is drawn for this server.
"""

import os
import secrets
import threading

from minillm.server import control

# Ray otherwise listens on all networks, whatever address it is given. On Linux too, in spite of the name.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# Ray's own processes are slow to start on a busy machine. Without a worker in time, it would wait for ever.
PATIENT = {"RAY_agent_register_timeout_ms": "600000", "RAY_worker_register_timeout_seconds": "600"}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}


def environment(local: bool) -> None:
    """Set what Ray reads from the environment, here and in the processes that are started from now on.

    local: for a cluster of this machine alone, with a new token.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if local:
        os.environ.update(LOCAL | PATIENT, RAY_AUTH_TOKEN=secrets.token_hex(32))


def main() -> None:
    """Run a cluster until the owner says stop or is gone. Tells it the address: {"op": "ready", "address": ...}."""
    arguments = control.arguments()
    owner, over = arguments["control"], threading.Event()
    owner.listen(lambda message: over.set(), over.set)
    from .ray_serve import start_head

    try:
        node = start_head(arguments["cpus"], arguments["folder"])
    except Exception as error:
        owner.send({"op": "failed", "why": str(error)})
        raise
    owner.send({"op": "ready", "address": node.gcs_address})
    while not over.wait(1.0):
        if dead := [name for name, _ in node.dead_processes()]:
            owner.send({"op": "failed", "why": f"Ray's {', '.join(dead)} ended"})
            break
    node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main()
