"""An engine's process whose steps a test can hold.

A file, named by GATE in the environment, says how many steps each engine may take from now on, as "NAME:STEPS" with a
new name each time. Without the file, all steps run.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import minillm
from minillm.server.engine_side import engine_process

GATE = "MINILLM_TEST_GATE"


class Gate:
    def __init__(self, file: Path):
        self.file, self.name, self.taken = file, "", 0

    def __call__(self, ids, weight, scale):
        """The operation that begins a step."""
        while not self.is_open():
            time.sleep(0.005)
        return weight[ids] * scale

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


def main() -> None:
    with minillm.using(embedding=Gate(Path(os.environ[GATE]))):
        engine_process.main()


if __name__ == "__main__":
    main()
