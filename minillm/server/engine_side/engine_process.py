"""The engine's process under `minillm serve`: it loads the model, steps the engine, and serves the workers.  Lesson 99.

Its owner, the supervisor, replaces it when it ends, however it ends.
"""

import base64
import logging
import os
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

from minillm import garbage
from minillm.config import EngineOptions

from .. import control, logs
from ..config import ServerConfig
from ..control import Control
from ..limits import BEAT

if TYPE_CHECKING:
    from minillm.engine.async_llm import AsyncLLM

    from .adapter_loader import Changes
    from .hub import Hub

log = logging.getLogger(__name__)
FAILED_STEPS = 3  # in a row; after so many, a new process is the better hope: a GPU's context may be broken for good


def packed(options: dict[str, Any]) -> str:
    """Return options as text. The engine checks what an option is (a dtype, a path), so any object may be one."""
    return base64.b64encode(pickle.dumps(options)).decode()


def run(
    owner: Control,
    *,
    model: Any,
    profile: str | None,
    name: str | None,
    engine: EngineOptions,
    config: ServerConfig,
    adapters: "Changes | None" = None,
) -> None:
    """Serve the workers whose connections the owner sends, until it says stop or the engine fails.

    engine: `EngineConfig`'s fields. config: the server's. adapters: what clients of the engine before this one have
    loaded and unloaded.
    """
    stop = threading.Event()
    connect: list = []  # the hub's `connect`, once there is a hub

    def obey(message: dict) -> None:
        if message["op"] == "worker":
            left = {"op": "left", "id": message.get("id")}
            connect[0](message["socket"], lambda: owner.send(left))
        else:
            stop.set()

    # Whatever this process does when its owner ends, loading or stuck in a step: it must not stay.
    owner.listen(obey, lambda: os._exit(1))
    from minillm.engine.async_llm import AsyncLLM

    from .hub import Hub

    if profile is not None:
        from minillm.advice import profiles

        engine = profiles.apply(model, profile, engine)
    llm = AsyncLLM(model, **engine)
    hub = Hub(llm, name or llm.name, config, lambda changes: owner.send({"op": "adapters", "changes": changes}))
    hub.loader.restore(adapters or {})
    connect.append(hub.connect)
    with garbage.frozen():
        owner.send({"op": "ready", "model": name or llm.name, "counted": hub.counted()})
        _watch(owner, llm, hub, stop)
    hub.close()
    llm.close()


def _watch(owner: Control, llm: "AsyncLLM", hub: "Hub", stop: threading.Event) -> None:
    """Report to the owner until it says stop. Exits if the engine has failed."""
    lost: str | None = None
    while not stop.wait(BEAT):
        stats = llm.stats() | {"rows": llm.config.max_num_seqs}
        owner.send({"op": "beat", "working": llm.working, "counted": hub.counted(), "stats": stats})
        why = None
        if not (llm.alive and hub.alive):
            why = "the engine's thread has ended" if hub.alive else "the thread that serves the workers has ended"
        elif llm.failed_steps >= FAILED_STEPS:
            why = f"{llm.failed_steps} steps in a row have failed"
        elif lost is not None:
            why = lost
        lost = llm.failure  # a beat later, its requests have been told
        if why is not None:
            log.error(why)
            sys.exit(1)


def main() -> None:
    arguments = control.arguments()
    options = pickle.loads(base64.b64decode(arguments["options"]))  # from the process that started this one
    logs.set_up(options["config"].log_format, options["config"].log_level)
    owner = arguments["control"]
    try:
        run(owner, **options, adapters=arguments.get("adapters"))
    except Exception as error:
        from minillm.errors import MinillmError

        expected = isinstance(error, (MinillmError, ConnectionError, ModuleNotFoundError))
        owner.send({"op": "failed", "why": str(error) if expected else f"{type(error).__name__}: {error}"})
        if not expected:
            raise
        sys.exit(1)


if __name__ == "__main__":
    main()
