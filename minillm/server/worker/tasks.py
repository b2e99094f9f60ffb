"""Tasks of an event loop, kept until they are done: the loop itself has only weak references to them."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks(set[asyncio.Task]):
    """The tasks that were started here and run."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Start a task. In the thread of its event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
