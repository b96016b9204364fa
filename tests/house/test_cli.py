"""The command line: assembled from entry points, quick, and clear where something is wrong."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from email.message import Message
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvguard import __version__, cli

pytestmark = pytest.mark.usefixtures("clean_environment")

RunResult = tuple[int, str, str]
Run = Callable[..., RunResult]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts commands into the entry-point group, each from the source text of its module."""

    def install(**sources: str) -> None:
        points = []
        for name, source in sources.items():
            (tmp_path / f"kvguard_test_{name}.py").write_text(source)
            points.append(EntryPoint(name, f"kvguard_test_{name}:{name}", cli.COMMAND_GROUP))
            monkeypatch.delitem(sys.modules, f"kvguard_test_{name}", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(cli, "entry_points", lambda group: points)

    return install


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process: status, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "400")  # wide enough that no cell of a table wraps

    def run(*arguments: str) -> RunResult:
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        status = exited.value.code
        assert status is None or isinstance(status, int)
        return status or 0, out, err

    return run


def test_help_lists_a_command_without_importing_it(plugins: Callable[..., None], run: Run) -> None:
    """The root's help shows the first line of a command's docstring although importing its module would fail."""
    plugins(campaign='raise SystemError\n\ndef campaign(trials: int = 1) -> None:\n    """Run trials of faults."""\n')
    status, out, _ = run("--help")
    assert status == 0
    assert "campaign" in out and "Run trials of faults." in out
    assert "kvguard_test_campaign" not in sys.modules


def test_a_command_runs_with_its_options(plugins: Callable[..., None], run: Run) -> None:
    """A plain function from the group becomes a command with its options and its exit status."""
    source = "import typer\n\ndef campaign(trials: int = 1) -> None:\n    print(trials)\n    raise typer.Exit(trials)\n"
    plugins(campaign=source)
    assert run("campaign", "--trials", "3")[:2] == (3, "3\n")
    assert "--trials" in run("campaign", "--help")[1]


def test_a_group_of_commands_can_be_plugged_in(plugins: Callable[..., None], run: Run) -> None:
    """A typer application from the group becomes a group of commands."""
    source = (
        "import typer\n\nlab = typer.Typer()\n\n@lab.command()\ndef one() -> None:\n    print(1)\n\n"
        "@lab.command()\ndef two() -> None:\n    print(2)\n"
    )
    plugins(lab=source)
    assert run("lab", "two")[:2] == (0, "2\n")


@pytest.mark.parametrize("where", ["import", "run"])
def test_a_missing_package_is_one_line(
    where: str, plugins: Callable[..., None], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command whose package is missing, at import or later, says what to install and exits 2."""
    metadata = Message()
    metadata["Provides-Extra"] = "campaign"
    monkeypatch.setattr(cli, "metadata", lambda name: metadata)
    monkeypatch.setitem(sys.modules, "torch", None)
    at_import = "import torch.nn\n\ndef campaign() -> None:\n    pass\n"
    at_run = "def campaign() -> None:\n    import torch.nn\n"
    plugins(campaign=at_import if where == "import" else at_run)
    assert run("campaign") == (2, "", "kvguard: kvguard campaign needs torch: pip install 'kvguard[campaign]'\n")
    assert run("version")[0] == 0


def test_a_missing_package_without_an_extra_is_named(plugins: Callable[..., None], run: Run) -> None:
    """A command that has no extra of its name names the package itself."""
    plugins(lab="import kvguardless_package\n\ndef lab() -> None:\n    pass\n")
    told = "kvguard: kvguard lab needs kvguardless_package: pip install kvguardless_package\n"
    assert run("lab") == (2, "", told)


def test_a_broken_module_of_ours_is_not_hidden(plugins: Callable[..., None]) -> None:
    """An import that fails inside kvguard is a bug and keeps its traceback."""
    plugins(lab="import kvguard.nosuch\n\ndef lab() -> None:\n    pass\n")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["lab"])


def test_a_plugin_cannot_take_a_built_in_name(plugins: Callable[..., None], run: Run) -> None:
    """`kvguard version` stays ours whatever another package registers."""
    plugins(version="def version() -> None:\n    print('theirs')\n")
    assert run("version")[1].startswith(f"kvguard {__version__}\n")


@pytest.mark.parametrize("arguments", [["nosuch"], ["config", "--nosuch"], ["config", "surplus"], ["--nosuch"]])
def test_wrong_usage_exits_2(arguments: list[str], run: Run) -> None:
    """An unknown command or option is a usage error on standard error, without a traceback."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert arguments[-1] in err and "Traceback" not in err


def test_a_configuration_error_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused configuration is one line on standard error, exit 2, no traceback."""
    monkeypatch.setenv("KVGUARD_LEVEL", "seals")
    told = "level: 'seals' (from environment variable KVGUARD_LEVEL) is not in this release; use level: keys"
    assert run("config") == (2, "", f"kvguard: {told}\n")


def test_a_configuration_error_of_a_plugin_is_one_line(plugins: Callable[..., None], run: Run) -> None:
    """A command from the group need not catch ConfigError itself."""
    source = "from kvguard.config import GuardConfig\n\ndef lab() -> None:\n    GuardConfig(sed=1)\n"
    plugins(lab=source)
    status, out, err = run("lab")
    assert (status, out) == (2, "") and err.startswith("kvguard: unknown key 'sed' in the call")


def test_an_error_of_another_kind_is_not_hidden(plugins: Callable[..., None]) -> None:
    """A ValueError that is no ConfigError is a bug and keeps its traceback."""
    plugins(lab="def lab() -> None:\n    raise ValueError('bug')\n")
    with pytest.raises(ValueError, match="bug"):
        cli.main(["lab"])


def test_config_shows_values_and_sources(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvguard config` shows each setting as one writes it, and where it came from."""
    path = tmp_path / "guard.yaml"
    path.write_text("on_violation: halt\n")
    monkeypatch.setenv("KVGUARD_SEED", "7")
    status, out, _ = run("config", "--file", str(path))
    rows = {cells[0]: cells[1:3] for line in out.splitlines() if len(cells := _cells(line)) == 4 and cells[0]}
    assert status == 0
    assert rows["control_plane"] == ["true", "default"]
    assert rows["seed"] == ["7", "environment variable KVGUARD_SEED"]
    assert rows["on_violation"][0] == "halt" and rows["on_violation"][1].startswith("file ")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_config_as_json_prints_nothing_else(run: Run) -> None:
    """`kvguard config --json` prints one JSON list of settings and nothing else."""
    status, out, err = run("config", "--json")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert rows[0] == {
        "name": "level",
        "value": "tags",
        "source": "default",
        "doc": "what is proven; off installs nothing",
    }


def test_versions_are_shown(run: Run) -> None:
    """`kvguard version` and `kvguard --version` begin with kvguard's own version."""
    assert run("version")[1].splitlines()[0] == f"kvguard {__version__}"
    assert run("--version")[:2] == (0, f"kvguard {__version__}\n")


def test_importing_kvguard_imports_nothing_heavy(run_python: Callable[..., str]) -> None:
    """`import kvguard` brings in neither torch nor numpy, pydantic, structlog or typer."""
    code = "import kvguard; print(sorted({'torch', 'numpy', 'pydantic', 'structlog', 'typer'} & set(sys.modules)))"
    assert run_python(code) == "[]\n"


def test_help_imports_nothing_heavy(run_python: Callable[..., str]) -> None:
    """`kvguard --help` brings in neither torch, numpy, pydantic nor structlog."""
    code = (
        "from kvguard import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n"
        "    print(sorted({'torch', 'numpy', 'pydantic', 'structlog'} & set(sys.modules)))\n"
    )
    assert run_python(code).splitlines()[-1] == "[]"


def test_help_is_quick(root: Path) -> None:
    """The best of three `kvguard --help` takes less than three times what importing its command-line library takes."""
    took_s: dict[str, list[float]] = {}
    for _ in range(3):
        for code in ("import typer, rich.console", "from kvguard.cli import main; main(['--help'])"):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
            took_s.setdefault(code, []).append(time.perf_counter() - started)
    library, ours = map(min, took_s.values())
    assert ours < 3 * library
