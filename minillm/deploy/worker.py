"""An HTTP worker of a server with replicas: the same HTTP, other engines.  See `minillm.server.worker.worker`.

It joins Ray's cluster to learn which replicas there are, and talks to them over connections of its own.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from minillm.server import control, logs
from minillm.server.control import Control
from minillm.server.shares import Shares
from minillm.server.worker.worker import Front, run

from .handshake import Address
from .policies import find_policy
from .replicas import ReplicatedEngine


async def work(arguments: dict[str, Any], owner: Control, shares: tuple[Shares, int] | None) -> None:
    """Serve until the owner says stop or is gone. arguments: see `serving`."""
    from . import ray_serve

    ray_serve.join(arguments["address"])
    loop, engines = asyncio.get_running_loop(), dict[str, ReplicatedEngine]()

    def tell(name: str, what: dict[str, Any]) -> None:
        owner.send({"op": "tell", "what": {"model": name} | what})

    for name, application in arguments["applications"].items():

        def listed(addresses: dict[str, Address], name: str = name) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: engines[name].listed(addresses))

        engines[name] = ReplicatedEngine(
            ray_serve.reserver(ray_serve.handle_of(application), listed),
            find_policy(arguments["policy"]),
            lambda choices: owner.send({"op": "moved", "choices": choices}),
            **({"tell": partial(tell, name)} if shares is not None else {}),
        )

    def obey(message: dict) -> None:
        match message["op"]:
            case "told":
                engines[message["model"]].learn(message)
            case "left":
                for engine in engines.values():
                    engine.forget(message["worker"])

    async def connected() -> None:
        await asyncio.gather(*(engine.connected for engine in engines.values()))

    listener = control.opened(arguments["listener"])
    await Front(list(engines.values()), listener, owner, obey, shares=shares).serve(connected(), logs.set_up)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    run(work)
