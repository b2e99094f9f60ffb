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
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError, MinillmError, MissingPackage
from minillm.folders import how_to_install
from minillm.values import as_float, read_json, shown

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
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")  # ChatML's, Llama 3's, Gemma's
SMOLLM_SPLIT = "smollm"  # GPT-2's, after each digit has become a piece of its own
LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3")
WEIGHTS = "model.safetensors"
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries in Rust report an error of the system
WHY = 160  # characters of a library's error that are quoted
NAME_BYTES = 200  # of a directory's name, to which others are added
TOKENIZER_BYTES = 64_000_000  # more than that of a vocabulary of 262,144 tokens
CHUNK = 1 << 20
MB = 1e6

log = logging.getLogger(__name__)


def directory(file: Path) -> Path:
    """Return the model of a GGUF file as a directory of the cache. It is converted if its content is not there yet.

    Raises ConfigError for a file that is damaged or holds what the engine does not read; MissingPackage.
    """
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    file = file.absolute()  # not resolved: in the Hub's cache a file is a link to one that is named by its hash
    state = _state(file)
    sha256 = _known_hash(file, state)
    target = cache.cache_directory() / "gguf" / sha256[:16] / _name(file)
    if cache.is_complete(target, sha256):
        return target
    header = _checked(file)
    check_packages()

    def fill(temporary: Path) -> cache.Origin:
        source = file.name.encode(errors="backslashreplace").decode()  # a name may have bytes that are no text
        _say(f"converting {source} once, into {target}")
        found = convert_into(temporary, file, source, sha256, str(header.metadata.get("general.license", "")), _say)
        if _state(file) != state:
            raise ConfigError(f"{file} changed while it was converted: wait until it is complete")
        return found

    return cache.build(target, sha256, _most_bytes(header), fill, _say)


def _say(line: str) -> None:
    log.warning("%s", line)


def _name(file: Path) -> str:
    """Return the name of a file's directory: its own, but never a hidden one, "." or "..", or too long."""
    return file.stem.encode(errors="ignore")[:NAME_BYTES].decode(errors="ignore").strip(". ") or "model"


def _state(file: Path) -> tuple[int, int, int]:
    """Return what changes when another content takes a file's place."""
    about = file.stat()
    return about.st_size, about.st_mtime_ns, about.st_ino


def _known_hash(file: Path, state: tuple[int, int, int]) -> str:
    """Return the sha256 of a file; computed once for each path, size and time of change, since large files take
    seconds.
    """
    identity = b"\n".join([os.fsencode(file), *(str(each).encode() for each in state)])
    known = cache.cache_directory() / "gguf" / f"{hashlib.sha256(identity).hexdigest()[:16]}.json"
    try:
        if isinstance(found := read_json(known, ConfigError).get("sha256"), str):
            return found
    except ConfigError as error:  # there is none, or it is damaged
        log.debug("%s", error)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        unfinished = known.with_suffix(f".{os.getpid()}-{id(digest)}")
        unfinished.write_text(json.dumps({"file": str(file), "sha256": digest.hexdigest()}), encoding="utf-8")
        unfinished.replace(known)
    except OSError as error:  # a cache that is read-only may still hold the model
        log.debug("%s could not be written: %s", known, error)
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
    """Return the header of a file that can be converted. Raises ConfigError, which names what is not supported."""
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
    scaling, *factors = (
        header.metadata.get(f"{header.architecture}.rope.{key}")
        for key in ("scaling.type", "scaling.factor", "scale_linear")
    )
    if scaling is None and any(factor not in (None, 0, 1) for factor in factors):
        scaling = "linear"  # llama.cpp's default for files that state only a factor
    if scaling not in (None, "none"):
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
    _check_shape(file, header)
    kind, split = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind not in TOKENIZERS:
        raise ConfigError(f"{file}: the tokenizer {shown(kind)} is not supported; it must be {' or '.join(TOKENIZERS)}")
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    if kind == "llama" and not prefix and not header.architecture.startswith("gemma"):  # Gemma's never has one
        raise ConfigError(
            f"{file}: a tokenizer that puts no space before a text is not supported in GGUF files of "
            f"{header.architecture}: use the model's directory with safetensors"
        )
    if kind == "gpt2" and split not in _splits():
        raise ConfigError(
            f"{file}: its tokenizer splits text in a way, {shown(split)}, that is not supported in GGUF files: use the "
            "model's directory with safetensors"
        )
    return header


def _check_shape(file: Path, header: "Header") -> None:
    """Raise ConfigError unless the numbers of the metadata are those of the tensors.

    transformers makes a model of the size that the metadata state, before it looks at a tensor.
    """
    metadata, shapes = header.metadata, {name: each.shape for name, each in header.tensors.items()}

    def number(key: str, default: int | None = None) -> int:
        key = f"{header.architecture}.{key}"
        found = metadata.get(key, default)
        if type(found) is not int or not 1 <= found < 1 << 31:
            raise ConfigError(
                f"{file} is damaged, or of a kind that is not supported in GGUF files: {key} must be a whole number "
                f"above 0, not {shown(found)}"
            )
        return found

    width, heads = number("embedding_length"), number("attention.head_count")
    number("context_length", 1)
    # What transformers takes for it: a fixed number, what rotates, or a share of the width.
    head = HEAD_DIMS.get(header.architecture) or width // heads
    if header.architecture == "llama":
        head = number("rope.dimension_count", head)
    stated = {
        "token_embd.weight": (width, number("vocab_size", shapes.get("token_embd.weight", (0, 0))[-1])),
        "blk.0.attn_q.weight": (width, heads * head),
        "blk.0.attn_k.weight": (width, number("attention.head_count_kv", heads) * head),
        "blk.0.ffn_up.weight": (width, number("feed_forward_length")),
    }
    for name, shape in stated.items():
        if name not in shapes:
            raise ConfigError(f"{file} has no tensor {name}: name a file with the whole model")
        if shapes[name] != shape:
            raise ConfigError(
                f"{file} is damaged: by its metadata the tensor {name} has the shape {shape}, and it has "
                f"{shapes[name]}; download it again"
            )
    layers = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    if (blocks := number("block_count")) != len(layers):
        raise ConfigError(
            f"{file} is damaged: it has tensors of {len(layers)} layers, and {header.architecture}.block_count is "
            f"{blocks}; download it again"
        )
    for key, required in (("attention.layer_norm_rms_epsilon", True), ("rope.freq_base", False)):
        key = f"{header.architecture}.{key}"
        value = as_float(metadata.get(key, None if required else 1.0))
        if value is None or value <= 0:
            raise ConfigError(f"{file} is damaged: {key} must be a number above 0, not {shown(metadata.get(key))}")
    for name in ("bos", "eos", "eot", "padding", "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        token = metadata.get(key, 0)
        if type(token) is not int or not 0 <= token < shapes["token_embd.weight"][-1]:
            raise ConfigError(f"{file} is damaged: {key} must be the id of a token, not {shown(token)}")


def _splits() -> tuple[str, ...]:
    """Return the names of the ways to split text before byte-pair encoding that are known."""
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
    # transformers would also read a tokenizer or a configuration that lies beside the file: here nothing does.
    alone = target / "alone"
    alone.mkdir()
    link = alone / "model.gguf"
    link.symlink_to(file.absolute())
    with _named(file), _quiet():
        _write_tokenizer(target, link, header.metadata)
        nbytes = _write_model(target, link, len(header.tensors), _ends(target, header.metadata))
    shutil.rmtree(alone)
    say(f"{nbytes / MB:,.0f} MB of weights")
    rounded = sorted({each.type for each in header.tensors.values()} - {*PLAIN})
    return cache.Origin(source, sha256, ", ".join(rounded), license)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Errors of the libraries that convert a file, as one that names it; those of the machine stay as they are."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (MinillmError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if found := OS_ERROR.search(str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number)) from error
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{file} cannot be converted ({why[:WHY]}): it is damaged, or of a kind that is not supported in GGUF "
            "files; download it again, or use the model's directory with safetensors"
        ) from error


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


def _ends(directory: Path, metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: of the file's metadata, and those by whose text llama.cpp knows them.

    A file states one end of a text, and chat models also have an end of a turn.
    """
    stated = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    added = read_json(directory / "tokenizer.json", ConfigError)["added_tokens"]
    known = [each["id"] for each in added if each["special"] and each["content"] in TURN_ENDS]
    return [*dict.fromkeys(each for each in [*stated, *known] if each is not None)]


def _write_model(target: Path, file: Path, count: int, ends: list[int]) -> int:
    """Write weights and configurations; the bytes of the weights. count: of the file's tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel
    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{missing[0]} is missing" + (f", and {len(missing) - 1} more" * (len(missing) > 1)))
    tensors = {name: _smallest(each.detach()) for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if len(tensors) != count:  # transformers drops what it has no place for, such as biases
        raise ConfigError(
            f"it has {count} tensors, and its kind of model has {len(tensors)}: use the model's directory with "
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
        if len(ends) > 1:
            model.generation_config.eos_token_id = ends
        model.generation_config.save_pretrained(target)
    return sum(each.nbytes for each in tensors.values())


def _smallest(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor in the fewest bits that hold its values exactly."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return tensor.to(dtype).contiguous()
    return tensor.contiguous()
