"""A model is in the cache whole or not at all, whatever happens to the process that builds it."""

import subprocess
import sys
from pathlib import Path

import pytest

from minillm import ConfigError
from minillm.pretrained import cache

ROOT = Path(__file__).resolve().parents[2]
FOUND = cache.Origin("a test", "abc")
# Builds a model in argv[1]. `fill` writes half of it, says so, and waits until a file "go" is there.
BUILDER = """
import sys, time
from pathlib import Path
from minillm.pretrained import cache

target = Path(sys.argv[1])

def fill(folder):
    (folder / "weights").write_text("half")
    print("filling", flush=True)
    while not (target.parent / "go").exists():
        time.sleep(0.01)
    return cache.Origin("a test", "abc")

print(cache.build(target, "abc", 0, fill, lambda line: print("waiting", flush=True)), flush=True)
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    return tmp_path / "models" / "small"


def start(target: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(target)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def fill(folder: Path) -> cache.Origin:
    assert not list(folder.iterdir())
    (folder / "weights").write_text("all")
    return FOUND


def never(folder: Path) -> cache.Origin:
    raise AssertionError("it was built again")


def quiet(line: str) -> None:
    pass


def test_a_killed_process_leaves_nothing_that_looks_complete(target):
    with start(target) as process:
        assert process.stdout.readline() == "filling\n"
        process.kill()
    assert not cache.is_complete(target, "abc")
    assert cache.build(target, "abc", 0, fill, quiet) == target
    assert (target / "weights").read_text() == "all" and cache.origin(target) == FOUND
    left = {path.name for path in target.parent.iterdir()} - {".small.lock"}
    assert left == {"small"}, "what the killed process had written is still there"


def test_of_two_processes_one_builds_and_the_other_waits_for_it(target):
    with start(target) as first:
        assert first.stdout.readline() == "filling\n"
        with start(target) as second:
            assert second.stdout.readline() == "waiting\n"
            (target.parent / "go").touch()
            assert first.stdout.read() == f"{target}\n"
            assert second.stdout.read() == f"{target}\n", "it built the model again"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError("bad"), RuntimeError("a bug")])
def test_an_error_midway_leaves_nothing_and_is_raised_as_it_is(target, error):
    def interrupted(folder):
        (folder / "weights").write_text("half")
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        cache.build(target, "abc", 0, interrupted, quiet)
    assert {path.name for path in target.parent.iterdir()} == {".small.lock"}


def test_a_complete_model_is_not_built_again(target):
    cache.build(target, "abc", 0, fill, quiet)
    assert cache.build(target, "abc", 0, never, quiet) == target


@pytest.mark.parametrize("change", ["another file", "another layout", "no origin"])
def test_an_older_or_unfinished_directory_is_replaced(target, change):
    cache.build(target, "abc", 0, fill, quiet)
    (target / "left over").touch()
    if change == "another layout":
        cache.write_origin(target, cache.Origin("a test", "abc", layout=0))
    if change == "no origin":
        (target / cache.ORIGIN).unlink()
    wanted = "new" if change == "another file" else "abc"
    cache.build(target, wanted, 0, lambda folder: cache.Origin("a test", fill(folder) and wanted), quiet)
    assert cache.is_complete(target, wanted) and not (target / "left over").exists()


def test_a_disk_without_room_is_refused_before_any_work(target, monkeypatch):
    monkeypatch.setattr(cache, "free_bytes", lambda place: 999_000_000)
    with pytest.raises(
        ConfigError, match="999 MB free, and 1,000 MB are needed: free some space, or set MINILLM_CACHE"
    ):
        cache.build(target, "abc", 1_000_000_000, never, quiet)
    assert cache.build(target, "abc", 999_000_000, fill, quiet) == target


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"{tmp_path / 'file'}, cannot be written: .*set MINILLM_CACHE"):
        cache.build(tmp_path / "file" / "models" / "small", "abc", 0, never, quiet)


def test_a_disk_that_fills_up_midway_is_one_sentence(target):
    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="cannot be written: No space left on device. Free some space"):
        cache.build(target, "abc", 0, full, quiet)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MINILLM_CACHE": "/here", "XDG_CACHE_HOME": "/there"}, "/here"),
        ({"XDG_CACHE_HOME": "/there"}, "/there/minillm"),
        ({"XDG_CACHE_HOME": "relative"}, "HOME/.cache/minillm"),  # has no effect, says its specification
        ({"XDG_CACHE_HOME": ""}, "HOME/.cache/minillm"),
        ({"MINILLM_CACHE": ""}, "HOME/.cache/minillm"),
        ({"MINILLM_CACHE": "~/models"}, "HOME/models"),
    ],
)
def test_the_cache_is_where_the_environment_puts_it(tmp_path, monkeypatch, variables, expected):
    for name in ("MINILLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(cache.cache_directory()) == expected.replace("HOME", str(tmp_path))


def test_a_model_of_the_hub_has_its_name_and_not_its_commits():
    assert cache.model_name(Path("/cache/models--org--some-name/snapshots/0123abc")) == "org/some-name"
    assert cache.model_name(Path("/models/tiny-gemma")) == "tiny-gemma"
    assert cache.model_name(Path("tiny-gemma")) == "tiny-gemma"
