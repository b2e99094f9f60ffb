"""A GGUF file as a directory that the engine reads: transformers dequantizes its weights, once.  Lesson 05.

The tensors keep every bit: they are stored in 16 bits where that loses nothing, else in float32. So the model computes
what the file says, and gives transformers' own numbers.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import io
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError, MissingPackage
from minillm.folders import how_to_install
from minillm.values import read_json, shown

from . import cache

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .gguf_header import Header

# An architecture in GGUF's own words -> in config.json's. transformers reads others too, but the engine does not.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
}
# Files do not state these values, which transformers sets as most models have them: head_dim, on which they depend.
HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3": 256}
# What these architectures have; another tensor means another computation, which transformers would leave out.
TENSOR = re.compile(
    r"(token_embd|output|output_norm)\.weight"
    r"|blk\.\d+\.(attn_(q|k|v|output|norm|q_norm|k_norm)|ffn_(gate|up|down|norm)|post_(attention|ffw)_norm)"
    r"\.(weight|bias)"
)
PLAIN = ("F32", "F16", "BF16")  # the formats of tensors that are not quantized
TOKENIZERS = ("gpt2", "llama")  # byte-level BPE, and sentencepiece's
GPT2_SPLIT = ("gpt-2", "gpt2")
SMOLLM_SPLIT = "smollm"  # GPT-2's, after each digit has become a piece of its own
LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3")
WEIGHTS = "model.safetensors"
TOKENIZER_BYTES = 64_000_000  # more than that of a vocabulary of 262,144 tokens
CHUNK = 1 << 20
MB = 1e6

log = logging.getLogger(__name__)


def directory(file: Path) -> Path:
    """The model of a GGUF file as a directory of the cache. It is converted if its content is not there yet.

    Raises ConfigError for a file that is damaged or holds what the engine does not read; MissingPackage.
    """
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    file = file.resolve()
    sha256 = _known_hash(file)
    target = cache.cache_directory() / "gguf" / sha256[:16] / file.stem
    if cache.is_complete(target, sha256):
        return target
    header = _checked(file)
    check_packages()

    def fill(temporary: Path) -> cache.Origin:
        _say(f"converting {file.name} once, into {target}")
        return convert_into(temporary, file, file.name, sha256, str(header.metadata.get("general.license", "")), _say)

    return cache.build(target, sha256, _most_bytes(header), fill, _say)


def _say(line: str) -> None:
    log.warning("%s", line)


def _known_hash(file: Path) -> str:
    """The sha256 of a file; computed once for each path, size and time of change, since large files take seconds."""
    state = file.stat()
    identity = f"{file}\n{state.st_size}\n{state.st_mtime_ns}\n{state.st_ino}"
    known = cache.cache_directory() / "gguf" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    if known.is_file() and isinstance(found := read_json(known, ConfigError).get("sha256"), str):
        return found
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        unfinished = known.with_suffix(f".{id(digest)}")
        unfinished.write_text(json.dumps({"file": str(file), "sha256": digest.hexdigest()}), encoding="utf-8")
        unfinished.replace(known)
    except OSError as error:
        raise cache.not_writable(error) from error
    return digest.hexdigest()


def check_packages() -> None:
    """Raise MissingPackage unless a GGUF file can be converted here."""
    try:
        import gguf  # noqa: F401
        from transformers.integrations.gguf import gguf_tokenizer_mapping  # noqa: F401
    except ImportError as error:
        how = how_to_install("minillm[models]")
        raise MissingPackage(
            f"a GGUF file is read with `gguf` and transformers 5.23 or newer ({error}): {how}"
        ) from error


def _checked(file: Path) -> "Header":
    """The header of a file that can be converted. Raises ConfigError, which names what is not supported."""
    from . import gguf_header

    header = gguf_header.check(file)
    if header.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file}: the architecture {shown(header.architecture)} is not supported; supported in GGUF files are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if strange := [name for name in header.tensors if not TENSOR.fullmatch(name)]:
        raise ConfigError(
            f"{file}: the tensor {shown(strange[0])} is of a kind that is not supported in GGUF files: use the "
            "model's directory with safetensors"
        )
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(
            f"{file}: rope scaling ({shown(scaling)}) is not supported in GGUF files: use the model's directory with "
            "safetensors"
        )
    head_dim = HEAD_DIMS.get(header.architecture)
    if head_dim != (found := header.metadata.get(f"{header.architecture}.attention.key_length", head_dim)) and head_dim:
        raise ConfigError(
            f"{file}: heads of {shown(found)} numbers are not supported in GGUF files of {header.architecture}, only "
            f"of {head_dim}: use the model's directory with safetensors"
        )
    kind, split = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind not in TOKENIZERS:
        raise ConfigError(f"{file}: the tokenizer {shown(kind)} is not supported; it must be {' or '.join(TOKENIZERS)}")
    if kind == "gpt2" and split not in _splits():
        raise ConfigError(
            f"{file}: its tokenizer splits text in a way, {shown(split)}, that is not supported in GGUF files: use the "
            "model's directory with safetensors"
        )
    return header


def _splits() -> tuple[str, ...]:
    """The names of the ways to split text before byte-pair encoding that are known."""
    check_packages()
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return (*GPT2_SPLIT, SMOLLM_SPLIT, *GGUF_PRE_TOKENIZER_SPLITS)


def _most_bytes(header: "Header") -> int:
    """At most what the directory will take: its tensors in float32, and the tokenizer."""
    return 4 * sum(math.prod(each.shape) for each in header.tensors.values()) + TOKENIZER_BYTES


def convert_into(
    target: Path, file: Path, source: str, sha256: str, license: str, say: Callable[[str], None]
) -> cache.Origin:
    """Write the model of a GGUF file into an empty directory: weights, configuration, tokenizer, chat template.

    Raises ConfigError before any work for a file that is damaged or holds what the engine does not read.
    """
    header = _checked(file)
    with _quiet():
        _write_tokenizer(target, file, header.metadata)
        nbytes = _write_model(target, file, len(header.tensors))
    say(f"{nbytes / MB:,.0f} MB of weights")
    rounded = sorted({each.type for each in header.tensors.values()} - {*PLAIN})
    return cache.Origin(source, sha256, ", ".join(rounded), license)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' advice, off; and its progress bars, unless a terminal shows them."""
    from transformers.utils import logging as their_logging

    level = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        their_logging.set_verbosity(level)


def _write_tokenizer(target: Path, file: Path, metadata: Mapping[str, Any]) -> None:
    from transformers import AutoTokenizer

    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    options = {}
    if kind == "gpt2" and split in LLAMA3_SPLITS and "tokenizer.ggml.add_bos_token" not in metadata:
        options["add_bos_token"] = True  # Llama 3's files do not say so, and llama.cpp knows it by the split
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **options).save_pretrained(target)
    if kind == "gpt2" and split == SMOLLM_SPLIT:  # which transformers splits as GPT-2 does
        path = target / "tokenizer.json"
        content = read_json(path, ConfigError)
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _write_model(target: Path, file: Path, count: int) -> int:
    """Write weights and configurations; the bytes of the weights. count: of the file's tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel
    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{file}: {missing[0]} is missing" + (f", and {len(missing) - 1} more" * (len(missing) > 1)))
    tensors = {name: _smallest(each.detach()) for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if len(tensors) != count:  # transformers drops what it has no place for, such as biases
        raise ConfigError(
            f"{file} has {count} tensors, and its kind of model has {len(tensors)}: use the model's directory with "
            "safetensors"
        )
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    dtypes = {each.dtype for each in tensors.values()}
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    # What the engine computes in on a GPU: models are trained in bfloat16, and four bits are not worth float32 there.
    config["dtype"] = "float16" if dtypes == {torch.float16} else "bfloat16"
    config["architectures"] = [type(model).__name__]
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (target / WEIGHTS).chmod((target / "config.json").stat().st_mode)  # it was written for its owner only
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    return sum(each.nbytes for each in tensors.values())


def _smallest(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor in the fewest bits that hold its values exactly."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return tensor.to(dtype).contiguous()
    return tensor.contiguous()
