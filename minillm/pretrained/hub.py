"""A model of the Hugging Face Hub as a directory that the engine can load.  Lesson 00.

The library `huggingface_hub` does the work, with the user's token, cache and environment variables (HF_TOKEN, HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE). It is imported only when a model is fetched. This module chooses the files, looks in the
cache when the Hub does not answer, and says in one sentence what is missing and how to get it.

The cache's layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from minillm.errors import ConfigError, MinillmError, MissingPackage
from minillm.folders import how_to_install
from minillm.values import read_json, shown

MAIN = "main"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# The last three say how a checkpoint is quantized, where config.json does not.
CONFIG_FILES = (CONFIG, "generation_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
FORM = "org/name or org/name@revision"

# The Hub's rules for a name: its two parts begin and end with a letter, a digit or an underscore.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+/-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
GB = 1e9

log = logging.getLogger(__name__)


def is_repository(text: object) -> bool:
    """Return whether `text` has the form of a model on the Hub, org/name or org/name@revision.

    "data/tiny-gemma" has it too. So a caller that accepts both looks for a directory of that name first, and a
    directory wins. The name of a model's file, such as "models/small.gguf", is never a repository.
    """
    return isinstance(text, str) and _is_name(text.partition("@")[0])


def _is_name(name: str) -> bool:
    forbidden = "--" in name or ".." in name or name.endswith((".git", ".gguf", ".safetensors"))
    return bool(_NAME.fullmatch(name)) and not forbidden


def snapshot(repository: str, *, revision: str | None = None, tokenizer_only: bool = False) -> Path:
    """Return the directory of a model in the Hub's cache, after downloading what the cache lacks.  Lesson 00.

    repository      "org/name" or "org/name@revision"
    revision        a branch, a tag or a commit; default: the main branch
    tokenizer_only  whether to fetch only the tokenizer's files

    Only the files that the engine reads are downloaded: the configuration, the tokenizer and the weights in
    safetensors. Nothing is downloaded, or even asked, for a commit that is in the cache. A branch or a tag is looked up
    at each call; without a connection, the copy in the cache is used. A finished file is never downloaded again.
    Raises ConfigError, which names what is missing and the way to get it; MissingPackage.
    """
    name, revision = _parse(repository, revision)
    model = _Model(_library(), name, revision)
    cached = model.cached()
    lacks = _lacks(cached, tokenizer_only) if cached else []
    complete = None if lacks else cached
    if complete is not None and _COMMIT.fullmatch(revision):
        return complete
    try:
        commit, names = model.listing()
    except _Unavailable as error:
        if complete is not None and error.recoverable:
            if not model.offline:
                log.warning("%s; the copy in the cache is used: %s", error, complete)
            return complete
        state = f", and {model} is neither a directory nor in the cache at {model.cache}"
        if lacks:
            state = f", and the copy of {model} in the cache lacks {_listed(lacks)}"
        elif error.answered:  # it has no model to download, whatever the cache holds
            state = ""
        raise ConfigError(f"{error}{state}: {error.way_out}") from error
    return model.download(commit, names, tokenizer_only)


def _parse(repository: str, revision: str | None) -> tuple[str, str]:
    """Return a repository's name and its revision. Raises ConfigError."""
    if not isinstance(repository, str) or not is_repository(repository):
        raise ConfigError(
            f"a model on the Hugging Face Hub is named {FORM}, with letters, digits and -_. in its two parts, "
            f"not {shown(repository)}"
        )
    name, at, given = repository.partition("@")
    if at and revision is not None and given != revision:
        raise ConfigError(f"{repository} names the revision {given!r} and revision={revision!r} another: give one")
    asked = given if at else MAIN if revision is None else revision
    if not isinstance(asked, str) or not _REVISION.fullmatch(asked) or ".." in asked or asked.endswith("/"):
        raise ConfigError(f"a revision of {name} is a branch, a tag or a commit, such as main, not {shown(asked)}")
    return name, asked


def _library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        how = how_to_install("huggingface_hub")
        raise MissingPackage(
            f"models of the Hugging Face Hub are fetched with `huggingface_hub`, which is not installed: {how}"
        ) from error
    return huggingface_hub


class _Unavailable(MinillmError):
    """A model cannot be had from the Hub.

    way_out: what to do about it. answered: whether the Hub refused; else it could not be asked, or a file not be
    written. recoverable: whether a copy in the cache may be used instead.
    """

    def __init__(self, why: str, way_out: str, answered: bool = False, recoverable: bool = True):
        super().__init__(why)
        self.way_out, self.answered, self.recoverable = way_out, answered, recoverable


class _Model:
    """One revision of a model: on the Hub and in the cache."""

    def __init__(self, hub: ModuleType, name: str, revision: str):
        self.hub, self.name, self.revision = hub, name, revision
        self.api = hub.HfApi(library_name="minillm")
        self.offline = bool(hub.constants.HF_HUB_OFFLINE)
        self.site = hub.constants.ENDPOINT
        self.cache = Path(hub.constants.HF_HUB_CACHE).expanduser()
        self.folder = self.cache / f"models--{name.replace('/', '--')}"
        self.command = f"hf download {name}" + ("" if revision == MAIN else f" --revision {revision}")

    def __str__(self) -> str:
        return self.name if self.revision == MAIN else f"{self.name}@{self.revision}"

    def cached(self) -> Path | None:
        """Return the snapshot of this revision in the cache, which may lack files."""
        commit = self.revision
        if not _COMMIT.fullmatch(commit):
            try:
                commit = (self.folder / "refs" / self.revision).read_text().strip()
            except (OSError, ValueError):
                return None
        snapshot = self.folder / "snapshots" / commit
        return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None

    def listing(self) -> tuple[str, list[str]]:
        """Return the commit that the revision stands for on the Hub, and the names of its files. Raises
        _Unavailable.
        """
        if self.offline:
            raise _Unavailable(
                "HF_HUB_OFFLINE is set", f"unset it, or fetch the model where there is a network with `{self.command}`"
            )
        try:
            seconds = self.hub.constants.HF_HUB_ETAG_TIMEOUT
            info = self.api.model_info(self.name, revision=self.revision, timeout=seconds)
            commit, names = info.sha, [each.rfilename for each in info.siblings]
        except (OSError, self.hub.errors.HTTPError) as error:
            raise self.reason(error) from error
        except (ValueError, KeyError, TypeError, AttributeError):
            commit, names = None, []
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):  # a login page or a proxy
            raise _Unavailable(
                f"{self.site} does not answer as the Hugging Face Hub does",
                f"check HF_ENDPOINT and the proxy, then try `{self.command}`",
            )
        return commit, names

    def download(self, commit: str, names: Collection[str], tokenizer_only: bool) -> Path:
        """Download what the cache lacks of a commit with these files. Raises ConfigError."""
        small = [name for name in TOKENIZER_FILES if name in names]
        if not tokenizer_only:
            self._check_kind(names)
            small += [name for name in (*CONFIG_FILES, INDEX) if name in names]
        elif TOKENIZER not in names:
            raise ConfigError(f"{self} has no {TOKENIZER}, the one format of tokenizers that minillm reads")
        try:
            # The weights are last: where they are, everything else is, even after an interrupted download.
            paths = [self._fetch(commit, name) for name in small]
            if not tokenizer_only:
                weights = self._weights(names, Path(paths[0]).parent)
                self._check_space(commit, weights)
                paths += [self._fetch(commit, name) for name in weights]
        except (OSError, RuntimeError, ValueError, self.hub.errors.HTTPError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = self.reason(error)
            which = "" if reason.answered else f"{self} could not be downloaded because "
            raise ConfigError(f"{which}{reason}: {reason.way_out}") from error
        self._remember(commit)
        return Path(paths[0]).parent

    def _fetch(self, commit: str, name: str) -> str:
        return self.api.hf_hub_download(self.name, name, revision=commit)

    def _check_kind(self, names: Collection[str]) -> None:
        """Raise ConfigError unless these files are a model's, with weights in safetensors."""
        weights, ggufs = _of_kind(names, ".safetensors"), _of_kind(names, ".gguf")
        if ggufs and not weights:
            raise ConfigError(
                f"{self} has its weights only as GGUF ({_listed(ggufs)}), not as safetensors: name a repository with "
                f"safetensors, or download one file with `{self.command} {ggufs[0]}` and name that file"
            )
        if "adapter_config.json" in names and CONFIG not in names:
            raise ConfigError(f"{self} is an adapter for another model: name a repository that has the whole model")
        if CONFIG not in names:
            raise ConfigError(f"{self} has no {CONFIG} in transformers' layout: name a repository that has one")
        if not weights:
            pickled = [name for ending in (".bin", ".pt", ".pth") for name in _of_kind(names, ending)]
            if not pickled:
                raise ConfigError(f"{self} has no weights: name a repository with *.safetensors")
            raise ConfigError(
                f"{self} has no *.safetensors, only {_listed(pickled)}, which minillm does not read: convert it with "
                f'transformers: AutoModelForCausalLM.from_pretrained("{self.name}").save_pretrained("converted")'
            )

    def _weights(self, names: Collection[str], folder: Path) -> list[str]:
        """Return the safetensors files to load, chosen as the loader does. Raises ConfigError."""
        if INDEX not in names:
            return [SINGLE] if SINGLE in names else _of_kind(names, ".safetensors")
        weights = _in_index(folder)
        if absent := [name for name in weights if name not in names]:
            raise ConfigError(f"{INDEX} of {self} names {_listed(absent)}, which the repository lacks")
        return weights

    def _check_space(self, commit: str, names: list[str]) -> None:
        """Raise ConfigError if the files that the cache lacks do not fit on its disk."""
        files = [self.api.hf_hub_download(self.name, name, revision=commit, dry_run=True) for name in names]
        needed = sum(each.file_size or 0 for each in files if each.will_download)
        free = shutil.disk_usage(self.folder).free if needed else 0
        if needed > free:
            raise ConfigError(
                f"{self} needs {needed / GB:.1f} GB more, and {self.cache} has {free / GB:.1f} GB free: free some "
                "space, or set HF_HOME to a directory on a larger disk"
            )

    def _remember(self, commit: str) -> None:
        """Note in the cache which commit the revision stands for. Only now: before, its files were not complete."""
        ref = self.folder / "refs" / self.revision
        try:
            if self.revision == commit or (ref.is_file() and ref.read_text() == commit):
                return
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            new.write_text(commit)
            new.replace(ref)  # at once: another process may be reading it
        except OSError as error:  # a complete cache may be read-only
            log.debug("%s could not be written: %s", ref, error)

    def reason(self, error: Exception) -> _Unavailable:
        """Return what an error of the library means, and the way out."""
        errors = self.hub.errors
        while isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the library wraps what happened
        if isinstance(error, errors.HfHubHTTPError):
            return self._refusal(error)
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return _Unavailable(
                f"the disk of {self.cache} is full", "free some space, or set HF_HOME to a directory on a larger disk"
            )
        if isinstance(error, OSError) and error.filename is not None:
            return _Unavailable(
                f"{error.filename} cannot be written ({error.strerror})",
                f"make the cache at {self.cache} writable, or set HF_HOME to a directory that is",
            )
        if "TimeoutException" in {each.__name__ for each in type(error).__mro__}:  # of the HTTP client it uses
            return _Unavailable(f"{self.site} does not answer", f"check the network, then try `{self.command}`")
        if isinstance(error, errors.HTTPError):
            way_out = f"check the network and HF_ENDPOINT, then try `{self.command}`"
            return _Unavailable(f"{self.site} cannot be reached ({_first_line(error)})", way_out)
        again = f"try again with `{self.command}`, which keeps the finished files"
        return _Unavailable(f"huggingface_hub reports {_first_line(error)}", again)

    def _refusal(self, error: Any) -> _Unavailable:
        """Return what an answer of the Hub with an error means, and the way out."""
        errors, status, has_token = self.hub.errors, error.response.status_code, bool(self.hub.get_token())
        page, login = f"{self.site}/{self.name}", "log in with `hf auth login` or set HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            why = f"{self.name} is gated"
            way_out = (
                f"accept its terms at {page}, {'with the account of your token' if has_token else f'then {login}'}"
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = f"{self.site} has no model {self.name}, or it is private"
            private = "use a token that may read it" if has_token else login
            way_out = f"check the spelling, or name a directory that exists; if it is private, {private}"
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f"{self.name} has no revision {self.revision}"
            way_out = f"its branches, tags and commits are at {page}/tree/{MAIN}"
            return _Unavailable(why, way_out, answered=True, recoverable=False)
        elif isinstance(error, errors.DisabledRepoError):
            why, way_out = f"{self.name} is disabled on {self.site}", "use another model"
        elif status == 401:
            why, way_out = f"{self.site} rejects the token", f"{login} with a valid one, or remove it"
        elif status == 403:
            why = f"the token may not read {self.name}"
            way_out = f"give it the right to at {self.site}/settings/tokens, or use another"
        elif status == 429:
            why, way_out = f"{self.site} has had too many requests from here", f"wait some minutes, or {login}"
        else:
            why, way_out = f"{self.site} answers with status {status}", f"try again later with `{self.command}`"
            return _Unavailable(why, way_out)
        return _Unavailable(why, way_out, answered=True)


def _lacks(folder: Path, tokenizer_only: bool) -> list[str]:
    """Return the files that a snapshot in the cache lacks to be loaded, as far as its own files say. Raises
    ConfigError.
    """
    if tokenizer_only:
        return [] if (folder / TOKENIZER).is_file() else [TOKENIZER]
    lacks = [] if (folder / CONFIG).is_file() else [CONFIG]
    found = [path.name for path in folder.glob("*.safetensors") if path.is_file()]
    if (folder / INDEX).is_file():
        return lacks + [name for name in _in_index(folder) if not (folder / name).is_file()]
    if any(map(_SHARD.search, found)):
        return [*lacks, INDEX]
    return lacks if found else [*lacks, SINGLE]


def _in_index(folder: Path) -> list[str]:
    """Return the files that a snapshot's index names. Raises ConfigError."""
    placed = read_json(folder / INDEX, ConfigError).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise ConfigError(f"{folder / INDEX}: weight_map must give each tensor's file by its name, not {shown(placed)}")
    return sorted(set(placed.values()))


def _of_kind(names: Collection[str], ending: str) -> list[str]:
    """Return the files with this ending, without those in folders, which hold the weights for other programs."""
    return sorted(name for name in names if name.endswith(ending) and "/" not in name)


def _listed(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _first_line(error: Exception) -> str:
    text = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
