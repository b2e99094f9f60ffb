"""Files that are no tensor of torch.save, or one that does harm if it is believed: name -> (bytes, what is said)."""

import io
import pickle
import struct
import warnings
import zipfile

import torch

HIDDEN = 8


def saved(value: object, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def rebuilt(data: bytes, method: int = zipfile.ZIP_STORED, **files: bytes | None) -> bytes:
    """A saved tensor with other files in its archive; None: without that one. "_" stands for "." and "__" for "/"."""
    names = {f"archive/{name.replace('__', '/').replace('_', '.')}": content for name, content in files.items()}
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as own, zipfile.ZipFile(made, "w", method) as other:
        for name in own.namelist():
            if name not in names:
                other.writestr(name, own.read(name))
        for name, content in names.items():
            if content is not None:
                other.writestr(name, content)
    return made.getvalue()


RAN: list[int] = []  # filled by the code in an attack, if anything ever runs that


class Runs:
    """A pickle of it runs code."""

    def __reduce__(self):
        return exec, ("import tests.prompts.attacks as attacks; attacks.RAN.append(1)",)


def described(own: bytes, **changed: bytes) -> bytes:
    """A saved tensor [2, HIDDEN] whose description has these bytes instead: old -> new, in turn."""
    pickled = zipfile.ZipFile(io.BytesIO(own)).read("archive/data.pkl")
    for old, new in changed.values():  # type: ignore[misc]
        assert pickled.count(old) >= 1, (pickled, old)
        pickled = pickled.replace(old, new, 1)
    return rebuilt(own, data_pkl=pickled)


PLAIN = saved(torch.ones(2, HIDDEN))
SHAPE = b"K\x02K\x08\x86"  # BININT1 2, BININT1 8, TUPLE2
STRIDES = b"K\x08K\x01\x86"
LENGTH = b"K\x10t"  # of the storage: BININT1 16, TUPLE
HUGE = b"\x8a\x08" + struct.pack("<q", 2**60)  # LONG1


def _many_entries() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for i in range(5000):
            archive.writestr(f"archive/{i}", b"")
    return made.getvalue()


def _nested() -> bytes:
    """A description in which each tuple has the one before twice: 2^200 members, if anything looks at all of them."""
    pickled = b"\x80\x02)q\x00"
    for i in range(200):
        pickled += b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    return rebuilt(PLAIN, data_pkl=pickled + b"h\xc8)R.")


ATTACKS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "too few bytes"),
    "text": (b"a tensor, honestly" * 9, "no zip archive"),
    "half of a file": (PLAIN[: len(PLAIN) // 2], "no zip archive"),
    "the old format": (saved(torch.ones(2, HIDDEN), _use_new_zipfile_serialization=False), "no zip archive"),
    "a pickle that runs code": (pickle.dumps(Runs()), "no zip archive"),
    "code in the archive": (rebuilt(PLAIN, data_pkl=pickle.dumps(Runs(), 2)), "exec makes"),
    "code, by newer opcodes": (rebuilt(PLAIN, data_pkl=pickle.dumps(Runs(), 4)), "something else"),
    "a zip bomb": (rebuilt(PLAIN, zipfile.ZIP_DEFLATED, data__0=bytes(10_000_000)), "compressed"),
    "a description that is a bomb": (rebuilt(PLAIN, data_pkl=b"\x80\x02" + b")" * 5000 + b"."), "more than one tensor"),
    "tuples of tuples of tuples": (_nested(), "no function"),
    "a jump in the memo": (rebuilt(PLAIN, data_pkl=b"\x80\x02)r\xff\xff\xff\x7f."), "something else"),
    "a frame of exabytes": (rebuilt(PLAIN, data_pkl=b"\x80\x04\x95" + b"\xff" * 8 + b"."), "something else"),
    "text of gigabytes": (rebuilt(PLAIN, data_pkl=b"\x80\x02X\xff\xff\xff\x7f."), "damaged"),
    "a pickle without an end": (rebuilt(PLAIN, data_pkl=b"\x80\x02)"), "damaged"),
    "an empty stack": (rebuilt(PLAIN, data_pkl=b"\x80\x02R."), "damaged"),
    "thousands of files": (_many_entries(), "5,000 files"),
    "no description": (rebuilt(PLAIN, data_pkl=None), "no data.pkl"),
    "no numbers": (rebuilt(PLAIN, data__0=None), "0 bytes"),
    "too few numbers": (rebuilt(PLAIN, data__0=bytes(60)), "60 bytes"),
    "too many numbers": (rebuilt(PLAIN, data__0=bytes(68)), "68 bytes"),
    "numbers of another file": (described(PLAIN, key=(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009")), "0 bytes"),
    "numbers outside of the archive": (
        described(PLAIN, key=(b"X\x01\x00\x00\x000", b"X\x05\x00\x00\x00../..")),
        "0 by",
    ),
    "big-endian": (rebuilt(PLAIN, byteorder=b"big"), "big-endian"),
    "a sparse tensor": (saved(torch.eye(HIDDEN).to_sparse()), "to_dense"),
    "compressed rows": (saved(torch.eye(HIDDEN).to_sparse_csr()), "to_dense"),
    "a sparse tensor with indices outside it": (
        saved(torch.sparse_coo_tensor([[10**9], [0]], [1.0], (2, HIDDEN), check_invariants=False)),
        "to_dense",
    ),
    "a tensor on no device": (saved(torch.ones(2, HIDDEN, device="meta")), "meta"),
    "a tensor of a GPU": (described(PLAIN, device=(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")), "cuda:0"),
    "a parameter": (saved(torch.nn.Parameter(torch.ones(2, HIDDEN))), r"\.data"),
    "a list": (saved([torch.ones(2, HIDDEN)]), "something else"),
    "a state dictionary": (saved({"weight": torch.ones(2, HIDDEN)}), "something else"),
    "a module": (saved(torch.nn.Linear(2, 2)), "something else|makes"),
    "a number": (saved(3), "something else"),
    "complex numbers": (saved(torch.ones(2, HIDDEN, dtype=torch.complex64)), "ComplexFloatStorage"),
    "whole numbers": (saved(torch.ones(2, HIDDEN, dtype=torch.int64)), "LongStorage"),
    "fp8": (saved(torch.ones(2, HIDDEN).to(torch.float8_e4m3fn)), "UntypedStorage"),
    "a view of some rows": (saved(torch.ones(9, HIDDEN)[2:4]), "as of a view"),
    "a view of one row, many times": (saved(torch.ones(1, HIDDEN).expand(50, HIDDEN)), "as of a view"),
    "transposed": (saved(torch.ones(HIDDEN, 5).T), "as of a view"),
    "strides beyond the storage": (described(PLAIN, strides=(STRIDES, b"J\xff\xff\xff\x7fK\x01\x86")), "as of a view"),
    "strides of huge numbers": (described(PLAIN, strides=(STRIDES, HUGE + b"K\x01\x86")), "as of a view"),
    "negative strides": (described(PLAIN, strides=(STRIDES, b"J\xf8\xff\xff\xffK\x01\x86")), "another way"),
    "an offset": (described(PLAIN, offset=(b"QK\x00", b"QK\x01")), "begin at 1"),
    "a negative offset": (described(PLAIN, offset=(b"QK\x00", b"QJ\xff\xff\xff\xff")), "begin at -1"),
    "a huge declared shape": (described(PLAIN, shape=(SHAPE, HUGE + b"K\x08\x86")), "rows, but a prompt here"),
    "a huge declared width": (described(PLAIN, shape=(SHAPE, b"K\x02" + HUGE + b"\x86")), "shape"),
    "a negative shape": (described(PLAIN, shape=(SHAPE, b"J\xff\xff\xff\xffK\x08\x86")), "another way"),
    "a shape of other numbers than stored": (described(PLAIN, shape=(SHAPE, b"K\x03K\x08\x86")), "24 numbers"),
    "a storage said to be huge": (described(PLAIN, length=(LENGTH, HUGE + b"t")), "1,152,921,504,606,846,976 in 64"),
    "no rows": (saved(torch.ones(0, HIDDEN)), "0 rows"),
    "too many rows": (saved(torch.ones(101, HIDDEN)), "101 rows"),
    "one dimension": (saved(torch.ones(HIDDEN)), "shape"),
    "a batch": (saved(torch.ones(1, 2, HIDDEN)), r"squeeze\(0\)"),
    "another hidden size": (saved(torch.ones(2, HIDDEN + 1)), "shape"),
    "NaN": (saved(torch.full((2, HIDDEN), torch.nan)), "finite"),
    "infinity": (saved(torch.full((2, HIDDEN), -torch.inf)), "finite"),
    "too large for the model's dtype": (saved(torch.full((2, HIDDEN), 1e300, dtype=torch.float64)), "at most"),
}
with warnings.catch_warnings():  # torch is about to remove them
    warnings.simplefilter("ignore")
    if hasattr(torch, "quantize_per_tensor"):
        quantized = saved(torch.quantize_per_tensor(torch.ones(2, HIDDEN), 0.1, 0, torch.qint8))
        ATTACKS["a quantized tensor"] = quantized, "QInt8Storage"
