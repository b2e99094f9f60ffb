"""The table of operations: one entry a name, one function that runs now.  Lessons 00 and 04.

Each entry has a plain-torch reference (`reference.py`, the executable specification); a device may have a faster
function for it (`cpu.py`, `triton.py`); and `minillm.using` puts the reader's own function in its place.
"""

import importlib
import inspect
import threading

from minillm.overrides import Parts, register

from . import reference

ENTRIES = (
    "embedding",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "rotary_embedding",
    "gated_activation",
    "write_kv",
    "decode_attention",
    "prefill_attention",
    "lm_head",
    "truncate",
    "sample",
)


def names() -> tuple[str, ...]:
    return ENTRIES


class OperationSet(Parts):
    """The functions that run now on one type of device: `ops.on("cpu").linear(x, weight)`."""

    def __init__(self, device: str):
        self.device = device
        functions, origin = {}, {}
        module, why_not = _fast_module(device)
        for name in ENTRIES:
            fast = getattr(module, name, None)
            functions[name] = fast or getattr(reference, name)
            label = module.__name__.rsplit(".", 1)[-1] if fast else "reference"
            origin[name] = (label, f"faster on {device}" if fast else why_not or "the reference is as fast here")
        super().__init__(functions, origin)


def _fast_module(device: str):
    wanted = {"cpu": "cpu", "cuda": "triton"}.get(device)
    if wanted is None:
        return None, f"no faster functions for {device}"
    try:
        return importlib.import_module(f".{wanted}", __package__), ""
    except ImportError as error:
        return None, f"{wanted} functions cannot be imported ({error})"


_sets: dict[str, OperationSet] = {}
_lock = threading.RLock()


def on(device: str) -> OperationSet:
    """The operations for a device type ("cpu", "cuda"). There is one set a type, shared by all engines."""
    with _lock:
        if device not in _sets:
            _sets[device] = OperationSet(device)
        return _sets[device]


@register
def _sets_here() -> list[OperationSet]:
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else sorted({"cpu", *_sets})
    return [on(device) for device in devices]


def table(device: str = "cpu") -> list[dict[str, str]]:
    """Every operation with what runs for it now and why: name, runs, why, signature."""
    operations = on(device)
    return [
        {
            "name": name,
            "runs": operations.origin[name][0],
            "why": operations.origin[name][1],
            "signature": f"{name}{inspect.signature(getattr(reference, name))}",
        }
        for name in ENTRIES
    ]
