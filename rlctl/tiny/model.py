"""Builds the embedded model and its tokenizer as standard Hugging Face objects, without downloads.

The model gets a supervised warm start: it is trained to a high accuracy, then its output distribution is
flattened. A model from early-stopped training is often confidently wrong: whole groups of responses repeat
one mistake, and the group has no reward variance. Therefore the model is trained beyond the target accuracy,
and its output head is then scaled down until the accuracy of samples matches the target. For any seed, every
prompt then has right and wrong responses with sufficient probability.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlctl.errors import RunFailure
from rlctl.run_spec.model import EOS, PAD, RESPONSE_LENGTH, UNK, VOCABULARY, EmbeddedRecipe

#: Renders only the message contents.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
#: Problems that the accuracy is measured on, for a standard error of about 0.01.
_NUM_MEASURED = 1024


def build_tokenizer(recipe: EmbeddedRecipe) -> Any:
    """Character-level tokenizer: unknown characters become `<unk>`; decoding inserts no separators."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=recipe.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(recipe: EmbeddedRecipe) -> Any:
    """A Llama model in float32, initialised from torch's global random state.

    Llama, because every engine supports it and transformers loads the saved tokenizer unchanged (for a Qwen2
    directory it uses Qwen2's byte-level class, which drops unknown characters). Embeddings are untied,
    because vLLM on CPU keeps a stale output head after a weight sync of tied embeddings.
    """
    special = {"pad_token_id": VOCABULARY.index(PAD), "eos_token_id": VOCABULARY.index(EOS)}
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        architectures=[LlamaForCausalLM.__name__],
        dtype="float32",
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def save_model(model: Any, model_dir: Path) -> None:
    """Writes config and weights like `save_pretrained`, but without its progress bar."""
    model.config.save_pretrained(model_dir)
    model.generation_config.save_pretrained(model_dir)
    save_file(model.state_dict(), model_dir / "model.safetensors", metadata={"format": "pt"})


def warm_start(
    model: Any,
    problems: list[tuple[str, str]],
    recipe: EmbeddedRecipe,
    seed: int,
) -> float:
    """Trains `model` in place up to `recipe.taught_accuracy`, then flattens it to `recipe.target_accuracy`.

    The accuracy of samples at temperature 1 is computed without sampling, as the mean probability of the only
    right answer, including the end of sequence. Returns its final value.

    Raises:
        RunFailure: the accuracy was not reached in `recipe.max_steps`.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(problems)
    measured = tokens[torch.randperm(len(tokens), generator=generator)[:_NUM_MEASURED]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    model.train()
    for _ in range(recipe.max_steps):
        batch = tokens[torch.randint(len(tokens), (recipe.batch_size,), generator=generator)]
        nll = _answer_nll(model, batch)
        optimizer.zero_grad()
        nll.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warmup.step()
        accuracy = _accuracy(nll)
        # The batch accuracy is free but noisy and one update old: near the goal, measure.
        if accuracy > 0.8 * recipe.taught_accuracy:
            accuracy = _measure(model, measured)
            if accuracy >= recipe.taught_accuracy:
                model.eval()
                if recipe.target_accuracy < recipe.taught_accuracy:
                    accuracy = _soften(model, measured, recipe.target_accuracy)
                return accuracy
    raise RunFailure(
        f"the embedded model's warm start did not reach an accuracy of {recipe.taught_accuracy} "
        f"in {recipe.max_steps} steps",
        fix="try another trainer.seed",
    )


def imitate(
    model: Any, games: Callable[[], list[list[tuple[str, bool]]]], num_steps: int, recipe: EmbeddedRecipe
) -> float:
    """Trains `model` in place on what a player wrote; returns the last loss, nats per token.

    `games` returns a batch of them, each as parts of text: (text, whether the player wrote it). Each of the
    player's parts is followed by the end of sequence.
    """
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    model.train()
    loss = torch.zeros(())
    for _ in range(num_steps):
        rows = [
            [(ids[token], is_own) for text, is_own in game for token in ([*text, EOS] if is_own else text)]
            for game in games()
        ]
        length = max(map(len, rows))
        padded = torch.tensor([row + [(ids[PAD], False)] * (length - len(row)) for row in rows])
        tokens = padded[..., 0]
        is_own = padded[:, 1:, 1].bool()
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits[is_own], tokens[:, 1:][is_own])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warmup.step()
    model.eval()
    return loss.item()


@torch.no_grad()
def _soften(model: Any, measured: Tensor, target: float) -> float:
    """Scales the output head by the factor in (0, 1) that lowers the accuracy to `target`, by bisection."""
    head = model.get_output_embeddings().weight
    taught = head.clone()
    low, high = 0.0, 1.0  # 0: uniform distribution, 1: the trained model
    for _ in range(20):
        middle = 0.5 * (low + high)
        head.copy_(taught * middle)
        low, high = (middle, high) if _measure(model, measured) < target else (low, middle)
    return _measure(model, measured)


@torch.no_grad()
def _measure(model: Any, tokens: Tensor) -> float:
    """Accuracy of samples at temperature 1 on these problems."""
    return _accuracy(_answer_nll(model, tokens))


def _tokens(problems: list[tuple[str, str]]) -> Tensor:
    """(N, P + T) int64: prompt, answer, end of sequence; all rows have the same length."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    return torch.tensor([[*(ids[char] for char in prompt + answer), ids[EOS]] for prompt, answer in problems])


def _answer_nll(model: Any, tokens: Tensor) -> Tensor:
    """Cross-entropy of the answer tokens, (N, T), in nats."""
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=RESPONSE_LENGTH).logits
    return functional.cross_entropy(logits.transpose(1, 2), tokens[:, -RESPONSE_LENGTH:], reduction="none")


def _accuracy(nll: Tensor) -> float:
    """Mean probability of the complete right answer."""
    return float(nll.detach().sum(1).neg().exp().mean())
