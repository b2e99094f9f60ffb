"""Faults in fetching a model of the Hub and in reading the header of a GGUF file."""

from . import Fault

HUB, GGUF = "minillm/pretrained/hub.py", "minillm/pretrained/gguf_header.py"

FAULTS = (
    Fault(
        "a cached commit is looked up at the Hub",
        HUB,
        "if complete is not None and _COMMIT.fullmatch(revision):",
        "if complete is None and _COMMIT.fullmatch(revision):",
        "tests/pretrained/test_hub.py -k cached_commit",
    ),
    Fault(
        "a copy in the cache counts though it lacks files that its index names",
        HUB,
        "complete = None if lacks else cached",
        "complete = cached",
        "tests/pretrained/test_hub.py -k lacks_files",
    ),
    Fault(
        "the Hub is asked without a time limit",
        HUB,
        "revision=self.revision, timeout=seconds)",
        "revision=self.revision, timeout=2 + seconds)",
        "tests/pretrained/test_hub.py -k time_limit",
    ),
    Fault(
        "tensors may overlap",
        GGUF,
        "if each.start < end:",
        "if each.start < data:",
        "tests/pretrained/test_gguf_header.py -k damaged_file",
    ),
    Fault(
        "a string may be as long as the file",
        GGUF,
        "if length > most:",
        "if length > self.size:",
        "tests/pretrained/test_gguf_header.py -k many_gigabytes",
    ),
    Fault(
        "offsets count from the end of the header, without its padding",
        GGUF,
        "data = -(-self.position // alignment) * alignment",
        "data = self.position",
        "tests/pretrained/test_gguf_header.py -k what_gguf_reads",
    ),
)
