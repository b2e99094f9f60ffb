"""`minillm serve` with gated engines, in a process for tests."""

import minillm.deploy.replica
from minillm.deploy import scaling

minillm.deploy.replica.ENGINE = "tests.deploy.gated_engine"  # before Ray's module is imported
scaling.UP, scaling.DOWN, scaling.EVERY, scaling.LOOK_BACK = 0.5, 2.0, 0.5, 1.0

from minillm.cli import app  # noqa: E402

if __name__ == "__main__":
    app()
