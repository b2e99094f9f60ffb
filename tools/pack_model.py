"""Pack a downloaded model into files that are small enough to carry, and unpack it on a machine without a network.

    python tools/pack_model.py pack ~/.cache/minillm/models/smollm2-135m .pack
    python tools/pack_model.py unpack .pack .model

`minillm download` stores weights in float32 that were rounded to Q4_1 and Q8_0 before. A pack has their codes and
scales again, a fifth of the bytes, and only if they give back every bit of every weight: tensors that they do not give
back are packed as they are. The parts are .pack/1/part, .pack/2/part, ..., each with at most --part-mib MiB.
"""

import argparse
import hashlib
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

BLOCK = 32  # weights that share a scale in both formats
MIB = 1 << 20
TOP = 15  # the largest code of Q4_1; of Q8_0 it is 127
WEIGHTS = "model.safetensors"
DIGEST = hashlib.sha256().digest_size
FILE = "file:"  # before the name of a file that is packed as it is


def q8_0(blocks: Tensor) -> list[Tensor] | None:
    """Codes and scales of blocks [n, 32] float32 that are exactly code * scale; None if they are not."""
    scale = (blocks.abs().amax(1) / 127).half()
    codes = _codes(blocks, scale).to(torch.int8)
    return [codes, scale] if torch.equal(from_q8_0(codes, scale), blocks) else None


def from_q8_0(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale.float()[:, None]


def q4_1(blocks: Tensor) -> list[Tensor] | None:
    """Codes, scales and minima of blocks [n, 32] float32 that are exactly code * scale + minimum; None if not."""
    least = blocks.amin(1).half()
    reach = blocks.amax(1) - least.float()
    codes, scale = torch.zeros(blocks.shape, dtype=torch.uint8), torch.zeros_like(least)
    left = torch.ones(len(blocks), dtype=torch.bool)
    for largest in range(TOP, 0, -1):  # the largest code that a block has, nearly always 15
        tried = (reach / largest).half()
        found = _codes(blocks - least.float()[:, None], tried).clamp(0, TOP).to(torch.uint8)
        fits = left & (_from_q4_1(found, tried, least) == blocks).all(1)
        codes[fits], scale[fits] = found[fits], tried[fits]
        left &= ~fits
        if not left.any():
            return [codes[:, ::2] | codes[:, 1::2] << 4, scale, least]
    return None


def from_q4_1(pairs: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """pairs [n, 16] uint8: two codes in each byte."""
    return _from_q4_1(torch.stack([pairs & 15, pairs >> 4], 2).flatten(1), scale, least)


def _from_q4_1(codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    return codes * scale.float()[:, None] + least.float()[:, None]


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    step = scale.float()[:, None]
    return torch.where(step > 0, blocks / step, 0.0).round()


Pack = Callable[[Tensor], list[Tensor] | None]
FORMATS: dict[str, tuple[Pack, Callable[..., Tensor]]] = {"q8_0": (q8_0, from_q8_0), "q4_1": (q4_1, from_q4_1)}


def packed(directory: Path) -> bytes:
    """All files of a model's directory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.iterdir()):
        if file.name != WEIGHTS:
            tensors[FILE + file.name] = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    for name, tensor in load_file(directory / WEIGHTS).items():
        tensors |= _packed(name, tensor)
    body = zlib.compress(save(tensors))
    return hashlib.sha256(body).digest() + body


def _packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if tensor.dtype == torch.float32 and tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0:
        for kind, (pack, _) in FORMATS.items():
            if (found := pack(tensor.reshape(-1, BLOCK))) is not None:
                shape = torch.tensor(tensor.shape)
                return {f"{kind}:{index}:{name}": each for index, each in enumerate([shape, *found])}
    return {f"plain:0:{name}": tensor}


def unpack(body: bytes, directory: Path) -> None:
    """Write the directory that was packed. Raises ValueError for parts that are damaged or not all there."""
    digest, rest = body[:DIGEST], body[DIGEST:]
    if hashlib.sha256(rest).digest() != digest:
        raise ValueError("the parts are damaged, or one of them is missing: pack them again, and copy all of them")
    weights, kinds = dict[str, list[Tensor]](), dict[str, str]()
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensor in sorted(load(zlib.decompress(rest)).items()):
        if name.startswith(FILE):
            (directory / name.removeprefix(FILE)).write_bytes(tensor.numpy().tobytes())
        else:
            kind, _, own = name.split(":", 2)
            kinds[own] = kind
            weights.setdefault(own, []).append(tensor)
    tensors = {}
    for name, (first, *more) in weights.items():
        tensors[name] = first if kinds[name] == "plain" else FORMATS[kinds[name]][1](*more).view(*first.tolist())
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--part-mib", type=int, default=29)
    options = parser.parse_args()
    if options.what == "unpack":
        parts = sorted(options.source.glob("*/part"), key=lambda part: int(part.parent.name))
        try:
            unpack(b"".join(part.read_bytes() for part in parts), options.target)
        except ValueError as error:
            print(f"{options.source}: {error}", file=sys.stderr)
            return 1
        return 0
    body, size = packed(options.source), options.part_mib * MIB
    for number, start in enumerate(range(0, len(body), size), 1):
        part = options.target / str(number) / "part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(body[start : start + size])
        print(part, f"{part.stat().st_size / MIB:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
