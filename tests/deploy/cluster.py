"""A Ray cluster of two nodes, in a process for tests, which reads commands and writes a line when each is done.

Each node has room for a large replica (1.5 CPUs), and for some small ones.
"""

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
    cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False} | ray_serve.agent_ports())
    nodes = [cluster.add_node(num_cpus=2, **ray_serve.agent_ports())]
    ray_serve.join(cluster.address)
    say(cluster.address)
    for line in sys.stdin:
        try:
            obey(line.split(maxsplit=1), cluster, nodes)
        except Exception as error:  # the cluster stays, for other tests
            say(repr(error))
        else:
            say("done")
    serve.shutdown()
    ray_serve.leave()
    cluster.shutdown()


def obey(command: list[str], cluster, nodes: list) -> None:
    """Do one thing to the cluster. nodes: all but its first."""
    from ray import serve

    match command:
        case ["kill"]:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        case ["add"]:
            nodes.append(cluster.add_node(num_cpus=2, **ray_serve.agent_ports()))
        case ["run", text]:
            given = json.loads(text)
            serve.start(http_options={"host": "127.0.0.1", "port": given.pop("port")})
            serve.run(application(given), name="ours")
        case ["delete"]:
            serve.delete("ours")


def say(text: str) -> None:
    print("cluster:", text.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
