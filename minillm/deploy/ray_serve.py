"""Run replicas on Ray Serve, and ask it for places on them.

This is the only module that imports Ray. Some of its interfaces are alpha, and `Node` is internal, so a minor version
is required. Call `head.environment` before it is imported: Ray reads the environment then.
"""

import asyncio
import logging
import re
import warnings
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.worker import global_worker
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from minillm.errors import ConfigError
from minillm.server.config import ServerConfig
from minillm.server.ledger import Families

from . import replicas as replicas_module
from . import scaling
from .handshake import Address
from .ingress import Ingress
from .places import Reserve
from .ports import free_ports
from .replica import ENGINE, EngineDoor, ReplicaFailed
from .replicas import Listed
from .scaling import ReplicaLoad

log = logging.getLogger(__name__)
VERSION = "2.60."
APPLICATION = "minillm:"  # before a model's name
DEPLOYMENT = "replica"
# The engine refuses what is too much, with a Retry-After. Ray would let it wait.
NO_LIMIT = 1_000_000
HEALTH_PERIOD = 1.0  # seconds between two looks at a replica
AGENTS = {  # where a node keeps the port of each of its agents -> the parameter that chooses it
    METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    METRICS_EXPORT_PORT_NAME: "metrics_export_port",
    DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
    RUNTIME_ENV_AGENT_PORT_NAME: "runtime_env_agent_port",
}
ATTEMPTS = 2  # to start a replica that has failed to start
QUIET = {"enable_access_log": False}  # of Ray, which would write a line for each report; minillm has its own

if not ray.__version__.startswith(VERSION):
    raise ConfigError(f"replicas need Ray {VERSION}x, and {ray.__version__} is installed: pip install 'minillm[ray]'")


@dataclass(frozen=True)
class Placement:
    """A model's replicas. name: the model's for clients. options: of its engine's process, packed.

    most: if there are more of them while many tokens wait; tokens: how many may wait on each. cpus, gpus: what Ray
    reserves for a replica; a GPU can be shared. engine: the module that its process runs.
    """

    name: str
    options: str
    replicas: int
    most: int | None
    tokens: float
    cpus: float
    gpus: float
    hang_timeout: float
    load_timeout: float
    shutdown_grace: float
    engine: str = ENGINE

    @property
    def application(self) -> str:
        return APPLICATION + self.name


class Slots:
    """The places on this replica, by the worker that reserved them.

    Serve counts a place until it is given back, so for ever if the process that reserved it is killed. replica: what
    Serve runs in this process.
    """

    def __init__(self, replica: Any):
        self._replica, self._reserve = replica, replica.reserve_slot
        self._holders: dict[str, str] = {}  # of each place
        self._loop: asyncio.AbstractEventLoop | None = None
        replica.reserve_slot = self.reserve

    async def reserve(self, metadata: Any, place: str) -> tuple[bool, int]:
        """Reserve a place as Serve does. metadata: has the id of the worker, in a field that Serve does not use."""
        self._loop = asyncio.get_running_loop()
        answer: tuple[bool, int] = await self._reserve(metadata, place)
        if metadata.session_id:
            self._holders[place] = metadata.session_id
        return answer

    def keep(self, workers: Collection[str]) -> None:
        """Give back the places of all other workers. On any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._keep, workers)

    def _keep(self, workers: Collection[str]) -> None:
        for place, worker in list(self._holders.items()):
            if worker not in workers:
                self._replica.release_slot(place)  # without effect if the worker has given it back
        held = self._replica._reserved_slots
        self._holders = {place: worker for place, worker in self._holders.items() if place in held}


class Replica:
    """Started, watched and replaced by Ray: a process that owns an engine's, and never imports torch."""

    def __init__(self, placement: Placement):
        self.name = serve.get_replica_context().replica_id.unique_id
        self.door = EngineDoor(
            placement.options,
            self.name,
            ray.util.get_node_ip_address(),
            engine=placement.engine,
            hang_timeout=placement.hang_timeout,
            load_timeout=placement.load_timeout,
        )
        (actor,) = global_worker.actors.values()
        self._slots = Slots(actor._replica_impl)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what workers need to connect."""
        return self.door.address._asdict()

    def check_health(self) -> None:
        """Raise if the engine has ended or is stuck; then Ray replaces this replica. Called every HEALTH_PERIOD."""
        self._slots.keep(self.door.workers)
        self.door.check()

    def counted(self) -> tuple[str, Families]:
        """Return this replica's name and what its engine has counted."""
        return self.name, self.door.counted

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what decides how many replicas there are."""
        stats = self.door.stats
        return dict(ReplicaLoad.of(stats, int(stats["rows"]))._asdict()) if stats else {}

    def __del__(self) -> None:
        """End the engine: Ray calls this when the replica has no requests any more, or its grace period is over."""
        if hasattr(self, "door"):
            self.door.close()


class NamedRouter(RequestRouter):
    """Serve's request router: a request names its replica, which a worker has chosen. Reports which replicas there are.

    Ray copies this class with the values that it refers to, but not the modules.
    """

    # Seconds for a replica to say how many requests it has. One that is late is passed over, on a busy machine too.
    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 4.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or else it would be asked again without a pause
        named = [each for each in candidate_replicas if each.replica_id.unique_id in pending_request.args]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        deployment = self._deployment_id
        if (listener := replicas_module.LISTENERS.get((deployment.app_name, deployment.name))) is not None:
            listener({each.replica_id.unique_id: Address(**each.replica_metadata) for each in replicas})


class PatientNode(Node):
    """A node that says itself at which ports its agents are.

    Ray's main process gives up if they have not said so within 15 s, which importing them may take on a busy machine.
    """

    def start_ray_processes(self) -> None:
        for name, parameter in AGENTS.items():
            persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, parameter))
        super().start_ray_processes()


def agent_ports() -> dict[str, int]:
    """Return free ports for the agents of a node, by the parameters that choose them."""
    return dict(zip(AGENTS.values(), free_ports(len(AGENTS)), strict=True))


def start_head(cpus: int, folder: str) -> Node:
    """Start a Ray cluster of this machine, which ends with this process. It has no dashboard and no autoscaler.

    cpus: those that replicas can use. folder: for its logs and sockets.
    """
    chosen = {"num_cpus": cpus, "temp_dir": folder, "gcs_server_port": 0} | agent_ports()
    parameters = RayParams(include_dashboard=False, no_monitor=True, include_log_monitor=False, **chosen)
    return PatientNode(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True)


def join(address: str) -> None:
    """Make this process a part of the cluster at `address`."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns of replicas that ended, with tracebacks
    ray.init(address, namespace="minillm", log_to_driver=False, configure_logging=False)


def leave() -> None:
    """End this process's part in the cluster."""
    ray.shutdown()


def resources() -> Mapping[str, float]:
    """Return what the cluster has in all: "CPU", "GPU" and others; this machine's GPUs before Ray is connected.

    `serve run` makes the application first, and connects to Ray then.
    """
    if ray.is_initialized():
        return ray.cluster_resources()
    return {"GPU": get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators()}


def nodes() -> list[Mapping[str, float]]:
    """Return what each machine of the cluster has."""
    return [each["Resources"] for each in ray.nodes() if each["Alive"]]


def bound(placement: Placement, name: str = DEPLOYMENT) -> Application:
    """Return a model's replicas as a deployment of this name, which is to be run."""
    bundle = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus else {})
    router = RequestRouterConfig(request_router_class=f"{NamedRouter.__module__}.{NamedRouter.__name__}")
    number: dict[str, Any] = {"num_replicas": placement.replicas}
    if placement.most is not None:
        number = {"autoscaling_config": _autoscaling(placement.replicas, placement.most, placement.tokens)}
    return serve.deployment(
        Replica,
        name=name,
        **number,
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
        placement_group_bundles=[bundle],
        request_router_config=router,
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_timeout_s=placement.shutdown_grace,
        logging_config=QUIET,
        max_constructor_retry_count=ATTEMPTS,
    ).bind(placement)


def _autoscaling(least: int, most: int, tokens: float) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=f"{scaling.__name__}:{scaling.ByTokens.__name__}", policy_kwargs={"target": tokens}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the interval, whose successor is for all of a cluster
        return AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            metrics_interval_s=scaling.EVERY,
            look_back_period_s=scaling.LOOK_BACK,
            upscale_delay_s=scaling.UP,
            downscale_delay_s=scaling.DOWN,
            policy=policy,
        )


def deploy(placements: Sequence[Placement]) -> None:
    """Start the replicas of all models, and wait until they run. Raises ReplicaFailed, which says why."""
    serve.start(proxy_location="Disabled")
    targets = [serve.RunTarget(bound(each), name=each.application, route_prefix=None) for each in placements]
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        raise ReplicaFailed(_why_not() or str(error)) from None


def _why_not() -> str:
    """Return what replicas that could not start have said."""
    told = (each.message for app in serve.status().applications.values() for each in app.deployments.values())
    matches = (re.search(rf"{ReplicaFailed.__name__}: (.+)", text) for text in told)
    return "; ".join(dict.fromkeys(each[1] for each in matches if each))


def remove(placements: Sequence[Placement]) -> None:
    """End the replicas, once they have no requests or their grace period is over. Waits for a minute at most."""
    for blocking in (False, True):  # so that all of them end at the same time
        for each in placements:
            try:
                serve.delete(each.application, _blocking=blocking)
            except TimeoutError:
                log.warning("the replicas of %s still have requests; Ray ends them later", each.name)


def applications() -> dict[str, str]:
    """Return the applications that `deploy` has started in this cluster, by their models' names."""
    running = serve.status().applications
    return {each.removeprefix(APPLICATION): each for each in running if each.startswith(APPLICATION)}


def handle_of(application: str) -> DeploymentHandle:
    """Return what reaches the replicas of an application that `deploy` has started."""
    return serve.get_deployment_handle(DEPLOYMENT, application)


def reserver(handle: DeploymentHandle, listed: Listed) -> Reserve:
    """Return what reserves places on a model's replicas. listed: called with their addresses, on any thread."""
    replicas_module.LISTENERS[handle.app_name, handle.deployment_name] = listed
    handle = handle.options(stream=False)  # begins to listen, too

    @asynccontextmanager
    async def reserve(name: str, worker: str) -> AsyncIterator[str]:
        async with handle.options(session_id=worker).choose_replica(name) as chosen:
            yield chosen.replica_id

    return reserve


class Counts:
    """Asks all replicas of a model what their engines have counted."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle

    def __call__(self, seconds: float) -> dict[str, Families]:
        """Return it by replica. Raises an error if one of them does not answer in time."""
        return dict(self._handle.broadcast("counted").results(timeout_s=seconds))


class ProxiedWorker:
    """Started by Ray to take HTTP from its proxy. The other arguments are those of `Ingress`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, router: str, host: str, config: ServerConfig, *replicas: DeploymentHandle
    ):
        self._ingress = Ingress(router, host, config, list(replicas), reserver, Counts)
        self._app = await self._ingress.app()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application that Ray sends requests to."""
        return self._app

    def __del__(self) -> None:
        """Disconnect from the replicas."""
        if hasattr(self, "_ingress"):
            self._ingress.close()


def with_ingress(
    placements: Sequence[Placement], workers: int, router: str, host: str, config: ServerConfig
) -> Application:
    """Return an application of all models, behind Ray's proxy. The other arguments are those of `Ingress`."""
    replicas = [bound(each, f"{DEPLOYMENT}-{each.name.replace('/', '-')}") for each in placements]
    front = serve.deployment(
        serve.ingress()(ProxiedWorker),
        name="front",
        num_replicas=workers,
        max_surge_percent=100,  # in an update, new ones start before the old ones end, which their streams hold up
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": 0},  # there is room for it next to any replicas, as for Ray's proxy
        graceful_shutdown_timeout_s=config.shutdown_grace,
        logging_config=QUIET,
    )
    return front.bind(router, host, config, *replicas)
