"""A Ray cluster of two nodes, in a process for tests, which reads commands and writes a line when each is done.

Each node has room for a large replica (1.5 CPUs), and for some small ones. The argument is a port for the dashboard,
which `serve deploy` talks to.
"""

import contextlib
import json
import sys

import minillm.deploy.replica

minillm.deploy.replica.ENGINE = "tests.deploy.gated_engine"  # before Ray's module is imported

from minillm.deploy import application, ray_serve  # noqa: E402


def main() -> None:
    from ray import serve
    from ray._private import node
    from ray.cluster_utils import Cluster

    node.Node = ray_serve.PatientNode
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": int(sys.argv[1])}
    cluster = Cluster(True, head_node_args={"num_cpus": 2} | dashboard | ray_serve.agent_ports())
    nodes = [cluster.add_node(num_cpus=2, **ray_serve.agent_ports())]
    ray_serve.join(cluster.address)
    say(cluster.address)
    for line in sys.stdin:
        try:
            answer = obey(line.split(maxsplit=1), cluster, nodes)
        except Exception as error:  # the cluster stays, for other tests
            say(repr(error))
        else:
            say(f"done {answer}")
    serve.shutdown()
    ray_serve.leave()
    cluster.shutdown()


def obey(command: list[str], cluster, nodes: list) -> int | None:
    """Do one thing to the cluster. nodes: all but its first. Returns what was asked for."""
    from ray import serve

    match command:
        case ["kill"]:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        case ["add"]:
            nodes.append(cluster.add_node(num_cpus=2, **ray_serve.agent_ports()))
        case ["run", text]:
            given = json.loads(text)
            serve.start(**given["proxy"])
            serve.run(application(given["arguments"]), name="ours")
        case ["delete", name]:
            delete(name.strip())
        case ["places", name]:
            return places(name.strip())
    return None


def delete(application: str) -> None:
    """Delete an application, however long it takes; Serve itself waits for a minute."""
    from ray import serve

    while True:
        with contextlib.suppress(TimeoutError):
            return serve.delete(application)


def places(application: str) -> int:
    """Return how many requests Serve counts on an application's replicas."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    ours = [ray.get_actor(each, "serve") for each in names if each.startswith(f"SERVE_REPLICA::{application}#")]
    return sum(ray.get([each.get_num_ongoing_requests.remote() for each in ours]))


def say(text: str) -> None:
    print("cluster:", text.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
