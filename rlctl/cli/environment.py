"""`rlctl environment test`: checks an environment, and the turns of a model's template, before training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.command import FailOn, Format, Out, Trust, default_option, spec_named
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.audit import EnvironmentAudit
    from rlctl.environment.template_audit import AuditFinding, TemplateAudit
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.terminal import Console

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Try an environment before training in it.\n\n"
        "rlctl environment test calculator.py:Calculator --model smollm2-135m"
    ),
)

#: Most tokens of a sequence and of a turn, if the spec does not say.
_CONTEXT_LENGTH = 1 << 16
_TURN_LENGTH = 256
_STYLES = {"prompt": "dim", "observation": "cyan", "sampled": "bold green", "warning": "bold yellow"}
_STYLES["critical"] = "bold red"


@app.command("test")
def try_out(
    what: Annotated[
        str, typer.Argument(metavar="SPEC_OR_NAME", help="file.py:Name, or a run's spec (YAML or preset).")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]…", help="Keys of the spec, such as environment.tool_timeout=2s."),
    ] = None,
    model: Annotated[
        str | None,
        default_option("MODEL", "Audit this model's chat template too.", "bytes, with ChatML"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Rows to play: any file that `prepare-data` reads; may be repeated."
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=4, help="Episodes to play.")] = 200,
    fail_on: FailOn = None,
    trust: Trust = False,
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Play an environment with policies that know nothing, and report what is wrong with it.

    Checks whether `reset` is deterministic, what empty replies, an echo, random tokens and calls of the tools
    score, whether failures are excluded, whether calls hang, and whether processes or files are left. With
    --model also: whether the model's chat template keeps what was read and sampled over several turns, and
    which tokens are trained on. No model is run.

    rlctl environment test wordle.py:Wordle --data words.parquet

    rlctl environment test wordle.py:Wordle --model Qwen/Qwen3-0.6B --fail-on critical
    """
    from rlctl.registry import ENVIRONMENTS

    own = [f"model.path={model}"] if model else []
    spec = spec_named(what, ENVIRONMENTS, [*(overrides or ()), *own], trust=trust)
    from rlctl.cli.output import check_out, counting, write_report

    check_out([], out, is_page=False)
    from rlctl.environment.audit import audit_environment
    from rlctl.environment.build import SINGLE_TURN
    from rlctl.environment.protocol import EnvironmentContext
    from rlctl.environment.template_audit import audit_template
    from rlctl.rollout.protocol import Sampling

    if spec.environment.name == SINGLE_TURN:
        fix = "name file.py:Name; `rlctl reward` tries graders"
        raise UsageError("there is nothing to test in single turns", where=what, fix=fix)
    tokenizer, ends = _model(spec, model)
    length = spec.environment.context_length or _CONTEXT_LENGTH
    given = (spec.environment, tokenizer, Sampling(_TURN_LENGTH), length)
    context = EnvironmentContext(*given, chat_template_kwargs=spec.data.chat_template_kwargs)
    with counting("playing") as count:
        tasks = _tasks(spec, tokenizer, data)
        audit = audit_environment(spec.environment.name, context, tasks, episodes, count)
    template = audit_template(tokenizer, ends, spec.data.chat_template_kwargs) if model else None
    show = partial(_print, audit=audit, template=template)
    write_report(output_format, out, show, partial(_document, audit, template))
    severities = {finding.severity for finding in _findings(audit, template)}
    if fail_on and severities & {"critical", fail_on}:
        raise typer.Exit(3)


def _model(spec: RunSpec, model: str | None) -> tuple[Any, list[int]]:
    """A tokenizer, and the tokens that end a turn."""
    from rlctl.environment.byte_tokenizer import byte_tokenizer

    if model is None:
        tokenizer = byte_tokenizer()
        return tokenizer, [tokenizer.eos_token_id]
    from transformers import GenerationConfig

    from rlctl.model_files import load_reader, model_directory
    from rlctl.rollout.protocol import end_ids

    path = model_directory(model)
    tokenizer, config = load_reader(path, trust_remote_code=spec.model.trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the model has none
        generation = GenerationConfig.from_model_config(config)
    return tokenizer, end_ids(tokenizer, generation)


def _tasks(spec: RunSpec, tokenizer: Any, data: list[str] | None) -> list[Task]:
    from rlctl.data.prompts import PromptDataset
    from rlctl.data.schema import Message, Row
    from rlctl.prepare.data_files import read_any

    continues = spec.data.continue_final_message
    rows = read_any(data, continue_final_message=continues) if data else None
    return PromptDataset(
        rows or [Row("", (Message("user", "Begin."),), "")],
        tokenizer,
        max_prompt_length=_CONTEXT_LENGTH,
        filter_overlong=True,
        chat_template_kwargs=spec.data.chat_template_kwargs,
    ).all_tasks()


def _findings(audit: EnvironmentAudit, template: TemplateAudit | None) -> list[AuditFinding]:
    return [*audit.findings, *(template.findings if template else [])]


def _document(audit: EnvironmentAudit, template: TemplateAudit | None) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "findings": [asdict(finding) for finding in _findings(audit, template)],
        "tools": audit.tools,
        "prompt_tokens": _prompt_tokens(audit),
        "policies": [
            {
                "policy": played.policy,
                "episodes": len(played.episodes),
                "errors": len(played.errors),
                "rewards": played.rewards,
                "num_turns": played.mean("num_turns"),
            }
            for played in audit.played
        ],
        "template": [asdict(scene) for scene in template.scenes] if template else None,
    }


def _prompt_tokens(audit: EnvironmentAudit) -> dict[str, float] | None:
    """Lengths of the first prompts; None: none was read."""
    from statistics import median

    lengths = audit.prompt_lengths
    return {"least": lengths[0], "median": median(lengths), "most": lengths[-1]} if lengths else None


def _print(console: Console, audit: EnvironmentAudit, template: TemplateAudit | None) -> None:
    import json
    from statistics import fmean

    from rich.text import Text

    from rlctl.errors import visible
    from rlctl.text_table import print_table

    for tool in audit.tools:
        console.print(Text(f"tool  {json.dumps(tool['function'], ensure_ascii=False)}"), soft_wrap=True)
    rows = []
    for played in audit.played:
        rewards = played.rewards
        scores = [f"{f(rewards):.2f}" for f in (fmean, min, max)] if rewards else ["—"] * 3
        counts = (len(played.episodes), len(played.errors))
        means = [f"{played.mean(key):.1f}" for key in ("num_turns", "num_tool_calls", "tool_errors")]
        seconds = f"{1e3 * played.mean('seconds/environment'):.0f}"
        rows.append((played.policy, *map(str, counts), *scores, *means, seconds))
    headings = (
        *("policy", "episodes", "failed", "mean reward", "least", "most", "turns", "calls", "tool errors"),
        "ms",
    )
    console.print(end="\n" if audit.tools else "")
    print_table(console, headings, rows, right=range(1, 10))
    tokens = _prompt_tokens(audit)
    if tokens:
        text = "\nfirst prompts: {least} to {most} tokens, {median:g} in the median".format(**tokens)
        console.print(f"{text}, with tools and what reset said; data.max_prompt_length must allow them")
    for scene in template.scenes if template else []:
        title = f"\nafter {scene.name}: {scene.num_sequences} sequence{'s'[: scene.num_sequences > 1]}"
        console.print(Text(title, style="bold"))
        pieces = [(visible(text), _STYLES[kind]) for text, kind in scene.pieces]
        console.print(Text.assemble(*pieces), soft_wrap=True)
    if template:
        kinds = [(kind, _STYLES[kind]) for kind in ("prompt", "observation", "sampled")]
        legend = [part for kind in kinds for part in (kind, " · ")][:-1]
        console.print(Text.assemble("\n", *legend, ": only sampled tokens are trained on"))
    findings = _findings(audit, template)
    console.print(end="\n")
    for finding in findings:
        label = (f"{finding.severity}: ", _STYLES[finding.severity])
        console.print(
            Text.assemble(label, (finding.name, "bold"), "  ", visible(finding.what)), soft_wrap=True
        )
        if finding.fix:
            console.print(Text(f"  fix  {visible(finding.fix)}", style="cyan"), soft_wrap=True)
    if not findings:
        console.print("nothing found")
