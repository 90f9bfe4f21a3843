"""What the documentation site takes from elsewhere when it is built: tables of the code, pages of the root.

A page names a table by a comment of its own line, `<!-- generated: spec keys -->`; `TABLES` says which there
are. README, CONTRIBUTING, SECURITY and CHANGELOG become pages; their links into `docs/` stay valid.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import MISSING, fields
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

    from rlctl.registry import Part

ROOT = Path(__file__).parent
#: File at the root → its page.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
}
_MARKER = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?:docs/)?([^)#:\s]+)")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Warns):\n", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)
_COMMENTED = re.compile(r"^((?: {4}#: .*\n)*) {4}(\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*)")
_EXAMPLES = re.compile(r"(?:^(?:  )?(?:rlctl|kubectl) \S.*\n+)+", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made from files at the root."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=as_page(text)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of a page by their tables."""
    return with_tables(markdown)


def as_page(text: str) -> str:
    """The same text with links as seen from `docs/`."""
    return _LINK.sub(lambda link: PAGES.get(link[1], link[1]), text)


def with_tables(markdown: str) -> str:
    """The text with every marker replaced.

    Raises:
        KeyError: a marker names no table.
    """
    return _MARKER.sub(lambda marker: TABLES[marker[1]](), markdown)


def _spec_keys() -> str:
    from rlctl.cli.app import run

    with redirect_stdout(io.StringIO()) as table:
        run(["explain", "--format", "markdown"])
    return table.getvalue()


def _metrics() -> str:
    from rlctl.metric_names import markdown

    return markdown()


def _commands() -> str:
    """Help of every command, as Typer documents it, one heading level down and without Rich's markup."""
    import click
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from rlctl.cli.app import app

    command = get_command(app)
    document = partial(get_docs_for_click, ctx=click.Context(command, info_name="rlctl"))
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
    lines = [line.strip() for line in examples[0].splitlines() if line.strip()]
    return "```bash\n" + "\n".join(lines) + "\n```\n\n"


def _api() -> str:
    """Signature and docstring of everything in `rlctl.__all__`."""
    import rlctl
    from rlctl.api import CorrectOptions, EvaluateOptions
    from rlctl.evaluate.request import EvaluateRequest
    from rlctl.spec.algorithm import RolloutCorrectionSpec

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
    lines = ["| option | type | default |", "|---|---|---|"]
    for name, hint in kind.__annotations__.items():
        text = getattr(hint, "__forward_arg__", str(hint)).replace("|", "\\|")
        default = defaults[name]
        lines.append(f"| `{name}` | `{text}` | {'' if default is MISSING else f'`{default!r}`'} |")
    return "\n".join(lines) + "\n"


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
    lines = ["| attribute | content |", "|---|---|"]
    for names, text in content.items():
        default = defaults.get(names, MISSING)
        if isinstance(default, frozenset):
            default = ", ".join(sorted(default)) or "none"
        shown = f"; default: `{default}`" if isinstance(default, str | int | float) and default != "" else ""
        lines.append(_row((f"`{names}`", text.rstrip(".") + shown)))
    return "\n".join(lines)


def _diagnosis_rules() -> str:
    from itertools import groupby

    from rlctl.diagnose.rule import all_rules

    parts = []
    for module, rules in groupby(all_rules(), key=lambda rule: rule.detect.__module__):
        heading = (sys.modules[module].__doc__ or "").partition(".")[0].removeprefix("Rules about ")
        parts += [f"## {heading[:1].upper()}{heading[1:]}\n"]
        parts += ["| rule | metrics | info / warning / critical | source of the levels |"]
        parts += ["|---|---|---|---|"]
        parts += [f"| `{r.name}` | {r.signal} | {r.thresholds} | {r.source} |" for r in rules]
        parts += [""]
    return "\n".join(parts)


def _log_names(framework: str) -> str:
    """The names that one framework gives to metrics."""
    path = ROOT / "rlctl" / "diagnose" / "readers" / "frameworks" / f"{framework}.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = [(f"`{name}`", one) for name, one in content["names"].items()]
    rows += [(f"matching `{pattern}`", one) for pattern, one in content.get("patterns", {}).items()]
    lines = ["| in the log | canonical | difference |", "|---|---|---|"]
    for name, one in rows:
        key, meaning = (one, "") if isinstance(one, str) else (one["key"], one.get("meaning", ""))
        cells = (name, f"`{key.replace(chr(92) + '1', '…')}`", meaning or "—")
        lines.append(_row(cells))
    return "\n".join(lines)


def _graders() -> str:
    """Every built-in grader, as it is registered."""
    from rlctl.registry import GRADERS

    lines = ["| `reward.name` | grades | score | needs |", "|---|---|---|---|"]
    for part in sorted(GRADERS.parts(), key=lambda part: (part.name != "auto", part.name)):
        source = f" ({part.source})" if part.source else ""
        needs = "; ".join(sorted(part.needs))
        lines.append(f"| `{part.name}` | {part.label} | {part.formula}{source} | {needs} |")
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    """A row of a table, with bars in its cells escaped."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _parts(registry_name: str) -> str:
    """The parts of a registry."""
    from rlctl import registry

    lines = ["| name | | formula | one value per | source | status |", "|---|---|---|---|---|---|"]
    for part in getattr(registry, registry_name).parts():
        status = "experimental" if part.experimental else "stable"
        cells = (f"`{part.name}`", part.label, part.formula, part.unit, part.source, status)
        lines.append(_row(cells))
    return "\n".join(lines)


#: What an estimator needs of the batch → what that costs.
_COSTS = {
    "group_ids": "`rollout.n` ≥ 2",
    "baseline_scores": "one more generation (greedy)",
    "score_norms": "one more forward pass in bypass mode",
    "sequence_weights": "",  # of the same pass
    "values": "a critic",
}


def _estimators() -> str:
    """The advantage estimators, with what they need and read."""
    from rlctl.registry import ADVANTAGE_ESTIMATORS

    rows = []
    for part in ADVANTAGE_ESTIMATORS.parts():
        needs = [_COSTS[need] for need in sorted(part.needs)] + [f"`{key}`" for key in sorted(part.options)]
        rows.append((part, ", ".join(filter(None, needs))))
    return _table("A of response i, or of its token t", "needs, reads", rows)


def _stable_losses() -> str:
    """The losses that are proven on real runs, with the keys that they read."""
    from rlctl.registry import POLICY_LOSSES

    parts = [POLICY_LOSSES.part(name) for name in POLICY_LOSSES.stable()]
    return _table(
        "per token", "reads", [(part, ", ".join(f"`{o}`" for o in sorted(part.options))) for part in parts]
    )


def _table(of: str, needs: str, rows: Iterable[tuple[Part, str]]) -> str:
    lines = [f"| name | | {of} | {needs} | source |", "|---|---|---|---|---|"]
    for part, needed in rows:
        cells = (f"`{part.name}`", part.title, part.formula, needed, part.source)
        lines.append(_row(cells))
    return "\n".join(lines)


def _experimental_losses() -> str:
    """The losses that are not yet proven on real runs, with their own parameters."""
    from rlctl.registry import POLICY_LOSSES

    lines = ["| name | | formula | `loss_params`, defaults | source |", "|---|---|---|---|---|"]
    for part in (POLICY_LOSSES.part(name) for name in POLICY_LOSSES):
        if part.experimental:
            fields = part.params.model_fields.items() if part.params else ()
            given = [
                f"`{name}`" + (", required" if f.is_required() else f" {f.default}") for name, f in fields
            ]
            cells = (f"`{part.name}`", part.label, part.formula, "; ".join(given), part.source)
            lines.append(_row(cells))
    return "\n".join(lines)


def _import_keys(framework: str) -> str:
    """What `rlctl import` makes of each key of one framework."""
    from rlctl.convert.table import table

    one = table(framework)
    lines = [f"## {one.title}", "", one.note[:1].upper() + one.note[1:] + ".", ""]
    lines += ["| key | becomes | differs, or why not |", "|---|---|---|"]
    for key, rule in one.keys.items():
        targets = [target for target in (rule.to, *one.read_by.get(key, [])) if target]
        said = rule.differs
        differs = said if isinstance(said, str) else "; ".join(f"{k}: {v}" for k, v in said.items() if v)
        cells = (f"`{key}`", ", ".join(f"`{target}`" for target in targets), rule.unsupported or differs)
        lines.append(_row(cell or "—" for cell in cells))
    lines += [
        f"| `{key}`{' and all below' if key[-1] in '._-' else ''} | — | {why} |"
        for key, why in one.unsupported.items()
    ]
    return "\n".join([*lines, ""])


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
            *(("rlctl.rollout.protocol", name) for name in ("EngineContext", "Request", "Sampling")),
            ("rlctl.batch", "Turn"),
            ("rlctl.spec.rollout", "EngineCapabilities"),
            ("rlctl.track.sink", "SinkInputs"),
            ("rlctl.diagnose.rule", "Rule"),
            ("rlctl.diagnose.table", "RunLog"),
        )
    },
    **{
        f"import keys of {framework}": partial(_import_keys, framework)
        for framework in ("verl", "trl", "openrlhf", "slime", "prime-rl", "nemo-rl")
    },
    **{
        f"names in logs of {framework}": partial(_log_names, framework)
        for framework in (
            *("verl", "trl", "trl_async", "trl_ppo", "ms_swift", "llama_factory", "openrlhf", "slime"),
            *("prime_rl", "nemo_rl", "skyrl", "areal", "torchforge", "roll", "oat", "open_instruct"),
        )
    },
}
