"""Values of a run that follow from its model, data, reward and machine.

With `rlctl train --model --data --reward` they are inferred where nobody sets them. They are part of the
spec: a resumed run does not infer again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.model_files import load_reader, model_directory
from rlctl.reward.thoughts import opens_thoughts
from rlctl.run_spec.flags import Flags
from rlctl.run_spec.load import LoadedSpec, load_spec
from rlctl.run_spec.machine import Machine, gib
from rlctl.run_spec.memory import Phase, memory_total
from rlctl.run_spec.model_size import local_model, model_size
from rlctl.run_spec.placement import Placement
from rlctl.run_spec.run_spec import RunSpec

if TYPE_CHECKING:
    from rlctl.data.schema import Row

BATCH, MINI_BATCH = "data.train_batch_size", "actor.ppo_mini_batch_size"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
MICRO_BATCH, STEPS = "actor.ppo_micro_batch_size_per_gpu", "trainer.total_training_steps"
#: The keys that are inferred, in the order in which they are.
INFERRED = (PROMPT, RESPONSE, BATCH, MINI_BATCH, MICRO_BATCH, STEPS)

#: Most prompts per batch on GPUs and on CPUs; batches that an epoch should have at least.
_LARGEST_BATCH, _LARGEST_BATCH_CPU, _SMALLEST_BATCH, _FEWEST_BATCHES = 128, 16, 8, 8
#: Longest responses in tokens: by the grader of all terms, of thinking models, of others; most on CPUs.
_RESPONSES = {"exact": 256, "multiple_choice": 512, "code": 2048}
_THINKING, _OTHERS, _MOST_ON_CPU = 8192, 1024, 256
#: Prompt limits are multiples of this many tokens.
_ROUNDED_TO = 64
#: Longest prompts by characters that are tokenised to find the longest one.
_TOKENISED = 64
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
    longest, thinks = _longest_prompt(spec, rows, reader)
    response, why = _response_limit(spec, thinks, machine)
    limit, why_limit = -(-longest // _ROUNDED_TO) * _ROUNDED_TO, f"the longest prompt has {longest} tokens"
    if reader is None:
        why_limit = f"about {longest} tokens by the characters of the longest prompt: the model is not here"
    elif context := _context(reader[1]):
        if response > context // 2:
            response, why = context // 2, f"half of the model's context of {context} tokens"
        if limit > context - response:
            limit, why_limit = (
                context - response,
                f"the model's context of {context} tokens without the response",
            )
    choose(PROMPT, limit, why_limit)
    choose(RESPONSE, response, why)
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


def _longest_prompt(spec: RunSpec, rows: Sequence[Row], reader: tuple[Any, Any] | None) -> tuple[int, bool]:
    """Tokens of the longest prompt, and whether the model thinks before it answers."""
    from rlctl.data.prompts import Renderer

    by_length = sorted(rows, key=lambda row: -len(row.prompt_text))[:_TOKENISED]
    if reader is None:  # two characters a token, and a template around it
        thinks = spec.data.chat_template_kwargs.get("enable_thinking") is True
        return len(by_length[0].prompt_text) // 2 + _ROUNDED_TO, thinks
    renderer = Renderer(reader[0], spec.data.chat_template_kwargs)
    texts = [renderer.text(row) for row in by_length]
    switch = spec.data.chat_template_kwargs.get(
        "enable_thinking", "enable_thinking" in str(reader[0].chat_template)
    )
    return max(map(len, renderer.encode(texts))), bool(switch) or opens_thoughts(texts[0])


def _context(config: Any) -> int:
    """Tokens that the model can read; 0: unknown."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)


def _response_limit(spec: RunSpec, thinks: bool, machine: Machine) -> tuple[int, str]:
    names = {term.name for term in spec.reward.all_terms}
    if thinks:
        return _THINKING, "the model thinks before it answers"
    if not machine.gpus:
        return _MOST_ON_CPU, "longer responses are slow without a GPU"
    known = [_RESPONSES.get(name, _OTHERS) for name in names] or [_OTHERS]
    return max(known), f"for the reward {', '.join(sorted(names))}" if names <= _RESPONSES.keys() else "usual"


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
