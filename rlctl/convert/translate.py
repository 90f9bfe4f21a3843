"""Translates settings of another framework to a spec, with the outcome for every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.convert.source import ForeignConfig, ForeignSetting, Unresolved
from rlctl.convert.table import KeyRule, KeyTable, Open, compute, placeholders, word
from rlctl.errors import Problem, SpecError
from rlctl.spec.keys import closest, known_leaves, leaves_of
from rlctl.spec.load import load_spec
from rlctl.spec.run_spec import RunSpec

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

    @property
    def counts(self) -> dict[Status, int]:
        """Number of keys per status."""
        return {status: sum(row.status == status for row in self.rows) for status in STATUSES}


def translate(source: ForeignConfig) -> Translation:
    """Applies the framework's table to the settings of a file."""
    table = source.table
    result = Translation(table, [], {}, {}, notes=source.notes + ([table.note] if table.note else []))
    given = {key: setting.value for key, setting in source.settings.items()}
    defaults = table.defaults(given.get("_class"))
    values = defaults | given
    computed = {target: _computed(formula, values) for target, formula in table.formulas.items()}
    for key, value in table.constants.items():
        result.spec[key], result.origins[key] = value, f"always so in {table.title}"
    faults = {
        target: _faulty(table.formulas[target], values, defaults, given)
        for target, value in computed.items()
        if value is _MISSING
    }
    for key, setting in source.settings.items():
        targets = [one for one in table.read_by.get(key, []) if key in faults.get(one, (key,))]
        _add_row(result, setting, values, {target: computed[target] for target in targets})
    _add_defaults(result, given, defaults, computed)
    result.spec = {key: result.spec[key] for key in known_leaves() if key in result.spec} | result.spec
    result.problems += _problems(result)
    return result


#: `_MISSING`: a value without equivalent. `_LEFT_OUT`: a formula gives no value, so the spec key is not set.
_MISSING, _LEFT_OUT = object(), object()


def _computed(formula: str, values: dict[str, Any]) -> Any:
    """Value of a formula; `Unresolved` if it depends on a key that the file does not determine.

    `_LEFT_OUT` if the formula returns `leave out`, `_MISSING` if it cannot be computed, for example because
    it needs a key without a value.
    """
    used = {key: values.get(key) for key in placeholders(formula)}
    unresolved = [value for value in used.values() if isinstance(value, Unresolved)]
    known = {key: Open(value) if isinstance(value, Unresolved) else value for key, value in used.items()}
    try:
        value = compute(formula, known)
    except ValueError:
        return unresolved[0] if unresolved else _MISSING
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, Open):
            return Unresolved(part.text)
    return _LEFT_OUT if isinstance(value, str) and value == "leave out" else value


def _faulty(
    formula: str, values: dict[str, Any], defaults: dict[str, Any], given: dict[str, Any]
) -> list[str]:
    """Keys of the file because of which a formula cannot be computed: all that it reads, if no single one."""
    keys = [key for key in placeholders(formula) if key in given]
    single = [key for key in keys if _computed(formula, values | {key: defaults.get(key)}) is not _MISSING]
    return single or keys


def _add_row(
    result: Translation, setting: ForeignSetting, values: dict[str, Any], computed: dict[str, Any]
) -> None:
    """Adds the row of a key; `computed`: spec keys that formulas compute from it."""
    table, key = result.table, setting.key
    rule = table.rule(key)
    # Under an unsupported prefix, only a name that differs in about one letter counts as a misspelling.
    nearest = closest(key, table.keys, cutoff=0.8 if rule is None else 0.96)
    if rule is None or (key not in table.keys and nearest and abs(len(nearest) - len(key)) < 2):
        note = f"did you mean {nearest}?" if nearest else ""
        result.rows.append(KeyOutcome(key, setting.value, "unknown", {}, note, setting.where))
        return
    targets = ({rule.to: _mapped(rule, values[key])} if rule.to else {}) | computed
    targets = {target: value for target, value in targets.items() if value is not _LEFT_OUT}
    lost = [target for target, value in targets.items() if value is _MISSING]
    unknown = {target: value for target, value in targets.items() if isinstance(value, Unresolved)}
    became = {target: value for target, value in targets.items() if target not in (*lost, *unknown)}
    difference = rule.difference(setting.value, values)
    status: Status = "different" if difference else "same"
    note = difference or rule.remark(setting.value)
    if rule.unsupported:
        off = _is_neutral(rule, setting.value)
        status, note = ("same", "off here too") if off else ("not supported", rule.unsupported)
    elif lost:
        status, note = "not supported", f"no counterpart of {word(setting.value)}"
        note += f": {difference}" if difference else ""
        what = f"{key} = {word(setting.value)} has no counterpart; rlctl's default would be used"
        fix = "write the key into the spec"
        result.problems += [Problem("error", target, what, fix) for target in lost]
    reported = {problem.key for problem in result.problems}
    for target, value in unknown.items():
        if target not in reported:
            what = f"{key} depends on {value}, which the file does not determine ({setting.where})"
            fix = "set its variables with --set NAME=VALUE, or write the key into the spec"
            result.problems.append(Problem("error", target, what, fix))
    if unknown:
        note = f"not determined by the file{': ' if note else ''}{note}"
    result.spec |= became
    result.origins |= dict.fromkeys(became, f"{key}, {setting.where}")
    result.rows.append(KeyOutcome(key, setting.value, status, became, note, setting.where))


def _is_neutral(rule: KeyRule, value: Any) -> bool:
    return any(word(value) == word(neutral) for neutral in rule.neutral)


def _mapped(rule: KeyRule, value: Any) -> Any:
    if rule.values is None or isinstance(value, Unresolved):
        return value
    if word(value) in rule.values:
        mapped = rule.values[word(value)]
        return None if mapped == "null" else mapped
    return value if "*" in rule.values else _MISSING


def _add_defaults(
    result: Translation, given: dict[str, Any], defaults: dict[str, Any], computed: dict[str, Any]
) -> None:
    """Adds the framework's defaults that differ from rlctl's, or that have no equivalent."""
    ours = leaves_of(RunSpec()) | {"engine.dtype": None}  # whose default depends on the machine
    for key, rule in result.table.keys.items():
        default = defaults.get(key)
        if key in given or (default is None and not rule.to):
            continue
        if rule.unsupported and not _is_neutral(rule, default):
            result.implied.append(KeyOutcome(key, default, "not supported", {}, rule.unsupported, ""))
            continue
        found = {rule.to: _mapped(rule, default)} if rule.to and default is not None else {}
        found |= {target: computed[target] for target in result.table.read_by.get(key, [])}
        became = {
            target: value
            for target, value in found.items()
            if target not in result.spec
            and not (value is _MISSING or value is _LEFT_OUT or isinstance(value, Unresolved))
            and not _is_equal(value, ours.get(target))
        }
        if not became:
            continue
        result.spec |= became
        result.origins |= dict.fromkeys(became, f"default of {key}")
        difference = rule.difference(default, defaults | given)
        status: Status = "different" if difference else "same"
        result.implied.append(
            KeyOutcome(key, default, status, became, difference or rule.remark(default), "")
        )


def _is_equal(value: Any, ours: Any) -> bool:
    if isinstance(value, list) or isinstance(ours, list | tuple):
        one, two = (list(side) if isinstance(side, list | tuple) else [side] for side in (value, ours))
        return one == two
    return bool(value == ours) or word(value) == word(ours)


def _problems(result: Translation) -> list[Problem]:
    """Problems found by the spec check, and a missing model, because rlctl's default would be used."""
    found: list[Problem] = []
    if "model.path" not in result.spec and all(one.key != "model.path" for one in result.problems):
        what = "the file does not contain it: the built-in tiny model would be trained"
        found.append(Problem("error", "model.path", what, "write it into the spec"))
    try:
        loaded = load_spec(overrides=result.spec)
    except SpecError as error:
        return found + error.problems
    return found + loaded.warnings
