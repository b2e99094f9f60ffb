"""Faults in recording and replaying a trace."""

from . import Fault

RECORD, REPLAY = "minillm/trace/record.py", "minillm/trace/replay.py"

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
    Fault(
        "an entry shares the list of evicted blocks that is cleared afterwards",
        RECORD,
        "self._evicted.copy()",
        "self._evicted",
        "tests/trace/test_trace.py -k evictions",
    ),
    Fault(
        "a prompt's last token is replayed as a decode",
        REPLAY,
        "decodes = newest & (starts >= self.prompt[rows])",
        "decodes = newest",
        "tests/trace/test_trace.py -k replay_reconstructs",
    ),
    Fault(
        "a missing read event is not detected",
        REPLAY,
        "self._expect(step == self.newest_read + 1 and step <= self.launched,",
        "self._expect(step <= self.launched,",
        "tests/trace/test_trace.py -k lost_read",
    ),
)
