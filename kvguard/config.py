"""GuardConfig: every setting of the guard, where its value came from, and what to write instead of a wrong one.

Layers, each over the one before it: the defaults, a file (YAML or TOML; named by the call or by KVGUARD_CONFIG),
KVGUARD_* environment variables, the arguments of the call. A guard that silently ignored a setting would protect less
than its operator believes, so whatever is not understood is refused with a ConfigError: unknown keys, bad values,
settings that contradict each other, files that cannot be read.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvguard.config_file import ConfigError, read_config_file

__all__ = ["IMPLEMENTED_LEVELS", "ConfigError", "ConfigRow", "GuardConfig"]

Level = Literal["off", "tags", "keys", "seals", "debug"]

IMPLEMENTED_LEVELS: Final = ("off", "tags", "keys")
SECRET_CHARACTERS_MIN: Final = 32
ENV_PREFIX: Final = "KVGUARD_"
ENV_FILE: Final = "KVGUARD_CONFIG"
ENV_TEST_PREFIX: Final = "KVGUARD_TEST_"
DEFAULT_SOURCE: Final = "default"
ARGUMENT_SOURCE: Final = "argument"


@dataclass(frozen=True, kw_only=True)
class ConfigRow:
    """One setting as `kvguard config` shows it."""

    name: str
    value: Any
    source: str  # "default", "file PATH", "environment variable KVGUARD_NAME" or "argument"
    doc: str


class GuardConfig(BaseSettings):
    """The settings of one guard; frozen. Build it with `GuardConfig.load()` or by calling it; both read all layers."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_parse_none_str="none", frozen=True, extra="forbid", validate_default=False
    )

    level: Level = Field("tags", description="what is proven; off installs nothing")
    control_plane: bool = Field(True, description="check each allocation, free and adoption on the host")
    device_check: bool = Field(True, description="check each page that attention reads on the device, every step")
    write_check: bool = Field(
        True, description="with device_check: check each slot that a step writes, and redirect wrong ones"
    )
    on_violation: Literal["abort", "observe", "halt"] = Field(
        "abort", description="abort the request, only count and log, or stop the engine"
    )
    on_guard_error: Literal["disarm", "abort"] = Field(
        "disarm", description="after a fault inside kvguard: serve on without a guard, or abort what is in flight"
    )
    quarantine_pages_max: int = Field(64, ge=0, description="pages kept out of use after violations, at most")
    breaker_violations: int = Field(
        32, ge=0, description="violations within breaker_window_s that trip the breaker; 0 is no breaker"
    )
    breaker_window_s: float = Field(60.0, gt=0, allow_inf_nan=False, description="the breaker's window, in seconds")
    breaker_action: Literal["unfit", "observe"] = Field(
        "unfit", description="when the breaker trips: report the replica as unfit, or fall back to observe"
    )
    recorder_events_per_page: int = Field(8, ge=0, le=1024, description="events the flight recorder keeps of each page")
    steps_in_flight_max: int = Field(4, ge=1, le=64, description="unjudged steps above which the heartbeat is lost")
    report_content: bool = Field(False, description="put prompt text and token ids into reports")
    report_dir: Path | None = Field(None, description="folder for violation reports as files; none: no files")
    seed: int | None = Field(
        None, description="makes tags and digest keys replayable; none: from the operating system's randomness"
    )
    content_key_secret: SecretStr | None = Field(
        None, description="of content keys, the same for all ranks and P/D peers; none: random in each process"
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, config_path: str | os.PathLike[str] | None = None, /, **overrides: Any) -> None:
        """Reads all layers. `config_path` takes the place of KVGUARD_CONFIG; `overrides` win over everything."""
        fields = type(self).model_fields
        for name in overrides:
            _refuse_unknown(name, fields, where="the call")
        in_environment = _environment_variables(fields)
        path = config_path if config_path is not None else os.environ.get(ENV_FILE) or None
        from_file = read_config_file(Path(path)) if path is not None else {}
        for name in from_file:
            _refuse_unknown(name, fields, where=str(path))

        sources = dict.fromkeys(fields, DEFAULT_SOURCE)
        sources.update(dict.fromkeys(from_file, f"file {path}"))
        sources.update({name: f"environment variable {variable}" for name, variable in in_environment.items()})
        sources.update(dict.fromkeys(overrides, ARGUMENT_SOURCE))
        # What the environment overrides is taken out here, because pydantic-settings lets call arguments win over it.
        below = {name: value for name, value in from_file.items() if name not in in_environment}
        given = {**below, **overrides}
        try:
            if len(given) == len(fields):
                # Nothing is left for pydantic-settings to look for, which takes it milliseconds.
                BaseModel.__init__(self, **given)
            else:
                super().__init__(**given)
        except ValidationError as error:
            lines = [_explain_bad_value(dict(detail), sources) for detail in error.errors()]
            raise ConfigError("\n".join(lines)) from None
        self._sources = sources
        self._refuse_impossible()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, **overrides: Any) -> Self:
        """The configuration from all layers; `path` takes the place of KVGUARD_CONFIG. Raises ConfigError."""
        return cls(path, **overrides)

    @classmethod
    def default(cls, **overrides: Any) -> Self:
        """The defaults, changed by the call alone: no file and no environment variable has a say in any value.

        For campaigns, whose results must be the same on every machine. Raises ConfigError.
        """
        values = {name: field.default for name, field in cls.model_fields.items()}
        return cls(**{**values, **overrides})

    @property
    def is_off(self) -> bool:
        """True where nothing is to be installed: the engine runs its own functions, unpatched."""
        return self.level == "off"

    def explain(self) -> list[ConfigRow]:
        """Each setting with its value, where the value came from and what it does."""
        return [
            ConfigRow(name=name, value=getattr(self, name), source=self._sources[name], doc=field.description or "")
            for name, field in type(self).model_fields.items()
        ]

    @field_validator("level", mode="before")
    @classmethod
    def _bare_off(cls, value: Any) -> Any:
        # YAML reads a bare `off` as the boolean false.
        return "off" if value is False else value

    @field_validator("level")
    @classmethod
    def _implemented(cls, value: Level) -> Level:
        if value not in IMPLEMENTED_LEVELS:
            raise ValueError(f"is not in this release; use level: {IMPLEMENTED_LEVELS[-1]}")
        return value

    @field_validator("content_key_secret")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < SECRET_CHARACTERS_MIN:
            raise ValueError("is too short")
        return value

    @field_validator(
        "quarantine_pages_max",
        "breaker_violations",
        "breaker_window_s",
        "recorder_events_per_page",
        "steps_in_flight_max",
        "seed",
        mode="before",
    )
    @classmethod
    def _no_truth_as_number(cls, value: Any) -> Any:
        # pydantic takes true for 1, and YAML reads a bare `no` as false.
        if isinstance(value, bool):
            raise ValueError("is not a number")
        return value

    def _refuse_impossible(self) -> None:
        if self.level != "tags" or self.control_plane or self.device_check:
            return
        named = ", ".join(f"{name}: false ({self._sources[name]})" for name in ("control_plane", "device_check"))
        raise ConfigError(
            f"{named} at level: {self.level} ({self._sources['level']}) can only ever report clean; use level: off"
        )


def _environment_variables(fields: Mapping[str, Any]) -> dict[str, str]:
    """Field name -> the KVGUARD_* variable that is set for it. Refuses variables that belong to no field."""
    found: dict[str, str] = {}
    for variable in sorted(os.environ):
        upper = variable.upper()
        if not upper.startswith(ENV_PREFIX) or upper == ENV_FILE or upper.startswith(ENV_TEST_PREFIX):
            continue
        name = upper.removeprefix(ENV_PREFIX).lower()
        if name not in fields:
            valid = [ENV_FILE, *(f"{ENV_PREFIX}{field.upper()}" for field in fields)]
            raise ConfigError(_unknown("environment variable", variable, valid, where=""))
        found[name] = variable
    return found


def _refuse_unknown(name: str, fields: Mapping[str, Any], *, where: str) -> None:
    if name not in fields:
        raise ConfigError(_unknown("key", name, list(fields), where=f" in {where}"))


def _unknown(kind: str, name: str, valid: list[str], *, where: str) -> str:
    nearest = difflib.get_close_matches(name.upper(), [candidate.upper() for candidate in valid], n=1)
    meant = next((candidate for candidate in valid if [candidate.upper()] == nearest), None)
    hint = f" did you mean {meant!r}?" if meant else ""
    return f"unknown {kind} {name!r}{where}:{hint} valid {kind}s: {', '.join(valid)}"


def _explain_bad_value(detail: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """One line for one of pydantic's error records: the field, its value, where that came from, what to write."""
    name = str(detail["loc"][0])
    # What was meant to be a secret must not stand in a log, however wrong it is.
    value = "the value" if name == "content_key_secret" else _written(detail["input"])
    head = f"{name}: {value} (from {sources[name]})"
    if detail["type"] == "value_error" and name == "level":
        return f"{head} {detail['ctx']['error']}"
    return f"{head} is not {_expected(name)}{_nearest_choice(name, detail['input'])}"


def _written(value: Any) -> str:
    # As it stands in a file: YAML's false, not Python's False.
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def _expected(name: str) -> str:
    """What may be written for a field, in words, from its JSON schema."""
    schema = GuardConfig.model_json_schema()["properties"][name]
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    text = _expected_type(name, options[0])
    return f"{text}, or none" if "anyOf" in schema else text


def _expected_type(name: str, schema: Mapping[str, Any]) -> str:
    if name == "level":
        return f"one of {', '.join(IMPLEMENTED_LEVELS)}"
    if schema.get("format") == "password":
        return f"text of at least {SECRET_CHARACTERS_MIN} characters, for example from `openssl rand -hex 32`"
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "boolean":
        return "true or false"
    if schema["type"] == "integer":
        low, high = schema.get("minimum"), schema.get("maximum")
        bounds = f" from {low} to {high}" if high is not None else f" of at least {low}" if low is not None else ""
        return f"a whole number{bounds}"
    return "a finite number greater than 0" if schema["type"] == "number" else "the path of a folder"


def _nearest_choice(name: str, value: Any) -> str:
    schema = GuardConfig.model_json_schema()["properties"][name]
    choices = list(IMPLEMENTED_LEVELS) if name == "level" else schema.get("enum", [])
    nearest = difflib.get_close_matches(str(value).lower(), choices, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
