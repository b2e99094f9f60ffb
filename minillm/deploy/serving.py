"""`minillm serve --replicas`: replicas of one or several models behind one server.

This process owns the HTTP workers, and Ray's cluster unless it joins one. It holds no model. Ray starts the replicas
and replaces those that end; requests and tokens do not pass through it.
"""

import importlib.util
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from minillm.config import EngineConfig, EngineOptions
from minillm.cores import available
from minillm.errors import ConfigError, MissingPackage
from minillm.folders import how_to_install
from minillm.server.config import ServerConfig, ServerOptions, split
from minillm.server.control import Child
from minillm.server.serving import announce, check_server, listening, terminate_as_interrupt, url_of
from minillm.server.supervisor.fleet import ServerFailed, Workers
from minillm.values import shown

from . import head
from .policies import find_policy
from .replica import ReplicaFailed
from .reports import Reports
from .scaling import WAITING

if TYPE_CHECKING:  # it imports Ray
    from .ray_serve import Placement

log = logging.getLogger(__name__)
STARTUP = 600.0  # seconds for Ray, and for the HTTP workers, to start on a busy machine
ENDING = 30.0  # seconds for Ray's processes to end
CONNECT = 10.0  # seconds for a cluster to answer


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
    models: Sequence[ReplicatedModel] | None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ray_address: str | None = None,
    router: str = "prefix",
    **options: Any,
) -> None:
    """Serve until interrupted (Ctrl-C) or terminated.

    models: None for those that another server has started in the cluster; then this one has only HTTP workers.
    ray_address: a cluster to join; None: one of this machine alone is started, and ended. router: see `find_policy`.
    options: fields of `ServerConfig`. Raises PortTaken, ConfigError, MissingPackage; ServerFailed if Ray, a replica or
    the workers cannot be started, or there are none any more.
    """
    options |= {"ray_address": ray_address, "router": router}
    try:
        with running_replicas(models, host=host, port=port, **options) as server:
            announce(", ".join(server.models), server.url)
            server.join()
    except KeyboardInterrupt:
        log.info("minillm has stopped")


@dataclass
class RunningReplicas:
    """A server with replicas: its `url` (no trailing slash), the models' names, its HTTP workers, and its cluster."""

    url: str
    models: list[str]
    workers: Workers
    cluster: "_Cluster"

    def join(self) -> None:
        """Wait until there is no worker, or no cluster, any more. Raises ServerFailed."""
        threading.Thread(target=self._join_workers, daemon=True).start()
        self.cluster.ended.wait()
        raise ServerFailed(self.cluster.why)

    def _join_workers(self) -> None:
        try:
            self.workers.join()
        except ServerFailed as error:
            self.cluster.end(str(error))


@contextmanager
def running_replicas(
    models: Sequence[ReplicatedModel] | None,
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
    if models is None and ray_address is None:
        raise ConfigError("to join, name the Ray cluster in which the models are served: ray_address")
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        listener = stack.enter_context(listening(host, port))
        cluster = stack.enter_context(_cluster(ray_address, models or ()))
        stack.enter_context(terminate_as_interrupt())  # again: Ray has changed it
        from . import ray_serve

        if models is None:
            applications = ray_serve.applications()
            if not applications:
                raise ServerFailed(
                    f"no model is served in the Ray cluster at {ray_address}: start minillm serve --replicas with this "
                    "--ray-address first"
                )
            fixed = dict[str, int | None].fromkeys(applications)
        else:
            placements = [placement(each, config, engine) for each in models]
            _check_room(placements, ray_serve.nodes(), ray_address is None)
            if ray_address is not None:
                stack.callback(ray_serve.remove, placements)
            try:
                ray_serve.deploy(placements)
            except ReplicaFailed as error:
                raise ServerFailed(f"the replicas could not be started: {error}") from None
            applications = {each.name: each.application for each in placements}
            fixed = {each.name: each.replicas if each.most is None else None for each in placements}
        arguments = {"address": cluster.address, "policy": router, "applications": applications}
        workers = Workers(
            listener,
            config.workers,
            config.shutdown_grace,
            config.hang_timeout,
            "minillm.deploy.worker",
            arguments,
            STARTUP,
        )
        counts = [(ray_serve.Counts(ray_serve.handle_of(each)), fixed[name]) for name, each in applications.items()]
        reports = Reports(counts, workers)
        try:
            workers.start(None)
            yield RunningReplicas(url_of(host, listener), list(applications), workers, cluster)
        finally:
            try:
                workers.stop()
            finally:
                workers.close()
                reports.close()


def check(models: Sequence[ReplicatedModel] | None, config: ServerConfig, router: str) -> None:
    """Check what can be checked before anything starts. models: None: another server's.

    Raises ConfigError, MissingPackage.
    """
    check_server(config)
    if config.adapter_folder is not None:
        raise ConfigError(
            "adapter_folder is for one engine: with replicas, what a client loads would be in one of them alone. Give "
            "all of them their adapters when they start: --adapter NAME=DIR"
        )
    find_policy(router)
    names = [each.name for each in models or ()]
    if models is not None and (not names or len(set(names)) < len(names)):
        raise ConfigError(f"each model needs a name of its own, not {', '.join(names) or 'none'}")
    for each in models or ():
        if each.replicas < 1:
            raise ConfigError(f"replicas must be a whole number from 1, not {each.replicas!r}")
        if each.max_replicas is not None and each.max_replicas < each.replicas:
            raise ConfigError(f"max_replicas must be at least replicas ({each.replicas}), not {each.max_replicas!r}")
        if not each.waiting_tokens > 0:
            raise ConfigError(f"waiting_tokens must be above 0, not {each.waiting_tokens!r}")
        if (needed := ranks(each)) > 1 and each.gpus and each.gpus != needed:
            raise ConfigError(f"gpus must be {needed}, one for each rank of {each.name}, or 0, not {each.gpus:g}")
    taken = list(names)
    for each in models or ():
        for name, _ in EngineConfig.of(**each.options).adapters:
            if name in taken:
                raise ConfigError(f"adapter {shown(name)} has the name of a model or another adapter: choose another")
            taken.append(name)
    if importlib.util.find_spec("ray") is None:
        raise MissingPackage(f"replicas need ray, which is not installed: {how_to_install('minillm[ray]')}")


class _Cluster:
    """A Ray cluster. `ended` is set once it has ended, or the last HTTP worker has; `why` says which."""

    def __init__(self, address: str):
        self.address, self.ended = address, threading.Event()
        self.why = "Ray's main process has ended"

    def end(self, why: str) -> None:
        """Note that it has ended."""
        if not self.ended.is_set():
            self.why = why
        self.ended.set()


@contextmanager
def _cluster(address: str | None, models: Sequence[ReplicatedModel]) -> Iterator[_Cluster]:
    """Join a cluster, or start one that lives as long as the block."""
    head.environment(address is None)
    if address is not None:
        with _joined(address):
            yield _Cluster(address)
        return
    cpus = max(available(), round(sum(each.replicas * each.cpus for each in models) + 0.5))
    cluster, answer, said = _Cluster(""), list[dict](), threading.Event()

    def heard(message: dict) -> None:
        answer.append(message)
        said.set()
        if message["op"] == "failed":
            cluster.end(message["why"])

    def gone() -> None:
        cluster.ended.set()
        said.set()

    folder, started = tempfile.mkdtemp(prefix="minillm-ray-"), False
    child = Child("minillm.deploy.head", {"cpus": cpus, "folder": folder})
    child.control.listen(heard, gone)
    try:
        said.wait(STARTUP)
        if not answer or answer[0]["op"] != "ready":
            why = answer[0]["why"] if answer else f"it was not ready within {STARTUP:g} s, or ended"
            raise ServerFailed(f"Ray could not be started: {why}; its logs are in {folder}")
        started, cluster.address = True, answer[0]["address"]
        with _joined(cluster.address):
            yield cluster
    finally:
        child.control.send({"op": "stop"})
        child.end(ENDING)
        child.control.close()
        if started:  # or else its logs say why not
            shutil.rmtree(folder, ignore_errors=True)


def _check_room(placements: "Sequence[Placement]", nodes: Sequence[Mapping[str, float]], ours: bool) -> None:
    """Say what cannot start, since Ray would wait for ever. Raises ConfigError.

    nodes: what each machine has. ours: there will be no more of them.
    """
    for what in ("CPU", "GPU"):
        each = [(one.replicas, getattr(one, f"{what.lower()}s")) for one in placements]
        needed, largest = sum(count * size for count, size in each), max(size for _, size in each)
        has = [node.get(what, 0) for node in nodes]
        if needed > sum(has):
            text = f"the replicas need {needed:g} {what}s, and Ray's cluster has {sum(has):g}"
        elif largest > max(has):
            text = f"a replica needs {largest:g} {what}s of one machine, and the largest has {max(has):g}"
        else:
            continue
        if ours:
            raise ConfigError(f"{text}: start fewer (--replicas), or give each less (--replica-{what.lower()}s)")
        log.warning("%s: some of them wait until it has more", text)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """Be a part of a cluster until the block ends. Raises ServerFailed."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():  # Ray would try for minutes
        try:
            socket.create_connection((host, int(port)), CONNECT).close()
        except OSError as error:
            raise ServerFailed(f"no Ray cluster answers at {address} ({error}): does `ray status` know it?") from None
    from . import ray_serve

    try:
        ray_serve.join(address)
    except ConnectionError as error:
        raise ServerFailed(f"no Ray cluster answers at {address}: {error}") from None
    try:
        yield
    finally:
        ray_serve.leave()


def ranks(model: ReplicatedModel) -> int:
    """Return how many processes share the model in a replica. Raises ConfigError."""
    return EngineConfig.of(**model.options).ranks


def placement(model: ReplicatedModel, config: ServerConfig, engine: str | None = None) -> "Placement":
    """Return what Ray is told of a model's replicas, which have the server's options `config`."""
    from minillm.server.engine_side.engine_process import packed

    from . import ray_serve

    options = dict(model.options)
    gpus = (float(ranks(model)) if ray_serve.resources().get("GPU") else 0.0) if model.gpus is None else model.gpus
    if 0 < gpus < 1:
        options.setdefault("gpu_memory_utilization", 0.9 * gpus)
    if adapters := EngineConfig.of(**model.options).adapters:
        options["adapters"] = {name: str(Path(directory).resolve()) for name, directory in adapters}
    files = model.model
    if files is not None and Path(files).exists():
        files = str(Path(files).resolve())  # replicas run in other directories
    choice = {"model": files, "profile": model.profile, "name": model.name, "engine": options, "config": config}
    return ray_serve.Placement(
        model.name,
        packed(choice),
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
