"""`minillm serve --replicas`: replicas of one or several models behind one server.

This process owns the HTTP workers, and Ray's cluster unless it joins one. It holds no model. Ray starts the replicas
and replaces those that end; requests and tokens do not pass through it.
"""

import importlib.util
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from minillm.config import EngineOptions
from minillm.cores import available
from minillm.errors import ConfigError, MissingPackage
from minillm.folders import how_to_install
from minillm.server.config import ServerConfig, ServerOptions, split
from minillm.server.control import Child
from minillm.server.ledger import Families, summed
from minillm.server.limits import BEAT
from minillm.server.serving import announce, check_server, listening, terminate_as_interrupt, url_of
from minillm.server.supervisor.fleet import ServerFailed, Workers

from . import head
from .policies import find_policy
from .replica import ReplicaFailed
from .scaling import WAITING

if TYPE_CHECKING:  # it imports Ray
    from .ray_serve import Placement

log = logging.getLogger(__name__)
STARTUP = 600.0  # seconds for Ray, and for the HTTP workers, to start on a busy machine
ENDING = 30.0  # seconds for Ray's processes to end


@dataclass(frozen=True)
class ReplicatedModel:
    """A model of which several replicas run.

    name: for clients. model: as for `serve`. options: the engine's. cpus: what Ray reserves for a replica. gpus: the
    same; a share of one, such as 0.5, also divides its memory; None: one for each rank, if the cluster has GPUs.
    profile: as for `serve`. max_replicas: how many there may be while tokens wait; None: `replicas`. waiting_tokens:
    how many may wait on each before there are more.
    """

    name: str
    model: str | None
    replicas: int = 1
    options: EngineOptions = field(default_factory=EngineOptions)
    cpus: float = 1.0
    gpus: float | None = None
    profile: str | None = None
    max_replicas: int | None = None
    waiting_tokens: float = WAITING


def serve_replicas(
    models: Sequence[ReplicatedModel],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ray_address: str | None = None,
    router: str = "prefix",
    **options: Any,
) -> None:
    """Serve until interrupted (Ctrl-C) or terminated.

    ray_address: a cluster to join; None: one of this machine alone is started, and ended. router: see `find_policy`.
    options: fields of `ServerConfig`. Raises PortTaken, ConfigError, MissingPackage; ServerFailed if Ray, a replica or
    the workers cannot be started, or there are none any more.
    """
    options |= {"ray_address": ray_address, "router": router}
    try:
        with running_replicas(models, host=host, port=port, **options) as server:
            announce(", ".join(each.name for each in models), server.url)
            server.join()
    except KeyboardInterrupt:
        log.info("minillm has stopped")


@dataclass
class RunningReplicas:
    """A server with replicas: its `url` (no trailing slash) and its HTTP workers."""

    url: str
    workers: Workers
    ended: threading.Event  # Ray's cluster has ended

    def join(self) -> None:
        """Wait until there is no worker, or no cluster, any more. Raises ServerFailed."""
        threading.Thread(target=self._join_workers, daemon=True).start()
        self.ended.wait()
        raise ServerFailed("Ray's cluster, or the last HTTP worker, has ended")

    def _join_workers(self) -> None:
        try:
            self.workers.join()
        except ServerFailed:
            self.ended.set()


@contextmanager
def running_replicas(
    models: Sequence[ReplicatedModel],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ray_address: str | None = None,
    router: str = "prefix",
    engine: str | None = None,
    **options: Any,
) -> Iterator[RunningReplicas]:
    """Serve until the block ends; the arguments are those of `serve_replicas`. engine: the module of engine processes,
    for measurements without a model.
    """
    config, rest = split(cast(ServerOptions, options))
    if rest:
        raise ConfigError(f"{', '.join(rest)}: the engines' options belong to the models")
    check(models, config, router)
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        listener = stack.enter_context(listening(host, port))
        address, ended = stack.enter_context(_cluster(ray_address, models))
        stack.enter_context(terminate_as_interrupt())  # again: Ray has changed it
        from . import ray_serve

        placements = [placement(each, config, engine) for each in models]
        try:
            ray_serve.deploy(placements)
        except ReplicaFailed as error:
            raise ServerFailed(f"the replicas could not be started: {error}") from None
        given = {
            "address": address,
            "policy": router,
            "applications": {each.name: each.application for each in placements},
        }
        workers = Workers(
            listener,
            config.workers,
            config.shutdown_grace,
            config.hang_timeout,
            "minillm.deploy.worker",
            given,
            STARTUP,
        )
        reports = _Reports(placements, workers)
        try:
            workers.start(None)
            yield RunningReplicas(url_of(host, listener), workers, ended)
        finally:
            reports.over.set()
            try:
                workers.stop()
            finally:
                workers.close()
                if ray_address is not None:
                    ray_serve.remove(placements)


class _Reports:
    """Asks the replicas again and again what they have counted, for the ledger. Counts of those that ended are kept."""

    def __init__(self, placements: "Sequence[Placement]", workers: Workers):
        from .ray_serve import Counts, handle_of

        self.over = threading.Event()
        self._counts = [Counts(handle_of(each.application)) for each in placements]
        # How many replicas a model has; None: as many as Ray finds right.
        self._fixed = [each.replicas if each.most is None else None for each in placements]
        self._known = [dict[str, Families]() for _ in placements]
        self._workers, self._restarts = workers, 0
        workers.ledger.engine = lambda: summed(*(each for known in self._known for each in known.values()))
        threading.Thread(target=self._work, name="minillm-reports", daemon=True).start()

    def _work(self) -> None:
        while not self.over.wait(BEAT):
            for counts, known in zip(self._counts, self._known, strict=True):
                try:
                    found = counts(5 * BEAT)
                except Exception as error:  # a replica has just ended, for example
                    log.debug("a replica did not report: %s", error)
                    continue
                known.update(found)
            pairs = zip(self._known, self._fixed, strict=True)
            ended = sum(max(len(known) - fixed, 0) for known, fixed in pairs if fixed is not None)
            while ended > self._restarts:
                self._restarts += 1
                self._workers.ledger.restarted("engine")


def check(models: Sequence[ReplicatedModel], config: ServerConfig, router: str) -> None:
    """Check what can be checked before anything starts. Raises ConfigError, MissingPackage."""
    check_server(config)
    find_policy(router)
    names = [each.name for each in models]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"each model needs a name of its own, not {', '.join(names) or 'none'}")
    for each in models:
        if each.replicas < 1:
            raise ConfigError(f"replicas must be a whole number from 1, not {each.replicas!r}")
        if each.max_replicas is not None and each.max_replicas < each.replicas:
            raise ConfigError(f"max_replicas must be at least replicas ({each.replicas}), not {each.max_replicas!r}")
        if not each.waiting_tokens > 0:
            raise ConfigError(f"waiting_tokens must be above 0, not {each.waiting_tokens!r}")
    if importlib.util.find_spec("ray") is None:
        raise MissingPackage(f"replicas need ray, which is not installed: {how_to_install('minillm[ray]')}")


@contextmanager
def _cluster(address: str | None, models: Sequence[ReplicatedModel]) -> Iterator[tuple[str, threading.Event]]:
    """Join a cluster, or start one that lives as long as the block. Gives its address, and what is set if it ends."""
    head.environment(address is None)
    ended = threading.Event()
    if address is not None:
        with _joined(address):
            yield address, ended
        return
    cpus = max(available(), round(sum(each.replicas * each.cpus for each in models) + 0.5))
    answer: list[dict] = []
    said, started = threading.Event(), False

    def heard(message: dict) -> None:
        answer.append(message)
        said.set()

    def gone() -> None:
        ended.set()
        said.set()

    folder = tempfile.mkdtemp(prefix="minillm-ray-")
    child = Child("minillm.deploy.head", {"cpus": cpus, "folder": folder})
    child.control.listen(heard, gone)
    try:
        said.wait(STARTUP)
        if not answer or answer[0]["op"] != "ready":
            why = answer[0]["why"] if answer else f"it was not ready within {STARTUP:g} s, or ended"
            raise ServerFailed(f"Ray could not be started: {why}; its logs are in {folder}")
        started = True
        with _joined(answer[0]["address"]):
            yield answer[0]["address"], ended
    finally:
        child.control.send({"op": "stop"})
        child.end(ENDING)
        child.control.close()
        if started:  # or else its logs say why not
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """Be a part of a cluster until the block ends. Raises ServerFailed."""
    from . import ray_serve

    try:
        ray_serve.join(address)
    except ConnectionError as error:
        raise ServerFailed(f"no Ray cluster answers at {address}: {error}") from None
    try:
        yield
    finally:
        ray_serve.leave()


def placement(model: ReplicatedModel, config: ServerConfig, engine: str | None = None) -> "Placement":
    """Return what Ray is told of a model's replicas, which have the server's options `config`."""
    from minillm.server.engine_side.engine_process import packed

    from . import ray_serve

    options = dict(model.options)
    ranks = float(cast(int, options.get("tensor_parallel_size", 1)))
    gpus = (ranks if ray_serve.resources().get("GPU") else 0.0) if model.gpus is None else model.gpus
    if 0 < gpus < 1:
        options.setdefault("gpu_memory_utilization", 0.9 * gpus)
    given = {"model": model.model, "profile": model.profile, "name": model.name, "engine": options, "config": config}
    return ray_serve.Placement(
        model.name,
        packed(given),
        model.replicas,
        model.max_replicas,
        model.waiting_tokens,
        model.cpus,
        gpus,
        config.hang_timeout,
        config.load_timeout,
        config.shutdown_grace,
        *(() if engine is None else (engine,)),
    )
