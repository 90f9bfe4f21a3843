"""Rewards, environments and tools of TRL scripts: the same ones in the spec, or `???`; never others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.app import run
from rlctl.convert.conversion_report import spec_yaml
from rlctl.convert.source import read
from rlctl.convert.translate import Translation, translate
from rlctl.errors import UsageError
from rlctl.user_code import load_function

SCORES = """
from functools import partial

def right(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]

async def short(completions, **kwargs):
    return [-len(c) / 100 for c in completions]

class Judge:
    def __call__(self, completions, **kwargs):
        return [0.0 for _ in completions]

ALL = [right, short]
BY_NAME = {"right": right, "short": short}
"""

TWO = [{"name": "scores.py:right", "weight": 1.0}, {"name": "scores.py:short", "weight": 0.5}]


def imported(text: str, name: str, directory: Path, **options: str) -> Translation:
    (directory / "scores.py").write_text(SCORES, encoding="utf-8")
    file = directory / name
    file.write_text(text, encoding="utf-8")
    return translate(read(file, framework=None, environment=options, arguments=[]))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def expanded(text: str) -> str:
    """The script: `BOTH` imports both functions, `T` is the trainer."""
    return text.replace("BOTH\n", "from scores import right, short\n").replace("T(", "GRPOTrainer(")


def missing(result: Translation, key: str) -> str:
    return next((one.what for one in result.problems if one.key == key and one.severity == "error"), "")


@pytest.mark.parametrize(
    "text",
    [
        "BOTH\nT(reward_funcs=[right, short])",
        "from scores import right as r, short as s\nT(reward_funcs=[r, s])",
        "import scores\nT(reward_funcs=[scores.right, scores.short])",
        "import scores as sc\nfuncs = [sc.right, sc.short]\nT(reward_funcs=funcs)",
        "from scores import ALL\nT(reward_funcs=ALL)",
        "from scores import BY_NAME\nT(reward_funcs=[BY_NAME[n] for n in ['right', 'short']])",
        "from scores import BY_NAME\nT(reward_funcs=list(BY_NAME.values()))",
        "from scores import *\nT(reward_funcs=[right, short])",
        "BOTH\nR = {'a': right, 'b': short}\nT(reward_funcs=[R['a'], R['b']])",
        "BOTH\nfuncs = []\nfuncs.append(right)\nfuncs += [short]\nT(reward_funcs=funcs)",
        "BOTH\nfuncs = [right]\nfuncs.extend([short])\nT(reward_funcs=funcs)",
        "BOTH\ndef main():\n    funcs = [right]\n    funcs.append(short)\n    T(reward_funcs=funcs)\n",
        "BOTH\nT('org/m', [right, short])",
        "BOTH\nmore = [short]\nT(reward_funcs=[right, *more])",
        "BOTH\nT(reward_funcs=[right] + [short])",
        "BOTH\nkw = dict(a=1)\nkw2 = {'reward_funcs': [right, short]}\nT(**kw2)",
        "BOTH\nclass Mine(GRPOTrainer):\n    pass\nMine(reward_funcs=[right, short])",
        "BOTH\nclass C:\n    funcs = [right, short]\nT(reward_funcs=C.funcs)",
    ],
)
def test_functions_that_an_import_gives_keep_names_and_weights(text: str, tmp_path: Path) -> None:
    config = "args = GRPOConfig(reward_weights=[1.0, 0.5])\n"
    result = imported(f"{config}{expanded(text)}\n", "train.py", tmp_path)
    assert result.spec.get("reward.terms") == TWO
    assert not missing(result, "reward.terms")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("T(reward_funcs=[lambda completions, **k: [1.0]])", "has no name"),
        ("from functools import partial\nBOTH\nT(reward_funcs=[partial(right, x=1)])", ""),
        ("from scores import Judge\nT(reward_funcs=[Judge()])", "is an object"),
        ("from scores import Judge\njudge = Judge()\nT(reward_funcs=judge)", "is an object"),
        ("from scores import Judge\nT(reward_funcs=Judge(0.5))", ""),
        ("BOTH\nT(reward_funcs=right if x else None)", ""),
        ("BOTH\nf = [right]\nif x:\n    f.append(short)\nT(reward_funcs=f)", ""),
        ("BOTH\nf = []\nfor g in (right, short):\n    f.append(g)\nT(reward_funcs=f)", ""),
        ("from scores import BY_NAME\nT(reward_funcs=[BY_NAME[n] for n in args.rewards])", ""),
        ("def main():\n    def f(completions):\n        return [1.0]\n    T(reward_funcs=f)\n", "inside a"),
        ("def f(prompts, **k):\n    return [1.0]\nT(reward_funcs=f)", "`completions`"),
        ("T(reward_funcs=make_rewards())", ""),
        ("T(reward_funcs=args.reward_funcs)", ""),
        ("T(reward_funcs=['org/a', 'org/b'])", "two reward models"),
        ("from trl.rewards import think_format_reward as t\nT(reward_funcs=t)", "no counterpart"),
        ("BOTH\nT(reward_funcs=right, args=GRPOConfig(reward_weights=[1, 2]))", "2 weights"),
        ("BOTH\nT(reward_funcs=right, args=GRPOConfig(reward_weights=w()))", ""),
        ("def f(environments):\n    return [e.x() for e in environments]\nT(reward_funcs=f)", "get_reward"),
        ("T(train_dataset=d)", "names no reward"),
        ("T(**settings())", "names no reward"),
        ("def f(completions):\n    return net(completions)\nnet = g()\nT(reward_funcs=f)", "net"),
        ("def run(reward):\n    T(reward_funcs=reward)\nreward = 'org/a'\n", ""),
    ],
)  # fmt: skip
def test_a_reward_that_a_file_does_not_name_is_missing(text: str, reason: str, tmp_path: Path) -> None:
    result = imported(f"c = GRPOConfig(beta=0)\n{expanded(text)}\n", "train.py", tmp_path)
    assert not {"reward.terms", "reward.name"} & set(result.spec)
    assert reason in missing(result, "reward.terms")
    assert "\nreward.terms: ???" in spec_yaml(result, "train.py")


def test_a_models_name_is_a_reward_model(tmp_path: Path) -> None:
    for given in ("'org/rm'", "['org/rm']", "rm"):
        text = "rm = AutoModelForSequenceClassification.from_pretrained('org/rm', num_labels=1)\n"
        result = imported(f"{text}GRPOTrainer(model='m', reward_funcs={given})\n", "train.py", tmp_path)
        assert result.spec["reward.terms"] == [{"name": "model", "weight": 1.0}]
        assert result.spec["reward.model.path"] == "org/rm"
    text = expanded("BOTH\nGRPOConfig(reward_weights=[1, 2])\nT(reward_funcs=['org/rm', right])")
    result = imported(text, "train.py", tmp_path)
    assert [(one["name"], one["weight"]) for one in result.spec["reward.terms"]] == [
        ("model", 1),
        ("scores.py:right", 2),
    ]


def test_rewards_of_a_command_line(tmp_path: Path) -> None:
    command = (
        "trl grpo --model_name_or_path m --reward_funcs accuracy_reward scores.right --reward_weights 1 0.5"
    )
    result = imported(command, "run.sh", tmp_path)
    assert result.spec["reward.terms"] == [
        {"name": "maths", "weight": 1.0},
        {"name": "scores.py:right", "weight": 0.5},
    ]
    text = "model_name_or_path: m\nnum_generations: 8\nreward_funcs:\n- think_format_reward\n"
    assert missing(imported(text, "grpo.yaml", tmp_path), "reward.terms")
    text = "trl grpo --model_name_or_path m --reward_model_name_or_path org/rm --reward_funcs scores.short"
    result = imported(text, "run.sh", tmp_path)
    assert [one["name"] for one in result.spec["reward.terms"]] == ["model", "scores.py:short"]
    assert result.spec["reward.model.path"] == "org/rm"
    assert missing(imported("trl grpo --model_name_or_path m", "run.sh", tmp_path), "reward.terms")


@pytest.mark.parametrize(("limit", "expected"), [(1024, (128, 0.5)), (1000, None)])
def test_the_penalty_for_long_responses_needs_the_same_limit(
    limit: int, expected: tuple[int, float] | None, tmp_path: Path
) -> None:
    text = "from trl.rewards import get_soft_overlong_punishment\nfrom scores import right\n"
    text += "GRPOConfig(max_completion_length=1024, reward_weights=[1, 0.5])\n"
    text += "p = get_soft_overlong_punishment(max_completion_len=LIMIT, soft_punish_cache=128)\n"
    text += "GRPOTrainer(reward_funcs=[right, p])\n"
    result = imported(text.replace("LIMIT", str(limit)), "train.py", tmp_path)
    keys = ("reward.overlong.buffer_length", "reward.overlong.penalty_factor")
    assert tuple(result.spec.get(key) for key in keys) == (expected or (None, None))
    assert bool(missing(result, "reward.terms")) is (expected is None)


SCRIPT = '''
import re
from trl import GRPOConfig, GRPOTrainer
from scores import right

WORDS = re.compile("[a-z]+")
LIMIT = 3

def count(text):
    return len(WORDS.findall(text))

# kept beside the function
def few_words(completions, **kwargs):
    """1 where there are few."""
    return [float(count(c) < LIMIT) for c in completions]

raise SystemExit("never executed")
trainer = GRPOTrainer(model="org/m", args=GRPOConfig(beta=0.0), reward_funcs=[right, few_words])
trainer.train()
'''


def test_a_function_of_a_script_that_trains_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["import", "train.py", "--output", "grpo.yaml"]) == 0
    assert "grpo.yaml and grpo_functions.py written" in capsys.readouterr().out
    assert "grpo_functions.py:few_words" in (tmp_path / "grpo.yaml").read_text()
    function = load_function("grpo_functions.py:few_words", key="reward.terms")
    assert function(completions=["a b", "a b c d"]) == [1.0, 0.0]
    assert "Trainer" not in (tmp_path / "grpo_functions.py").read_text()


def test_a_guarded_script_is_named_itself(tmp_path: Path) -> None:
    text = SCRIPT.replace('raise SystemExit("never executed")\n', "if __name__ == '__main__':\n")
    text = text.replace("\ntrainer", "\n    trainer")
    result = imported(text, "train.py", tmp_path)
    assert [one["name"] for one in result.spec["reward.terms"]] == ["scores.py:right", "train.py:few_words"]
    assert result.functions is None


GAME = '''
class Game:
    def reset(self, **row):
        self.reward = 0.0

    def move(self, to: str) -> str:
        """Moves.

        Args:
            to: where
        """
        self.reward = 1.0
        return to
'''


@pytest.mark.parametrize("returned", ["e.reward", "float(e.reward)", "e.get_reward()"])
def test_an_environment_with_tools_and_its_own_reward(returned: str, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    text = f"""
from game import Game
from trl import GRPOConfig, GRPOTrainer

def add(a: int, b: int) -> str:
    \"\"\"Adds.

    Args:
        a: one
        b: other
    \"\"\"
    return str(a + b)

def own(environments, **kwargs):
    return [{returned} for e in environments]

args = GRPOConfig(max_tool_calling_iterations=4, max_completion_length=256)
GRPOTrainer(model="org/m", args=args, reward_funcs=own, environment_factory=Game, tools=TOOLS).train()
"""
    result = imported(text.replace("TOOLS", "[]"), "train.py", tmp_path)
    keys = ("environment.name", "environment.max_turns", "environment.max_tool_calls", "reward.terms")
    assert [result.spec.get(key) for key in keys] == ["game.py:Game", 5, 256, []]
    assert result.functions is None
    (tmp_path / "train.py").write_text(text.replace("TOOLS", "[add]"))
    assert run(["import", "train.py", "--output", "g.yaml"]) == 0
    from rlctl.environment.user_class import tool_schemas

    kind: Any = load_function("g_functions.py:GameWithTools", key="environment.name")
    assert [tool["function"]["name"] for tool in tool_schemas(kind)] == ["add", "move"]
    assert kind().add(1, 2) == "3"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("environment_factory=lambda: Game(3)", "class"),
        ("environment_factory=make", "class"),
        ("environment_factory={'a': Game, 'b': Game}", ""),
        ("tools=[search_of(client)]", "search_of"),
    ],
)
def test_an_environment_that_a_file_does_not_name_is_missing(
    argument: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    text = "from game import Game\nfrom scores import right\ndef make():\n    return Game()\n"
    result = imported(f"{text}GRPOTrainer(model='m', reward_funcs=right, {argument})\n", "train.py", tmp_path)
    assert "environment.name" not in result.spec
    assert reason in missing(result, "environment.name")
    assert "environment.name: ???" in spec_yaml(result, "train.py")


def test_options_of_a_script_have_their_defaults(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass, field

@dataclass
class Options:
    rate: float = field(default=3e-6, metadata={"help": "x"})
    steps: int = 40
    given: str = None

parser = argparse.ArgumentParser()
parser.add_argument("-n", "--num-samples", type=int, default=4)
parser.add_argument("--beta", type=float)
args = parser.parse_args()
options, training_args = HfArgumentParser((Options, GRPOConfig)).parse_args_into_dataclasses()
cfg = Options(steps=7)
model = AutoModelForCausalLM.from_pretrained("org/m", torch_dtype="auto")
GRPOConfig(learning_rate=options.rate, num_generations=args.num_samples, beta=args.beta, max_steps=cfg.steps,
    seed=int(os.environ.get("SEED", 5)), per_device_train_batch_size=args.num_samples)
GRPOTrainer(model, args=training_args, reward_funcs=["org/rm"])
"""
    result = imported(text, "train.py", tmp_path)
    keys = ("actor.lr", "rollout.n", "trainer.total_training_steps", "trainer.seed", "model.path")
    assert [result.spec.get(key) for key in keys] == [3e-6, 4, 7, 5, "org/m"]
    assert "args.beta" in missing(result, "actor.use_kl_loss")
    assert imported(text, "train.py", tmp_path, num_samples="2", beta="0.1").spec["actor.kl_loss_coef"] == 0.1


@pytest.mark.parametrize("trainer", ["OnlineDPO", "DPO", "SFT", "XPO", "Reward", "NashMD"])
def test_another_trainers_script_is_refused(trainer: str, tmp_path: Path) -> None:
    text = f"peft = LoraConfig(r=8)\n{trainer}Trainer(args={trainer}Config(beta=1), peft_config=peft)"
    with pytest.raises(UsageError, match=f"{trainer}Trainer"):
        imported(text, "train.py", tmp_path)


def test_a_trainer_without_config_has_its_classs_defaults(tmp_path: Path) -> None:
    result = imported("RLOOTrainer(model='m', reward_funcs='org/rm')\n", "train.py", tmp_path)
    assert result.spec["algorithm.adv_estimator"] == "rloo"
    assert result.spec["rollout.n"] == 2
    text = "c = PPOConfig(kl_coef=0.1)\nrm = AutoModelForSequenceClassification.from_pretrained('org/rm')\n"
    result = imported(f"{text}PPOTrainer(args=c, model=policy, reward_model=rm)\n", "train.py", tmp_path)
    assert [result.spec.get(key) for key in ("reward.name", "reward.model.path")] == ["model", "org/rm"]


LAUNCHED = """
import argparse
from scores import right, short
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1e-6)
parser.add_argument("--style-weight", type=float, default=0.5)
args = parser.parse_args()
config = GRPOConfig(learning_rate=args.rate, reward_weights=[1.0, args.style_weight], num_generations=4)
GRPOTrainer("org/m", [right, short], config).train()
"""


def test_a_command_that_starts_a_script_has_the_scripts_settings(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    command = "accelerate launch --num_processes 4 train.py --rate 3e-6 --style-weight 0.25\n"
    result = imported(command, "run.sh", tmp_path)
    assert result.table.name == "trl"
    assert [one["weight"] for one in result.spec["reward.terms"]] == [1.0, 0.25]
    keys = ("actor.lr", "rollout.n", "trainer.n_gpus_per_node", "data.train_batch_size")
    assert [result.spec.get(key) for key in keys] == [3e-6, 4, 4, 8]
    assert not [row.key for row in result.rows if row.status == "unknown"]


def test_options_of_a_command_reach_trls_parser(tmp_path: Path) -> None:
    text = LAUNCHED.replace("argparse.ArgumentParser()", "TrlParser((GRPOConfig,))")
    text = text[: text.index("parser.add")] + "(config,) = parser.parse_args_and_config()\n"
    text += "GRPOTrainer('org/m', [right, short], config).train()\n"
    (tmp_path / "train_grpo.py").write_text(text)
    command = "python train_grpo.py --learning_rate 3e-6 --reward_weights 1 0.5 --beta 0.04\n"
    result = imported(command, "run.sh", tmp_path)
    assert result.spec["reward.terms"] == TWO
    assert (result.spec["actor.lr"], result.spec["actor.kl_loss_coef"]) == (3e-6, 0.04)


OPEN_R1 = """
from dataclasses import dataclass, field
from scores import right, short
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

REGISTRY = {"accuracy": right, "short": short}

@dataclass
class Arguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy", "short"])

def main(script_args, training_args, model_args):
    reward_funcs = [REGISTRY[name] for name in script_args.reward_funcs]
    trainer = GRPOTrainer(model=model_args.model_name_or_path, reward_funcs=reward_funcs, args=training_args)
    trainer.train()

if __name__ == "__main__":
    parser = TrlParser((Arguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""


def test_a_registry_of_rewards_is_read_with_the_commands_names(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(OPEN_R1)
    result = imported(OPEN_R1, "grpo.py", tmp_path)
    assert [one["name"] for one in result.spec["reward.terms"]] == ["scores.py:right", "scores.py:short"]
    command = "accelerate launch grpo.py --model_name_or_path org/m --reward_funcs short --beta 0.1\n"
    result = imported(command, "run.sh", tmp_path)
    assert [one["name"] for one in result.spec["reward.terms"]] == ["scores.py:short"]
    assert (result.spec["model.path"], result.spec["actor.kl_loss_coef"]) == ("org/m", 0.1)


@pytest.mark.parametrize(
    "text",
    [
        "t = T('m', right)\nt.reward_funcs.append(lambda completions: [1.0])\nt.train()",
        "a = T('m', right)\na.train()\nb = T('m', short)\nb.train()",
        "def f(completions):\n    return [0.0]\nf = cached(f)\nT('m', f)",
    ],
)
def test_rewards_that_change_are_missing(text: str, tmp_path: Path) -> None:
    assert missing(imported(expanded(f"BOTH\n{text}"), "t.py", tmp_path), "reward.terms")


def test_a_loaded_model_with_an_adapter(tmp_path: Path) -> None:
    text = "model, tok = FastLanguageModel.from_pretrained(model_name='org/m', load_in_4bit=False)\n"
    text += "model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64)\n"
    result = imported(expanded(f"BOTH\n{text}T(model=model, reward_funcs=right)"), "t.py", tmp_path)
    keys = ("model.path", "model.lora_rank", "model.lora_alpha")
    assert [result.spec.get(key) for key in keys] == ["org/m", 32, 64]


def test_constants_of_another_file_are_read_and_those_of_a_missing_one_are_not(tmp_path: Path) -> None:
    (tmp_path / "rates.py").write_text("RATE = 2e-6\n")
    text = "from rates import RATE\nfrom gone import SEED\nGRPOConfig(learning_rate=RATE, seed=SEED)\n"
    result = imported(text, "t.py", tmp_path)
    assert result.spec["actor.lr"] == 2e-6
    assert "trainer.seed" not in result.spec
    assert "SEED" in missing(result, "trainer.seed")
