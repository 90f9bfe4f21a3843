"""Spec sections `data`, `rollout` and `reward`: prompts, sampling and grading of responses."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from rlctl.registry import GRADERS, ROLLOUT_ENGINES
from rlctl.run_spec.base import (
    Duration,
    JsonMapping,
    NullWord,
    OpenMapping,
    Registered,
    Section,
    StrList,
    one_or_many,
)


def _sources(value: Any) -> Any:
    """Checks the weights of a mixture; wraps a single name in a list.

    Raises:
        ValueError: a weight is not a positive number.
    """
    if not isinstance(value, dict):
        return one_or_many(value)
    for name, weight in value.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name} is {weight}: write a number above 0, or leave it out")
    return value


#: Names of files and data sets, or a mapping from names to weights.
Sources = Annotated[
    list[str] | dict[str, float],
    BeforeValidator(_sources, json_schema_input_type=list[str] | str | dict[str, float]),
]
GraderName = Annotated[str, Registered(GRADERS, imports_files=False)]

#: Values of vLLM's `max_lora_rank`; an engine applies adapters of any rank up to its value.
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Capabilities of a rollout engine; checks of the spec and the trainer depend on them, not on names."""

    modes: frozenset[str] = frozenset({"colocated"})  # supported values of `rollout.mode`
    dtypes: frozenset[str] = frozenset({"fp32", "bf16"})  # supported values of `rollout.dtype` besides null
    #: it starts with the policy's weights; otherwise it gets them in the first sync
    starts_with_policy: bool = False
    #: outside training (`rlctl evaluate`, `rlctl diagnose mismatch`) it reads the weights of
    #: `context.model_path` itself, and `context.model` is None; otherwise it gets the policy, too
    reads_model_files: bool = False
    #: after each sync it samples tokens and the trainer scores them (`rollout/sync_gap`)
    checks_syncs: bool = True
    #: values of `rollout.mode` in which it supports `rollout.max_staleness`
    samples_while_training: frozenset[str] = frozenset()
    #: values of `rollout.mode` in which it supports `rollout.in_flight`: it has `sample_in_flight` and
    #: `cancel_requests`
    samples_in_flight: frozenset[str] = frozenset()
    #: it receives only the LoRA adapter and applies it; otherwise it gets merged weights
    applies_adapters: bool = False
    takes_engine_kwargs: bool = False  # it reads `rollout.engine_kwargs`
    frees_memory: bool = False  # with `rollout.free_cache_engine` it releases its GPU memory between calls
    forms_batches: bool = False  # it accepts any number of prompts at once and forms batches internally
    tensor_parallel: bool = False  # it supports `rollout.tensor_model_parallel_size` above 1
    slow_on_gpu: str = ""  # how much slower than vLLM it is on a GPU; the spec check warns with this text
    min_temperature: float = 0.0  # the lowest temperature at which it samples as requested
    #: when it can report the tokens that top_p, top_k and min_p kept (`Turn.kept`), for
    #: `rollout.exact_sampling`: `never`, `top_k` (if `rollout.top_k` bounds their number) or `always`. Unless
    #: `never`, it also reports `Turn.most_likely`, which score centering needs
    reports_kept: Literal["never", "top_k", "always"] = "never"
    reports_experts: bool = False  # it can report the experts that computed each token, for routing replay


class DataSpec(Section):
    """Training and validation prompts."""

    train_files: Sources = Field(default=[])
    """Training prompts: files of any format that `prepare-data` reads, directories, patterns such as
    `data/train-*.parquet`, or data sets of the hub: `organisation/name[/configuration][@revision][:split]`
    (split: train). What is not prepared is prepared and cached. A mapping from names to weights mixes them:
    `{a.parquet: 0.8, b.csv: 0.2}`. Empty with `model.path: embedded`: the built-in task."""
    val_files: StrList = Field(default=[])
    """Validation prompts, named in the same way (split of the hub's data sets: test); empty: no validation,
    except for the built-in task."""
    train_batch_size: int = Field(default=128, ge=1)
    """Prompts per batch; `rollout.n` responses are sampled for each."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Maximum number of tokens of a prompt; for longer prompts see `filter_overlong_prompts`."""
    max_response_length: int = Field(default=512, ge=1)
    """Maximum number of sampled tokens of a response."""
    filter_overlong_prompts: bool = True
    """Drop prompts longer than `max_prompt_length` (their number is reported); false: refuse to start."""
    chat_template_kwargs: OpenMapping = Field(default={})
    """Additional arguments of the model's chat template, for example
    `data.chat_template_kwargs.enable_thinking=false`. null: the argument is not passed."""
    continue_final_message: bool = False
    """Accept prompts that end with a message of the assistant: the response continues this message."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch, seeded by `trainer.seed`."""


class ValKwargs(Section):
    """Sampling of responses to validation prompts."""

    n: int = Field(default=1, ge=1)
    """Responses per validation prompt; above 1, pass@k and maj@n are also logged."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature of validation; 0: greedy decoding, which needs n = 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in validation; 1: all tokens."""


class ServerSpec(Section):
    """Engines in separate processes, with `rollout.mode: server`."""

    replicas: int = Field(default=1, ge=1)
    """Number of engines to start: per node of the run, on the GPUs after the first
    `trainer.n_gpus_per_node`; with Ray, in total."""
    placement: Literal["auto", "nodes", "ray"] = "auto"
    """Where engines start. `nodes`: on the nodes of the run (only the first one if weights are sent as
    files); `ray`: wherever the Ray cluster has free resources; `auto`: `ray` if RAY_ADDRESS is set."""
    urls: StrList = Field(default=[])
    """Addresses of running engines on any node (`http://host:port`); if set, no engine is started."""
    weights_dir: str | None = None
    """Directory for new weights that every engine can read; null: shared memory of this machine."""
    weight_transfer: Literal["auto", "broadcast", "files"] = "auto"
    """How new weights are sent to engines: `broadcast` over NCCL (gloo on CPUs), or `files` in `weights_dir`.
    `auto`: broadcast on GPUs; files on CPUs, for adapters, and where broadcast is not possible."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Maximum seconds for the start or restart of an engine."""
    answer_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which an engine that produces no token counts as crashed."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of crashed engines in one run, over all engines."""

    @property
    def is_placed_by_ray(self) -> bool:
        """Whether Ray chooses the machines on which engines start."""
        has_cluster = self.placement == "auto" and "RAY_ADDRESS" in os.environ
        return not self.urls and (has_cluster or self.placement == "ray")


class RolloutSpec(Section):
    """Sampling of responses."""

    name: Annotated[str, Registered(ROLLOUT_ENGINES)] = "hf"
    """Rollout engine. `hf`: Hugging Face generation in the trainer; `vllm`; `file.py:function`: your own."""
    engine_params: OpenMapping = Field(default={})
    """Parameters that the engine declares in its registration: `rollout.engine_params.NAME=VALUE`."""
    mode: Literal["colocated", "server"] = "colocated"
    """Where the engine runs. `colocated`: in the trainer's processes, one engine per rank (or per
    `tensor_model_parallel_size` ranks); `server`: in separate processes (with `vllm`)."""
    n: int = Field(default=8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of sampling; log-probs of rollout and trainer are computed at this temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1: all tokens. Truncation biases every ratio unless `exact_sampling` is set."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample only from the k most likely tokens; -1: all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens whose probability is below this fraction of the highest one; 0: none."""
    exact_sampling: bool = False
    """Renormalise the trainer's log-probs (π_θ, π_old, π_ref) over the tokens that top_p, top_k and min_p
    kept, so that truncated sampling does not bias the ratios."""
    max_num_seqs: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Maximum number of sequences that one engine generates at once; null: no limit except its memory."""
    dtype: Annotated[Literal["fp32", "bf16", "int8"] | None, NullWord] = None
    """Precision of the engine's weights; null: `engine.dtype`. `int8`: rounded to 8 bits per row."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs over which one engine's model is sharded; if colocated, those of as many ranks of one node."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of a GPU's memory that a vLLM engine may use for weights and key-value cache."""
    free_cache_engine: bool = True
    """Whether a colocated vLLM engine on GPUs frees its memory during training."""
    sync_every: int = Field(default=1, ge=1)
    """Batches between weight syncs (a validation also syncs); above 1, some responses are of old weights."""
    prove_sync: Annotated[bool | None, NullWord] = None
    """At the start, prove that weight syncs reach all weights of every replica: change the weights, sync,
    compare log-probs, and undo the change. null: with engines whose syncs are tested (`vllm`, your own)."""
    merge_lora: bool = False
    """With `vllm` and LoRA: sync all weights with the adapter merged, instead of only the adapter."""
    server: ServerSpec = ServerSpec()
    engine_kwargs: JsonMapping = Field(default={})
    """Additional arguments of vLLM's engine, passed unchanged, or a JSON file with them:
    `rollout.engine_kwargs.enforce_eager=true`."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of batches to sample ahead during training, with the newest weights; 0: do not."""
    in_flight: bool = False
    """Sample on while weights are updated: open responses continue with the new weights, and a batch consists
    of the groups that are ready first. `max_staleness` batches of groups are open or wait during training."""
    stale_cache: Literal["recompute", "clear", "keep"] = "recompute"
    """Cached keys and values of older weights after an update in flight. `recompute`: new weights read open
    responses again; `clear`: open responses keep theirs, later requests use none; `keep`: they may use them,
    too."""
    max_age_updates: Annotated[int | None, NullWord] = Field(default=None, ge=0)
    """Largest age of an episode at training: optimizer updates since the weights that sampled its oldest
    token; null: no limit."""
    beyond_max_age: Literal["drop", "down_weight", "pace"] = "drop"
    """Episodes beyond `max_age_updates`: `drop` excludes them; `down_weight` multiplies their advantages by
    (1 + limit) / (1 + age); `pace` prevents them: fewer groups are open, and a batch waits for the oldest."""
    staleness: int = Field(default=0, ge=0)
    """Train every batch on responses that were sampled this many batches ago; for studies of stale data."""
    val_kwargs: ValKwargs = ValKwargs()

    @property
    def paces(self) -> bool:
        """Whether fewer groups are open, so that none is older than `max_age_updates`."""
        return self.max_age_updates is not None and self.beyond_max_age == "pace"


class RewardTerm(Section):
    """One term of a weighted sum of rewards."""

    name: GraderName
    """Grader of this term, as in `reward.name`."""
    weight: float = 1.0
    """Factor of its scores in the sum."""
    params: OpenMapping = Field(default={})
    """Parameters of the grader, as in `reward.params`."""

    @property
    def label(self) -> str:
        """Name in metrics: that of the grader or of the user's function."""
        return self.name.rpartition(":")[2]


class RewardModelSpec(Section):
    """The reward model of `name: model`."""

    path: Annotated[str | None, NullWord] = None
    """Directory or hub id of a Hugging Face sequence classifier with one output."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per forward pass of the reward model."""
    max_length: int = Field(default=4096, ge=1)
    """Maximum number of tokens of prompt and response together; longer inputs are truncated at the start."""
    device: Annotated[str | None, NullWord] = None
    """Device of the reward model: `cpu`, `cuda:1` …; null: the device of the rank."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the reward model."""
    trust_remote_code: bool = False
    """Run Python code that is shipped with the model. Enable it only if you trust the author."""


class JudgeSpec(Section):
    """The judge of `name: judge` and `name: judge_group`: a model behind an OpenAI-compatible API."""

    url: Annotated[str | None, NullWord] = Field(default=None, pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    """Base URL of the API, such as `http://127.0.0.1:8000/v1`."""
    model: Annotated[str | None, NullWord] = None
    """The judge's name there."""
    rubric: str = "The response answers the request correctly, completely and clearly."
    """What is judged, in words; or a file of such words, `rubric.md` or `rubric.txt`."""
    score_range: tuple[float, float] = (0.0, 10.0)
    """Least and greatest score of `judge`, and so its reward; those of `judge_group` are from 0 to 1."""
    votes: int = Field(default=1, ge=1, le=64)
    """Replies of the judge to each question; the score is their mean."""
    temperature: Annotated[float | None, NullWord] = Field(default=None, ge=0)
    """Of the judge; null: the server's own."""
    max_tokens: int = Field(default=4096, ge=1)
    """Most tokens of the judge's reply, its reasoning included."""
    key_variable: str = "JUDGE_API_KEY"
    """Name of the environment variable with the key of the API; the key appears in no log."""
    concurrency: int = Field(default=32, ge=1)
    """Calls of one rank at the same time."""
    timeout: Duration = "2min"
    """Longest time of a call."""
    retries: int = Field(default=5, ge=0)
    """How often a call is repeated after a fault of the network, at a busy server, or without a score."""
    step_timeout: Duration = "10min"
    """Longest time of all calls for a batch; responses that are not judged by then have no score."""
    calls_per_step: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Most calls of one rank for a batch; null: no limit."""

    @field_validator("score_range")
    @classmethod
    def _check_range(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if not -math.inf < ends[0] < ends[1] < math.inf:
            raise ValueError("give the least and the greatest score, for example [0, 10]")
        return ends


class CodeSpec(Section):
    """The sandbox of `name: code`."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Processor time in seconds for each input of a script, each call, or all test code of a response; the
    program may take 3 times as long if it waits for something else than a processor."""
    memory_mb: Annotated[int | None, NullWord] = Field(default=None, ge=64)
    """Memory limit of a process that runs a response, in MiB; null: 4096 for LiveCodeBench, LeetCode,
    HumanEval and MBPP, as their harnesses give, 512 for other sources."""


class OverlongSpec(Section):
    """Soft penalty for responses near the length limit (DAPO)."""

    buffer_length: int = Field(default=0, ge=0)
    """Tokens before `data.max_response_length` over which the penalty grows linearly; 0: no penalty."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """Penalty at the length limit, which is subtracted from the score."""


class RewardSpec(Section):
    """Grading of responses."""

    name: GraderName = "auto"
    """Grader. `maths`: math-verify; `exact`: text equals ground truth; `multiple_choice`: the option's
    letter; `countdown`: an equation; `code`: runs the response against tests; `model`: a reward model;
    `judge`, `judge_group`: a language model; `json_schema`, `tool_call`, `ifeval`: form and instructions;
    `file.py:function`: a user-defined grader; `auto`: chosen by each row's `data_source`."""
    params: OpenMapping = Field(default={})
    """Parameters that the grader declares: `reward.params.NAME=VALUE`."""
    by_source: dict[str, GraderName] = Field(default={})
    """Graders of `auto` for rows of some data sources, by the name of the source or of its file:
    `{gsm8k: maths, b.csv: rewards.py:close}`. Other sources keep theirs."""
    terms: Annotated[list[RewardTerm] | None, NullWord] = None
    """Weighted sum of several rewards; null: only `reward.name`; []: only the environment's own reward."""
    score_range: Annotated[tuple[float, float] | None, NullWord] = None
    """Least and greatest possible reward, `[0, 10]`, for intervals of `evaluate`; null: that of built-in
    graders, not known for others."""
    threads: int = Field(default=1, ge=1, le=256)
    """Calls of a `file.py:function` that is not `async` at the same time in each grading process; more than 1
    only for one that waits for a server and may run in several threads. `async` ones wait together anyway."""
    max_error_fraction: float = Field(default=0.1, ge=0, le=1)
    """Maximum fraction of responses that cannot be graded (they are excluded, not scored 0). Above it, a run
    stops and `evaluate` reports no score."""
    model: RewardModelSpec = RewardModelSpec()
    judge: JudgeSpec = JudgeSpec()
    code: CodeSpec = CodeSpec()
    overlong: OverlongSpec = OverlongSpec()

    @field_validator("score_range")
    @classmethod
    def _check_range(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and not -math.inf < ends[0] < ends[1] < math.inf:
            raise ValueError("give the least and the greatest reward, for example [0, 1]")
        return ends

    @property
    def all_terms(self) -> list[RewardTerm]:
        """`terms`, or `name` as the only term."""
        return [RewardTerm(name=self.name, params=self.params)] if self.terms is None else self.terms
