"""The server's log: text, or a line of JSON for each message.  Lesson 99."""

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

from . import access

HELD = 10_000  # messages that wait until whatever reads the log has read those before; more are dropped
LAST_WORDS = 1.0  # seconds


class JsonLines(logging.Formatter):
    """A message as an object: time (UTC), level, logger, process id, message, and the fields that it came with."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        } | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Unhurried(logging.Handler):
    """Lets a thread write messages through another handler: a full pipe or a slow disk never holds the caller.

    A message that finds no room is dropped. At the end of the process the messages that wait have a second.
    """

    def __init__(self, handler: logging.Handler):
        super().__init__(handler.level)
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stdout__, sys.__stderr__):
            handler.setStream(Unbuffered(handler.stream.fileno()))
        self._handler = handler
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(HELD)
        threading.Thread(target=self._write, name="minillm-log", daemon=True).start()
        atexit.register(self._finish)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self._waiting.put_nowait(record)

    def _write(self) -> None:
        while True:
            record = self._waiting.get()
            if self._handler.filter(record):  # not `handle`, which holds a lock that the process needs to end
                self._handler.emit(record)  # an error is reported on stderr, if that can be written, and forgotten
            self._waiting.task_done()

    def _finish(self) -> None:
        until = time.monotonic() + LAST_WORDS
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)


class Unbuffered:
    """Writes to a file descriptor without a lock of Python's.

    A thread that waits for a full pipe would hold that lock, and the process, which needs it to end, would wait too.
    """

    def __init__(self, file: int):
        self._file = file

    def write(self, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._file, data) :]

    def flush(self) -> None: ...


def set_up(form: str, level: str, output: TextIO | None = None) -> logging.Handler:
    """Send what this process logs to stderr, or to `output`. Returns the handler.

    form: "text" or "json". level: one of `config.LOG_LEVELS`. As text, requests are shown from level debug on: a line
    for each of them would hide the rest.
    """
    handler = logging.StreamHandler(output or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("minillm: %(message)s"))
    waiting, least = Unhurried(handler), logging.getLevelNamesMapping().get(level.upper(), logging.DEBUG)
    logging.getLogger().handlers = [waiting]
    logging.getLogger("minillm").setLevel(least)
    shown = form == "json" or least <= logging.DEBUG
    logging.getLogger(access.__name__).setLevel(least if shown else logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has just left
    return waiting


def unhurried() -> None:
    """Let threads write what minillm's log shows, wherever that is: no caller waits for a full pipe."""
    log = logging.getLogger("minillm")
    log.handlers = [Unhurried(handler) for handler in log.handlers]
