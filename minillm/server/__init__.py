"""The engine over HTTP, speaking OpenAI's API.  Lesson 99.

The engine runs in the process that calls `serve` or `running`, so that a function put in with `minillm.using`
serves every request. Needs the extra `serve` (fastapi, uvicorn); nothing is imported until one of the two is called.
"""

from .serving import PortTaken, RunningServer, running, serve

__all__ = ["PortTaken", "RunningServer", "running", "serve"]
