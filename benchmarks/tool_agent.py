"""Trains an agent whose answers cannot be had without its tool, `search`, and counts who uses it.

    python -m benchmarks.tool_agent [--seeds 1 2 3] [--steps 40]

A question is a number of two digits; its answer is a digit that is random per number, and stands only in the
corpus that `search` reads. A third of the numbers is held out: no training can teach their answers. The model
has the architecture of the built-in one, and a word for the beginning and the end of a call. Before the
training it imitates a player who knows how to take part and not what pays: it answers at random at once, or
searches, for the number that was asked or for another one, and then repeats what it read or guesses.

Each seed is trained twice on the same model and data, with the tool and without it, and played on the numbers
that are held out before and after. 16 prompts x 8 episodes a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlctl.run_spec.model import EOS, PAD, RECIPE, UNK

NUMBERS = [f"{number:02d}" for number in range(100)]
HELD_OUT = 32
CALL, END_OF_CALL = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
VOCABULARY = [PAD, EOS, UNK, CALL, END_OF_CALL, *"0123456789[] QTA"]
#: Shows whose message it is; the descriptions of the tools are not for this model.
TEMPLATE = (
    "{% if tools %}{% endif %}{% for message in messages %}"
    "{{ {'user': 'Q', 'tool': 'T', 'assistant': '', 'system': ''}[message['role']] }}{{ message['content'] }}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
WARM_UP_STEPS, BATCH_SIZE = 300, 64


def shown(number: str, digit: str) -> str:
    """What the tool says."""
    return f"[1] {number} {digit}"


def game(draw: random.Random) -> list[tuple[str, bool]]:
    """An episode of the player, with a corpus of its own: text, and whether the player wrote it."""
    asked, guess = draw.choice(NUMBERS), str(draw.randrange(10))
    spoken = [(f"Q{asked}A", False)]
    if draw.random() < 0.5:
        return [*spoken, (guess, True)]
    searched = asked if draw.random() < 0.5 else draw.choice(NUMBERS)
    found = str(draw.randrange(10))
    answer = found if draw.random() < 0.5 else guess
    call = (f"{CALL}{searched}{END_OF_CALL}", True)
    return [*spoken, call, (f"T{shown(searched, found)}A", False), (answer, True)]


def build_tokenizer() -> Any:
    """Characters, and two words of a call."""
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    words = "|".join(map(_escaped, (CALL, END_OF_CALL, EOS)))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=RECIPE.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in '{}"<>_/:.,|()[]' else char for char in text)


def write_model(folder: Path, seed: int) -> Path:
    """A model that takes part, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer, draw = build_tokenizer(), random.Random(seed)
    special = {"pad_token_id": VOCABULARY.index(PAD), "eos_token_id": VOCABULARY.index(EOS)}
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=RECIPE.hidden_size,
        intermediate_size=RECIPE.intermediate_size,
        num_hidden_layers=RECIPE.num_layers,
        num_attention_heads=RECIPE.num_heads,
        num_key_value_heads=RECIPE.num_heads,
        max_position_embeddings=RECIPE.max_position_embeddings,
        initializer_range=RECIPE.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.lr)
    for step in range(WARM_UP_STEPS):
        optimizer.param_groups[0]["lr"] = RECIPE.lr * min(1.0, (step + 1) / RECIPE.warmup_steps)
        rows = [_tokens(game(draw), tokenizer) for _ in range(BATCH_SIZE)]
        length = max(map(len, rows))
        padded = torch.tensor(
            [row + [(special["pad_token_id"], False)] * (length - len(row)) for row in rows]
        )
        tokens, is_own = padded[..., 0], padded[:, 1:, 1].bool()
        logits = model(tokens[:, :-1], use_cache=False).logits
        optimizer.zero_grad()
        functional.cross_entropy(logits[is_own], tokens[:, 1:][is_own]).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokens(spoken: list[tuple[str, bool]], tokenizer: Any) -> list[tuple[int, bool]]:
    ids = [(tokenizer(text)["input_ids"], is_own) for text, is_own in spoken]
    return [
        (token, is_own)
        for text, is_own in ids
        for token in ([*text, tokenizer.eos_token_id] if is_own else text)
    ]


def write_data(folder: Path, seed: int) -> dict[str, Path]:
    """The corpus, and the questions for training and those that are held out."""
    draw = random.Random(seed)
    answers = {number: str(draw.randrange(10)) for number in NUMBERS}
    order = draw.sample(NUMBERS, len(NUMBERS))
    files = {name: folder / f"{name}.jsonl" for name in ("corpus", "train", "held_out")}
    parts = {"held_out": order[:HELD_OUT], "train": order[HELD_OUT:]}
    lines = {"corpus": [{"text": f"{number} {digit}"} for number, digit in answers.items()]}
    lines |= {
        name: [{"prompt": number, "ground_truth": answers[number]} for number in numbers]
        for name, numbers in parts.items()
    }
    for name, rows in lines.items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def train(
    run_dir: Path, model: Path, files: dict[str, Path], seed: int, steps: int, tools: str
) -> dict[str, float]:
    """Rewards and calls of the first and the last five steps, and rewards on held-out numbers."""
    settings = {
        "trainer.run_dir": run_dir,
        "trainer.seed": seed,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps,
        "trainer.save_freq": -1,
        "trainer.logger": "[]",
        "model.path": model,
        "engine.dtype": "fp32",
        "data.train_files": files["train"],
        "data.val_files": files["held_out"],
        "data.max_prompt_length": 8,
        "data.max_response_length": 6,
        "data.train_batch_size": 16,
        "actor.ppo_mini_batch_size": 16,
        "actor.lr": 2e-3,
        "actor.lr_warmup_steps": 5,
        "rollout.n": 8,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.n": 4,
        "reward.name": "exact",
    }
    if tools:
        settings |= {
            "environment.tools": f"[{tools}]",
            "environment.params.corpus": files["corpus"],
            "environment.params.num_results": 1,
            "environment.max_turns": 2,
            "environment.max_tool_calls": 1,
            "environment.context_length": 40,
            "environment.concurrency": 32,
        }
    words = [sys.executable, "-m", "rlctl", "train", "-p", "rloo-seq-is"]
    words += [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return figures(lines)


def figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the first and the last five steps, and of both validations."""
    rows = [line for line in lines if "critic/score/mean" in line]
    validations = [line for line in lines if any(key.startswith("val/") for key in line)]
    found = {}
    for when, some, validated in (
        ("before", rows[:5], validations[0]),
        ("after", rows[-5:], validations[-1]),
    ):
        [key] = [key for key in validated if key.startswith("val/") and key.endswith("reward_mean")]
        found[f"held out {when}"] = validated[key]
        found[f"reward {when}"] = sum(row["critic/score/mean"] for row in some) / len(some)
        calls = [row.get("episode/num_tool_calls", 0.0) for row in some]
        found[f"share that calls {when}"] = sum(calls) / len(calls)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--sides", nargs="+", choices=("search", "none"), default=["search", "none"])
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for seed in given.seeds:
            folder = Path(name) / str(seed)
            folder.mkdir()
            files, model = write_data(folder, seed), write_model(folder / "model", seed)
            for tool in given.sides:
                one = train(folder / tool, model, files, seed, given.steps, tool.replace("none", ""))
                found.append({"seed": seed, "tool": tool, **one})
                print(
                    seed,
                    f"{tool:>6}",
                    *(f"{key} {value:.2f}" for key, value in one.items()),
                    flush=True,
                )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
