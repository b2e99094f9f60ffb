"""pyproject.toml, requirements.lock, environment.yml and the code's imports agree."""

import ast
import re
import sys
import tomllib
from importlib.metadata import metadata, packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import minillm
from minillm import cli
from minillm.bench import records
from minillm.course import doctor

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11.0", "3.12.0", "3.13.0"]
# Packages the GPU benchmark machine lacks: importing one at the top of a module would break a measurement.
LATE = {"fastapi", "uvicorn", "pydantic", "pydantic_core", "datasets"}
LATE |= {"ipykernel", "jupytext", "nbval", "openai", "zmq"}


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in found if each.name != "minillm"}


def declared() -> dict[str, Requirement]:
    """All requirements but those of the extra `ray`, which has a lock of its own."""
    extras = PROJECT["optional-dependencies"]
    groups = [PROJECT["dependencies"], *(group for name, group in extras.items() if name != "ray")]
    return requirements([line for group in groups for line in group])


def locked(name: str = "requirements.lock") -> dict[str, Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return requirements([line for line in lines if line and not line.startswith("#")])


def test_no_locked_package_needs_a_newer_python_than_the_project():
    """Debian 12, for example, comes with Python 3.11.2."""
    needs = {name: metadata(name).get("Requires-Python") for name in locked() if name not in for_other_systems()}
    assert len(needs) > 100
    too_new = {name: need for name, need in needs.items() if need and not set(PYTHONS) <= allowed(need)}
    assert not too_new


def for_other_systems() -> set[str]:
    """Locked packages that this system does not install."""
    return {name for name, each in locked().items() if each.marker and not each.marker.evaluate()}


def allowed(need: str) -> set[str]:
    return set(SpecifierSet(need).filter(PYTHONS))


def conda() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def conda_pins() -> dict[str, Requirement]:
    pip = next(each["pip"] for each in conda()["dependencies"] if isinstance(each, dict))
    return requirements([line for line in pip if not line.startswith("-")])


def pin(requirement: Requirement) -> str:
    (only,) = requirement.specifier
    assert only.operator == "==", f"{requirement} is not pinned exactly"
    return only.version


def modules() -> list[Path]:
    return [path for folder in ("minillm", "kernels", "data", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path, top_level: bool = False) -> set[str]:
    """Names of the packages a module imports; top_level: only those needed to import it."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_every_declared_package_is_locked_within_its_range():
    pins = locked()
    for name, requirement in declared().items():
        assert name in pins, f"{name} is in pyproject.toml but not in requirements.lock: run make lock"
        assert requirement.specifier.contains(pin(pins[name])), f"{pins[name]} is outside {requirement}"


def test_the_lock_pins_everything_exactly_once_and_torch_first():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert lines[0].startswith("torch==")
    assert len(lines) == len(locked())
    for requirement in locked().values():
        pin(requirement)


def test_ray_has_a_lock_of_its_own_which_pins_nothing_that_the_other_one_pins():
    needed = requirements(PROJECT["optional-dependencies"]["ray"])
    pins = locked("requirements-ray.lock")
    assert not pins.keys() & locked().keys() and len(pins) > 10
    assert needed["ray"].specifier.contains(pin(pins["ray"]))
    assert all(pin(each) for each in pins.values())
    others = [lines for name, lines in PROJECT["optional-dependencies"].items() if name != "ray"]
    assert not any("ray" in re.split(r"[^\w-]", line) for lines in others for line in lines), "`make demo` installs it"


def test_the_lock_contains_no_host_and_no_local_version():
    names = ("requirements.lock", "requirements-ray.lock", "environment.yml")
    text = "".join((ROOT / name).read_text() for name in names)
    assert "//" not in text
    assert "+" not in text, "a local version (+cpu, +cu130) exists on one index only"


def test_triton_is_required_only_on_linux():
    for place in (declared(), locked(), conda_pins()):
        marker = place["triton"].marker
        assert marker.evaluate({"sys_platform": "linux"})
        assert not marker.evaluate({"sys_platform": "darwin"})


def test_conda_gets_the_declared_packages_at_the_locks_versions():
    pins = conda_pins()
    assert pins.keys() == declared().keys()
    for name, requirement in pins.items():
        assert str(requirement) == str(locked()[name])


def test_condas_python_is_one_the_project_supports():
    (line,) = [each for each in conda()["dependencies"] if str(each).startswith("python=")]
    versions = Requirement("python" + PROJECT["requires-python"]).specifier
    assert versions.contains(line.split("=")[1])


def supported(version: str) -> bool:
    return Requirement("python" + PROJECT["requires-python"]).specifier.contains(version)


def test_the_supported_pythons_are_the_same_everywhere():
    """In pyproject.toml, in what continuous integration runs, in `minillm doctor`, in both make files."""
    assert all(map(supported, PYTHONS)) and not supported("3.10.14") and not supported("3.15.0")
    minors = [version.rpartition(".")[0] for version in PYTHONS]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == minors
    assert [".".join(map(str, each)) for each in doctor.TESTED] == minors
    assert all(supported(f"{major}.{minor}.0") for major, minor in doctor.UNTESTED)
    bounds = "(3, 11) <= sys.version_info[:2] < (3, 15)"
    for name in ("Makefile", "make.py"):
        assert bounds in (ROOT / name).read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert set(makefile.split("PYTHONS := ")[1].splitlines()[0].split()) >= {f"python{minor}" for minor in minors}


def test_everything_the_engine_imports_is_declared():
    owners = packages_distributions()
    known = declared() | requirements(PROJECT["optional-dependencies"]["ray"])
    ours = {"minillm", *(path.stem for path in (ROOT / "data").iterdir())}
    for path in modules():
        for name in imports(path) - sys.stdlib_module_names - ours:
            candidates = {canonicalize_name(each) for each in owners.get(name, [name])}
            assert candidates & known.keys(), f"{path.relative_to(ROOT)} imports {name}, which nothing declares"


def test_packages_a_gpu_machine_may_lack_are_imported_late():
    """Internal modules of the server and of the course's builder are imported late themselves."""
    for path in modules():
        inside = path.relative_to(ROOT).parts[:2]
        if inside == ("minillm", "server") or path.name in ("build.py", "lesson.py"):
            continue
        late = imports(path, top_level=True) & LATE
        assert not late, f"{path.relative_to(ROOT)} imports {late} at its top: import it where it is used"


def test_the_version_is_stated_in_one_place():
    """`minillm/version.py` is the one statement of it: packaging reads it there, everything else imports it."""
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    stated = [
        str(path.relative_to(ROOT))
        for folder in ("minillm", "kernels", "tools", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".toml") and "data" not in path.parts
        if minillm.__version__ in path.read_text(encoding="utf-8")
    ]
    assert stated == ["minillm/version.py"]
    assert minillm.__version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.opt")[0]
    assert CliRunner().invoke(cli.app, ["--version"]).stdout.strip() == minillm.__version__
    assert records.versions()["minillm"] == minillm.__version__
