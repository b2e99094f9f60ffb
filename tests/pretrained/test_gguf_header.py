"""The header of a GGUF file: what `gguf` writes is read; anything else is refused at little cost, with its place."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import ConfigError
from minillm.pretrained.gguf_header import BUFFER_BYTES, TYPES, Array, Header, TensorInfo, check

STRING, ARRAY, UINT8, UINT32, BOOL = 8, 9, 0, 4, 7
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def strings(key: str, values: list[str | bytes], count: int | None = None) -> bytes:
    length = len(values) if count is None else count
    return entry(key, ARRAY, struct.pack("<IQ", STRING, length) + b"".join(map(text, values)))


def tensor(name: str | bytes, shape: tuple[int, ...] = (32, 2), kind: int = F32, offset: int = 0) -> bytes:
    form = f"<I{len(shape)}QIQ"
    return text(name) + struct.pack(form, len(shape), *shape, kind, offset)


LLAMA = entry("general.architecture", STRING, text("llama"))
ONE = tensor("token_embd.weight")


def raw(
    *entries: bytes, tensors: tuple[bytes, ...] = (ONE,), data: int = 256, version: int = 3, counts: tuple | None = None
) -> bytes:
    """A file made of these parts. counts: what it claims to have, (tensors, entries)."""
    claimed = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


class Counted(type(Path())):
    """A path whose file counts the bytes that are read and how often."""

    def open(self, *arguments, **options):
        stream = super().open(*arguments, **options)
        self.bytes, self.reads, self.largest = 0, 0, 0

        class Raw:
            def __enter__(own):
                return own

            def __exit__(own, *error):
                stream.close()

            def read(own, count):
                found = stream.read(count)
                self.bytes, self.reads = self.bytes + len(found), self.reads + 1
                self.largest = max(self.largest, count)
                return found

            def seek(own, position):
                stream.seek(position)

        return Raw()


def refused(path: Path) -> str:
    """The message of the error, which names the file, in one line."""
    with pytest.raises(ConfigError) as caught:
        check(path)
    said = str(caught.value)
    assert str(path) in said and "\n" not in said and len(said) < 400 + len(str(path))
    return said.replace(str(path), "FILE")


@pytest.fixture
def place(tmp_path):
    return tmp_path / "model.gguf"


def written(place: Path, fill, arch: str = "llama") -> Path:
    """A file that `gguf` writes."""
    writer = gguf.GGUFWriter(place, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def everything(writer) -> None:
    """Every type of value, and tensors of several types."""
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        bits = int(name.strip("uint"))
        getattr(writer, f"add_{name}")(f"of.{name}", 2**bits - 1 if name[0] == "u" else -(2 ** (bits - 1)))
    writer.add_float32("of.float32", -0.1)
    writer.add_float64("of.float64", 1e300)
    writer.add_bool("of.bool", True)
    writer.add_bool("of.other.bool", False)
    writer.add_string("of.string", "Größe 日本 🎉")
    writer.add_string("of.empty.string", "")
    writer.add_array("of.integers", [3, -1, 2])
    writer.add_array("of.floats", [0.5, -2.0])
    writer.add_array("of.strings", ["a", "", "é"])
    writer.add_array("of.switches", [True, False])
    writer.add_array("long.strings", [f"token {index}" for index in range(5000)])
    writer.add_array("long.integers", list(range(5000)))
    writer.add_string("at.the.end", "after the arrays")
    generator = np.random.default_rng(0)
    for name, shape, kind in (
        ("token_embd.weight", (6, 64), "Q8_0"),
        ("blk.0.attn_q.weight", (64, 64), "Q4_1"),
        ("blk.0.attn_norm.weight", (64,), "F32"),
        ("blk.0.ffn_up.weight", (8, 256), "F16"),
        ("blk.0.experts.weight", (2, 3, 32), "Q4_0"),
    ):
        values = generator.standard_normal(shape, dtype=np.float32)
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file with everything."""
    return written(tmp_path_factory.mktemp("gguf") / "whole.gguf", everything)


@pytest.mark.parametrize("version", [2, 3])
def test_the_header_is_what_gguf_reads(whole, place, version):
    content = bytearray(whole.read_bytes())
    content[4] = version  # they differ only in that 3 may be big-endian
    place.write_bytes(content)
    header, reader = check(place), gguf.GGUFReader(place)
    assert (header.version, header.architecture, header.alignment) == (version, "llama", 32)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(theirs)
    for key, found in header.metadata.items():
        if isinstance(found, Array):
            assert len(found) == found.count == len(theirs[key]) == 5000
        else:
            assert (list(found) if isinstance(found, tuple) else found) == theirs[key]
            assert type(found) in (str, int, float, bool, tuple)
    assert header.metadata["long.strings"].type == "string" and header.metadata["long.integers"].type == "int32"
    assert header.tensors == {
        each.name: TensorInfo(
            tuple(map(int, each.shape)), each.tensor_type.name, int(each.data_offset), int(each.n_bytes)
        )
        for each in reader.tensors
    }


def test_the_table_of_types_is_that_of_gguf():
    assert {(kind, *sizes[1:]) for kind, sizes in TYPES.items()} == {
        (int(kind), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    assert all(gguf.GGMLQuantizationType(kind).name == name for kind, (name, _, _) in TYPES.items())


def test_the_quantization_is_the_type_of_most_elements_of_the_matrices(whole, place):
    assert check(whole).quantization == "Q4_1"
    place.write_bytes(raw(LLAMA, tensors=(tensor("a", (1000,)), tensor("b", (32, 2), F16, 4000 + 96)), data=8192))
    assert check(place).quantization == "F16"
    place.write_bytes(raw(LLAMA, tensors=(tensor("a", (64,)),)))
    assert check(place).quantization == "F32"


def test_an_alignment_of_its_own(place):
    def fill(writer):
        writer.add_custom_alignment(1024)
        writer.add_tensor("a", np.zeros((3, 5), np.float32))
        writer.add_tensor("b", np.zeros((3, 5), np.float32))

    header, reader = check(written(place, fill)), gguf.GGUFReader(place)
    assert header.alignment == 1024
    assert [each.start for each in header.tensors.values()] == [int(each.data_offset) for each in reader.tensors]


def test_a_large_vocabulary_is_read_in_pieces_and_its_long_strings_too(place):
    words = [f"word {index}" * (1 + index % 5) for index in range(60_000)] + ["long" * BUFFER_BYTES, "last"]
    place.write_bytes(raw(strings("tokens", words), LLAMA))
    path = Counted(place)
    header = check(path)
    assert header.metadata == {"tokens": Array("string", len(words)), "general.architecture": "llama"}
    assert path.reads < 100 and path.bytes < 1.1 * place.stat().st_size + 10 * BUFFER_BYTES


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (raw(LLAMA, version=1), "has version 1 of GGUF, and 2 and 3 are supported"),
        (raw(LLAMA, version=4), "has version 4 of GGUF"),
        (raw(LLAMA, version=0), "has version 0 of GGUF"),
        (raw(LLAMA, version=3 << 24), "is big-endian, which is not supported"),
        (raw(), "general.architecture must name the model's architecture, and is None"),
        (raw(entry("general.architecture", UINT32, bytes(4))), "general.architecture must name the model's"),
        (raw(entry("general.architecture", STRING, text(""))), "general.architecture must name the model's"),
        (raw(LLAMA, entry("split.count", 2, b"\3\0")), "FILE is one of the 3 files of a model: merge them"),
        (raw(LLAMA, tensors=()), "has no tensors, only metadata"),
        (raw(LLAMA, counts=(1 << 60, 1)), "claims 1152921504606846976 tensors, and at most 65536 are supported"),
        (raw(LLAMA, counts=(1, 1 << 60)), "claims 1152921504606846976 entries of metadata, and at most 65536"),
        (raw(LLAMA, counts=(1, 60_000)), "60000 entries of metadata would need 780000 bytes at byte 24, and the file"),
        (raw(LLAMA, counts=(60_000, 1)), "60000 tensors would need 1920000 bytes at byte 16"),
        (raw(LLAMA, counts=(1, 2)), "the name of tensor 0 claims 562949953421312 bytes"),
        (raw(LLAMA, counts=(2, 1)), "the name of tensor 1 is empty"),
        (raw(LLAMA, LLAMA), "the key 'general.architecture' occurs twice (at byte 69)"),
        (raw(entry("", UINT8, b"\1"), LLAMA), "the key of entry 0 is empty (at byte 24)"),
        (raw(entry(b"\xff\xfe", UINT8, b"\1"), LLAMA), "the key of entry 0 is not UTF-8 (at byte 32)"),
        (raw(struct.pack("<Q", 1 << 60) + b"key", LLAMA), "the key of entry 0 claims 1152921504606846976 bytes"),
        (raw(struct.pack("<Q", 5000) + b"key", LLAMA), "the key of entry 0 would need 5000 bytes at byte 32"),
        (raw(entry("a", 13, b""), LLAMA), "'a' has the unknown type 13 (at byte 33)"),
        (raw(entry("a", BOOL, b"\2"), LLAMA), "the value of 'a' must be true or false, 1 or 0, not 2 (at byte 37)"),
        (raw(entry("a", STRING, text(b"\xff")), LLAMA), "the value of 'a' is not UTF-8 (at byte 45)"),
        (raw(entry("a", STRING, struct.pack("<Q", 1 << 63)), LLAMA), "the value of 'a' claims 922337203685477580"),
        (raw(entry("a", STRING, struct.pack("<Q", 9999)), LLAMA), "the value of 'a' would need 9999 bytes"),
        (raw(entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1)), LLAMA), "'a' is an array of arrays"),
        (raw(entry("a", ARRAY, struct.pack("<IQ", 99, 1)), LLAMA), "the elements of 'a' have the unknown type 99"),
        (raw(entry("a", ARRAY, struct.pack("<IQ", UINT8, 1 << 60)), LLAMA), "the value of 'a' would need 11529215046"),
        (raw(entry("a", ARRAY, struct.pack("<IQB", BOOL, 1, 7)), LLAMA), "element 0 of 'a' must be true or false"),
        (raw(strings("a", [], 1 << 60), LLAMA), "'a' claims 1152921504606846976 strings, and at most 4194304"),
        (raw(strings("a", [], 4_000_000), LLAMA), "the 4000000 strings of 'a' would need 32000000 bytes"),
        (raw(strings("a", ["b", b"\xff"]), LLAMA), "a string of 'a' is not UTF-8 (at byte 66)"),
        (raw(LLAMA, entry("general.alignment", UINT32, struct.pack("<I", 48))), "must be a power of two, not 48"),
        (raw(LLAMA, entry("general.alignment", UINT32, bytes(4))), "general.alignment must be a power of two, not 0"),
        (raw(LLAMA, entry("general.alignment", STRING, text("32"))), "must be a power of two, not '32'"),
        (raw(LLAMA, tensors=(ONE, tensor("token_embd.weight", offset=256)), data=512), "embd.weight' occurs twice"),
        (raw(LLAMA, tensors=(tensor(b"\xc3"),)), "the name of tensor 0 is not UTF-8"),
        (raw(LLAMA, tensors=(tensor("a", ()),)), "the tensor 'a' has 0 dimensions, and 1 to 4 are possible"),
        (raw(LLAMA, tensors=(tensor("a", (1, 1, 1, 1, 64)),)), "the tensor 'a' has 5 dimensions"),
        (raw(LLAMA, tensors=(text("a") + struct.pack("<I", 1 << 31),)), "the tensor 'a' has 2147483648 dimensions"),
        (raw(LLAMA, tensors=(tensor("a", (0, 4)),)), "the tensor 'a' has the shape (0, 4), with a dimension of 0"),
        (raw(LLAMA, tensors=(tensor("a", (1 << 62, 4)),)), "the tensor 'a' of the shape (4611686018427387904, 4)"),
        (raw(LLAMA, tensors=(tensor("a", kind=99),)), "the tensor 'a' has the unknown type 99"),
        (raw(LLAMA, tensors=(tensor("a", kind=4),)), "the tensor 'a' has the unknown type 4"),
        (raw(LLAMA, tensors=(tensor("a", (48, 2), Q4_1),)), "has rows of 48 elements, and Q4_1 needs a multiple of 32"),
        (raw(LLAMA, tensors=(tensor("a", offset=16),)), "the offset 16, which is not a multiple of the alignment 32"),
        (raw(LLAMA, tensors=(tensor("a", offset=32),)), "the tensor 'a' ends at byte"),
        (raw(LLAMA, tensors=(tensor("a", offset=(1 << 64) - 32),)), "the tensor 'a' ends at byte"),
        (raw(LLAMA, tensors=(tensor("a"), tensor("b", offset=224)), data=512), "'a' and 'b' overlap at byte"),
        (raw(LLAMA, tensors=(tensor("b", offset=96), tensor("a")), data=512), "'a' and 'b' overlap at byte"),
        (raw(LLAMA, data=255), "is truncated: the tensor 'token_embd.weight' ends at byte"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_and_the_error_says_where(place, content, says):
    place.write_bytes(content)
    path = Counted(place)
    assert says in refused(path)
    assert path.bytes <= len(content) + BUFFER_BYTES


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty; download it again"),
        (b"GGU", "it is unknown, and begins with b'GGU'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "it is a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "it is a zip archive, such as a wheel"),
        (b"\x1f\x8b" + bytes(60), "it is compressed with gzip"),
        (b"\x80\x02" + bytes(60), "it is a Python pickle"),
        (b"tjgg" + bytes(60), "it is GGML, the format before GGUF"),
        (b"\n<!DOCTYPE html><title>Sign in</title>", "it is an HTML page"),
        (b'{"error": "not found"}', "it is JSON, such as a server's error message"),
        (struct.pack("<Q", 30) + b'{"a": {"dtype": "F32"}}       ', "it is a safetensors file"),
        (bytes(100), "it is unknown"),
    ],
)
def test_a_file_of_another_kind_is_named(place, content, says):
    place.write_bytes(content)
    assert refused(place).startswith(f"FILE is not a GGUF file: {says}")


def test_what_is_not_a_readable_file(tmp_path, monkeypatch):
    assert refused(tmp_path) == "FILE is a directory: name the .gguf file in it"
    assert refused(tmp_path / "none.gguf") == "no such file: FILE"
    assert "no such file" in refused(tmp_path / "none" / "none.gguf")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "cannot be read: Too many levels" in refused(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "FILE is not a regular file: name a .gguf file"
    (tmp_path / "secret").write_bytes(raw(LLAMA))

    def denied(self, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert refused(tmp_path / "secret") == "FILE cannot be read: Permission denied"


def test_a_file_that_ends_anywhere_in_its_header_is_truncated(place):
    content = raw(LLAMA, strings("a", ["one", "two"]), tensors=(tensor("a"), tensor("b", offset=256)), data=512)
    for length in range(4, len(content) - 512):
        place.write_bytes(content[:length])
        assert "is truncated" in refused(place)


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (entry("a", STRING, struct.pack("<Q", 1 << 32)), "the value of 'a' claims 4294967296 bytes"),
        (entry("a", ARRAY, struct.pack("<IQ", UINT8, 1 << 33)), "its header has more than 128 MiB (at byte 49)"),
        (strings("a", [], 1 << 29), "'a' claims 536870912 strings"),
        (LLAMA + tensor("a", (1 << 20, 1 << 20)), "the tensor 'a' of the shape (1048576, 1048576) in F32"),
    ],
)
def test_lengths_in_a_file_of_many_gigabytes_cost_little(place, start, says):
    """A sparse file has room for what the lengths claim."""
    place.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + start)
    os.truncate(place, 1 << 34)
    path = Counted(place)
    assert says in refused(path)
    assert path.bytes < 2 * BUFFER_BYTES and path.largest <= BUFFER_BYTES


EXTREMES = [0, 1, 2, 7, 31, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def damaged(draw):
    """A small file with a few bytes or numbers changed, and perhaps its end cut off."""
    content = bytearray(
        raw(
            LLAMA,
            entry("a.number", UINT32, struct.pack("<I", 7)),
            entry("general.alignment", UINT32, struct.pack("<I", 32)),
            strings("a.list", ["one", "two"]),
            entry("numbers", ARRAY, struct.pack("<IQHHH", 2, 3, 1, 2, 3)),
            tensors=(tensor("a", (64,)), tensor("b", (32, 4), Q8_0, 256), tensor("c", (2, 3, 4), F16, 416)),
            data=512,
        )
    )
    header = len(content) - 512
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(4, header - 1))
        change = draw(st.sampled_from(["byte", "word", "long"]))
        if change == "byte":
            content[at] = draw(st.integers(0, 255))
        else:
            size = 4 if change == "word" else 8
            value = draw(st.sampled_from(EXTREMES)) % 2 ** (8 * size)
            content[at : at + size] = value.to_bytes(size, "little")
    return bytes(content[: draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])


@given(damaged())
def test_any_damage_gives_a_header_or_an_error_at_little_cost(tmp_path_factory, content):
    place = tmp_path_factory.getbasetemp() / "damaged.gguf"
    place.write_bytes(content)
    path = Counted(place)
    try:
        header = check(path)
    except ConfigError as error:
        assert str(place) in str(error) and "\n" not in str(error) and len(str(error)) < 600
    else:
        assert isinstance(header, Header) and header.quantization in {name for name, _, _ in TYPES.values()}
        spans = sorted((each.start, each.start + each.nbytes) for each in header.tensors.values())
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
        assert spans[-1][1] <= len(content)
    assert path.bytes <= 3 * len(content) and path.reads < 200 and path.largest <= BUFFER_BYTES
