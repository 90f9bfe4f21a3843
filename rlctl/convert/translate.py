"""Translates settings of another framework to a spec, with the outcome for every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.convert.expressions import NoCounterpart, Open
from rlctl.convert.python_file import Unresolved, shown_path
from rlctl.convert.source import ForeignConfig
from rlctl.convert.table import ForeignSetting, KeyRule, KeyTable, compute, placeholders, word
from rlctl.errors import Problem, SpecError, UsageError
from rlctl.run_spec.keys import closest, known_leaves, leaves_of
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import default_spec
from rlctl.user_code import is_file_function

Status = Literal["same", "different", "not supported", "unknown"]
STATUSES: dict[Status, str] = {
    "same": "translated, same meaning",
    "different": "translated, different meaning",
    "not supported": "not supported",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """The outcome for one key."""

    key: str  # key of the other framework
    value: Any  # value of this key
    status: Status  # see `STATUSES`
    became: dict[str, Any]  # resulting spec keys → values
    note: str  # what differs, why it is not supported, or what is missing
    where: str  # line of the file; empty for a default of the framework


@dataclass(slots=True)
class Translation:
    """A spec as dotted keys, with the origin of every value."""

    table: KeyTable  # the framework
    rows: list[KeyOutcome]  # one for every key that the file sets
    spec: dict[str, Any]  # key → value
    origins: dict[str, str]  # spec key → origin of its value, as text
    #: rows for defaults of the framework that differ from rlctl's
    implied: list[KeyOutcome] = field(default_factory=list)
    #: errors to fix before `rlctl train` accepts the spec, and warnings
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # unsupported parts of the file
    functions: tuple[Path, str] | None = None  # a file with functions of a script, and its text

    @property
    def counts(self) -> dict[Status, int]:
        """Number of keys per status."""
        return {status: sum(row.status == status for row in self.rows) for status in STATUSES}


def translate(source: ForeignConfig) -> Translation:
    """Applies the framework's table to the settings of a file."""
    table = source.table
    result = Translation(table, [], {}, {}, notes=source.notes + ([table.note] if table.note else []))
    result.functions = source.functions
    settings = {key: setting.value for key, setting in source.settings.items()}
    defaults = table.defaults(settings.get("_class"))
    values = defaults | settings
    computed = {target: _computed(formula, values) for target, formula in table.formulas.items()}
    for key, value in table.constants.items():
        result.spec[key] = value
        result.origins[key] = f"always so in {table.title}"
    faults = {
        target: _faulty(table.formulas[target], values, defaults, settings)
        for target, value in computed.items()
        if isinstance(value, _Missing)
    }
    for key, setting in source.settings.items():
        targets = [target for target in table.read_by.get(key, []) if key in faults.get(target, (key,))]
        _add_row(result, setting, values, {target: computed[target] for target in targets})
    _add_defaults(result, settings, defaults, computed)
    _refuse_unknown(result)
    result.spec = {key: result.spec[key] for key in known_leaves() if key in result.spec} | result.spec
    result.problems += _problems(result)
    return result


@dataclass(frozen=True, slots=True)
class _Missing:
    """A value without equivalent."""

    reason: str = ""  # empty: it has none


#: A formula gives no value, so the spec key is not set.
_LEFT_OUT = object()


def _computed(formula: str, values: dict[str, Any]) -> Any:
    """Value of a formula; `Unresolved` if it depends on a key that the file does not determine.

    `_LEFT_OUT` if the formula returns `leave out`, `_Missing` if it cannot be computed, for example because
    it needs a key without a value.
    """
    used = {key: values.get(key) for key in placeholders(formula)}
    unresolved = [value for value in used.values() if isinstance(value, Unresolved)]
    known = {key: Open(value) if isinstance(value, Unresolved) else value for key, value in used.items()}
    try:
        value = compute(formula, known)
    except NoCounterpart as error:
        return _Missing(str(error))
    except ValueError:
        return unresolved[0] if unresolved else _Missing()
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Open):
            return Unresolved(item.text)
    return _LEFT_OUT if isinstance(value, str) and value == "leave out" else value


def _faulty(
    formula: str, values: dict[str, Any], defaults: dict[str, Any], settings: dict[str, Any]
) -> list[str]:
    """Keys of the file because of which a formula cannot be computed: all that it reads, if no single one."""
    keys = [key for key in placeholders(formula) if key in settings]
    single = [
        key for key in keys if not isinstance(_computed(formula, values | {key: defaults.get(key)}), _Missing)
    ]
    return single or keys


def _add_row(
    result: Translation, setting: ForeignSetting, values: dict[str, Any], computed: dict[str, Any]
) -> None:
    """Adds the row of a key; `computed`: spec keys that formulas compute from it."""
    table = result.table
    key = setting.key
    rule = table.rule(key)
    # Under an unsupported prefix, only a name that differs in about one letter counts as a misspelling.
    nearest = closest(key, table.keys, cutoff=0.8 if rule is None else 0.96)
    if rule is None or (key not in table.keys and nearest and abs(len(nearest) - len(key)) < 2):
        note = f"did you mean {nearest}?" if nearest else ""
        result.rows.append(
            KeyOutcome(
                key=key,
                value=setting.value,
                status="unknown",
                became={},
                note=note,
                where=setting.where,
            )
        )
        return
    targets = ({rule.to: _mapped(rule, values[key])} if rule.to else {}) | computed
    targets = {target: value for target, value in targets.items() if value is not _LEFT_OUT}
    lost = {target: value.reason for target, value in targets.items() if isinstance(value, _Missing)}
    unknown = {target: value for target, value in targets.items() if isinstance(value, Unresolved)}
    became = {target: value for target, value in targets.items() if target not in (*lost, *unknown)}
    difference = rule.difference(setting.value, values)
    status: Status = "different" if difference else "same"
    note = difference or rule.remark(setting.value)
    if rule.unsupported:
        off = _is_neutral(rule, setting.value)
        status, note = ("same", "off here too") if off else ("not supported", rule.unsupported)
    elif lost:
        why = next(iter(lost.values())) or difference
        status = "not supported"
        note = f"no counterpart of {_shown(setting.value)}{': ' if why else ''}{why}"
        reported = {problem.key for problem in result.problems}
        for target, reason in lost.items():
            message = f"{key} = {_shown(setting.value)} has no counterpart"
            message += f": {reason}" if reason else "; rlctl's default would be used"
            if target not in reported:
                result.problems.append(Problem("error", target, message, "write the key into the spec"))
    reported = {problem.key for problem in result.problems}
    for target, value in unknown.items():
        if target not in reported:
            message = f"{key} depends on {value}, which the file does not determine ({setting.where})"
            fix = "set its variables with --set NAME=VALUE, or write the key into the spec"
            result.problems.append(Problem("error", target, message, fix))
    if unknown:
        note = f"not determined by the file{': ' if note else ''}{note}"
    result.spec |= became
    result.origins |= dict.fromkeys(became, f"{key}, {setting.where}")
    result.rows.append(
        KeyOutcome(
            key=key,
            value=setting.value,
            status=status,
            became=became,
            note=note,
            where=setting.where,
        )
    )


def _shown(value: Any) -> str:
    """A value as a sentence about it gives it."""
    return ", ".join(word(item) for item in value) if isinstance(value, list) else word(value)


def _is_neutral(rule: KeyRule, value: Any) -> bool:
    return any(word(value) == word(neutral) for neutral in rule.neutral)


def _mapped(rule: KeyRule, value: Any) -> Any:
    if rule.values is None or isinstance(value, Unresolved):
        return value
    if word(value) in rule.values:
        mapped = rule.values[word(value)]
        return None if mapped == "null" else mapped
    return value if "*" in rule.values else _Missing()


def _add_defaults(
    result: Translation, settings: dict[str, Any], defaults: dict[str, Any], computed: dict[str, Any]
) -> None:
    """Adds the framework's defaults that differ from rlctl's, or that have no equivalent."""
    ours = leaves_of(default_spec()) | {"engine.dtype": None}  # whose default depends on the machine
    for key, rule in result.table.keys.items():
        default = defaults.get(key)
        if key in settings or (default is None and not rule.to):
            continue
        if rule.unsupported and not _is_neutral(rule, default):
            result.implied.append(
                KeyOutcome(
                    key=key,
                    value=default,
                    status="not supported",
                    became={},
                    note=rule.unsupported,
                    where="",
                )
            )
            continue
        targets = {rule.to: _mapped(rule, default)} if rule.to and default is not None else {}
        targets |= {target: computed[target] for target in result.table.read_by.get(key, [])}
        became = {
            target: value
            for target, value in targets.items()
            if target not in result.spec
            and not (isinstance(value, _Missing | Unresolved) or value is _LEFT_OUT)
            and not _is_equal(value, ours.get(target))
        }
        if not became:
            continue
        result.spec |= became
        result.origins |= dict.fromkeys(became, f"default of {key}")
        difference = rule.difference(default, defaults | settings)
        status: Status = "different" if difference else "same"
        result.implied.append(
            KeyOutcome(
                key=key,
                value=default,
                status=status,
                became=became,
                note=difference or rule.remark(default),
                where="",
            )
        )


def _is_equal(value: Any, ours: Any) -> bool:
    if isinstance(value, list) or isinstance(ours, list | tuple):
        theirs_listed, ours_listed = (
            list(side) if isinstance(side, list | tuple) else [side] for side in (value, ours)
        )
        return theirs_listed == ours_listed
    return bool(value == ours) or word(value) == word(ours)


def _refuse_unknown(result: Translation) -> None:
    """Refuses a file most of whose keys the table does not know.

    Raises:
        UsageError: it is of another version or program.
    """
    rows = [row for row in result.rows if not row.key.endswith("_class")]
    unknown = [row.key for row in rows if row.status == "unknown"]
    if 2 * len(unknown) > len(rows):
        some = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
        message = f"{len(unknown)} of {len(rows)} keys are none of {result.table.title}: {some}"
        raise UsageError(message, fix="is it another version's or framework's? `--from` names the framework")


#: A reward, by any of these keys; an environment may have one of its own.
_REWARDS = ("reward.name", "reward.terms", "reward.model.path")
#: Keys with names of users' files.
_FILES = ("reward.name", "reward.terms", "environment.name")


def _problems(result: Translation) -> list[Problem]:
    """Problems found by the spec check, and what is missing because rlctl's default would be used."""
    reported = {problem.key for problem in result.problems}
    problems: list[Problem] = []
    missing = result.table.required | {
        "model.path": "the file does not contain it: the built-in tiny model would be trained"
    }
    for key, message in missing.items():
        either = _REWARDS if key in _REWARDS else (key,)
        if not reported.union(result.spec).intersection(either):
            problems.append(Problem("error", key, message, "write it into the spec"))
    problems += _missing_files(result)
    own_files = frozenset(key for key in _FILES if ".py:" in str(result.spec.get(key)))  # not imported
    checked = {key: value for key, value in result.spec.items() if key not in own_files}
    try:
        loaded = load_spec(overrides=checked, left_open=own_files)
    except SpecError as error:
        return problems + error.problems
    return problems + loaded.warnings


def _missing_files(result: Translation) -> list[Problem]:
    """Files of functions and classes that are not there."""
    terms = result.spec.get("reward.terms") or []
    named = [("reward.terms", term["name"]) for term in terms]
    named += [(key, result.spec[key]) for key in _FILES if isinstance(result.spec.get(key), str)]
    files = {(key, str(name).rpartition(":")[0]) for key, name in named if is_file_function(name)}
    fix = "put it there; of a function of an installed package, write a file that imports it"
    written = result.functions and shown_path(result.functions[0])
    return [
        Problem("error", key, f"{file}: no such file", fix)
        for key, file in sorted(files)
        if file != written and not Path(file).expanduser().is_file()
    ]
