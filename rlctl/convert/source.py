"""Reads settings (key, value, line) from a file of another framework, without executing any of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlctl.convert.extract import ExtractedFile
from rlctl.convert.python_file import Unresolved
from rlctl.convert.python_settings import other_trainers, parsed, python_settings, trainers
from rlctl.convert.shell import Arg, commands, is_unresolved
from rlctl.convert.table import ForeignSetting, KeyTable, names, table
from rlctl.errors import UsageError
from rlctl.run_spec.keys import leaf_of
from rlctl.run_spec.sources import parse_scalar

_MAX_BYTES = 1 << 20
_OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_][\w@./-]*)=(.*)", re.DOTALL)
#: One item of a flat list, quoted or not, up to the next comma.
_HYDRA_ITEM = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^,\[\]{}"']+)\s*(?:,|$)""")
_INTERPOLATION = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")
#: Options with the file of accelerate's configuration, of `accelerate launch` and of `trl`.
_LAUNCHER_FILES = ("config_file", "accelerate_config")
_PROGRAMS = {"python", "python3", "accelerate", "torchrun", "trl", "uv"}
_KINDS = {".sh": "shell", ".bash": "shell", ".slurm": "shell", ".sbatch": "shell", ".py": "python"}
_KINDS |= {".yaml": "yaml", ".yml": "yaml"}


@dataclass(slots=True)
class ForeignConfig:
    """The settings of a file in order, with the last value of every key, and notes on unsupported parts."""

    table: KeyTable
    settings: dict[str, ForeignSetting]
    notes: list[str] = field(default_factory=list)
    #: a file with functions of the script that the spec names, and its text
    functions: tuple[Path, str] | None = None


def read(
    path: Path,
    *,
    framework: str | None,
    environment: Mapping[str, str],
    arguments: list[str],
    functions: Path | None = None,
) -> ForeignConfig:
    """Reads a launch script or configuration.

    Args:
        path: a shell script, Python file or YAML.
        framework: name of the framework; None: detected from the launch command, classes or keys.
        environment: environment variables for a shell script.
        arguments: arguments of the script.
        functions: file for functions that a script defines and that an import of the script would not give
            without training; None: `<script>_functions.py` in the working directory.

    Raises:
        UsageError: the file cannot be read, or no framework is recognised.
    """
    text = _text_of(path)
    chosen = [table(framework)] if framework else [table(name) for name in names()]
    kind = _KINDS.get(path.suffix) or ("shell" if text.startswith("#!") and "python" not in text[:40] else "")
    notes: list[str] = []
    copied: ExtractedFile | None = None
    if kind == "shell":
        started = commands(text, path=path, environment=environment, arguments=arguments, notes=notes)
        launch = _launched_script(path, started, chosen)
        if launch:
            script, words, at = launch
            launched, copied = _from_script(script, words, at, chosen, environment, functions, notes)
        else:
            launched = _from_shell(path, started, chosen, environment, arguments, notes)
    elif kind == "python":
        file = parsed(path, text, chosen, environment)
        copied = ExtractedFile(functions or _beside_spec(path), file)
        launched = python_settings(file, chosen, copied, notes)
    elif kind == "yaml":
        launched = _from_mapping(path, chosen, notes)
    else:
        message = "not a shell script, Python file or YAML by its name"
        raise UsageError(message, where=str(path), fix="name it .sh, .py or .yaml")
    if launched is None:
        known = framework or ", ".join(names())
        message = f"no launch command, configuration class or keys of {known} in it"
        fix = "name the framework with --from" if framework is None else "is it another framework's?"
        if kind == "python" and (others := other_trainers(text)):
            message = f"it constructs {others}"
            fix = f"import reads {', '.join(trainers(chosen))}"
        raise UsageError(message, where=str(path), fix=fix)
    key_table, settings = launched
    copies = (copied.path, copied.text) if copied and copied.text else None
    return ForeignConfig(key_table, _interpolated(_last(key_table, settings)), notes, copies)


def _text_of(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(raw) > _MAX_BYTES:
        raise UsageError("larger than 1 MiB", where=str(path), fix="is this the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UsageError("is not UTF-8 text", where=f"{path}:{line}", fix="save it as UTF-8") from error


_Found = tuple[KeyTable, list[ForeignSetting]]


def _beside_spec(script: Path) -> Path:
    return Path(f"{script.stem}_functions.py")


def _launched_script(
    path: Path, started: list[list[Arg]], chosen: list[KeyTable]
) -> tuple[Path, list[Arg], int] | None:
    """A Python file beside the script that a command starts and that constructs a trainer of the tables.

    Also the words of the command, and the index of the first one behind the file.
    """
    for args in started:
        words = [Arg(piece, arg.line) for arg in args for piece in _words(arg.text)]
        for at, argument in enumerate(words):
            file = next((f for f in (path.parent / argument.text, Path(argument.text)) if f.is_file()), None)
            if not argument.text.endswith(".py") or file is None:
                continue
            if any(f"{name}(" in _text_of(file) for name in trainers(chosen)):
                return file, words, at + 1
    return None


def _from_script(
    script: Path,
    words: list[Arg],
    start: int,
    chosen: list[KeyTable],
    environment: Mapping[str, str],
    functions: Path | None,
    notes: list[str],
) -> tuple[_Found | None, ExtractedFile]:
    """Settings of a Python file that a command starts, and of the command's options."""
    tables = [key_table for key_table in chosen if key_table.classes]
    options = _options(tables[0], words, start, script, notes)
    arguments = {option.key.replace("-", "_"): option.value for option in options}
    file = parsed(script, _text_of(script), tables, environment, arguments)
    copied = ExtractedFile(functions or _beside_spec(script), file)
    read = python_settings(file, tables, copied, notes)
    if read is None:
        return None, copied
    key_table, settings = read
    settings = [replace(setting, where=f"{script.name}, {setting.where}") for setting in settings]
    own = file.own_options  # its settings contain them
    is_read = file.reads_options or not options
    if not is_read:
        notes.append(f"{script.name} reads no options: those of the command have no effect")
    launcher = (*key_table.launcher, *_LAUNCHER_FILES)
    kept = [
        option
        for option in options
        if option.key in launcher or (is_read and option.key.replace("-", "_") not in own)
    ]
    return (key_table, settings + kept), copied


def _from_shell(
    path: Path,
    begun: list[list[Arg]],
    chosen: list[KeyTable],
    environment: Mapping[str, str],
    arguments: list[str],
    notes: list[str],
) -> _Found | None:
    """Settings of the launch command that has the most settings."""

    def started(script: str) -> list[list[Arg]]:
        return commands(script, path=path, environment=environment, arguments=arguments, notes=notes)

    launches: list[_Found] = []
    pending = list(begun)
    patterns = [pattern for key_table in chosen for pattern in key_table.commands]
    while pending:
        args = pending.pop(0)
        words = [Arg(piece, arg.line) for arg in args for piece in _words(arg.text)]
        scripts = (arg.text for arg in args if "\n" in arg.text)
        nested = [script for script in scripts if any(re.search(pattern, script) for pattern in patterns)]
        if nested and len(args) > 1:
            pending += started(nested[0])
            continue
        for key_table in chosen:
            launched = _launched_at(key_table, words)
            if launched:
                start, variant = launched
                launches.append((key_table, [*variant, *_options(key_table, words, start, path, notes)]))
    if not launches:
        return None
    if len(launches) > 1:
        notes.append(f"{len(launches)} launch commands; the one with the most settings is read")
    return max(launches, key=lambda item: len(item[1]))


def _words(text: str) -> list[str]:
    """Splits an argument into words if it contains several options or a command."""
    pieces = text.split()
    options = [piece for piece in pieces if piece.startswith("--") or _OVERRIDE.fullmatch(piece)]
    is_line = len(options) > 1 or (len(pieces) > 1 and any(piece in _PROGRAMS for piece in pieces))
    return pieces if is_line and "{" not in text[:1] else [text]


def _launched_at(key_table: KeyTable, args: list[Arg]) -> tuple[int, list[ForeignSetting]] | None:
    """Index of the first argument after the launch command, and the class that this names; None: no such."""
    line = ""
    for number, arg in enumerate(args):
        line = f"{line} {arg.text}"
        for match in filter(None, (re.search(pattern, line) for pattern in key_table.commands)):
            named = match.groupdict().get("variant")
            classes = [name for name, variant in key_table.variants.items() if variant.command == named]
            return number + 1, [ForeignSetting("_class", name, f"line {arg.line}") for name in classes]
    return None


def _options(
    key_table: KeyTable, args: list[Arg], start: int, path: Path, notes: list[str]
) -> list[ForeignSetting]:
    """The settings in a command's arguments, including the launcher options listed in the table.

    Those of configuration files come first, because options override them, wherever the command names them.
    """
    in_files: list[ForeignSetting] = []
    options: list[ForeignSetting] = []
    at = 0
    while at < len(args):
        text = args[at].text
        line = f"line {args[at].line}"
        is_launcher = at < start
        at += 1
        unset = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)
        if unset:
            note = f"{line}: {unset[1]} is not set in the file: its options are not read"
            if note not in notes:
                notes.append(note)
            continue
        if is_launcher and text[2:].partition("=")[0] not in (*key_table.launcher, *_LAUNCHER_FILES):
            continue
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            values = [value] if equals else []
            while not equals and (
                not values if is_launcher else at < len(args) and not _is_option(args[at].text)
            ):
                values.append(args[at].text)
                at += 1
            if name in _LAUNCHER_FILES and key_table.launcher and values:
                of_file = _other_file(path, values[0], notes)
                in_files += [setting for setting in of_file if setting.key in key_table.launcher]
            elif name in {"config", "config-name", "config-path", "config-file"} and values:
                in_files += _other_file(path, values[0], notes)
            elif name and key_table.style == "flags":
                options.append(ForeignSetting(name, _value(values) if values else True, line))
            elif (
                key_table.style == "hydra" and not equals
            ):  # what follows are overrides, not the option's values
                at -= len(values)
        elif key_table.style == "hydra" and (override := _OVERRIDE.fullmatch(text)):
            sign, key, value = override.groups()
            options.append(ForeignSetting(f"~{key}" if "~" in sign else key, _hydra_value(value), line))
    return in_files + options


def _is_option(text: str) -> bool:
    return (text.startswith("--") and len(text) > 2) or text.endswith("[@]}")


def _value(values: list[str]) -> Any:
    """The value of an option with these words: a scalar, a list, or a mapping in JSON."""
    parsed = [_collection(value) if value.startswith("{") else _scalar(value) for value in values]
    return parsed[0] if len(parsed) == 1 else parsed


def _scalar(text: str) -> Any:
    return Unresolved(text) if is_unresolved(text) else parse_scalar(text)


def _collection(text: str) -> Any:
    """The list or mapping that the text is in YAML, of which JSON and most of Hydra's syntax is a part."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return Unresolved(text)


def _hydra_value(text: str) -> Any:
    """Parses the value of `key=value`: list, quoted text or scalar. Interpolations are resolved later."""
    text = text.strip()
    if text[:1] in {"[", "{"}:
        inner = text[1:-1] if text[0] == "[" and text[-1] == "]" else ""
        if inner and not _HYDRA_ITEM.sub("", inner).strip():
            return [_hydra_value(item[1]) for item in _HYDRA_ITEM.finditer(inner)]
        return _collection(text)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        inner = re.sub(rf"(\\+)(?={text[0]}|$)", lambda match: match[1][: len(match[1]) // 2], text[1:-1])
        return inner.replace("\\${", "${")
    return _scalar(text)


def _other_file(path: Path, name: str, notes: list[str]) -> list[ForeignSetting]:
    """Settings of a configuration file that a script or configuration refers to."""
    tried = [path.parent / name, *(parent / name for parent in path.resolve().parents)]
    file = next(
        (candidate for candidate in tried if candidate.suffix in {".yaml", ".yml"} and candidate.is_file()),
        None,
    )
    if file is None or is_unresolved(name):
        notes.append(f"{name}: this configuration is not read: no such file next to this file")
        return []
    return _settings_of(file, f"{file.name}:", notes)


def _from_mapping(path: Path, chosen: list[KeyTable], notes: list[str]) -> _Found | None:
    settings = _settings_of(path, "line ", notes)
    keys = [setting.key for setting in settings]
    if all(map(leaf_of, keys)) and not any(set(keys) <= key_table.keys.keys() for key_table in chosen):
        message = "every key is one of rlctl's: this is a spec"
        fix = f"rlctl train --spec {path} --dry-run"
        raise UsageError(message, where=str(path), fix=fix)
    scores = [
        sum(setting.key.startswith(tuple(key_table.marks)) for setting in settings) for key_table in chosen
    ]
    if not max(scores) and len(chosen) > 1:
        return None
    return chosen[scores.index(max(scores))], settings


def _settings_of(path: Path, where: str, notes: list[str]) -> list[ForeignSetting]:
    """Leaves of a YAML file, after those of the files in its `defaults`; lines follow `where`."""
    try:
        root = yaml.compose(_text_of(path), Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise UsageError("no `key: value` pairs at its top level", where=str(path))
        settings = list(_yaml_leaves(root, "", where))
    except RecursionError:
        raise UsageError("nested too deeply, or an anchor contains itself", where=str(path)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"not valid YAML: {error}".split("\n")[0], where=str(path)) from error
    inherited: list[ForeignSetting] = []
    for value in (setting.value for setting in settings if setting.key == "defaults"):
        for parent in value if isinstance(value, list) else [value]:
            inherited += _other_file(path, str(parent), notes) if parent != "_self_" else []
    return inherited + [setting for setting in settings if setting.key != "defaults"]


def _yaml_leaves(node: yaml.MappingNode, prefix: str, where: str) -> Iterator[ForeignSetting]:
    for key, value in _pairs(node):
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _yaml_leaves(value, f"{name}.", where)
        else:
            yield ForeignSetting(name, _yaml_value(value), f"{where}{key.start_mark.line + 1}")


def _pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a mapping, preceded by those that `<<` merges into it."""
    yaml.constructor.SafeConstructor().flatten_mapping(node)
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    return pairs


def _yaml_value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _yaml_value(value) for key, value in _pairs(node)}
    if "${" in node.value:
        return Unresolved(node.value)
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return parse_scalar(node.value) if is_plain else node.value


def _last(key_table: KeyTable, settings: list[ForeignSetting]) -> dict[str, ForeignSetting]:
    """The last setting of every key, under the key's canonical name."""
    latest: dict[str, ForeignSetting] = {}
    for setting in settings:
        key = key_table.canonical(setting.key)
        latest.pop(key, None)
        latest[key] = replace(setting, key=key)
    return latest


def _interpolated(settings: dict[str, ForeignSetting]) -> dict[str, ForeignSetting]:
    """Replaces `${other.key}` by the key's value if the file sets it."""

    def replaced(setting: ForeignSetting, depth: int = 0) -> Any:
        value = setting.value
        if not isinstance(value, Unresolved) or depth > 5:
            return value
        match = _INTERPOLATION.search(value)
        if match is None:
            return value
        dots, name = match.groups()
        if dots:  # one: a key beside this one; each further one: a level up
            name = ".".join([*setting.key.split(".")[: -len(dots)], name])
        other = replaced(settings[name], depth + 1) if name in settings else value
        if match[0] == value:
            return other
        if isinstance(other, Unresolved):
            return value
        text = value.replace(match[0], str(other))
        return replaced(replace(setting, value=Unresolved(text)), depth + 1) if "${" in text else text

    return {key: replace(setting, value=replaced(setting)) for key, setting in settings.items()}
