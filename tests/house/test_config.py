"""GuardConfig: layers, where values came from, and what is refused."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvguard.config import IMPLEMENTED_LEVELS, ConfigError, GuardConfig

pytestmark = pytest.mark.usefixtures("clean_environment")

DEFAULTS = {
    "level": "tags",
    "control_plane": True,
    "device_check": True,
    "write_check": True,
    "on_violation": "abort",
    "on_guard_error": "disarm",
    "quarantine_pages_max": 64,
    "breaker_violations": 32,
    "breaker_window_s": 60.0,
    "breaker_action": "unfit",
    "recorder_events_per_page": 8,
    "steps_in_flight_max": 4,
    "report_content": False,
    "report_dir": None,
    "seed": None,
    "content_key_secret": None,
}


def written(folder: Path, text: str, name: str = "guard.yaml") -> Path:
    """A configuration file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None = None, **overrides: Any) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        GuardConfig.load(path, **overrides)
    return str(caught.value)


def test_no_configuration_gives_the_defaults() -> None:
    """Without a file, variables or arguments every setting has its documented default, and says so."""
    config = GuardConfig.load()
    assert config.model_dump() == DEFAULTS
    assert GuardConfig() == config
    assert {row.source for row in config.explain()} == {"default"}


def test_each_layer_wins_over_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults give way to the file, the file to the environment, the environment to the call, each named as source."""
    path = written(tmp_path, "seed: 1\nbreaker_violations: 1\nquarantine_pages_max: 1\n")
    monkeypatch.setenv("KVGUARD_BREAKER_VIOLATIONS", "2")
    monkeypatch.setenv("KVGUARD_QUARANTINE_PAGES_MAX", "2")
    config = GuardConfig.load(path, quarantine_pages_max=3)
    rows = {row.name: (row.value, row.source) for row in config.explain()}
    assert rows["steps_in_flight_max"] == (4, "default")
    assert rows["seed"] == (1, f"file {path}")
    assert rows["breaker_violations"] == (2, "environment variable KVGUARD_BREAKER_VIOLATIONS")
    assert rows["quarantine_pages_max"] == (3, "argument")


@pytest.mark.parametrize("name", ["guard.yaml", "guard.yml", "guard.toml"])
def test_yaml_and_toml_say_the_same(name: str, tmp_path: Path) -> None:
    """The same settings can be written in YAML and in TOML."""
    text = 'on_violation = "halt"\nseed = 7\n' if name.endswith("toml") else "on_violation: halt\nseed: 7\n"
    config = GuardConfig.load(written(tmp_path, text, name))
    assert (config.on_violation, config.seed) == ("halt", 7)


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVGUARD_CONFIG names the file, and a path given in the call takes its place."""
    monkeypatch.setenv("KVGUARD_CONFIG", str(written(tmp_path, "seed: 1")))
    assert GuardConfig.load().seed == 1
    assert GuardConfig().seed == 1
    assert GuardConfig.load(written(tmp_path, "seed: 2", "other.yaml")).seed == 2
    monkeypatch.setenv("KVGUARD_CONFIG", "")
    assert GuardConfig.load().seed is None


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    """A file of comments only is a valid configuration."""
    assert GuardConfig.load(written(tmp_path, "# nothing yet\n")).model_dump() == DEFAULTS


@pytest.mark.parametrize("text", ["level: off\n", "level: 'off'\n", "level: false\n"])
def test_a_bare_off_in_yaml_is_a_level(text: str, tmp_path: Path) -> None:
    """`level: off` means off, although YAML reads a bare off as the boolean false."""
    assert GuardConfig.load(written(tmp_path, text)).is_off


def test_none_can_be_written_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable set to none takes back what the file has set."""
    monkeypatch.setenv("KVGUARD_SEED", "none")
    assert GuardConfig.load(written(tmp_path, "seed: 3")).seed is None


@pytest.mark.parametrize("level", ["seals", "debug"])
def test_levels_of_later_releases_are_refused(level: str) -> None:
    """A level that this release does not prove is refused rather than run as a weaker one."""
    assert refusal(level=level) == f"level: '{level}' (from argument) is not in this release; use level: keys"


@pytest.mark.parametrize("level", IMPLEMENTED_LEVELS)
def test_levels_of_this_release_are_accepted(level: str) -> None:
    """Each level that is named as implemented can be chosen; only off installs nothing."""
    assert GuardConfig(level=level).is_off is (level == "off")


def test_an_unknown_key_in_a_file_names_the_nearest(tmp_path: Path) -> None:
    """A misspelt key is refused with the file, the nearest valid key and all valid keys."""
    path = written(tmp_path, "on_violaton: abort\n")
    assert refusal(path) == (
        f"unknown key 'on_violaton' in {path}: did you mean 'on_violation'? valid keys: {', '.join(DEFAULTS)}"
    )


def test_an_unknown_argument_is_refused() -> None:
    """A misspelt argument of the call is refused like a misspelt key."""
    assert refusal(sed=1).startswith("unknown key 'sed' in the call: did you mean 'seed'?")


def test_a_key_like_no_other_gets_no_guess(tmp_path: Path) -> None:
    """Where no valid key is near, none is suggested."""
    assert "did you mean" not in refusal(written(tmp_path, "zzzzzzzz: 1\n"))


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVGUARD_ variable that is no setting is refused, because a typo there would go unseen."""
    monkeypatch.setenv("KVGUARD_LEVLE", "tags")
    assert refusal().startswith("unknown environment variable 'KVGUARD_LEVLE': did you mean 'KVGUARD_LEVEL'?")


def test_variables_of_the_tests_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that start with KVGUARD_TEST_ belong to the test suite and are no settings."""
    monkeypatch.setenv("KVGUARD_TEST_ANYTHING", "1")
    assert GuardConfig.load().model_dump() == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("level", "tgas", "'tgas' (from argument) is not one of off, tags, keys; did you mean 'tags'?"),
        ("level", True, "true (from argument) is not one of off, tags, keys"),
        ("on_violation", "observ", "not one of abort, observe, halt; did you mean 'observe'?"),
        ("control_plane", "perhaps", "'perhaps' (from argument) is not true or false"),
        ("quarantine_pages_max", -1, "-1 (from argument) is not a whole number of at least 0"),
        ("quarantine_pages_max", True, "true (from argument) is not a whole number of at least 0"),
        ("breaker_violations", 1.5, "1.5 (from argument) is not a whole number of at least 0"),
        ("breaker_window_s", 0, "0 (from argument) is not a finite number greater than 0"),
        ("breaker_window_s", float("inf"), "is not a finite number greater than 0"),
        ("breaker_window_s", float("nan"), "is not a finite number greater than 0"),
        ("recorder_events_per_page", 1025, "1025 (from argument) is not a whole number from 0 to 1024"),
        ("steps_in_flight_max", 0, "0 (from argument) is not a whole number from 1 to 64"),
        ("seed", "x", "'x' (from argument) is not a whole number, or none"),
        ("report_dir", 3, "3 (from argument) is not the path of a folder, or none"),
    ],
)
def test_a_bad_value_says_what_to_write(name: str, value: Any, told: str) -> None:
    """A bad value is refused with its field, its value, its source and what to write instead."""
    message = refusal(**{name: value})
    assert message.startswith(f"{name}: ") and told in message and "\n" not in message


def test_a_secret_is_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret of content keys is read from each layer, is masked where values are shown, and survives pickling."""
    secret = "5f" * 20
    monkeypatch.setenv("KVGUARD_CONTENT_KEY_SECRET", secret)
    config = pickle.loads(pickle.dumps(GuardConfig.load(written(tmp_path, "content_key_secret: ''\n"))))
    assert config.content_key_secret is not None and config.content_key_secret.get_secret_value() == secret
    assert secret not in f"{config!r} {config} {config.explain()} {[str(row.value) for row in config.explain()]}"
    monkeypatch.setenv("KVGUARD_CONTENT_KEY_SECRET", "none")
    assert GuardConfig.load().content_key_secret is None


@pytest.mark.parametrize("value", ["too-short-to-be-one", "", 12345678901234567890123456789012345, "9" * 31])
def test_a_bad_secret_is_refused_and_not_repeated(value: Any) -> None:
    """What was meant to be a secret does not end up in a log."""
    message = refusal(content_key_secret=value)
    assert message == (
        "content_key_secret: the value (from argument) is not text of at least 32 characters, for example from "
        "`openssl rand -hex 32`, or none"
    )


def test_a_bad_value_names_its_file(tmp_path: Path) -> None:
    """A bad value in a file is reported with the file's path, one line for each bad value."""
    path = written(tmp_path, "breaker_violations: no\nseed: x\n")
    first, second = refusal(path).splitlines()
    assert first == f"breaker_violations: false (from file {path}) is not a whole number of at least 0"
    assert second.startswith(f"seed: 'x' (from file {path})")


def test_a_bad_value_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad value in the environment is reported with the variable's name; an empty one is a bad value too."""
    monkeypatch.setenv("KVGUARD_QUARANTINE_PAGES_MAX", "many")
    assert "'many' (from environment variable KVGUARD_QUARANTINE_PAGES_MAX)" in refusal()
    monkeypatch.setenv("KVGUARD_QUARANTINE_PAGES_MAX", "")
    assert "'' (from environment variable KVGUARD_QUARANTINE_PAGES_MAX)" in refusal()


def test_a_guard_that_checks_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both proofs switched off is refused at any level but off, naming where each switch came from."""
    monkeypatch.setenv("KVGUARD_DEVICE_CHECK", "0")
    assert refusal(control_plane=False) == (
        "control_plane: false (argument), device_check: false (environment variable KVGUARD_DEVICE_CHECK) "
        "at level: tags (default) can only ever report clean; use level: off"
    )
    assert GuardConfig(control_plane=False, level="off").is_off
    assert GuardConfig(control_plane=True).control_plane
    assert GuardConfig(control_plane=False, level="keys").level == "keys"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("guard.yaml", "level: tags\nseed: [1\n", ", line 3: broken YAML: "),
        ("guard.yaml", "level: tags\nlevel: off\n", ", line 2: broken YAML: the key 'level' stands twice"),
        ("guard.yaml", "- level\n", ": must hold lines of the form `key: value`, but is a list"),
        ("guard.yaml", "seed: \x07\n", ": broken YAML: "),
        ("guard.toml", 'level = "tags"\nseed = \n', ": broken TOML: Invalid value (at line 2"),
        ("guard.toml", 'level = "tags"\nlevel = "off"\n', ": broken TOML: Cannot overwrite a value (at line 2"),
        ("guard.json", "{}", ": a configuration file must end in .yaml, .yml or .toml"),
    ],
)
def test_a_broken_file_says_where(name: str, text: str, told: str, tmp_path: Path) -> None:
    """A file that cannot be understood is refused with its path, the line and what is wrong, in one line."""
    path = written(tmp_path, text, name)
    message = refusal(path)
    assert message.startswith(f"{path}{told}") and "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file, a folder and a file that is no text are refused with their path."""
    assert refusal(tmp_path / "nosuch.yaml") == f"{tmp_path / 'nosuch.yaml'}: no such configuration file"
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    assert refusal(folder) == f"{folder}: cannot read the configuration file: Is a directory"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"seed = 1\n\xff")
    assert refusal(binary) == f"{binary}: not UTF-8 text (byte 9)"


def test_a_configuration_cannot_be_changed() -> None:
    """A configuration is frozen, so that what explain() says stays true."""
    with pytest.raises(ValidationError):
        GuardConfig().level = "off"


def test_a_configuration_survives_pickling() -> None:
    """A configuration can be handed to another process with its sources."""
    config = GuardConfig(seed=5)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.explain() == config.explain()


def test_every_setting_is_explained() -> None:
    """Each setting has a line of documentation."""
    rows = GuardConfig().explain()
    assert [row.name for row in rows] == list(DEFAULTS)
    assert all(row.doc for row in rows)


def test_a_configuration_error_is_no_pydantic_error() -> None:
    """The error is a ValueError without pydantic's chained traceback."""
    with pytest.raises(ValueError) as caught:
        GuardConfig(seed="x")
    assert isinstance(caught.value, ConfigError)
    assert caught.value.__suppress_context__


def test_the_tests_run_without_settings() -> None:
    """The fixture that clears the environment leaves no KVGUARD_ variable behind."""
    assert not [name for name in os.environ if name.startswith("KVGUARD_")]
