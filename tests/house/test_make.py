"""The front door: the Makefile, the script that builds .venv, and what CI calls."""

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tools import make_engine_env
from tools import make_env as make_env_module

Make = Callable[..., subprocess.CompletedProcess[str]]

LOCAL = ["torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "torch-2.9.1+cpu-cp311-cp311-linux_x86_64.whl"]


def phony(root: Path) -> set[str]:
    """The Makefile's targets."""
    match = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), flags=re.MULTILINE)
    assert match is not None
    return set(match.group(1).split())


def test_help_lists_every_target(make: Make, root: Path) -> None:
    """`make` alone and `make help` list each target with a line on what it does."""
    listed = {line.split()[1] for line in make("help").stdout.splitlines()}
    assert listed == phony(root)
    assert make().stdout == make("help").stdout


def test_test_checks_style_and_types_first(make: Make) -> None:
    """`make test` runs ruff, mypy, the suite with the real model at hand, and the engine's tests where it lives."""
    lines = make("--dry-run", "test").stdout.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "tools/make_env.py",
        "-m ruff check .",
        "-m mypy",
        "-m tools.prepare_smollm2",
        '-m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not soak"',
        "-m tools.make_engine_env vllm",
        ".venv-vllm/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm",
        "-m tools.make_engine_env sglang",
        ".venv-sglang/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/sglang",
    ]


def test_core_is_the_quick_part(make: Make) -> None:
    """`make test-core` leaves out whatever is slow and stays in the core, the kernels and the house."""
    last = make("--dry-run", "test-core").stdout.splitlines()[-1]
    assert '-m "not slow and not soak and not mutation"' in last and "tests/house" in last


def test_campaign_hands_its_arguments_on(make: Make) -> None:
    """`make campaign ARGS=...` gives the arguments to the kvguard script of .venv."""
    lines = make("--dry-run", "campaign", "ARGS=--seed 7").stdout.splitlines()
    assert lines == ["python3 tools/make_env.py", ".venv/bin/kvguard campaign --seed 7"]


def test_python_can_be_chosen(make: Make) -> None:
    """PYTHON=... picks the Python that the environment is built with."""
    assert make("--dry-run", "env", "PYTHON=python3.13").stdout == "python3.13 tools/make_env.py\n"


def test_clean_keeps_environments_and_runs(make: Make) -> None:
    """`make clean` removes neither an environment nor earlier runs."""
    removed, searched = make("--dry-run", "clean").stdout.splitlines()
    assert removed.startswith("rm -rf build dist ") and ".venv" not in removed and "runs" not in removed
    assert searched.startswith("find . \\( -path './.venv*' -o -path ./.git -o -path ./runs \\) -prune -o ")


@pytest.mark.parametrize("status", [0, 3])
def test_ci_exits_with_the_status_of_make_test(status: int, root: Path, tmp_path: Path) -> None:
    """.ci/run prints versions, calls `make test` in the repository and exits with its status."""
    stand_in = tmp_path / "make"
    stand_in.write_text(f'#!/bin/sh\necho "make $* in $(pwd)"\n[ "$1" = --version ] || exit {status}\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(root / ".ci" / "run")], env=environment, capture_output=True, text=True)
    assert done.returncode == status
    assert "Python 3." in done.stdout and done.stdout.splitlines()[-1] == f"make test in {root}"
    assert os.access(root / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(
    ("system", "machine", "tag", "gpu", "wheels", "tool", "argument"),
    [
        pytest.param("Linux", "x86_64", "cp311", None, LOCAL, "pip", "torch==2.13.0+cpu", id="newest-local-wheel"),
        pytest.param("Linux", "x86_64", "cp312", None, LOCAL, "uv", "--torch-backend=cpu", id="wheel-of-other-python"),
        pytest.param(
            "Linux", "aarch64", "cp311", None, LOCAL, "uv", "--torch-backend=cpu", id="wheel-of-other-machine"
        ),
        pytest.param("Linux", "x86_64", "cp311", None, [], "uv", "--torch-backend=cpu", id="open-internet"),
        pytest.param("Linux", "x86_64", "cp311", "nvidia", LOCAL, "pip", "torch>=2.6", id="nvidia"),
        pytest.param("Linux", "x86_64", "cp311", "amd", LOCAL, "uv", "--torch-backend=auto", id="amd"),
        pytest.param("Darwin", "arm64", "cp311", None, [], "pip", "torch>=2.6", id="mac"),
    ],
)
def test_torch_comes_from_where_the_machine_needs_it(
    make_env: ModuleType,
    system: str,
    machine: str,
    tag: str,
    gpu: str | None,
    wheels: list[str],
    tool: str,
    argument: str,
) -> None:
    """Without a GPU torch is a CPU build, from a local wheel where there is one that fits."""
    plan = make_env.choose_torch(system, machine, tag, gpu, wheels)
    assert (plan.tool, plan.arguments[0]) == (tool, argument)


@pytest.mark.parametrize(
    ("wheel", "version"),
    [
        (LOCAL[0], "2.13.0+cpu"),
        (LOCAL[1], "2.9.1+cpu"),
        ("torch-2.5.1+cpu-cp311-cp311-linux_x86_64.whl", None),  # older than kvguard needs
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", None),  # a CUDA build
        ("torch-2.13.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl", None),
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl", None),
        ("torch-2.13.0+cpu-cp313-cp313t-manylinux_2_28_x86_64.whl", None),
        ("torchvision-0.29.1+cpu-cp311-cp311-linux_x86_64.whl", None),
    ],
)
def test_a_local_wheel_must_fit(make_env: ModuleType, wheel: str, version: str | None) -> None:
    """Only a CPU build for this machine and this Python counts, and only if it is new enough."""
    assert make_env.cpu_wheel_version(wheel, "x86_64", "cp311") == version


def test_local_wheels_are_found_through_pips_configuration(make_env: ModuleType, tmp_path: Path) -> None:
    """Folders, file:// addresses and file:// indexes of pip's configuration are searched; other addresses are not."""
    folder, linked, index = tmp_path / "wheels", tmp_path / "more wheels", tmp_path / "simple"
    for place in (folder, linked, index / "torch"):
        place.mkdir(parents=True)
    (folder / LOCAL[0]).touch()
    (folder / "numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    (linked / LOCAL[1]).touch()
    page = '<a href="../../files/torch-2.14.1%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256=0">torch</a>'
    (index / "torch" / "index.html").write_text(page)
    listed = (
        f":env:.find-links='{folder} {linked.as_uri()}'\nglobal.find-links='{tmp_path}/nosuch'\n"
        f"global.extra-index-url='{index.as_uri()} https://example.invalid/simple'\nglobal.timeout='180'\n"
    )
    third = "torch-2.14.1+cpu-cp311-cp311-linux_x86_64.whl"
    assert make_env.local_wheels(listed) == [LOCAL[0], third, LOCAL[1]]
    assert make_env.local_wheels("") == []


def test_the_script_agrees_with_pyproject(make_env: ModuleType, root: Path) -> None:
    """The torch and the oldest Python that the script knows are those of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["torch"] == [make_env.TORCH]
    assert project["requires-python"] == ">=" + ".".join(map(str, make_env.OLDEST_PYTHON))
    assert make_env.TORCH == "torch>=" + ".".join(map(str, make_env.OLDEST_TORCH))


def test_an_old_python_is_told_in_one_line(make_env: ModuleType, root: Path) -> None:
    """A Python that is too old, or has no venv module, is refused with what to do; old ones can parse the script."""
    with pytest.raises(make_env.EnvError, match=r"needs Python 3\.11 or newer, this is 3\.10: try make PYTHON="):
        make_env.check_python((3, 10, 2), True)
    with pytest.raises(make_env.EnvError, match=r"apt-get install python3\.12-venv"):
        make_env.check_python((3, 12, 0), False)
    make_env.check_python((3, 11, 0), True)
    ast.parse((root / "tools" / "make_env.py").read_text(), feature_version=(3, 8))


@pytest.fixture
def workshop(make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny project for make_env to build in, with pip and venv replaced; the list records what was called."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "keep").touch()
    venv = tmp_path / ".venv"
    for name, value in {"ROOT": tmp_path, "VENV": venv, "STAMP": venv / "stamp", "PYTHON": venv / "bin/python"}.items():
        monkeypatch.setattr(make_env, name, str(value))
    called: list[str] = []

    def run(what: str, *command: str) -> None:
        called.append(what.partition(" ")[0])
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()

    def pip(what: str, *arguments: str) -> None:
        called.append(f"pip {arguments[-1]}".replace(str(tmp_path), ""))
        (venv / "bin" / "kvguard").touch()

    monkeypatch.setattr(make_env, "run", run)
    monkeypatch.setattr(make_env, "pip", pip)
    monkeypatch.setattr(make_env, "install_torch", lambda: called.append("torch"))
    return called


WHOLE = ["creating", "pip setuptools>=77", "torch", "pip [dev]"]


def test_a_finished_environment_is_left_alone(make_env: ModuleType, workshop: list[str]) -> None:
    """The first call builds everything, the second nothing."""
    assert make_env.main() == 0 and workshop == WHOLE
    assert make_env.main() == 0 and workshop == WHOLE


def test_a_half_built_environment_is_rebuilt(make_env: ModuleType, workshop: list[str], tmp_path: Path) -> None:
    """An environment without a stamp is removed and built afresh, and nothing beside it is touched."""
    leftover = tmp_path / ".venv" / "lib" / "half"
    leftover.mkdir(parents=True)
    assert make_env.main() == 0 and workshop == WHOLE
    assert not leftover.exists() and (tmp_path / "keep").exists()


def test_a_changed_pyproject_updates_in_place(make_env: ModuleType, workshop: list[str], tmp_path: Path) -> None:
    """A change of pyproject.toml installs what is new into the environment that is there."""
    make_env.main()
    workshop.clear()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert make_env.main() == 0 and workshop == ["torch", "pip [dev]"]


@pytest.mark.parametrize("place", ["kernels/operation/fast.c", "kernels/fast.h", "kvguard/fast.c", "kvguard/fast.h"])
def test_a_changed_c_source_is_built_in_place(
    place: str, make_env: ModuleType, workshop: list[str], tmp_path: Path
) -> None:
    """A C source that is new, or says something else, is built into the environment that is there."""
    make_env.main()
    source = tmp_path / place
    source.parent.mkdir(parents=True, exist_ok=True)
    for text in ("int one;", "int two;"):
        source.write_text(text)
        workshop.clear()
        assert make_env.main() == 0 and workshop == ["torch", "pip [dev]"]
        assert make_env.main() == 0 and workshop == ["torch", "pip [dev]"]


@pytest.mark.parametrize("name", ["pyproject.toml", "kernels/operation/fast.c", "kvguard/fast.c"])
def test_an_engines_environment_gets_kvguard_anew(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed pyproject.toml or C source installs kvguard into .venv-vllm again, and nothing else."""
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    for place in ("pyproject.toml", "kernels/operation/fast.c", "kvguard/fast.c"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("before")
    done: list[str] = []
    monkeypatch.setattr(make_engine_env, "ROOT", str(tmp_path))
    monkeypatch.setattr(make_engine_env, "_install_kvguard", lambda python: done.append("kvguard"))
    monkeypatch.setattr(make_engine_env, "run", lambda what, *command: done.append(what))
    monkeypatch.setattr(make_engine_env, "INSTALL", {"vllm": lambda build: None})
    monkeypatch.setattr(make_engine_env, "choose_torch", lambda *known: make_env_module.TorchPlan("uv", (), ""))
    make_engine_env.build("vllm")
    assert done[-1] == "kvguard" and len(done) == 3
    done.clear()
    make_engine_env.build("vllm")
    assert done == []
    (tmp_path / name).write_text("after")
    make_engine_env.build("vllm")
    assert done == ["kvguard"]


def test_an_update_that_fails_is_rebuilt(
    make_env: ModuleType, workshop: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that did not get to its end leaves an environment that counts as half-built, even if undone."""
    make_env.main()
    before = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")

    def no_disk() -> None:
        raise make_env.EnvError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(make_env, "install_torch", no_disk)
        assert make_env.main() == 1
    workshop.clear()
    (tmp_path / "pyproject.toml").write_text(before)
    assert make_env.main() == 0 and workshop == WHOLE


def test_a_moved_environment_is_rebuilt(make_env: ModuleType, workshop: list[str], tmp_path: Path) -> None:
    """An environment of another folder or another Python is built afresh, as its scripts point elsewhere."""
    make_env.main()
    workshop.clear()
    stamp = tmp_path / ".venv" / "stamp"
    stamp.write_text(stamp.read_text().replace(str(tmp_path), "/elsewhere"))
    assert make_env.main() == 0 and workshop == WHOLE


def test_an_environment_behind_a_link_is_not_deleted(
    make_env: ModuleType, workshop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A .venv that is a link to somewhere else is refused in one line."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".venv").symlink_to(elsewhere)
    assert make_env.main() == 1 and workshop == []
    assert capsys.readouterr().err == "env: .venv is a link to somewhere else: remove it, then make env again\n"
    assert elsewhere.is_dir()


def test_without_the_cpu_build_plain_torch_is_installed_with_a_warning(
    make_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where uv cannot get the CPU build, pip installs plain torch, after a warning about its size."""
    asked: list[str] = []

    def no_uv(what: str, *command: str) -> None:
        raise make_env.EnvError("no route")

    monkeypatch.setattr(make_env, "PYTHON", "true")
    monkeypatch.setattr(make_env, "find_gpu", lambda: None)
    monkeypatch.setattr(make_env, "local_wheels", lambda listed: [])
    monkeypatch.setattr(make_env.platform, "system", lambda: "Linux")
    monkeypatch.setattr(make_env, "run", no_uv)
    monkeypatch.setattr(make_env, "pip", lambda what, *arguments: asked.append(arguments[-1]))
    make_env.install_torch()
    assert asked == ["uv", make_env.TORCH]
    assert "3 GB" in capsys.readouterr().out


def test_a_failing_command_shows_its_output(make_env: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A command is silent unless it fails; then its last lines are shown."""
    make_env.run("working", "sh", "-c", "echo chatter")
    assert "chatter" not in capsys.readouterr().out
    with pytest.raises(make_env.EnvError, match="failed with status 4"):
        make_env.run("working", "sh", "-c", "echo no space left; exit 4")
    assert "no space left" in capsys.readouterr().err
