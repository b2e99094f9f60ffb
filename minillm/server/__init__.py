"""An OpenAI-compatible HTTP server for the engine.  Lesson 99.

The engine runs in the process that calls `serve` or `running`, so a function installed with `minillm.using` applies to
every request. Requires the `serve` extra (fastapi, uvicorn), which is not imported until one of the two is called.
"""

from .serving import PortTaken, RunningServer, running, serve

__all__ = ["PortTaken", "RunningServer", "running", "serve"]
