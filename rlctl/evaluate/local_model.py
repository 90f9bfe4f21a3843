"""A model on this machine: its tokenizer and identity at once, its weights only when needed; sampling."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlctl.data.prompts import PromptDataset
from rlctl.data.render import template_sha256
from rlctl.engine.model import load_policy, load_reader
from rlctl.engine.model_files import local_directory
from rlctl.evaluate.request import EngineName, Plan, lengths
from rlctl.evaluate.samples import Pair, Response
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import step_seed

if TYPE_CHECKING:
    from rlctl.evaluate.target import Target
    from rlctl.rollout.protocol import ResponseSampler, Sampling

Dtype = Literal["fp32", "bf16"]

_DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Files of a model directory that say nothing of how it answers.
_IRRELEVANT = re.compile(r"\..*|.*\.(md|png|gitattributes)|LICENSE.*", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Questions whose random numbers are drawn together.
BLOCK = 256


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: where it is, what it is, and what it runs in."""

    directory: Path  # its files
    tokenizer: Any
    context: int | None  # tokens of prompt and response it can read together; None: no limit is known
    sha256: str  # of its files, see `files_hash`
    #: engine, dtype: what it runs in
    engine: EngineName
    dtype: Dtype
    #: trust_remote_code, attn_implementation, engine_kwargs: as in the spec; the last one is vLLM's
    trust_remote_code: bool
    attn_implementation: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def sampling_engine(self, max_length: int, batch_size: int) -> Iterator[ResponseSampler]:
        """Load the weights into the engine; leaving gives the memory back.

        Args:
            max_length: tokens of prompt and response together, at most.
            batch_size: sequences at once.

        Raises:
            UsageError, EnvironmentFailure: the model or the engine cannot be used here.
        """
        if self.engine == "vllm":
            from rlctl.rollout.vllm import VLLMRollout

            engine = VLLMRollout(
                str(self.directory),
                self.tokenizer,
                dtype=self.dtype,
                max_model_len=max_length,
                max_num_seqs=batch_size,
                trust_remote_code=self.trust_remote_code,
                engine_kwargs=self.engine_kwargs,
            )
            try:
                yield engine
            finally:
                engine.close()
            return
        model, tokenizer = load_policy(
            str(self.directory),
            revision=None,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attn_implementation,
            dtype=_DTYPES[self.dtype],
        )
        copy = HFRollout(model, tokenizer, sampling_device(), max_num_seqs=batch_size)
        del model
        yield copy


def find_model(target: Target, engine: EngineName | None) -> ModelFiles:
    """Files, tokenizer and identity of the target's model.

    Args:
        target: what is evaluated.
        engine: None: the run's own if it is vLLM, else `hf`.

    Raises:
        UsageError: no such model, or its tokenizer cannot be read.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    spec = target.spec
    directory = local_directory(target.model_path)
    name: EngineName = engine or ("vllm" if spec and spec.rollout.name == "vllm" else "hf")
    trusts = spec.model.trust_remote_code if spec else False
    tokenizer, config = load_reader(str(directory), trust_remote_code=trusts)
    return ModelFiles(
        directory=directory,
        tokenizer=tokenizer,
        context=getattr(config.get_text_config(), "max_position_embeddings", None),
        sha256=files_hash(directory, target.checksums),
        engine=name,
        dtype=spec.engine.dtype if spec else ("bf16" if sampling_device().type == "cuda" else "fp32"),
        trust_remote_code=trusts,
        attn_implementation=spec.model.attn_implementation if spec else "sdpa",
        engine_kwargs=spec.rollout.engine_kwargs if spec and name == "vllm" else {},
    )


class LocalModel:
    """A model on this machine and the questions it is asked.

    Args:
        plan: for another engine than `openai`.

    Attributes:
        rows, prompts: the questions that fit, and each as the model reads it.
        identities: of each question, what its responses depend on.
        num_overlong: questions left out for their length.
        settings: what responses depend on, question and seed excepted; JSON.
        model: as in `results.json`.
        sampling: the distribution to draw from.

    Raises:
        UsageError: the model cannot be read, has no room for a response, or no question fits.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """

    def __init__(self, plan: Plan) -> None:
        self._request, target = plan.request, plan.target
        self._files = find_model(target, self._request.engine)
        self.sampling, max_prompt_length = lengths(self._request, target, self._files.context)
        self._questions = PromptDataset(
            plan.questions.rows,
            self._files.tokenizer,
            max_prompt_length=max_prompt_length,
            filter_overlong=True,
            chat_template_kwargs=target.spec.data.chat_template_kwargs if target.spec else None,
        )
        self.rows, self.prompts = self._questions.rows, self._questions.texts
        self.identities = self.prompts
        self.num_overlong = self._questions.num_dropped
        self.notes: list[str] = []
        self.about_sampling: dict[str, Any] = {"engine": self._files.engine, "dtype": self._files.dtype}
        if self._files.engine_kwargs:
            self.about_sampling["engine_kwargs"] = dict(self._files.engine_kwargs)
        template = template_hash(self._files.tokenizer)
        self.model: dict[str, Any] = {
            "path": target.model_path,
            "run_dir": str(target.run_dir) if target.run_dir else None,
            "step": target.step,
            "sha256": self._files.sha256,
            "template_sha256": template,
        }
        identity = {"model": self._files.sha256, "template": template}
        self.settings: dict[str, Any] = identity | self.about_sampling

    def sample(self, pairs: Sequence[Pair]) -> Iterator[dict[Pair, Response]]:
        """Sample these responses, ascending pairs, and yield them batch by batch.

        Raises:
            UsageError, EnvironmentFailure: the model or the engine cannot be used here.
        """
        request, length = self._request, self.sampling.max_response_length
        longest = max(self._questions.prompts([question], [0]).prompt_ids.shape[1] for question, _ in pairs)
        with self._files.sampling_engine(longest + length, request.batch_size) as engine:
            # An engine that forms its own batches is the faster, the more it is given at once.
            forms_batches = ROLLOUT_ENGINES.part(self._files.engine).capabilities.forms_batches
            size = BLOCK * request.n if forms_batches else request.batch_size
            yield from sample_responses(
                engine, self._questions, pairs, self.sampling, seed=request.seed, batch_size=size
            )


def files_hash(directory: Path, known: Mapping[str, str]) -> str:
    """SHA-256 over names and contents of a model's files, independent of the directory's name.

    Args:
        directory: weights, config, generation config, tokenizer.
        known: file → SHA-256, where it need not be read again.
    """
    digests = {
        file.name: known.get(file.name) or _file_hash(file)
        for file in sorted(directory.iterdir())
        if file.is_file() and not _IRRELEVANT.fullmatch(file.name)
    }
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template that prompts are rendered with; None: there is none."""
    # A tokenizer may have several templates, by name.
    return template_sha256(tokenizer.get_chat_template() if tokenizer.chat_template else None)


def sampling_device() -> torch.device:
    """Where models sample."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _file_hash(file: Path) -> str:
    """SHA-256 of the content; the hub's cache names large files by it."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sample_responses(
    engine: ResponseSampler,
    questions: PromptDataset,
    pairs: Sequence[Pair],
    sampling: Sampling,
    *,
    seed: int,
    batch_size: int,
) -> Iterator[dict[Pair, Response]]:
    """Sample these responses, a batch at a time; each depends on its question's place and its number only.

    Random numbers are drawn in blocks of `BLOCK` questions, each block with a seed of its own, the first
    samples of its questions before the second ones. So the same seed gives the same response number i to
    question q whatever n, the number of questions, the batch size, the ranks, and what is stored already.

    Args:
        engine: who samples.
        questions: what is asked.
        pairs: which responses, ascending.
        sampling: the distribution to draw from.
        seed: of all of it.
        batch_size: sequences at once; the siblings of a question stay together.
    """
    for batch in _batches(pairs, batch_size, block=len(questions) if sampling.greedy else BLOCK):
        if sampling.greedy:  # nothing is drawn
            block, places = 0, list(range(len(batch)))
        else:
            block = batch[0][0] // BLOCK
            places = [sample * BLOCK + question % BLOCK for question, sample in batch]
        rollouts = engine.generate(
            questions.prompts([question for question, _ in batch], places),
            sampling,
            n=1,
            step_seed=step_seed(seed, block, "evaluation"),
            num_groups_total=max(places) + 1,
        )
        said = zip(
            rollouts.response_texts,
            rollouts.truncated.tolist(),
            rollouts.response_mask.sum(-1).tolist(),
            strict=True,
        )
        yield {pair: Response(*values) for pair, values in zip(batch, said, strict=True)}


def _batches(pairs: Sequence[Pair], size: int, block: int) -> Iterator[list[Pair]]:
    """Cut into batches of about `size`: never across blocks, and only between questions."""
    for _, of_block in groupby(pairs, key=lambda pair: pair[0] // block):
        batch: list[Pair] = []
        for _, siblings in groupby(of_block, key=lambda pair: pair[0]):
            more = list(siblings)
            if batch and len(batch) + len(more) > size:
                yield batch
                batch = []
            batch += more
        yield batch
