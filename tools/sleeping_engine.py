"""`minillm serve` with engines whose steps only sleep, as long as recorded ones of Gemma 2B on an H200 take.

    python tools/sleeping_engine.py serve --replicas 2

All but the step itself is real: HTTP, routing, the scheduler and the messages. So a machine without a GPU can show what
a server adds to engines that are faster than it. The model is the embedded one, for its tokenizer; every token of an
answer is the same.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from minillm.deploy.simulation import H200  # noqa: E402
from minillm.runner.executor import LocalExecutor  # noqa: E402
from minillm.runner.launched import Results  # noqa: E402
from minillm.scheduler import Step  # noqa: E402

ME = "tools.sleeping_engine"
TOKEN = 300


class SleepingStep:
    """A step that ends at a time. until: by `time.perf_counter`."""

    def __init__(self, step: Step, until: float):
        self.step, self.until = step, until

    def wait(self) -> Results:
        time.sleep(max(self.until - time.perf_counter(), 0))
        count = int(self.step.samples.sum())
        return Results(np.full((count, 1), TOKEN), np.ones(count, np.int64))


class SleepingExecutor(LocalExecutor):
    """A device that runs one step after the other, asynchronously, and computes nothing."""

    ends = 0.0  # when the last step that was launched ends

    def launch(self, step: Step) -> SleepingStep:
        self.ends = max(self.ends, time.perf_counter()) + H200.seconds(step)
        return SleepingStep(step, self.ends)


def main() -> None:
    if sys.argv[1:]:
        from minillm.cli import app
        from minillm.server.supervisor import supervisor

        supervisor.ENGINE = ME
        from minillm.deploy import replica

        replica.ENGINE = ME  # before Ray's module is imported
        app()
        return
    from minillm.engine import engine
    from minillm.server.engine_side import engine_process

    engine.LocalExecutor = SleepingExecutor
    engine_process.main()


if __name__ == "__main__":
    main()
