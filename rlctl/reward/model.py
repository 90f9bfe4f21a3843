"""Reward model: a Hugging Face sequence classifier with one output; its logit is the score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from rlctl.batch import torch_device
from rlctl.chat_template import rendered
from rlctl.errors import EnvironmentFailure, RunFailure, UsageError, first_line
from rlctl.lazy import torch
from rlctl.lean_imports import import_models
from rlctl.registry import GRADERS
from rlctl.reward.protocol import Failure, Grade, Sample, Scorer

if TYPE_CHECKING:
    from rlctl.run_spec.rollout import RewardModelSpec, RewardSpec

_FIX = (
    "name a sequence classifier with one output; reward.model.trust_remote_code=true if it ships its own code"
)


@GRADERS.register(
    "model",
    label="a reward model",
    formula="logit of a sequence classifier with one output",
    needs={"`reward.model.path`"},
    known_responses=lambda ground_truth: None,
)
class ModelScorer(Scorer):
    """Scores are the classifier's logits in float32.

    Where its tokenizer has the policy's vocabulary, and no chat template or the policy's, the input is the
    tokens that the policy read and sampled. Elsewhere it is the prompt's messages and the response as the
    assistant's turn (a prompt without messages is one user turn) in its chat template; without a template,
    their contents joined by blank lines, with its start and end token. Inputs longer than `max_length` tokens
    are truncated at the start.

    Raises:
        UsageError: the model or device does not exist, the model has more than one output, or the checkpoint
            lacks the output layer.
        EnvironmentFailure: the model cannot be downloaded or placed on the device.
    """

    def __init__(self, section: RewardSpec, device: torch.device | None) -> None:
        spec = section.model
        self._model, self._tokenizer = _load(spec)
        added = self._tokenizer("")["input_ids"]
        #: the start token, in a list, if the tokenizer adds one to text
        self._start = [token for token in added[:1] if token != self._tokenizer.eos_token_id]
        self.set_policy(None)
        try:
            self._device = torch.device(spec.device) if spec.device else device or torch_device()
        except RuntimeError as error:
            message = f"no such device: {first_line(error)}"
            where = f"reward.model.device={spec.device}"
            raise UsageError(message, where=where, fix="cpu, cuda:0 …") from error
        try:
            self._model.to(self._device).eval()
        except (RuntimeError, AssertionError) as error:
            raise EnvironmentFailure(
                f"the reward model cannot be put on {self._device}: {first_line(error)}",
                where=f"reward.model.device={spec.device}",
                fix="name a device of this machine with enough free memory",
            ) from error
        self._padding: int | None = self._model.config.get_text_config().pad_token_id
        self._batch_size = spec.batch_size
        self._max_length = spec.max_length

    def set_policy(self, tokenizer: Any) -> None:
        """Compares the policy's tokenizer with its own: does it read the policy's tokens?"""
        own = self._tokenizer
        self._policys = tokenizer
        self._reads_tokens = tokenizer is not None and (
            own.chat_template in (None, tokenizer.chat_template) and own.get_vocab() == tokenizer.get_vocab()
        )

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Returns one logit per sample, in order; a `Failure` if it is not finite or there is no input.

        Raises:
            RunFailure: the device has too little memory.
        """
        grades: list[Grade] = [0.0] * len(samples)
        ids: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            tokens = self._tokens(sample)
            if isinstance(tokens, Failure):
                grades[index] = tokens
            else:
                ids[index] = tokens
        readable = sorted(ids, key=lambda place: len(ids[place]))  # similar lengths need less padding
        for start in range(0, len(readable), self._batch_size):
            rows = readable[start : start + self._batch_size]
            for row, score in zip(rows, self._scores([ids[row] for row in rows]), strict=True):
                is_finite = math.isfinite(score)
                grades[row] = score if is_finite else Failure(f"the reward model's score is {score}")
        return grades

    def _scores(self, ids: list[list[int]]) -> list[float]:
        """One logit per row of token ids, each that of the row alone.

        Decoders score the last token that is not the padding of the model's configuration, or without one
        the last token: then padding is a token with which no row ends.
        """
        padding = self._padding
        if padding is None or padding < 0:
            padding = next(token for token in count() if all(row[-1] != token for row in ids))
            for config in (self._model.config.get_text_config(), self._model.config):  # models read either
                config.pad_token_id = padding
        pad = torch.nn.utils.rnn.pad_sequence
        padded = pad([torch.tensor(row) for row in ids], batch_first=True, padding_value=padding).to(
            self._device
        )
        mask = pad([torch.ones(len(row), dtype=torch.int64) for row in ids], batch_first=True).to(
            self._device
        )
        try:
            with torch.no_grad():
                logits = self._model(padded, attention_mask=mask).logits
        except torch.OutOfMemoryError as error:
            rows, length = padded.shape
            raise RunFailure(
                f"the reward model ran out of memory on {self._device} with {rows} × {length} tokens",
                where="reward.model",
                fix="lower reward.model.batch_size or max_length, or give it a separate device",
            ) from error
        scores: list[float] = logits.float().squeeze(-1).tolist()
        return scores

    def _tokens(self, sample: Sample) -> list[int] | Failure:
        tokenizer = self._tokenizer
        if self._reads_tokens:
            ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
            sampled = sample.response_ids or self._ended(
                tokenizer(sample.response, add_special_tokens=False)["input_ids"]
            )
            is_complete = tokenizer.chat_template or ids[:1] == self._start
            ids = [*(() if is_complete else self._start), *ids, *sampled]
        elif tokenizer.chat_template:
            asked = sample.messages or [{"role": "user", "content": sample.prompt}]
            turns = [*asked, {"role": "assistant", "content": sample.response}]
            try:
                text = rendered(tokenizer, turns)
            except Exception as error:  # Jinja's own errors and whatever the template raises
                return Failure(f"the reward model's chat template refuses the sample: {error}")
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._ended(tokenizer(self._plain(sample))["input_ids"])
            is_doubled = self._start and ids[:2] == 2 * self._start  # the text has one, too
            ids = ids[1:] if is_doubled else ids
        return list(ids[-self._max_length :]) or Failure("neither prompt nor response has tokens")

    def _ended(self, ids: list[int]) -> list[int]:
        """The ids with one end token, if the tokenizer has one."""
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _plain(self, sample: Sample) -> str:
        """Prompt and response without the policy's chat markup and start token."""
        asked = "\n\n".join(message["content"] for message in sample.messages)
        if not sample.prompt.endswith(asked):  # it has the markup of the policy's chat template
            return f"{asked}\n\n{sample.response}"
        start = self._policys and self._policys.bos_token
        return sample.prompt.removeprefix(start or "") + sample.response


def _load(spec: RewardModelSpec) -> tuple[Any, Any]:
    import_models()
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from rlctl.model_files import explained  # imports Pydantic, which grading processes do not need

    if spec.path is None:
        raise UsageError("the reward model has no path", where="reward.model.path", fix=_FIX)
    where = f"reward.model.path={spec.path}"
    trust = {"trust_remote_code": spec.trust_remote_code}
    dtype = torch.float32 if spec.dtype == "fp32" else torch.bfloat16
    with explained(spec.path, "reward.model.path", "a reward model", _FIX) as path:
        config = AutoConfig.from_pretrained(path, **trust)
        if config.num_labels != 1:
            message = f"a reward model has one output, this one has {config.num_labels}"
            raise UsageError(message, where=where, fix=_FIX)
        tokenizer = AutoTokenizer.from_pretrained(path, **trust)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **trust
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise UsageError(f"its weights lack {missing}: its scores would be random", where=where, fix=_FIX)
    return model, tokenizer
