"""A scheduler that is checked after every step: a test module that imports the fixture has it for all of its tests."""

import pytest

from minillm.engine.engine import Engine


@pytest.fixture(autouse=True)
def scheduler_is_consistent_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Engine._read

    def read_and_check(engine, launched):
        read(engine, launched)
        engine.scheduler.check()

    monkeypatch.setattr(Engine, "_read", read_and_check)
