"""Wheel, sdist and editable install hold the modules behind the links, and leave other people's names alone."""

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kvguard.kernels.native import extension

LINKS = ("kernels", "adapters", "fault_injection")
MODULES = ("kvguard", *(f"kvguard.{link}" for link in LINKS), "kvguard.config", "kvguard.cli")
PACKED = ("*.py", "*.pyi", "*.json", "*.safetensors", "*.j2", "*.html", "*.md", "py.typed")
DECLARED = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
MODULES_IN_C = DECLARED["tool"]["setuptools"]["ext-modules"]
EXTENSIONS = tuple(module["name"] for module in MODULES_IN_C)
SOURCES = tuple(source for module in MODULES_IN_C for source in module["sources"])
HEADERS = tuple({header for module in MODULES_IN_C for header in module["depends"]})
needs_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C compiler, or no Python.h",
)
DATA = ("words.json", "weights.safetensors", "report.html.j2", "report.html", "README.md")


@pytest.mark.parametrize("link", LINKS)
def test_links_resolve(link: str, root: Path) -> None:
    """kvguard/NAME is a relative link to the folder NAME beside it."""
    path = root / "kvguard" / link
    assert os.readlink(path) == f"../{link}"
    assert path.resolve() == root / link and path.is_dir()


@needs_a_compiler
@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_can_be_built_here_is_built_here(name: str) -> None:
    """With a C compiler at hand no other test leaves out what is in C: `make env` has built it."""
    assert extension(name) is not None


@pytest.mark.parametrize("link", LINKS)
def test_linked_folders_are_namespace_portions(link: str, root: Path) -> None:
    """A linked folder has a stub for type checkers but no __init__.py, which would shadow another project's package."""
    assert not (root / link / "__init__.py").exists()
    assert (root / link / "__init__.pyi").exists()


@pytest.mark.parametrize("name", LINKS)
def test_packages_of_the_same_name_stay_importable(
    name: str, root: Path, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """With the repository first on sys.path, `import kernels` still gives Hugging Face's package and not our folder."""
    # A stand-in: with the real package installed, transformers would change its behaviour in all other tests.
    theirs = tmp_path / name / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("")
    code = (
        f"import site\nsys.path.append({str(tmp_path)!r})\nassert sys.path[0] == {str(root)!r}\n"
        f"import {name}, kvguard.{name}\nprint({name}.__file__)\nprint(*kvguard.{name}.__path__)\n"
    )
    their_file, our_folder = run_python(code).splitlines()
    assert their_file == str(theirs)
    assert Path(our_folder).resolve() == root / name


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packaging needs, with a data file of each kind; building in it leaves the repository alone."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("kvguard", *LINKS):
        # What was built in place here does not count: it is built there, or not.
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
        shutil.copytree(root / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        if (root / name).exists():
            shutil.copy(root / name, copy / name)
    (copy / "fault_injection" / "probe").mkdir()
    for name in DATA:
        (copy / "fault_injection" / "probe" / name).write_text("{}")
    return copy


def quietly(*command: str, **environment: str) -> None:
    """Runs a command, with these variables, and shows what it printed only where it fails."""
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def built(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, both built straight from the tree."""
    dist = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel"]
    quietly(*build, "--outdir", str(dist), str(project))
    return dist


def pip_install(*arguments: str, **environment: str) -> None:
    """pip install without dependencies, network or a build environment of its own."""
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    quietly(sys.executable, "-m", "pip", "install", *options, *arguments, **environment)


def imported_from(installed: Path, tmp_path: Path, *, follow_pth: bool, native: bool | None = None) -> list[str]:
    """Imports every module in a Python that sees our dependencies but no other kvguard, and says where from.

    `native`: whether the extensions must be there, or must not.
    """
    code = (
        f"import sys, site, importlib, importlib.util\n"
        f"sys.path.insert(0, {str(installed)!r})\n"
        f"{follow_pth} and site.addsitedir({str(installed)!r})\n"
        f"sys.path.extend({site.getsitepackages()!r})\n"  # as plain entries: an editable kvguard there stays unseen
        f"for name in {MODULES!r}:\n"
        f"    print(list(importlib.import_module(name).__spec__.submodule_search_locations or [])\n"
        f"          or importlib.import_module(name).__file__)\n"
    )
    if native is not None:
        code += (
            f"for name in {EXTENSIONS!r}:\n"
            f"    assert (importlib.util.find_spec(name) is not None) is {native}, name\n"
            f"    {native} and importlib.import_module(name)\n"
            f"from kvguard.kernels import host_check\n"
            f"assert host_check.is_built() is {native}\n"
        )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_a_built_distribution_imports(pattern: str, built: Path, tmp_path: Path) -> None:
    """The wheel and the sdist, installed without dependencies, import from where they were installed."""
    (distribution,) = built.glob(pattern)
    installed = tmp_path / "installed"
    pip_install("--target", str(installed), str(distribution))
    assert all(str(installed) in place for place in imported_from(installed, tmp_path, follow_pth=False))


@pytest.mark.slow
def test_an_editable_install_imports(project: Path, tmp_path: Path) -> None:
    """An editable install imports from the tree, through the links."""
    installed = tmp_path / "installed"
    pip_install("--target", str(installed), "--editable", str(project))
    assert all(str(project) in place for place in imported_from(installed, tmp_path, follow_pth=True))


@pytest.mark.slow
def test_the_wheel_holds_what_the_tree_holds(built: Path, project: Path) -> None:
    """The wheel holds each module and data file behind the links, and no top-level package but kvguard."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        Path(folder, file).relative_to(project).as_posix()
        for folder, _, files in os.walk(project / "kvguard", followlinks=True)
        for file in files
        if any(fnmatch(file, pattern) for pattern in PACKED)
    }
    native = {name for name in names if name.endswith((".so", ".pyd"))}
    assert names - native == expected
    assert {f"kvguard/fault_injection/probe/{name}" for name in DATA} <= names
    assert "kvguard/py.typed" in names and "kvguard/kernels/__init__.pyi" in names


@pytest.mark.slow
@needs_a_compiler
def test_the_wheel_holds_the_extensions_for_every_later_python(built: Path, tmp_path: Path) -> None:
    """Built against the stable ABI, which file names and the wheel's tag say; they are what is imported."""
    (wheel,) = built.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        native = sorted(name for name in archive.namelist() if name.endswith(".so"))
    assert native == sorted(f"{name.replace('.', '/')}.abi3.so" for name in EXTENSIONS)
    installed = tmp_path / "installed"
    pip_install("--target", str(installed), str(wheel))
    imported_from(installed, tmp_path, follow_pth=False, native=True)


@pytest.mark.slow
def test_the_sdist_holds_the_c_sources(built: Path) -> None:
    """Whoever installs from it can build them."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SOURCES, *HEADERS} <= names


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True])
def test_without_a_compiler_it_installs_and_imports(editable: bool, project: Path, tmp_path: Path) -> None:
    """A compiler that fails costs the extensions, not the install."""
    installed, copy = tmp_path / "installed", tmp_path / "copy"
    # A copy: what another test has built in place would be found there.
    shutil.copytree(project, copy, symlinks=True, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info"))
    pip_install("--target", str(installed), *["--editable"] * editable, str(copy), CC="false")
    imported_from(installed, tmp_path, follow_pth=editable, native=False)


@pytest.mark.slow
@needs_a_compiler
def test_an_editable_install_builds_the_extensions_in_the_tree(project: Path, tmp_path: Path) -> None:
    """Where the Python is."""
    copy = tmp_path / "copy"
    shutil.copytree(project, copy, symlinks=True, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info"))
    installed = tmp_path / "installed"
    pip_install("--target", str(installed), "--editable", str(copy))
    imported_from(installed, tmp_path, follow_pth=True, native=True)
    for source in SOURCES:
        assert list((copy / source).parent.glob("*.abi3.so")), source


@pytest.mark.slow
def test_the_wheel_declares_the_command_line(built: Path) -> None:
    """The wheel declares the script, the campaign command, and the plug-ins of vLLM, SGLang and pytest."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        declared = archive.read(name).decode()
    assert "kvguard = kvguard.cli:main" in declared
    assert "[kvguard.commands]\ncampaign = kvguard.fault_injection.cli:campaign" in declared
    assert "[pytest11]\nkvguard = kvguard.fault_injection.pytest_plugin" in declared
    assert "[vllm.general_plugins]\nkvguard = kvguard.adapters.vllm.plugin:register" in declared
    assert "[sglang.srt.plugins]\nkvguard = kvguard.adapters.sglang.plugin:register" in declared


@pytest.mark.slow
def test_the_base_install_is_light(built: Path) -> None:
    """Without extras the distribution asks for no torch and no engine."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(required) == 7
    assert not [line for line in required if "torch" in line or "vllm" in line or "sglang" in line]
