"""Faults in finding, fetching and converting trained models."""

from . import Fault

CACHE, WHEELS, GGUF = "minillm/pretrained/cache.py", "minillm/pretrained/wheels.py", "minillm/pretrained/gguf_file.py"
HUB, HEADER = "minillm/pretrained/hub.py", "minillm/pretrained/gguf_header.py"

FAULTS = (
    Fault(
        "a model is built where it will lie",
        CACHE,
        'temporary = target.with_name(f".{target.name}.unfinished")',
        "temporary = target",
        "tests/pretrained/test_cache.py",
    ),
    Fault(
        "a file with another hash is used",
        WHEELS,
        "if digest.hexdigest() != sha256:",
        "if not sha256:",
        "tests/pretrained/test_download.py -k another_file_under_the_name",
    ),
    Fault(
        "digits of SmolLM2's texts are not split",
        GGUF,
        'if kind == "gpt2" and split == SMOLLM_SPLIT:',
        "if split is None:",
        "tests/pretrained/test_gguf_file.py -k texts_become_the_tokens",
    ),
    Fault(
        "weights are stored in bfloat16 although that changes them",
        GGUF,
        "if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):",
        "if tensor.ndim:",
        "tests/pretrained/test_gguf_file.py -k every_value_is_stored_exactly",
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
        HEADER,
        "if each.start < end:",
        "if each.start < data:",
        "tests/pretrained/test_gguf_header.py -k damaged_file",
    ),
    Fault(
        "a string may be as long as the file",
        HEADER,
        "if length > most:",
        "if length > self.size:",
        "tests/pretrained/test_gguf_header.py -k many_gigabytes",
    ),
    Fault(
        "offsets count from the end of the header, without its padding",
        HEADER,
        "data = -(-self.position // alignment) * alignment",
        "data = self.position",
        "tests/pretrained/test_gguf_header.py -k what_gguf_reads",
    ),
)
