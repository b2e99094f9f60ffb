"""An engine's process whose steps a test can hold.

A file, named by GATE in the environment, says how many steps each engine may take from now on, as "NAME:STEPS" with a
new name each time. Without the file, all steps run. For each choice that an engine is given, its process adds a byte to
a file of its own next to it; an engine takes up what it was given before its next step.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from pytest import MonkeyPatch

from minillm.engine.async_llm import AsyncLLM
from minillm.parallel.executor import ParallelExecutor
from minillm.runner.executor import LocalExecutor
from minillm.server.engine_side import engine_process

GATE = "MINILLM_TEST_GATE"


class Gate:
    def __init__(self, file: Path):
        self.file, self.name, self.taken = file, "", 0

    def before(self, launch):
        """A method that launches a step, once the gate is open."""

        def launched(executor, step):
            while not self.is_open():
                time.sleep(0.005)
            return launch(executor, step)

        return launched

    def is_open(self) -> bool:
        text = ""
        with suppress(FileNotFoundError):
            text = self.file.read_text()
        name, _, steps = text.partition(":")
        if name != self.name:
            self.name, self.taken = name, 0
        self.taken += 1
        if not text or self.taken <= int(steps or 0):
            return True
        self.taken -= 1
        return False


def given(gate: Path) -> int:
    """How many choices all engines were given so far."""
    return sum(each.stat().st_size for each in gate.parent.glob(f"{gate.name}.given.*"))


def main() -> None:
    file, submit = Path(os.environ[GATE]), AsyncLLM.submit
    gate = Gate(file)

    def counted(engine, requests):
        submit(engine, requests)
        with open(f"{file}.given.{os.getpid()}", "ab") as given:
            given.write(bytes(len(requests)))

    with MonkeyPatch.context() as patch:
        patch.setattr(AsyncLLM, "submit", counted)
        for executor in (LocalExecutor, ParallelExecutor):
            patch.setattr(executor, "launch", gate.before(executor.launch))
        engine_process.main()


if __name__ == "__main__":
    main()
