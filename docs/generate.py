"""Writes what the pages take from the code, the examples and the benchmarks.

    python docs/generate.py

A page holds generated text between two comments, each on a line of its own:

    <!-- generated: spec keys -->
    <!-- end of generated text -->

The first comment names an entry of `TABLES` or a file of the repository. Text between the two is overwritten.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cached_property, partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from rlctl.registry import Part

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
COMMAND = "python docs/generate.py"
END = "<!-- end of generated text -->"

BEGIN = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
BLOCK = re.compile(rf"{BEGIN.pattern}\n(?:(?!<!-- ).*\n)*^{END}$", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Warns):\n", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)
_COMMENTED = re.compile(r"^((?: {4}#: .*\n)*) {4}(\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*)")
_EXAMPLES = re.compile(r"(?:^ *(?:rlctl|kubectl) \S.*(?:\\\n.*)*\n+)+", re.MULTILINE)


def outdated() -> dict[Path, str]:
    """Pages whose generated text is out of date, with the text that they should have."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md"))}
    current = {path: with_generated_text(text) for path, text in texts.items()}
    return {path: text for path, text in current.items() if text != texts[path]}


def with_generated_text(page: str) -> str:
    """The page with all generated text written anew.

    Raises:
        KeyError: a comment names neither a table nor a file.
        ValueError: a comment has no second one below it.
    """
    if open_ended := BEGIN.findall(BLOCK.sub("", page)):
        raise ValueError(f"without `{END}` below it: <!-- generated: {open_ended[0]} -->")
    return BLOCK.sub(
        lambda block: "\n\n".join((block[0].partition("\n")[0], _generated(block[1]), END)), page
    )


def _generated(name: str) -> str:
    if name in TABLES or not (ROOT / name).is_file():
        return TABLES[name]().strip("\n")
    text = (ROOT / name).read_text(encoding="utf-8").strip("\n")
    return text if name.endswith(".md") else f"```python\n{text}\n```"


def _table(columns: str, rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown; `columns` are separated by bars, bars in cells are escaped."""
    lines = [[column.strip() for column in columns.split("|")]]
    lines += [["---"] * len(lines[0])]
    lines += [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _spec_keys() -> str:
    from rlctl.run_spec.key_table import key_rows

    return _table(
        "key | type | default | meaning",
        ((f"`{row.key}`", row.type, f"`{row.default}`", row.meaning) for row in key_rows()),
    )


def _metrics() -> str:
    from rlctl.metric_names import SECTIONS, Metric

    def elsewhere(metric: Metric) -> str:
        names = (
            framework if name == metric.name else f"{framework} `{name}`"
            for framework, name in metric.peers.items()
        )
        return ", ".join(names) or "—"

    tables = {
        title: _table(
            "key | unit | definition | same quantity elsewhere",
            ((f"`{m.name}`", m.unit, m.definition, elsewhere(m)) for m in metrics),
        )
        for title, metrics in SECTIONS.items()
    }
    return "\n".join(f"### {title}\n\n{table}" for title, table in tables.items())


def _commands() -> str:
    """Help of every command, as Typer documents it, one heading level down and without Rich's markup."""
    import click
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from rlctl.cli.app import app

    command = get_command(app)
    document = partial(
        get_docs_for_click, ctx=click.Context(command, info_name="rlctl", **command.context_settings)
    )
    text = document(obj=command, name="rlctl")
    for parent in command.commands.values():
        names = getattr(parent, "subcommands", ())
        prefix = f"rlctl {parent.name}"
        below = [document(obj=parent.subcommand(name), indent=2, call_prefix=prefix) for name in names]
        own = document(obj=parent, indent=1, call_prefix="rlctl")
        text = text.replace(own, "".join([own, *below]))
    text = re.sub(r"\[/?bold\]", "`", text.partition("\n")[2])
    return _EXAMPLES.sub(_code_block, text)


def _code_block(examples: re.Match[str]) -> str:
    return "```bash\n" + inspect.cleandoc(re.sub(r"\n+ *", "\n", examples[0])) + "\n```\n\n"


def _api() -> str:
    """Signature and docstring of everything in `rlctl.__all__`."""
    import rlctl
    from rlctl.api import CorrectOptions, EvaluateOptions
    from rlctl.evaluate.request import EvaluateRequest
    from rlctl.run_spec.algorithm import RolloutCorrectionSpec

    defaults = {
        "evaluate": (EvaluateOptions, {field.name: field.default for field in fields(EvaluateRequest)}),
        "correct": (
            CorrectOptions,
            {name: field.default for name, field in RolloutCorrectionSpec.model_fields.items()},
        ),
    }
    parts = []
    for name in rlctl.__all__:
        thing = getattr(rlctl, name)
        parts.append(_documented(f"rlctl.{name}", thing))
        if name in defaults:
            parts.append(_options(*defaults[name]))
        if inspect.isclass(thing):
            parts.append(_members(thing))
    return "\n".join(parts)


def _options(kind: type, defaults: Mapping[str, Any]) -> str:
    """The keyword arguments that a `TypedDict` describes; a default that is a factory is left out."""
    hints = {name: getattr(hint, "__forward_arg__", str(hint)) for name, hint in kind.__annotations__.items()}
    shown = {name: "" if defaults[name] is MISSING else f"`{defaults[name]!r}`" for name in hints}
    return _table("option | type | default", ((f"`{n}`", f"`{hint}`", shown[n]) for n, hint in hints.items()))


def _members(kind: type) -> str:
    """Public properties and methods of a class, with the first paragraph of their docstrings."""
    lines = []
    for name, member in vars(kind).items():
        is_property = isinstance(member, property)
        if name.startswith("_") or not (is_property or inspect.isfunction(member)):
            continue
        signature = re.sub(
            r"'([^']*)'", r"\1", str(inspect.signature(member.fget if is_property else member))
        )
        call = "" if is_property else re.sub(r"\(self(, )?", "(", signature.partition(" -> ")[0])
        summary = " ".join(inspect.cleandoc(member.__doc__ or "").partition("\n\n")[0].split())
        lines.append(f"- `{name}{call}`, {signature.partition(' -> ')[2] or 'None'}: {summary}")
    return "\n".join(lines) + "\n" if lines else ""


def _documented(name: str, thing: Any) -> str:
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    lines = [f"## `{name}`", "", "```python", f"{name}{signature}", "```", ""]
    summary, *sections = _SECTION.split(inspect.cleandoc(thing.__doc__))
    lines.append(summary)
    for title, content in zip(sections[::2], sections[1::2], strict=True):
        lines += [f"**{title}**", ""]
        lines += [_ENTRY.sub(r"- `\1`: \2", line).strip() for line in content.strip("\n").splitlines()]
        lines.append("")
    return "\n".join(lines) + "\n"


def _attributes(module: str, name: str) -> str:
    """Attributes and properties of a class, as its docstrings or comments describe them, with defaults."""
    kind = getattr(import_module(module), name)
    if attributes := inspect.cleandoc(kind.__doc__).partition("\nAttributes:\n")[2]:
        found = _ATTRIBUTE.findall(attributes)
    else:  # comments before the fields, or in their lines
        commented = _COMMENTED.findall(inspect.getsource(kind))
        found = [(name, before.replace("#:", "") + after) for before, name, after in commented]
    content = {names: " ".join(text.split()) for names, text in found if text}
    for member, value in vars(kind).items():
        if isinstance(value, property | cached_property) and not member.startswith("_"):
            content[member] = " ".join(value.__doc__.split())
    defaults = {field.name: field.default for field in fields(kind)}
    rows = []
    for names, text in content.items():
        default = defaults.get(names, MISSING)
        if isinstance(default, frozenset):
            default = ", ".join(sorted(default)) or "none"
        shown = f"; default: `{default}`" if isinstance(default, str | int | float) and default != "" else ""
        rows.append((f"`{names}`", text.rstrip(".") + shown))
    return _table("attribute | content", rows)


def _diagnosis_rules() -> str:
    from rlctl.diagnose.rule import all_rules

    parts = []
    for module, rules in groupby(all_rules(), key=lambda rule: rule.detect.__module__):
        heading = (sys.modules[module].__doc__ or "").partition(".")[0].removeprefix("Rules about ")
        rows = [(f"`{rule.name}`", rule.signal, str(rule.thresholds), rule.source) for rule in rules]
        table = _table("rule | metrics | info / warning / critical | source of the levels", rows)
        parts.append(f"## {heading[:1].upper()}{heading[1:]}\n\n{table}")
    return "\n".join(parts)


def _log_names(framework: str) -> str:
    """The names that one framework gives to metrics."""
    import tomllib

    path = ROOT / "rlctl" / "diagnose" / "readers" / "frameworks" / f"{framework}.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    named = [(f"`{name}`", one) for name, one in content["names"].items()]
    named += [(f"matching `{pattern}`", one) for pattern, one in content.get("patterns", {}).items()]
    rows = []
    for name, one in named:
        key, meaning = (one, "") if isinstance(one, str) else (one["key"], one.get("meaning", ""))
        rows.append((name, f"`{key.replace(chr(92) + '1', '…')}`", meaning or "—"))
    return _table("in the log | canonical | difference", rows)


def _graders() -> str:
    """Every built-in grader, as it is registered."""
    from rlctl.registry import GRADERS

    rows = []
    for part in sorted(GRADERS.parts(), key=lambda part: (part.name != "auto", part.name)):
        source = f" ({part.source})" if part.source else ""
        rows.append((f"`{part.name}`", part.label, f"{part.formula}{source}", "; ".join(sorted(part.needs))))
    return _table("`reward.name` | grades | score | needs", rows)


def _parts(registry_name: str) -> str:
    """The parts of a registry."""
    from rlctl import registry

    rows = (
        (*_of(part, part.label), part.unit, part.source, "experimental" if part.experimental else "stable")
        for part in getattr(registry, registry_name).parts()
    )
    return _table("name | | formula | one value per | source | status", rows)


def _of(part: Part, title: str) -> tuple[str, str, str]:
    return f"`{part.name}`", title, part.formula


#: What an estimator needs of the batch → what that costs.
_COSTS = {
    "group_ids": "`rollout.n` ≥ 2",
    "baseline_scores": "one more generation (greedy)",
    "score_norms": "one more forward pass in bypass mode",
    "sequence_weights": "",  # of the same pass
    "values": "a critic",
}


def _keys(part: Part) -> list[str]:
    return [f"`{key}`" for key in sorted(part.options)]


def _estimators() -> str:
    """The advantage estimators, with what they need and read."""
    from rlctl.registry import ADVANTAGE_ESTIMATORS

    rows = []
    for part in ADVANTAGE_ESTIMATORS.parts():
        needs = [_COSTS[need] for need in sorted(part.needs)] + _keys(part)
        rows.append((*_of(part, part.title), ", ".join(filter(None, needs)), part.source))
    return _table("name | | A of response i, or of its token t | needs, reads | source", rows)


def _stable_losses() -> str:
    """The losses that are proven on real runs, with the keys that they read."""
    from rlctl.registry import POLICY_LOSSES

    parts = [POLICY_LOSSES.part(name) for name in POLICY_LOSSES.stable()]
    rows = ((*_of(part, part.title), ", ".join(_keys(part)), part.source) for part in parts)
    return _table("name | | per token | reads | source", rows)


def _experimental_losses() -> str:
    """The losses that are not yet proven on real runs, with their own parameters."""
    from rlctl.registry import POLICY_LOSSES

    rows = []
    for part in (POLICY_LOSSES.part(name) for name in POLICY_LOSSES):
        if part.experimental:
            params = part.params.model_fields.items() if part.params else ()
            given = [f"`{name}`{', required' if f.is_required() else f' {f.default}'}" for name, f in params]
            rows.append((*_of(part, part.label), "; ".join(given), part.source))
    return _table("name | | formula | `loss_params`, defaults | source", rows)


def _import_keys(framework: str) -> str:
    """What `rlctl import` makes of each key of one framework."""
    from rlctl.convert.table import table

    one = table(framework)
    rows = []
    for key, rule in one.keys.items():
        targets = dict.fromkeys(target for target in (rule.to, *one.read_by.get(key, [])) if target)
        said = rule.differs
        differs = said if isinstance(said, str) else "; ".join(f"{k}: {v}" for k, v in said.items() if v)
        becomes = ", ".join(f"`{target}`" for target in targets)
        rows.append((f"`{key}`", becomes or "—", rule.unsupported or differs or "—"))
    rows += [
        (f"`{key}`{' and all below' if key[-1] in '._-' else ''}", "—", why)
        for key, why in one.unsupported.items()
    ]
    content = _table("key | becomes | differs, or why not", rows)
    return f"## {one.title}\n\n{one.note[:1].upper()}{one.note[1:]}.\n\n{content}"


TABLES: dict[str, Callable[[], str]] = {
    "graders": _graders,
    "spec keys": _spec_keys,
    "metrics": _metrics,
    "commands": _commands,
    "api": _api,
    "diagnosis rules": _diagnosis_rules,
    "advantage estimators": _estimators,
    "losses": _stable_losses,
    "experimental losses": _experimental_losses,
    "correction weights": partial(_parts, "CORRECTION_WEIGHTS"),
    "rejection criteria": partial(_parts, "REJECTION_CRITERIA"),
    **{
        f"attributes of {name}": partial(_attributes, module, name)
        for module, name in (
            ("rlctl.algos.losses", "LossInputs"),
            ("rlctl.algos.estimators", "AdvantageInputs"),
            ("rlctl.algos.correction", "LogRatio"),
            ("rlctl.train.terms", "KeptTokens"),
            *(("rlctl.rollout.protocol", name) for name in ("EngineContext", "Request", "Sampling")),
            ("rlctl.batch", "Turn"),
            ("rlctl.run_spec.rollout", "EngineCapabilities"),
            ("rlctl.track.sink", "SinkInputs"),
            ("rlctl.diagnose.rule", "Rule"),
            ("rlctl.diagnose.table", "RunLog"),
        )
    },
    **{
        f"import keys of {framework}": partial(_import_keys, framework)
        for framework in ("verl", "trl", "openrlhf", "slime")
    },
    **{
        f"names in logs of {framework}": partial(_log_names, framework)
        for framework in (
            *("verl", "trl", "trl_async", "trl_ppo", "ms_swift", "llama_factory", "openrlhf", "slime"),
            *("prime_rl", "nemo_rl", "skyrl", "areal", "torchforge", "roll", "oat", "open_instruct"),
            "tinker",
        )
    },
}


if __name__ == "__main__":
    pages = outdated()
    for page, current in pages.items():
        page.write_text(current, encoding="utf-8")
    print("wrote", ", ".join(str(page.relative_to(ROOT)) for page in pages) or "nothing: all text is current")
