"""Faults in recording and replaying a trace."""

from . import Fault

RECORD = "minillm/trace/record.py"

FAULTS = (
    Fault(
        "an incomplete last line is read",
        RECORD,
        'if not line.endswith("\\n"):',
        "if not line:",
        "tests/trace/test_trace_files.py -k unfinished_file",
    ),
    Fault(
        "times are a thousand times too large",
        RECORD,
        '"time": at / 1e6',
        '"time": at / 1e3',
        "tests/trace/test_trace_files.py -k times_are_seconds",
    ),
    Fault(
        "a trace with a file buffers ten times as many entries",
        RECORD,
        "len(self._entries) >= CHUNK",
        "len(self._entries) >= 10 * CHUNK",
        "tests/trace/test_trace_files.py -k memory_stays_bounded",
    ),
)
