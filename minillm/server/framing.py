"""Messages on the local socket between the engine's process and its HTTP workers.  Lesson 99.

A message is a JSON object and an array of integers (mostly token ids). Unlike a pickle, it cannot execute code.
"""

import json
import struct
from array import array
from collections.abc import Iterable, Iterator

SIZES = struct.Struct("<II")  # bytes of JSON, bytes of numbers that follow it
NUMBER = "q"


def pack(message: dict, numbers: Iterable[int] = ()) -> bytes:
    # UTF-8, not ASCII: escapes would make text in most scripts longer and slower to decode.
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    numbers = numbers if isinstance(numbers, array) else array(NUMBER, numbers)
    head, data = text.encode("utf-8", "surrogatepass"), numbers.tobytes()
    return SIZES.pack(len(head), len(data)) + head + data


class Unpacker:
    """Turns incoming bytes into pairs of (message, numbers), each as soon as it is complete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict, array]]:
        self._held += data
        while len(self._held) >= SIZES.size:
            head, numbers = SIZES.unpack_from(self._held)
            end = SIZES.size + head + numbers
            if len(self._held) < end:
                return
            message = json.loads(self._held[SIZES.size : SIZES.size + head])
            found = array(NUMBER, bytes(self._held[SIZES.size + head : end]))
            del self._held[:end]
            yield message, found
