"""The command line, put together from the entry-point group `kvguard.commands`.

Only the command that was asked for is imported: `kvguard --help` must not wait for torch, and a command whose package
is missing must not take the others down. The help of the others is read from their source text.
"""

import ast
import dataclasses
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata, version
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

import kvguard

__all__ = ["build_app", "main"]

COMMAND_GROUP: Final = "kvguard.commands"
EXIT_USAGE: Final = 2
PACKAGES_OF_INTEREST: Final = ("numpy", "torch", "triton", "vllm", "sglang")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 done, 2 wrong usage or configuration, else what the command says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    asked = _command_asked_for(given)
    try:
        build_app(given)(args=given, prog_name="kvguard")
    except ImportError as error:
        # Where a command of ours is incomplete that is a bug, and wants a traceback, unless a package is missing.
        if asked is None or not error.name or error.name.partition(".")[0] == "kvguard":
            raise
        _fail(_missing_package(asked, error))
    except ValueError as error:
        from kvguard.config_file import ConfigError

        if not isinstance(error, ConfigError):
            raise
        _fail(str(error))
    sys.exit(0)


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The typer application for these arguments: the command they name is imported, the others are only listed."""
    app = typer.Typer(
        name="kvguard",
        help=(kvguard.__doc__ or "").partition("\n")[0],
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    app.callback()(_root)
    app.command("config")(_config)
    app.command("version")(_version)
    asked = _command_asked_for(arguments)
    for point in _commands():
        if point.name == asked:
            loaded = point.load()
            if isinstance(loaded, typer.Typer):
                app.add_typer(loaded, name=point.name)
            else:
                app.command(point.name)(loaded)
        else:
            app.command(point.name)(_listed_only(point))
    return app


def _commands() -> Iterable[EntryPoint]:
    """The commands of installed packages, by name; one that takes a built-in name is left out."""
    found = {point.name: point for point in entry_points(group=COMMAND_GROUP)}
    return [found[name] for name in sorted(found) if name not in ("config", "version")]


def _command_asked_for(arguments: Sequence[str]) -> str | None:
    # The root has no options with a value, so the first word that is no option is the command.
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _listed_only(point: EntryPoint) -> Callable[[], None]:
    def command() -> None:
        raise AssertionError(f"{point.name} was listed, not loaded")

    command.__doc__ = _docstring(point)
    return command


def _docstring(point: EntryPoint) -> str:
    """The docstring of a command's function, without importing its module."""
    try:
        spec = importlib.util.find_spec(point.module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        tree = ast.parse(source)
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == point.attr)
    return next((ast.get_docstring(function) or "" for function in functions), "")


def _missing_package(command: str, error: ImportError) -> str:
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError):
        return f"kvguard {command} cannot use {package}: {error}"
    extras: list[str] = []
    try:
        extras = metadata("kvguard").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        pass
    wanted = f"'kvguard[{command}]'" if command in extras else package
    return f"kvguard {command} needs {package}: pip install {wanted}"


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        print(f"kvguard: {line}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvguard {kvguard.__version__}")
        raise typer.Exit()


def _root(
    version_wanted: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _version() -> None:
    """Show the versions of kvguard, Python and the packages it works with."""
    typer.echo(f"kvguard {kvguard.__version__}")
    typer.echo(f"python {platform.python_version()}")
    for package in PACKAGES_OF_INTEREST:
        try:
            typer.echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} not installed")


def _config(
    file: Annotated[
        Path | None, typer.Option("--file", help="Configuration file, in place of KVGUARD_CONFIG.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show every setting, its value and where the value came from."""
    from kvguard.config import GuardConfig

    rows = [dataclasses.asdict(row) for row in GuardConfig.load(file).explain()]
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", "what it does")
    for row in rows:
        style = "" if row["source"] == "default" else "bold"
        table.add_row(row["name"], Text(_written(row["value"])), Text(row["source"]), row["doc"], style=style)
    Console().print(table)


def _written(value: Any) -> str:
    """A value as one writes it in a configuration file."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
