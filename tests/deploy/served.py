"""`minillm serve` with gated engines, in a process for tests."""

import minillm.deploy.replica

minillm.deploy.replica.ENGINE = "tests.deploy.gated_engine"  # before Ray's module is imported

from minillm.cli import app  # noqa: E402

if __name__ == "__main__":
    app()
