"""What is built and installed: one name, each source once, and nobody else's modules in the way."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.forked import ROOT, output_of, printed

PARTS = ("aio_native", "offload", "optim", "perf")


def build(kind, source, target, scratch):
    """A wheel or an sdist, with what is installed here; returns its path."""
    code = (
        f"import sys; from scikit_build_core.build import build_{kind} as build\n"
        f"name = build({str(target)!r}, {{'build-dir': {str(scratch)!r}}})\n"
        "print(name, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    printed(done)
    return target / done.stderr.split()[-1]


@pytest.fixture(scope="module")
def sdist(once, tmp_path_factory):
    return once("sdist", lambda folder: build("sdist", ROOT, folder, tmp_path_factory.mktemp("scratch")))


@pytest.fixture(scope="module")
def wheel(once, tmp_path_factory):
    return once("wheel", lambda folder: build("wheel", ROOT, folder, tmp_path_factory.mktemp("scratch")))


def tracked(*folders):
    done = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no clone: git does not know which files belong to it")
    return {name for name in done.stdout.split() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}


def test_each_source_is_once_in_the_sdist(sdist):
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.isfile()]
        names = {member.name.partition("/")[2] for member in members}
        digests = [hashlib.sha256(archive.extractfile(member).read()).hexdigest() for member in members if member.size]
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    assert len(names) == len(members)
    wanted = {f"src/nvme_offload/{name}" for name in tracked(*PARTS) if not name.startswith("perf/results/")}
    assert wanted - names == set()
    assert {name for name in names if name.startswith(PARTS)} == set(), "the links in src lead there"
    assert {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "tests/support/script.py"} <= names
    built = [name for name in names if name.endswith(".so") or name.startswith((".ci", "build"))]
    assert not built + [name for name in names if "/results/" in name]
    for name in wanted:
        digest = hashlib.sha256((ROOT / name.removeprefix("src/nvme_offload/")).read_bytes()).hexdigest()
        assert digests.count(digest) <= 1 or name.endswith("__init__.py"), f"{name} is there twice"


def assert_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert {name.split("/")[0] for name in names} == {"nvme_offload", "nvme_offload-0.1.0.dist-info"}
    assert not [name for name in names if name.endswith((".cpp", ".hpp", ".cmake", ".json", ".md"))]
    checkout_only = tuple(f"perf/{room}/" for room in ("benchmarks", "experiments", "results"))
    assert not [name for name in names if name.removeprefix("nvme_offload/").startswith(checkout_only)]
    installed = {name for name in tracked(*PARTS) if not name.startswith(checkout_only)}
    assert {f"nvme_offload/{name}" for name in installed if name.endswith((".py", ".pyi"))} - names == set()
    assert {"nvme_offload/py.typed", "nvme_offload/__init__.pyi", "nvme_offload/__main__.py"} <= names
    native = sorted(name.split(".")[0] for name in names if name.endswith(".so"))
    assert native == ["nvme_offload/aio_native/_native", "nvme_offload/optim/_kernels"]
    assert "offload = nvme_offload.perf.cli:main" in entries
    licenses = {name.partition("licenses/")[2] for name in names if "licenses/" in name}
    assert licenses == {"LICENSE", "LICENSES/liburing.txt"}
    assert "](docs/" not in metadata, "on a package index the README's links lead to the source"
    always = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE))
    assert always == {"aiofiles", "numpy", "pydantic", "rich", "torch", "typer"}


def test_links_and_pictures_of_the_readme_are_whole_on_a_package_index():
    """There it stands alone: what leads into a checkout leads to the source, and pictures are fetched from there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    for rule in settings["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    assert len(links) > 30
    assert all(link.startswith("https://") for link in links)
    raw = "https://raw.githubusercontent.com/nvme-offload/nvme-offload/main/"
    assert [link.removeprefix(raw) for link in links if link.startswith(raw)] == pictures
    blob = "https://github.com/nvme-offload/nvme-offload/blob/main/"
    for path in [*pictures, *(link.removeprefix(blob) for link in links if link.startswith(blob))]:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(("python", "asked_for"), [("3.11", True), ("3.13", True), ("3.14", False)])
def test_the_binding_is_asked_for_only_where_it_has_wheels(python, asked_for):
    """It has them up to CPython 3.13, and no source: with a newer one pip would refuse the whole package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    pins = [(ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "constraints-clients.txt")]
    lines = [line for page in (project, *map(str.splitlines, pins)) for line in page if line.startswith("pyuring")]
    assert len(lines) == 3
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": python}
    for marker in (Requirement(line).marker for line in lines):
        assert (marker is None or marker.evaluate(machine)) == asked_for


@pytest.mark.slow
def test_contents_of_the_wheel(wheel):
    assert_contents(wheel)


@pytest.mark.slow
def test_a_wheel_is_built_from_the_unpacked_sdist(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert_contents(build("wheel", source, tmp_path, tmp_path / "scratch"))


class Environment:
    """A virtual environment of its own; torch and the like are those of this one."""

    def __init__(self, folder):
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, *what):
        command = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet", "--no-index"]
        options = ["--no-deps", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check"]
        output_of(*command, *options, *what)

    def run(self, program, *arguments, cwd, environment=None):
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return output_of(self.bin / program, *arguments, cwd=cwd, env=kept | (environment or {}))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    environment = Environment(folder / "venv")
    if request.param == "wheel":
        environment.install(request.getfixturevalue("wheel"))
    else:
        environment.install("-C", f"build-dir={folder / 'scratch'}", "-e", ROOT)
    return environment


@pytest.fixture
def workplace(tmp_path):
    """A user's folder, with modules and packages of these names."""
    folder = tmp_path / "project"
    (folder / "drive").mkdir(parents=True)
    (folder / "optim.py").write_text("OWNER = 'user'\n")
    for name in set(PARTS) - {"optim"}:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("OWNER = 'user'\n")
    return folder


def first_example():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"^```python runnable\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    assert "OffloadAdamW(" in code
    return code.replace("/mnt/nvme0", "drive")


@pytest.mark.slow
def test_a_wheel_installs_and_trains_where_there_is_no_compiler(wheel, workplace, tmp_path):
    """Its dependencies come from the package index, as wheels; only what a shell script needs is on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("env", "sh", "uname"):
        (tools / tool).symlink_to(shutil.which(tool))
    venv.create(tmp_path / "venv", with_pip=True)
    path = f"{tmp_path / 'venv' / 'bin'}:{tools}"
    assert not any(shutil.which(compiler, path=path) for compiler in ("cc", "gcc", "g++", "clang", "cmake", "make"))
    (workplace / "constraints.txt").write_text((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    (workplace / "train.py").write_text(first_example() + "\nprint(optimizer.stats().steps)\n")

    def run(*command):
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= {"PATH": path, "HOME": str(tmp_path)}
        return output_of(*command, cwd=workplace, env=environment)

    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--only-binary", ":all:", "-c", "constraints.txt", wheel)
    assert run(python, "train.py").splitlines()[-1] == "3"
    assert "folder: exists and can be written" in run(tmp_path / "venv" / "bin" / "offload", "doctor", "drive")
    assert list((workplace / "drive").iterdir()) == []


OWNERS = f"""
import {", ".join(PARTS)}
assert {{m.OWNER for m in ({", ".join(PARTS)})}} == {{OWNER}}, "another's module was imported"
"""


@pytest.mark.slow
def test_the_readmes_example_runs_beside_a_users_modules(installed, workplace):
    check = "\nimport nvme_offload, sys\nassert optimizer.stats().steps == 3\nprint(nvme_offload.__path__[0])\n"
    (workplace / "train.py").write_text("OWNER = 'user'\n" + OWNERS + first_example() + check + OWNERS)
    found = installed.run("python", "train.py", cwd=workplace)
    assert Path(found.splitlines()[-1]) != Path(sysconfig.get_path("purelib"), "nvme_offload")
    assert list((workplace / "drive").iterdir()) == []


@pytest.mark.slow
def test_the_command_runs_beside_a_users_modules(installed, workplace):
    version = importlib.metadata.version("nvme-offload")
    assert installed.run("offload", "--version", cwd=workplace) == f"offload {version}\n"
    assert installed.run("python", "-m", "nvme_offload", "--version", cwd=workplace) == f"offload {version}\n"
    assert "Measure and check" in installed.run("offload", "--help", cwd=workplace)
    plan = json.loads(installed.run("offload", "plan", "--params", "1e6", "--layers", "2", "--json", cwd=workplace))
    assert plan["bytes_per_rank"]["process"]["host"] > 100 << 20, "the libraries were weighed"
    bench = ("--path", "drive", "--size", "8MiB", "--bs", "64KiB", "--runtime", "0", "--direct", "optional", "--json")
    assert json.loads(installed.run("offload", "bench", *bench, cwd=workplace))["verified"] is True
    assert list((workplace / "drive").iterdir()) == []
