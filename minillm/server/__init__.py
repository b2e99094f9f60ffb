"""An OpenAI-compatible HTTP server for the engine.  Lesson 99.

Processes, HTTP, and the formats of other servers' APIs belong here. Scheduling and sampling do not.

`running` serves an engine of the process that calls it, so a function installed with `minillm.using` applies to every
request. `serve`, which is `minillm serve`, runs the engine in a process of its own, and replaces it if it fails.

Each process has a folder: `supervisor`, which owns the others; `worker`, which speaks HTTP; and `engine_side`, which
runs next to the engine. The files here are shared: how to start a server, its options and limits, and the messages
between the processes.

Requires the `serve` extra (fastapi, uvicorn), which is not imported until one of the two functions is called.
"""

from .serving import PortTaken, RunningServer, running, serve

__all__ = ["PortTaken", "RunningServer", "running", "serve"]
