"""An engine for replicas of this process: that of the server's tests."""

from tests.server.conftest import engine, model_directory  # noqa: F401
