"""Compares steps per hour and reward of training in an environment with TRL's `environment_factory`.

    python -m benchmarks.environments [--trl-python PYTHON] [--json FILE] [--rounds 3] [--steps 12]
    python -m benchmarks.environments --llm [--trl-python PYTHON] [--json FILE] [--rounds 1] [--steps 2]

Both sides train the same small model with the same class (`benchmarks/doubler.py`): 16 prompts × 8 episodes
of at most two turns, a call of the tool and a reply. They have the same chat template (Qwen2.5's, with
tools), limits of tokens, learning rate, float32 on one CPU thread, and one optimizer step per batch (GRPO
without a KL penalty). The model is built here: it was taught the format, and some of the numbers.

Every side runs in a process of its own; sides alternate, TRL first. A step's time is the time between the
ends of two steps. The ratio of each round is TRL's median step over rlctl's; the reward is the mean over the
second half of the steps, with a 95 % interval of the difference over rounds, each of which has another seed.

`--llm`: SmolLM2-135M-Instruct with the calculator and the questions of `examples/`, 2 prompts × 8 episodes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.doubler import Doubler
from benchmarks.intervals import mean_interval
from benchmarks.step import Clock, last_number, run_rlctl
from examples.calculator import Calculator

HERE = Path(__file__).resolve().parent
PROMPTS, SAMPLES, TURN_TOKENS, WARM_UP, HIGHEST = 16, 8, 40, 2, 9
#: Share of the calls that the model gets right, token by token, when its first training ends.
TAUGHT = 0.4
EPISODE_TOKENS = 3 * TURN_TOKENS  # of TRL's completion: two turns and the tool's output


def conversation(number: int, *, is_whole: bool) -> list[dict[str, Any]]:
    """The task, and with `is_whole` the call of the tool, its output, and the reply."""
    call = {"type": "function", "function": {"name": "double", "arguments": {"number": number}}}
    rest = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": str(2 * number)},
        {"role": "assistant", "content": str(2 * number)},
    ]
    return [{"role": "user", "content": f"Double {number}."}, *(rest if is_whole else [])]


def build_model(where: Path, template: str) -> None:
    """Writes the model, with a tokenizer of its conversations."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from rlctl.environment.user_class import tool_schemas

    backend = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token=special[2], chat_template=template
    )

    def text(number: int, *, is_whole: bool = True) -> str:
        messages = conversation(number, is_whole=is_whole)
        given = {"tools": tool_schemas(Doubler), "add_generation_prompt": not is_whole}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([text(number) for number in range(1, HIGHEST + 1)], trainer)
    backend.add_special_tokens([AddedToken(one, special=True) for one in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token=special[2], chat_template=template
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **sizes, **ids)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2000):
        numbers = torch.randint(1, HIGHEST + 1, (16,)).tolist()
        rows = [tokenizer(text(number), add_special_tokens=False)["input_ids"] for number in numbers]
        prompts = [
            len(tokenizer(text(n, is_whole=False), add_special_tokens=False)["input_ids"]) for n in numbers
        ]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = tokens.clone()
        for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            labels[place, :prompt], labels[place, len(row) :] = -100, -100
        logits = model(tokens).logits[:, :-1]
        wanted = labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        right = ((logits.argmax(-1) == wanted) | (wanted < 0)).all(1).float().mean()
        if right >= TAUGHT:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)


def run_ours(job: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    found = run_rlctl(
        "rloo-seq-is",
        [
            f"model.path={job['model']}",
            f"data.train_files={job['rows']}",
            f"data.train_batch_size={job['prompts']}",
            "data.max_prompt_length=512",
            f"data.max_response_length={TURN_TOKENS}",
            f"rollout.n={SAMPLES}",
            f"environment.name={job['class']}",
            "environment.max_turns=2",
            "environment.context_length=768",
            f"reward.name={HERE / 'step.py'}:last_number" if job["is_llm"] else "reward.terms=[]",
            "algorithm.adv_estimator=grpo",
            f"actor.ppo_mini_batch_size={job['prompts']}",
            f"actor.ppo_micro_batch_size_per_gpu={job['prompts'] * SAMPLES}",
            f"actor.lr={job['lr']}",
            "actor.lr_scheduler_type=constant",
            "actor.lr_warmup_steps=0",
            "engine.dtype=fp32",
            "trainer.test_freq=-1",
            f"trainer.seed={seed}",
        ],
        warm_up=WARM_UP,
        steps=steps,
    )
    return {key: found[key] for key in ("wall", "cpu", "rewards", "mean_length", "calls")}


def run_trl(job: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Imports nothing from rlctl, whose dependencies may be missing here."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock(WARM_UP)

    def is_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            last_number(one[-1]["content"], truth) for one, truth in zip(completions, answer, strict=True)
        ]

    class Timer(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.times.clear()
            clock.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=job["prompts"] * SAMPLES,
            gradient_accumulation_steps=1,
            num_generations=SAMPLES,
            max_completion_length=EPISODE_TOKENS,
            max_tool_calling_iterations=1,
            temperature=1.0,
            beta=0.0,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_steps=steps + WARM_UP,
            logging_steps=1,
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=is_right if job["is_llm"] else None,
            args=config,
            train_dataset=Dataset.from_list(job["tasks"]),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
            callbacks=[Timer()],
            environment_factory=Calculator if job["is_llm"] else Doubler,
        )
        trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return {
        **clock.steps(),
        "rewards": [row["reward"] for row in rows],
        "mean_length": statistics.fmean(row["completions/mean_length"] for row in rows[WARM_UP:]),
        "calls": statistics.fmean(row["tools/call_frequency"] for row in rows[WARM_UP:]),
    }


def describe(where: Path, trl: str, *, is_llm: bool) -> Path:
    """Writes the model and the tasks; the chat template is the file of TRL's package."""
    from rlctl.data.schema import Message, Row, write_rows

    code = "import trl, pathlib; print(pathlib.Path(trl.__file__).parent / 'chat_templates/qwen2_5.jinja')"
    found = subprocess.run([trl, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    template, model = Path(found).read_text("utf-8"), where / "model"
    if is_llm:
        from transformers import AutoTokenizer

        from examples.calculator_questions import rows as questions
        from rlctl.model_files import model_directory

        shutil.copytree(model_directory("smollm2-135m"), model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
        rows = questions()
        prompts = [[{"role": one.role, "content": one.content} for one in row.prompt] for row in rows]
        tasks = [{"prompt": p, "answer": row.ground_truth} for p, row in zip(prompts, rows, strict=True)]
    else:
        build_model(model, template)
        numbers = 8 * list(range(1, HIGHEST + 1))
        tasks = [{"prompt": conversation(n, is_whole=False), "number": n} for n in numbers]
        rows = []
        for n, task in zip(numbers, tasks, strict=True):
            question = task["prompt"][0]["content"]
            given = {"ability": "tools", "index": n, "question": question, "extra": {"number": n}}
            rows.append(Row("doubler", (Message("user", question),), str(2 * n), **given))
    write_rows(where / "train.parquet", "train", rows)
    job = {
        "is_llm": is_llm,
        "model": str(model),
        "rows": str(where / "train.parquet"),
        "tasks": tasks,
        "prompts": 2 if is_llm else PROMPTS,
        "lr": 1e-5 if is_llm else 5e-4,
        "class": str(
            HERE.parent / "examples/calculator.py:Calculator" if is_llm else HERE / "doubler.py:Doubler"
        ),
    }
    (where / "job.json").write_text(json.dumps(job))
    return where / "job.json"


def in_a_process(python: str, side: str, job: Path, steps: int, seed: int, threads: int) -> dict[str, Any]:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    answer = job.with_name("answer.json")
    words = [python, __file__, "--side", side, "--job", str(job), "--steps", str(steps), "--seed", str(seed)]
    done = subprocess.run(
        [*words, "--json", str(answer)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def compare(trl: str, rounds: int, steps: int, *, is_llm: bool, threads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"trl": [], "rlctl": []}
    with tempfile.TemporaryDirectory() as where:
        job = describe(Path(where), trl, is_llm=is_llm)
        for seed in range(1, rounds + 1):
            for side, python in (("trl", trl), ("rlctl", sys.executable)):
                one = in_a_process(python, side, job, steps, seed, threads)
                found[side].append(one)
                late = statistics.fmean(one["rewards"][-(steps // 2) :])
                print(
                    f"round {seed} {side:>5}: {3600 / statistics.median(one['wall']):7.0f} steps/h, CPU "
                    f"{statistics.median(one['cpu']):6.2f} s/step, reward {one['rewards'][0]:.2f} → "
                    f"{late:.2f}, {one['mean_length']:.1f} tokens and {one['calls']:.2f} calls per episode",
                    flush=True,
                )
    pairs = list(zip(found["trl"], found["rlctl"], strict=True))
    for unit in ("wall", "cpu"):
        each = [statistics.median(a[unit]) / statistics.median(b[unit]) for a, b in pairs]
        found[f"{unit}_ratios"] = each
        print(f"{unit}: TRL's step over rlctl's: " + ", ".join(f"{ratio:.2f}" for ratio in each))
    late = [[statistics.fmean(one["rewards"][-(steps // 2) :]) for one in pair] for pair in pairs]
    differences = [ours - theirs for theirs, ours in late]
    if rounds > 1:
        mean, low, high = mean_interval(differences)
        print(f"reward, rlctl − TRL: {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}")
    return found | {"differences": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps per round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llm", action="store_true", help="SmolLM2-135M with a calculator")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        run = run_trl if given.side == "trl" else run_ours
        found = run(json.loads(given.job.read_text()), given.steps, given.seed)
    else:
        trl = given.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
        if trl is None:
            raise SystemExit(
                "TRL is not here: pip install trl==1.16.0, or --trl-python of an environment that has it"
            )
        found = compare(trl, given.rounds, given.steps, is_llm=given.llm, threads=given.threads)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
