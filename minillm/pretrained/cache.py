"""The directory where fetched and converted models lie, and how one gets there whole or not at all.  Lesson 00.

MINILLM_CACHE  the directory; default: minillm in XDG_CACHE_HOME, or in ~/.cache

A model is built in a directory of another name and renamed when it is complete. A lock lets one process build it at a
time: the others wait, and find it. What a killed process left is removed by the next one that builds the same model.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from minillm.errors import ConfigError, MissingPackage
from minillm.folders import how_to_install
from minillm.values import read_json

ORIGIN = "minillm_origin.json"
LAYOUT = 1  # of a converted directory; a change of it makes old ones incomplete, so they are made again
MB = 1e6

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The origin of a converted model; stored in its directory, in the last file written.

    source   in words
    sha256   of the GGUF file
    rounded  the quantized formats that its weights had in that file, such as "Q4_1"; "" if none
    license  "" if it is not known
    """

    source: str
    sha256: str
    rounded: str = ""
    license: str = ""
    layout: int = LAYOUT

    @property
    def remark(self) -> str:
        """Return what to know about this model's quality; "" if nothing."""
        if not self.rounded:
            return ""
        return f"its weights were rounded to {self.rounded} before minillm read them, and the original model is better"


def origin(directory: Path) -> Origin | None:
    """Return the origin of a converted model, or of a model that was quantized from one; None for any other
    directory.
    """
    file = directory / ORIGIN
    if not file.is_file():
        return None
    fields = read_json(file, ConfigError)
    try:
        return Origin(**fields)
    except TypeError:  # written by another version
        return None


def write_origin(directory: Path, origin: Origin) -> None:
    """Mark a directory as complete."""
    (directory / ORIGIN).write_text(json.dumps(asdict(origin), indent=1) + "\n", encoding="utf-8")


def is_complete(directory: Path, sha256: str) -> bool:
    """Return whether a directory of the cache is a whole model, made by this version from the file with that hash."""
    try:
        known = origin(directory)
    except (ConfigError, OSError) as error:  # it is damaged, or in a directory that may not be read
        log.debug("%s", error)
        return False
    return known is not None and (known.sha256, known.layout) == (sha256, LAYOUT)


def cache_directory() -> Path:
    """Return where models are stored; it may not exist. Raises ConfigError if there is no home directory."""
    if named := os.environ.get("MINILLM_CACHE"):
        return Path(named).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:  # a relative path in XDG_CACHE_HOME has no effect, says its specification
        return (base if base.is_absolute() else Path.home() / ".cache") / "minillm"
    except RuntimeError:
        raise ConfigError("there is no home directory for the cache of models: set MINILLM_CACHE") from None


def build(target: Path, sha256: str, needed: int, fill: Callable[[Path], Origin], say: Callable[[str], None]) -> Path:
    """Make a directory of the cache, unless it is complete already; return it.

    needed  bytes that must be free on its disk
    fill    writes the model into an empty directory, and returns its origin
    say     is told when another process builds the same model

    Raises ConfigError, before any work, if the cache is not writable or its disk too full; MissingPackage.
    """
    if is_complete(target, sha256):
        return target
    temporary = target.with_name(f".{target.name}.unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), lambda: say(f"{target}: waiting for another process")):
            if is_complete(target, sha256):
                return target
            shutil.rmtree(temporary, ignore_errors=True)
            check_free(target.parent, needed)
            temporary.mkdir()
            try:
                write_origin(temporary, fill(temporary))
                if target.exists():
                    shutil.rmtree(target)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if isinstance(error, ConnectionError):  # Unreachable
            raise
        raise not_writable(error) from error
    return target


def not_writable(error: OSError) -> ConfigError:
    """Return the error to raise when the cache cannot be written."""
    return ConfigError(
        f"the cache of models, {cache_directory()}, cannot be written: {error.strerror or error}. Free some space "
        "there, or set MINILLM_CACHE to another directory"
    )


def free_bytes(folder: Path) -> int:
    """Return what is free on the disk that holds a directory."""
    return shutil.disk_usage(folder).free


def check_free(folder: Path, needed: int) -> None:
    """Raise ConfigError unless so many bytes are free on the disk that holds `folder`."""
    free = free_bytes(folder)
    if free < needed:
        raise ConfigError(
            f"{folder} has {free / MB:,.0f} MB free, and {needed / MB:,.0f} MB are needed: free some space, or set "
            "MINILLM_CACHE to a directory on another disk"
        )


@contextmanager
def _locked(file: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Hold a lock between processes; it ends with its process. waits: called if another process has it."""
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        how = how_to_install("minillm[models]")
        raise MissingPackage(f"the cache of models needs `filelock`, which is not installed: {how}") from error
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waits()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def model_name(directory: Path) -> str:
    """Return the name by which clients and records know a model: its directory's, or org/name in the Hugging Face
    cache.
    """
    folder, kind, _ = ("", "", "", *directory.parts)[-3:]
    if kind == "snapshots" and folder.startswith("models--"):
        return folder.removeprefix("models--").replace("--", "/")
    return directory.name
