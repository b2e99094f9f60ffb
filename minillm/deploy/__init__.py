"""Several replicas of an engine behind one server.

Choosing a replica belongs here, and a simulation of it, which need no Ray. HTTP and what an engine does with a request
do not.
"""

from typing import Any


def application(arguments: dict[str, Any]) -> Any:
    """Return the application for `serve run minillm.deploy:application`, or for a config file of `serve deploy`.

    arguments: see `application.build`. Raises ConfigError, MissingPackage.
    """
    from .application import build

    return build(arguments)
