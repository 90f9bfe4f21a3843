"""The evaluated model: loads tokenizer and file hash immediately, weights only for sampling."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data.prompts import PromptDataset, template_sha256
from rlctl.engine.model import load_policy
from rlctl.environment.build import EpisodeSource
from rlctl.evaluate.request import Plan, lengths
from rlctl.evaluate.samples import Pair, Response
from rlctl.files import sha256_of
from rlctl.model_files import load_reader, local_directory
from rlctl.registry import ROLLOUT_ENGINES, source_sha256
from rlctl.rollout.engines import engine_outside_training, spec_outside_training
from rlctl.rollout.hf import DTYPES
from rlctl.rollout.seeds import step_seed
from rlctl.run_spec.machine import native_dtype
from rlctl.run_spec.run_spec import EngineSpec, RunSpec
from rlctl.user_code import files_of

if TYPE_CHECKING:
    from rlctl.rollout.protocol import ResponseSampler, Sampling

#: Files of a model directory that do not affect its responses.
_IRRELEVANT = re.compile(r"\..*|.*\.(md|png|gitattributes)|LICENSE.*", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Number of questions per call of an engine that forms its own batches.
QUESTIONS_AT_ONCE = 256


class LocalModel:
    """A model and its questions.

    Attributes:
        rows: the questions, without those excluded for their length.
        prompts: the rendered prompts.
        identities: per question, the text that identifies its stored responses.
        num_overlong: number of questions excluded for their length.
        sampling: sampling distribution.
        about_sampling: engine, dtype and other options.
        model: as in `results.json`.
        settings: everything else that responses depend on, except the seed; JSON-serializable.
        tokenizer: the model's.

    Raises:
        UsageError: the model cannot be read, its context is too short for a response, or no question fits.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """

    def __init__(self, plan: Plan) -> None:
        self._request = plan.request
        target = plan.target
        spec = plan.target.spec
        given = spec or RunSpec(engine=EngineSpec(dtype=native_dtype()[0]))
        self._spec = spec_outside_training(
            given.model_copy(update={"environment": plan.environment}),
            plan.engine,
            max_num_seqs=self._request.batch_size,
        )
        rollout = self._spec.rollout
        self._directory = local_directory(target.model_path)
        self.tokenizer, config = load_reader(
            str(self._directory), trust_remote_code=self._spec.model.trust_remote_code
        )
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.sampling, max_prompt_length = lengths(self._request, target, context)
        self._questions = PromptDataset(
            plan.questions.rows,
            self.tokenizer,
            max_prompt_length=max_prompt_length,
            filter_overlong=True,
            chat_template_kwargs=plan.chat_template_kwargs,
        )
        self.rows = self._questions.rows
        self.prompts = self._questions.texts
        self.identities = self.prompts
        self.num_overlong = self._questions.num_dropped
        self.about_sampling: dict[str, Any] = {"engine": plan.engine, "dtype": self._spec.engine.dtype}
        options = {"engine_kwargs": rollout.engine_kwargs, "engine_params": rollout.engine_params}
        options["chat_template_kwargs"] = dict(plan.chat_template_kwargs)
        self.about_sampling |= {name: value for name, value in options.items() if value}
        version = engine_version(plan.engine)
        if version:
            self.about_sampling["engine_sha256"] = version
        environment = self._spec.environment
        if environment.is_multi_turn:  # episodes depend on its code, and on further columns of the row
            files = {str(file): sha256_of(file) for file in files_of(*environment.code_names)}
            self.about_sampling["environment"] = environment.model_dump(mode="json") | {"files": files}
            self.identities = [
                json.dumps([text, row.ground_truth, row.extra], sort_keys=True, default=str)
                for text, row in zip(self.prompts, self.rows, strict=True)
            ]
        sha256 = files_hash(self._directory, target.checksums)
        template = template_hash(self.tokenizer)
        self.model = {
            "path": target.model_path,
            "run_dir": str(target.run_dir) if target.run_dir else None,
            "step": target.step,
            "sha256": sha256,
            "template_sha256": template,
        }
        self.settings = {"model": sha256, "template": template} | self.about_sampling
        self.settings.pop("chat_template_kwargs", None)  # the prompts identify what they change

    def sample(self, pairs: Sequence[Pair]) -> Iterator[dict[Pair, Response]]:
        """Yields responses as they are sampled; none that the engine aborted.

        `pairs` are ascending.

        Raises:
            UsageError, EnvironmentFailure: the model or the engine cannot be used on this machine.
        """
        request = self._request
        longest = max(len(self._questions.token_ids[question]) for question, _ in pairs)
        if self._spec.environment.is_multi_turn:
            longest = max(longest, self._spec.max_length - self.sampling.max_response_length)
        with self._sampling_engine(longest) as engine:
            # An engine that forms its own batches is faster with more sequences per call.
            forms_batches = self._spec.rollout_engine.forms_batches
            size = QUESTIONS_AT_ONCE * request.n if forms_batches else request.batch_size
            yield from sample_responses(
                engine,
                self._questions,
                pairs,
                self.sampling,
                EpisodeSource.of(self._spec, self.tokenizer),
                seed=request.seed,
                batch_size=size,
            )

    def _sampling_engine(self, max_prompt_length: int) -> AbstractContextManager[ResponseSampler]:
        """The engine with the model's weights; frees the memory on exit.

        Raises:
            UsageError, EnvironmentFailure: the model or the engine cannot be used on this machine.
        """
        load = partial(
            load_policy,
            str(self._directory),
            revision=None,
            trust_remote_code=self._spec.model.trust_remote_code,
            attn_implementation=self._spec.model.attn_implementation,
            dtype=DTYPES[self._spec.engine.dtype],
        )
        return engine_outside_training(
            self._spec,
            str(self._directory),
            self.tokenizer,
            lambda: load()[0],
            max_prompt_length=max_prompt_length,
            max_response_length=self.sampling.max_response_length,
        )


def engine_version(name: str) -> str | None:
    """SHA-256 of the imported file that defines a user's rollout engine; None: a built-in engine."""
    return source_sha256(ROLLOUT_ENGINES[name])


def files_hash(directory: Path, known: Mapping[str, str]) -> str:
    """SHA-256 over names and contents of a model's files, independent of the directory name.

    Files in `known` (file → SHA-256) are not read.
    """
    digests = {}
    for file in sorted(directory.iterdir()):
        if not file.is_file() or _IRRELEVANT.fullmatch(file.name):
            continue
        blob = file.resolve()  # the hub's cache names large files by their hash
        has_hash = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
        digests[file.name] = known.get(file.name) or (blob.name if has_hash else sha256_of(file))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str | None:
    """SHA-256 of the (default) chat template that renders the prompts; None if there is no template."""
    return template_sha256(tokenizer.get_chat_template() if tokenizer.chat_template else None)


def sample_responses(
    engine: ResponseSampler,
    questions: PromptDataset,
    pairs: Sequence[Pair],
    sampling: Sampling,
    source: EpisodeSource,
    *,
    seed: int,
    batch_size: int,
) -> Iterator[dict[Pair, Response]]:
    """Samples responses in batches; each depends only on the seed, its question index and its sample index.

    Sample i of question q is therefore the same for any n, number of questions, batch size, number of ranks
    and set of stored responses.

    `pairs` are ascending. `batch_size` is in episodes; responses to one question stay in one batch.
    Responses that the engine aborted are omitted: they are not what the policy would say.
    """
    own_seed = step_seed(seed, 0, "evaluation")
    for batch in _batches(pairs, batch_size):
        asked = [question for question, _ in batch]
        members = list(zip(questions.tasks(asked, asked), (sample for _, sample in batch), strict=True))
        episodes = source.sample(engine, members, sampling, own_seed)
        yield {
            (episode.task.group_id, episode.member): Response(
                episode.response, episode.truncated, episode.num_sampled, episode.reward
            )
            for episode in episodes
            if not episode.aborted and not episode.error
        }


def _batches(pairs: Sequence[Pair], size: int) -> Iterator[list[Pair]]:
    """Splits pairs into batches of about `size` episodes, never within a question."""
    batch: list[Pair] = []
    for _, siblings in groupby(pairs, key=lambda pair: pair[0]):
        more = list(siblings)
        if batch and len(batch) + len(more) > size:
            yield batch
            batch = []
        batch += more
    if batch:
        yield batch
