"""Reads a configuration file, YAML or TOML, into a plain mapping, or says in one line what is wrong with it."""

import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

__all__ = ["ConfigError", "read_config_file"]


class ConfigError(ValueError):
    """A configuration that kvguard refuses. The message is for an operator: what, where, what to write instead."""


def read_config_file(path: Path) -> dict[str, Any]:
    """The top-level keys of a configuration file; an empty file is an empty mapping."""
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError(f"{path}: a configuration file must end in .yaml, .yml or .toml")
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    return _parse_toml(path, text) if suffix == ".toml" else _parse_yaml(path, text)


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: broken TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: broken TOML: nested too deep") from None


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else f"{path}"
        raise ConfigError(f"{where}: broken YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: broken YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: broken YAML: nested too deep") from None
    except (ValueError, TypeError) as error:
        # The loader's own conversions: a date that does not exist, a list as a key.
        raise ConfigError(f"{path}: broken YAML: {str(error).splitlines()[0]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold lines of the form `key: value`, but is a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, where YAML would let the last one win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)
