"""Values of a run that follow from its model, data, reward and machine.

With `rlctl train --model --data --reward` they are inferred where nobody sets them. They are part of the
spec: a resumed run does not infer again.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlctl.environment.build import SINGLE_TURN, TOOLS, EpisodeSource
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.model_files import load_reader, model_directory
from rlctl.registry import ENVIRONMENTS
from rlctl.reward.thoughts import opens_thoughts
from rlctl.run_spec.environment import is_agent
from rlctl.run_spec.flags import Flags
from rlctl.run_spec.load import LoadedSpec, load_spec
from rlctl.run_spec.machine import Machine, gib
from rlctl.run_spec.memory import Phase, memory_total
from rlctl.run_spec.model_size import local_model, model_size
from rlctl.run_spec.placement import Placement
from rlctl.run_spec.run_spec import RunSpec

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.data.schema import Row

BATCH, MINI_BATCH = "data.train_batch_size", "actor.ppo_mini_batch_size"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
#: Only where episodes may have several turns.
CONTEXT = "environment.context_length"
MICRO_BATCH, STEPS = "actor.ppo_micro_batch_size_per_gpu", "trainer.total_training_steps"
#: The keys that are inferred, in the order in which they are.
INFERRED = (PROMPT, RESPONSE, CONTEXT, BATCH, MINI_BATCH, MICRO_BATCH, STEPS)

#: Most prompts per batch on GPUs and on CPUs; batches that an epoch should have at least.
_LARGEST_BATCH, _LARGEST_BATCH_CPU, _SMALLEST_BATCH, _FEWEST_BATCHES = 128, 16, 8, 8
#: Longest responses in tokens: by the grader, of thinking models, of other graders with a GPU and without.
_RESPONSES = {"exact": 256, "multiple_choice": 512, "code": 2048}
_THINKING, _OTHERS, _OTHERS_ON_CPU = 8192, 1024, 256
#: The limit of a response is at least so many times the tokens of the longest known answer.
_TIMES_LONGEST_ANSWER = 2
#: Prompt limits are multiples of this many tokens.
_ROUNDED_TO = 64
#: Longest prompts by characters that are tokenised to find the longest one; likewise answers.
_TOKENISED = 64
#: Rows whose episodes begin, to see what the environment adds: of classes, and of agents and tasksets.
_BEGUN, _BEGUN_AGENTS = 16, 2
#: Sequences per pass that are tried on GPUs, and how much of a GPU's memory they may take; on CPUs.
_MICRO_BATCHES, _MEMORY_SHARE, _MICRO_BATCH_CPU = (64, 32, 16, 8, 4, 2, 1), 0.8, 8
#: Phases of `memory_parts` whose memory depends on the size of a pass.
_TRAINING = frozenset(get_args(Phase)) - {"generation"}

#: Rows that are read before a run starts; the run reads all.
CHECKED_ROWS = 100_000

Inferred = dict[str, tuple[object, str]]


def load_with_flags(
    flags: Flags,
    presets: Sequence[str],
    files: Sequence[Path],
    values: Sequence[str],
    machine: Machine,
    *,
    fetch: bool,
) -> LoadedSpec:
    """Loads a spec with the flags, and infers what nobody sets, unless the model is the embedded one.

    Args:
        values: `KEY=VALUE` arguments.
        machine: that trains.
        fetch: download a model that is not here, to read its tokenizer; False: estimate the lengths.

    Raises:
        SpecError: as `load_spec`.
        UsageError: a flag and an argument set the same key, or the data or the tokenizer cannot be read.
        EnvironmentFailure: the model or a data set cannot be fetched.
    """
    every = [*flags.overrides(values), *values]
    loaded = load_spec(presets, files, every, base=flags.preset, left_open=frozenset(INFERRED))
    if loaded.spec.is_embedded or not loaded.spec.data.train_files:
        return load_spec(presets, files, every, base=flags.preset)
    free = {key for key in INFERRED if loaded.origins[key].layer == "default" or _is_base(loaded, key, flags)}
    inferred = infer(loaded.spec, free, machine, fetch=fetch)
    return load_spec(presets, files, every, base=flags.preset, inferred=inferred)


def _is_base(loaded: LoadedSpec, key: str, flags: Flags) -> bool:
    """Whether only the preset of `--model` sets the key."""
    origin = loaded.origins[key]
    return flags.preset is not None and (origin.layer, origin.name) == ("preset", flags.preset)


def infer(spec: RunSpec, free: Iterable[str], machine: Machine, *, fetch: bool) -> Inferred:
    """Key → value and reason, for those of `INFERRED` that are `free`; empty if the data cannot be read.

    Raises:
        UsageError, EnvironmentFailure: as `load_with_flags`.
    """
    inferred: Inferred = {}

    def choose(key: str, value: int, why: str) -> None:
        nonlocal spec
        if key in free:
            inferred[key] = value, why
            section, _, name = key.partition(".")
            changed = getattr(spec, section).model_copy(update={name: value})
            spec = spec.model_copy(update={section: changed})

    rows, count = _rows(spec, fetch=fetch)
    if not rows:
        return inferred
    reader = reader_of(spec, fetch=fetch)
    longest = _longest_prompt(spec, rows, reader)
    response, why = _response_limit(spec, rows, reader, machine, thinks=longest.thinks)
    limit = _rounded(longest.num_tokens)
    why_limit = longest.why
    context = _context(reader[1]) if reader else 0
    if context:
        if response > context // 2:
            response = context // 2
            why = f"half of the model's context of {context} tokens"
        if limit > context - response:
            limit = context - response
            why_limit = f"the model's context of {context} tokens without the response"
    choose(PROMPT, limit, why_limit)
    choose(RESPONSE, response, why)
    if spec.environment.is_multi_turn:
        choose(CONTEXT, *_episode_length(spec, context))
    ranks = spec.world_size
    choose(BATCH, _batch_size(count, ranks, on_gpus=bool(machine.gpus)), f"of {count:,} rows")
    batch = spec.data.train_batch_size
    choose(MINI_BATCH, batch, "the batch: one optimizer step for each")
    if spec.actor.ppo_max_token_len_per_gpu is None:
        choose(MICRO_BATCH, *_micro_batch(spec, machine))
    epochs = spec.trainer.total_epochs
    steps = max(1, count * epochs // batch)
    choose(STEPS, steps, f"{epochs} epoch{'s' if epochs > 1 else ''} of {count:,} rows, {batch} in a batch")
    return inferred


def _rows(spec: RunSpec, *, fetch: bool) -> tuple[list[Row], int]:
    """The first `CHECKED_ROWS` training rows, and the number of all; none if they cannot be read here.

    The checks of inputs report the reason.
    """
    from rlctl.data.read import check_files, load_rows
    from rlctl.prepare.data_files import hub_name, local_files

    if not fetch and any(map(hub_name, spec.data.train_files)):
        return [], 0
    continues = spec.data.continue_final_message
    options: dict[str, Any] = {"reward": spec.reward, "continue_final_message": continues}
    try:
        files = local_files(spec.data.train_files, split="train", **options)
        return load_rows(files, continue_final_message=continues, most=CHECKED_ROWS), check_files(files)
    except UsageError:
        return [], 0


def reader_of(spec: RunSpec, *, fetch: bool) -> tuple[Any, Any] | None:
    """Tokenizer and config; None: not on this machine, or unreadable, which checks report."""
    directory = local_model(spec.model)
    if directory is None or not directory.is_dir():
        if not fetch:
            return None
        directory = Path(model_directory(spec.model.path))
    try:
        path = str(directory) if directory.is_dir() else spec.model.path
        reader: tuple[Any, Any] = load_reader(path, trust_remote_code=spec.model.trust_remote_code)
    except (UsageError, EnvironmentFailure):
        return None
    return reader


@dataclass(frozen=True, slots=True)
class _LongestPrompt:
    """Of all rows.

    Attributes:
        num_tokens: that the first turn of an episode reads.
        why: what they are.
        thinks: the model thinks before it answers.
    """

    num_tokens: int
    why: str
    thinks: bool


def _longest_prompt(spec: RunSpec, rows: Sequence[Row], reader: tuple[Any, Any] | None) -> _LongestPrompt:
    from rlctl.data.prompts import PromptDataset

    by_length = sorted(rows, key=lambda row: -len(row.prompt_text))[:_TOKENISED]
    options = spec.data.chat_template_kwargs
    if reader is None:  # two characters a token, and a template around it
        about = len(by_length[0].prompt_text) // 2 + _ROUNDED_TO
        without = " and without what the environment adds" * spec.environment.is_multi_turn
        why = f"about {about} tokens by the characters of the longest prompt{without}: the model is not here"
        return _LongestPrompt(about, why, options.get("enable_thinking") is True)
    tokenizer = reader[0]
    every = [*by_length, *_spread(rows, _BEGUN // 2)]
    limits: dict[str, Any] = {"max_prompt_length": sys.maxsize, "filter_overlong": False}
    tasks = PromptDataset(every, tokenizer, chat_template_kwargs=options, **limits).all_tasks()
    switch = options.get("enable_thinking", "enable_thinking" in str(tokenizer.chat_template))
    thinks = bool(switch) or opens_thoughts(tasks[0].text)
    longest = max(len(task.prompt_ids) for task in tasks)
    if spec.environment.is_multi_turn:
        return _LongestPrompt(*_with_environment(spec, tokenizer, tasks, longest), thinks)
    return _LongestPrompt(longest, f"the longest prompt has {longest} tokens", thinks)


def _spread(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """So many of the rows, at equal distances."""
    return rows[:: max(1, len(rows) // count)][:count]


def _with_environment(spec: RunSpec, tokenizer: Any, tasks: Sequence[Task], of_rows: int) -> tuple[int, str]:
    """The longest first prompt with tools and with what `reset` or an agent adds, and what it consists of.

    What is added is measured on some rows; any of it may come with the longest row.

    Args:
        tasks: of the longest rows first, then of some others.
        of_rows: tokens of the longest row.
    """

    def summary(added: int, without: str = "") -> tuple[int, str]:
        longest = with_tools + added
        parts = {"of tools": with_tools - of_rows, "of the environment": added}
        words = [f"{count} {whose}" for whose, count in parts.items() if count > 0]
        of_these = f", of these {' and '.join(words)}" if words else ""
        left_out = f", without what the environment adds: {without}" if without else ""
        return longest, f"the longest first prompt has {longest} tokens{of_these}{left_out}"

    with_tools = of_rows
    with closing(EpisodeSource.of(spec, tokenizer)) as source:
        try:
            with_tools = max(source.first_length(task) for task in tasks)
            if "RANK" in os.environ:  # episodes need not begin alike on all ranks, and each infers for itself
                return summary(0, "ranks could differ in it")
            added, problem = _added(spec, source, tasks)
        except (UsageError, EnvironmentFailure) as error:
            return summary(0, error.what)
    return summary(added, problem)


def _added(spec: RunSpec, source: EpisodeSource, tasks: Sequence[Task]) -> tuple[int, str]:
    """Most tokens that an episode reads beyond row and tools; 0 if none began, and why.

    Raises:
        UsageError, EnvironmentFailure: the environment cannot be built.
    """
    from rlctl.rollout.protocol import Sampling

    names = (spec.environment.name, *spec.environment.others)
    half = _BEGUN // 2
    begun = [*tasks[:half], *tasks[-half:]] if all(map(_starts_fast, names)) else tasks[:_BEGUN_AGENTS]
    prompts = source.first_prompts(begun, Sampling(spec.data.max_response_length))
    more = [
        len(prompt.token_ids) - source.first_length(task)
        for task, prompt in zip(begun, prompts, strict=True)
        if prompt.token_ids
    ]
    return (max(0, *more), "") if more else (0, prompts[0].problem)


def _starts_fast(name: str) -> bool:
    """Whether an episode begins by a call of `reset`, if any, and not by the start of a program."""
    part = ENVIRONMENTS.part(name)
    return name in {SINGLE_TURN, TOOLS} or (inspect.isclass(part.function) and not is_agent(part.function))


def _context(config: Any) -> int:
    """Tokens that the model can read; 0: unknown."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)


def _response_limit(
    spec: RunSpec,
    rows: Sequence[Row],
    reader: tuple[Any, Any] | None,
    machine: Machine,
    *,
    thinks: bool,
) -> tuple[int, str]:
    """The limit of a response, or of a turn, by the reward and the answers of the rows."""
    if thinks:
        return _THINKING, "the model thinks before it answers"
    names = _graders(spec, rows)
    others = _OTHERS if machine.gpus else _OTHERS_ON_CPU
    limit = max([_RESPONSES.get(name, others) for name in names] or [others])
    longest = _longest_answer(names, rows, reader)
    if _TIMES_LONGEST_ANSWER * longest > limit:
        return _rounded(_TIMES_LONGEST_ANSWER * longest), f"twice the longest answer, of {longest} tokens"
    if names and names <= _RESPONSES.keys():
        return limit, f"for the reward {', '.join(sorted(names))}"
    return limit, "usual" if machine.gpus else "usual without a GPU, where longer responses are slow"


def _graders(spec: RunSpec, rows: Sequence[Row]) -> set[str]:
    """Names of the graders; `auto` stands for those of the rows' sources."""
    from rlctl.reward.build import grader_for, named_grader

    names = {term.name for term in spec.reward.all_terms}
    if "auto" in names:
        names.remove("auto")
        sources = {row.data_source for row in rows if row.ground_truth}
        names |= {named_grader(spec.reward.by_source, source) or grader_for(source) for source in sources}
    return names


def _longest_answer(graders: Iterable[str], rows: Sequence[Row], reader: tuple[Any, Any] | None) -> int:
    """Tokens of the longest right response that a built-in grader knows from a row; 0: it knows none."""
    from rlctl.reward.pool import is_ours
    from rlctl.reward.trial import known_responses

    longest = 0
    by_length = sorted(rows, key=lambda row: -len(row.ground_truth))[:_TOKENISED]
    for name in filter(is_ours, graders):
        for row in by_length:
            try:
                known = known_responses(name, row.ground_truth) if row.ground_truth else None
            except ValueError:  # which the check of the first row, and `rlctl reward`, report
                continue
            text = (known[0] if known else None) or ""
            length = len(text) // 2 if reader is None else len(reader[0](text)["input_ids"])
            longest = max(longest, length)
    return longest


def _episode_length(spec: RunSpec, context: int) -> tuple[int, str]:
    """Most tokens of an episode's sequence: prompt and turns, as far as the model and its passes allow."""
    turns = spec.environment.max_turns
    response = spec.data.max_response_length
    wanted = spec.data.max_prompt_length + turns * response
    budgets = (spec.pass_tokens, spec.critic.ppo_max_token_len_per_gpu if spec.trains_critic else None)
    most = min([wanted, *filter(None, (context, *budgets))])
    if most < wanted:
        limit = "the model's context" if most == context else "the token budget of a pass"
        return most, f"{limit}; {turns} turns of {response} tokens would take {wanted}"
    return wanted, f"the prompt and {turns} turns of {response} tokens, which outputs of tools share"


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _ROUNDED_TO) * _ROUNDED_TO


def _batch_size(num_rows: int, ranks: int, *, on_gpus: bool) -> int:
    """A power of two with several batches in an epoch, or the multiple of the ranks below it."""
    most = _LARGEST_BATCH if on_gpus else _LARGEST_BATCH_CPU
    wanted = max(_SMALLEST_BATCH, min(most, num_rows // _FEWEST_BATCHES))
    wanted = max(1, min(wanted, num_rows))
    power = 1 << (wanted.bit_length() - 1)
    return max(power // ranks, 1) * ranks


def _micro_batch(spec: RunSpec, machine: Machine) -> tuple[int, str]:
    if not machine.gpus:
        return _MICRO_BATCH_CPU, "on CPUs"
    most = max(1, spec.ppo_mini_batch_size * spec.rollout.n // spec.data_ranks)
    fitting = [size for size in _MICRO_BATCHES if size <= most]
    size_of_model = model_size(spec.model)
    for size in fitting:
        actor = spec.actor.model_copy(update={"ppo_micro_batch_size_per_gpu": size})
        parts = Placement(spec.model_copy(update={"actor": actor}), size_of_model, machine).gpu_parts
        if any(part.num_bytes is None for part in parts):
            break
        peak = memory_total(parts, _TRAINING)
        if peak <= _MEMORY_SHARE * machine.gpu_bytes:
            return size, f"{gib(peak)} of {gib(machine.gpu_bytes)} by the estimate"
    return 1, "the model's memory is unknown, or hardly fits"
