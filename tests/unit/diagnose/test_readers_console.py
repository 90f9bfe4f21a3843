"""Console logs and what people paste, of every framework: synthetic, in the shapes that real ones have."""

import io
import json
import sys

import pytest

from rlctl.cli.app import run
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine
from rlctl.errors import UsageError
from rlctl.metric_names import ELSEWHERE, METRICS
from tests.unit.diagnose import formats

EVERYTHING = frozenset({*METRICS, *ELSEWHERE})
ENTROPY, SCORE, NORM, LOSS = "actor/entropy", "critic/score/mean", "actor/grad_norm", "actor/pg_loss"
COUNTED = "the printed lines have no step: they are counted from 1"
FROM_BAR = "the printed lines have no step: it is taken from the progress bar"


def read(tmp_path, text, name="some.log"):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    return read_run(tmp_path / name, EVERYTHING)


def logged(run, key):
    """Step → value of a metric."""
    series = run.table.series(key)
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def trl(reward, epoch, **others):
    """A row as Hugging Face's trainer prints it."""
    row = {"loss": 0.25, "grad_norm": 0.5, "learning_rate": 1e-06, "completion_length": 31.5}
    return str({**row, "reward": reward, "reward_std": 0.125, "kl": 0.01, **others, "epoch": epoch})


# --- one log of each framework -------------------------------------------------------------------

VERL = "step:{step} - actor/entropy:{x} - critic/score/mean:np.float64(0.5) - perf/mfu/actor:0.25"
SWIFT = "'global_step/max_steps': '{step}/90', 'percentage': '5.6%', 'train_speed(iter/s)': 0.05}}"
FRAMEWORKS = {
    "verl": (VERL, ENTROPY),
    "ragen through verl": (VERL.replace("perf/mfu/actor:0.25", "rollout/success:0.5"), ENTROPY),
    "rllm through verl": ("(main_task pid=7) " + VERL + " - batch/solve_none:12.000", ENTROPY),
    "trl": ("{{'loss': 0.1, 'reward': {x}, 'reward_std': 0.5, 'kl': 0.01, 'epoch': 0.{step}}}", SCORE),
    "open-r1 through trl": ("{{'loss': 0.1, 'rewards/format': 1.0, 'reward': {x}, 'kl': 0.0, "
                            "'completion_length': 9.5, 'epoch': 0.{step}}}", SCORE),
    "ms-swift": ("{{'loss': 0.1, 'reward': {x}, 'frac_reward_zero_std': 0.5, " + SWIFT, SCORE),
    "ms-swift on megatron": (" [2026-01-01 00:00:00] iteration      {step}/      90 | consumed samples: 64 | "
                             "elapsed time: 17m 33s | reward: {x} | reward_std: 1.0E-01 | grad norm: 0.016 | "
                             "number of skipped iterations:   0 |", SCORE),
    "llama-factory": ('{{"current_steps": {step}, "total_steps": 90, "loss": 0.1, "reward": {x}, '
                      '"learning_rate": 1e-6, "elapsed_time": "0:11:19"}}', SCORE),
    "openrlhf": ("(PPOTrainer) ppo_trainer.py:547] ✨ Global step {step}: {{'actor_lr': 1e-6, "
                 "'entropy_loss': {x}, 'response_length': tensor(9.5, device='cuda:0')}}", ENTROPY),
    "slime": ("x.py:9 - step {step}: {{'train/entropy_loss': {x}, 'train/pg_loss': 0.0, "
              "'train/lr-pg_0': 1e-06}}", ENTROPY),
    "prime-rl": ("10:00:00 SUCCESS Step {step} |   9s | Loss 0.1 | Entropy {x} | Mismatch KL 0.001", ENTROPY),
    "nemo-rl": ("========================= Step {step}/90 =========================\n▶ Preparing batch...\n\n"
                "📊 Training Results:\n  • Loss: 0.0100\n  • Generation KL Error: 0.0010\n"
                "  • Avg Reward: {x}\n\n"
                "⏱️  Timing:\n  • Total step time: 35.70s\n  • generation: 4.95s (13.9%)", SCORE),
    "skyrl": ("2026-01-01 | INFO | tracking:log:150 - Step {step}: \n{{'generate/avg_num_tokens': '512.1',\n"
              " 'policy/policy_entropy': '{x}',\n 'trainer/epoch': 0}}", ENTROPY),
    "areal": ("StatsLogger INFO: Epoch 1/9 Step {step}/90 Train step {step}/90 done.\n"
              "╒═══════════════════════╤══════╤════════════════════════════════╤═════╕\n"
              "│ ppo_actor/seq_len/avg │ 9.12 │ ppo_actor/update/entropy/avg   │ {x} │\n"
              "├───────────────────────┼──────┼────────────────────────────────┼─────┤\n"
              "│ ppo_actor/prompt_len  │ 5.00 │ ppo_actor/update/grad_norm     │ 0.5 │\n"
              "╘═══════════════════════╧══════╧════════════════════════════════╧═════╛", ENTROPY),
    "torchforge": ("=== [global_logger_r0] - METRICS STEP {step} ===\n  main/rollout/avg_advantage: 0.0\n"
                   "  reward/evaluate_response/avg_total_reward: {x}\n  rl_trainer/learning_rate: 1e-06\n"
                   "==============================", SCORE),
    "roll": ("[2026-01-01 00:00:00,123] [INFO] [rlvr_pipeline.py (838)]: {{\"critic/score/mean\": {x}, "
             "\"actor/pg_loss@sum\": 0.1, \"tokens/response_length/mean\": 9.5, \"system/n\": 64}}\n"
             "[2026-01-01 00:00:00,124] [INFO] [rlvr_pipeline.py]: pipeline step {step} finished", SCORE),
    "oat": ("{{\n    'train/policy_grad_norm': 0.5,\n    'train/entropy': {x},\n"
            "    'train/pg_loss': 0.1,\n    'actor/rewards': 0.5,\n    'misc/query_step': 8.0\n}}", ENTROPY),
    "open-instruct": ('{{"training_step": {step}, "scores": 0.5, "policy/entropy_avg": {x}, '
                      '"optim/grad_norm": 0.5, "val/stop_rate": 0.9, "loss/policy_avg": 0.1}}', ENTROPY),
}  # fmt: skip


def lines_of(name):
    form, key = FRAMEWORKS[name]
    return [form.format(step=step, x=x) for step, x in ((3, 0.25), (4, 0.5), (5, 0.75))], key


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_is_recognised_with_its_steps(tmp_path, name):
    lines, key = lines_of(name)
    run = read(tmp_path, "\n".join(lines) + "\n")
    assert run.framework == name.partition(" through ")[2] or name.partition(" on ")[0]
    steps = (0, 1, 2) if name == "slime" else (1, 2, 3) if COUNTED in run.notes else (3, 4, 5)
    found = logged(run, key)
    assert list(found.values()) == [0.25, 0.5, 0.75]
    if name != "slime":
        assert tuple(found) == steps


OTHERS = [
    "{'step': 7, 'reward': 99.0, 'loss': 99.0, 'action': 'click'}",  # an agent's turn
    '{"step": 8, "reward": 99.0, "entropy": 99.0}',
    "[Judge] {'score': 99.0, 'ok': true}",
    "Step 2: add the numbers, so the reward = 99 and the loss = 99",
    "step 9: {'action': 'scroll', 'reward': 99.0}",
    "step:9 - reward:99",
    "Step 9 | open the door | 99",
    "| step | reward | loss |\n|---|---|---|\n| 9 | 99 | 99 |",
    "reward: 99\nentropy: 99",
    "  50%|█████     | 1/2 [00:01<00:01,  1.98s/it]",
    "{'reward': 99.0, 'answer': [\n",
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["verl", "openrlhf", "slime", "prime-rl", "nemo-rl", "areal", "ms-swift"])
def test_what_others_print_is_no_row(tmp_path, name, other):
    """Whatever a grader, an agent or a model prints between a trainer's rows, the table is the same."""
    lines, _ = lines_of(name)
    alone = read(tmp_path, "\n".join(lines))
    mixed = read(tmp_path, "\n".join(f"{other}\n{line}\n{other}" for line in lines))
    assert mixed.framework == alone.framework
    assert mixed.table.steps.tolist() == alone.table.steps.tolist()
    assert {key: logged(mixed, key) for key in mixed.table.columns} == {
        key: logged(alone, key) for key in alone.table.columns
    }


@pytest.mark.parametrize("other", [OTHERS[0], *OTHERS[2:7], OTHERS[9]])
def test_what_others_print_is_no_row_of_trls(tmp_path, other):
    rows = [trl(0.25, 0.1), trl(0.5, 0.2), trl(0.75, 0.3)]
    run = read(tmp_path, "\n".join(f"{other}\n{row}" for row in rows))
    assert logged(run, SCORE) == {1: 0.25, 2: 0.5, 3: 0.75}


# --- how it was printed or pasted ------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapped",
    [
        "> {}",
        "> > {}",
        "```\n{}\n```",
        "\x1b[36m(TaskRunner pid=38606)\x1b[0m {}",
        "\ufffd[36m(TaskRunner pid=38606, ip=10.0.0.7)\ufffd[0m {}",
        "> > [36m(main_task pid=1)[0m {}",
        " 10%|█         | 1/9 [00:01<00:08,  1.1s/it]\r                    \r{}",
        "Here is what I see:\n\n{}\n\nIs that normal?",
    ],
)
@pytest.mark.parametrize("name", ["verl", "openrlhf", "ms-swift", "llama-factory"])
def test_quotes_fences_colours_prefixes_and_bars_around_a_row(tmp_path, name, wrapped):
    lines, key = lines_of(name)
    run = read(tmp_path, "\n".join(wrapped.format(line) for line in lines))
    assert logged(run, key) == {3: 0.25, 4: 0.5, 5: 0.75}
    assert run.framework == name


def test_a_row_of_verls_that_a_terminal_wrapped(tmp_path):
    """At any place but within the last number."""
    whole = {ENTROPY: 0.25, SCORE: 0.5, NORM: 1.5, "response_length/mean": 330.4}
    row = "step:7 - " + " - ".join(f"{name}:{value}" for name, value in whole.items())
    for place in range(row.index("entropy"), row.index("330")):
        run = read(tmp_path, f"(T pid=1) {row[:place]}\n(T pid=1) {row[place:]}\n(T pid=1) Saved.\n")
        assert {key: logged(run, key)[7] for key in run.table.columns} == whole, row[:place]


def test_a_dictionary_over_several_lines_and_several_on_one(tmp_path):
    one, two = trl(0.25, 0.1), trl(0.5, 0.2)
    run = read(
        tmp_path, one.replace(", 'reward'", ", \n'reward'").replace("'kl'", "\n 'kl'") + f"\n{two} {one[:40]}"
    )
    assert logged(run, SCORE) == {1: 0.25, 2: 0.5}
    run = read(tmp_path, f"of 0.1'}} {trl(0.25, 0.1)} {trl(0.5, 0.2)} {trl(0.75, 0.3)[:-60]}")
    assert list(logged(run, SCORE).values())[:2] == [0.25, 0.5]


def test_a_dictionary_without_its_opening_brace(tmp_path):
    assert logged(read(tmp_path, trl(0.25, 0.1)[1:]), SCORE) == {1: 0.25}


def test_a_cut_row_loses_its_last_number_because_that_may_be_cut_too(tmp_path):
    run = read(tmp_path, f"{trl(0.25, 0.1)}\n{{'loss': 0.5, 'grad_norm': 0.125, 'reward': 0.7")
    assert logged(run, NORM) == {1: 0.5, 2: 0.125}
    assert logged(run, SCORE) == {1: 0.25}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("nan", None), ("NaN", None), ("-inf", None), ("Infinity", None), ("None", ...), ("True", 1.0),
     ("false", 0.0), ("1,024", 1024.0), ("'0.5'", 0.5), ("np.float32(0.5)", 0.5),
     ("tensor(0.5, device='cuda:0')", 0.5),
     ("5e-1", 0.5), ("+.5", 0.5)],
)  # fmt: skip
def test_spellings_of_numbers(tmp_path, text, expected):
    """`None` was not logged; NaN and infinities were, and are not finite."""
    run = read(tmp_path, f"{{'loss': 0.5, 'grad_norm': {text}, 'reward': 0.5, 'kl': 0.1, 'epoch': 0.1}}")
    assert logged(run, NORM) == ({} if expected in {None, ...} else {1: expected})
    assert (NORM in run.table.nonfinite) == (expected is None)


def test_a_percentage_is_a_share(tmp_path):
    run = read(tmp_path, "SUCCESS Step 1 | Reward 0.5 | Max Off-Policy 0 | Truncation 12.5%\n")
    assert logged(run, "response_length/clip_ratio") == {1: 0.125}


def test_rows_of_an_evaluation_do_not_mix_with_those_of_training(tmp_path):
    """Some trainers put the prefix only before some names of the row."""
    evaluation = (
        "{'eval_loss': 0.1, 'eval_reward': 0.9, 'reward': 0.9, 'completion_length': 99.0, 'epoch': 0.1}"
    )
    run = read(tmp_path, f"{trl(0.25, 0.1)}\n{evaluation}\n{trl(0.5, 0.2)}")
    assert logged(run, SCORE) == {1: 0.25, 2: 0.5}
    assert logged(run, "response_length/mean") == {1: 31.5, 2: 31.5}
    assert logged(run, "val/eval/reward_mean") == {1: 0.9}


# --- tables and lists --------------------------------------------------------------------------------

TABBED = (
    "Step\tTraining Loss\treward\trewards / format / mean\tkl\n"
    "10\t0.5\t0.25\t1.0\tnan\n20\t-0.5\t0.5\tNo Log\t0.1\n"
)
TABLES = {
    "as GitHub shows it": (
        "Step | Training Loss | reward | rewards / format / mean | kl\n-- | -- | -- | -- | --\n"
        "10 | 0.5 | 0.25 | 1.0 | nan\n20 | -0.5 | 0.5 | No Log | 0.1\n"
    ),
    "with outer pipes": (
        "| Step | Training Loss | `reward` | rewards/format/mean | kl |\n|---:|:---|---|---|---|\n"
        "| 10 | 0.5 | 0.25 | 1.0 | NaN |\n| 20 | -0.5 | 0.5 | | 0.1 |\n"
    ),
    "from a notebook, with tabs": TABBED,
    "with tabs below other text": "My run:\n" + TABBED.replace("No Log", "-"),
    "of pandas": (
        "   step  loss  reward  rewards/format/mean   kl\n0    10   0.5    0.25                  1.0  NaN\n"
        "1    20  -0.5    0.50                 None  0.1\n"
    ),
    "with box characters": (
        "┏━━━━━━┳━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━┳━━━━━┓\n"
        "┃ step ┃ loss ┃ reward ┃ rewards/format/mean ┃ kl  ┃\n"
        "┡━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━╇━━━━━┩\n"
        "│ 10   │ 0.5  │ 0.25   │ 1.0                 │ nan │\n"
        "│ 20   │ -0.5 │ 0.5    │                     │ 0.1 │\n"
        "└──────┴──────┴────────┴─────────────────────┴─────┘\n"
    ),
}


@pytest.mark.parametrize("form", TABLES)
def test_tables(tmp_path, form):
    run = read(tmp_path, TABLES[form])
    assert (run.framework, logged(run, SCORE)) == ("trl", {10: 0.25, 20: 0.5})
    assert logged(run, LOSS) == {10: 0.5, 20: -0.5}
    assert logged(run, "reward/format/mean") == {10: 1.0}
    assert run.table.nonfinite["actor/kl_loss"].tolist() == [10]


def test_a_table_whose_columns_are_steps(tmp_path):
    run = read(tmp_path, "| metric | step 1 | step 50 |\n|---|---|---|\n| actor/entropy | 0.5 | 0.25 |\n")
    assert logged(run, ENTROPY) == {1: 0.5, 50: 0.25}


def test_a_step_above_the_names_is_no_column(tmp_path):
    run = read(tmp_path, "| step 1 | step 50 |\n|---|---|\n| actor/entropy | 0.5 |\n")
    assert logged(run, ENTROPY) == {50: 0.5}


@pytest.mark.parametrize(
    "table",
    [
        "| Phase | Typical `gen_kl_error` | Range |\n|---|---|---|\n| Steps 1–20 | ~0.45 | 0.32 – 0.64 |\n",
        "| setting | baseline | ours |\n|---|---|---|\n| reward | 0.5 | 0.6 |\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
    ],
)
def test_tables_that_are_no_log(tmp_path, table):
    with pytest.raises(UsageError, match="not a known log format"):
        read(tmp_path, table)


@pytest.mark.parametrize(
    "text",
    [
        "actor/entropy: 0.25\ncritic/score/mean: 0.5\n",
        "| metric | value |\n|---|---|\n| actor/entropy | 0.25 |\n| critic/score/mean | 0.5 |\n",
        "wandb: Run history:\nwandb:      actor/entropy █▇▁\n"
        "wandb: Run summary:\nwandb:      actor/entropy 0.25\nwandb:  critic/score/mean 0.5\n",
    ],
)
def test_lists_of_names_and_values(tmp_path, text):
    run = read(tmp_path, text)
    assert (logged(run, ENTROPY), logged(run, SCORE)) == ({1: 0.25}, {1: 0.5})
    assert COUNTED in run.notes


def test_a_list_with_its_step(tmp_path):
    run = read(
        tmp_path, "wandb:  actor/entropy 0.25\nwandb:  actor/lr 1e-6\nwandb:  training/global_step 54\n"
    )
    assert logged(run, ENTROPY) == {54: 0.25}


def test_lines_that_any_script_may_print(tmp_path):
    run = read(
        tmp_path,
        "INFO step=100 loss=0.5 reward=0.25 lr=1e-6\nINFO step=110/900 loss=0.25 reward=0.5 lr=1e-6\n",
    )
    assert logged(run, SCORE) == {100: 0.25, 110: 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "loss: 0.5, reward: 0.25, grad_norm: 1.5\nloss: 0.5, reward: 0.5, grad_norm: 1.5\n",
            {1: 0.25, 2: 0.5},
        ),
        ("reward=0.25 grad_norm=1.5\n", {1: 0.25}),
        ("It collapses at step 120:\nreward: 0.25\ngrad_norm: 35.2\n", {120: 0.25}),
        ("* **reward**: 0.25\n* **grad_norm**: 35.2\n", {1: 0.25}),
    ],
)
def test_pasted_names_and_values(tmp_path, text, expected):
    assert logged(read(tmp_path, text), SCORE) == expected


def test_a_row_behind_a_progress_bar_and_curly_quotes(tmp_path):
    bar = "Training Progress:   1%|          | 3/700 [00:30<1:00:00, 16.20s/it]"
    assert logged(read(tmp_path, f"{bar}{VERL.format(step=3, x=0.5)}\n"), ENTROPY) == {3: 0.5}
    assert logged(read(tmp_path, trl(0.25, 0.1).replace(" '", " ‘").replace("':", "’:")), SCORE) == {1: 0.25}


def test_a_list_of_rows_within_a_document(tmp_path):
    rows = [{"_step": step, "actor/entropy": 0.5} for step in (3, 4)]
    assert logged(read(tmp_path, json.dumps({"name": "x", "history": rows})), ENTROPY) == {3: 0.5, 4: 0.5}


OTHER = "(WorkerDict pid=22) INFO 01-01 10:00:00 loader.py:20] loading weights: 3 of 9"
WHOLE = "{'loss': 0.1, 'reward': 0.5, 'reward_std': 0.5, 'completion_length': 9.5, 'epoch': 0.2}\n"


@pytest.mark.parametrize(
    "other", [OTHER, "[rank1]:[W1126] Warning: slow", "2026-01-01 10:00:00 INFO saved 3"]
)
@pytest.mark.parametrize("place", [20, 34, 47, 60])
def test_a_row_that_another_process_printed_into(tmp_path, place, other):
    row = WHOLE.replace("0.5", "0.25", 1).replace("0.2}", "0.1}")
    run = read(tmp_path, f"{row[:place]}{other}\n{row[place:]}{WHOLE}")
    assert (logged(run, SCORE), len(run.table.steps)) == ({1: 0.25, 2: 0.5}, 2)
    assert run.unread == ()
    stamped = row.replace("'epoch'", "'time': '2026-01-01 10:00:00', 'epoch'")
    assert logged(read(tmp_path, stamped), SCORE) == {1: 0.25}
    begin, end = row.split(" 'reward_std'")
    run = read(tmp_path, f"{begin}\n{other}\n 'reward_std'{end}{WHOLE}")
    assert (logged(run, SCORE), len(run.table.steps)) == ({1: 0.25, 2: 0.5}, 2)


@pytest.mark.parametrize("other", [OTHER, "[rank1]:[W1126] Warning: slow"])
@pytest.mark.parametrize("place", [60, 75, 90, 107])
def test_a_row_of_verls_that_another_process_printed_into(tmp_path, place, other):
    rows = [f"(TaskRunner pid=1) {VERL.format(step=step, x=0.25)} - actor/grad_norm:0.5\n" for step in (3, 4)]
    text = f"{rows[0][:place]}{other}\n(TaskRunner pid=1) {rows[0][place:]}{rows[1]}"
    run = read(tmp_path, text)
    assert (logged(run, ENTROPY), logged(run, NORM)) == ({3: 0.25, 4: 0.25}, {3: 0.5, 4: 0.5})
    assert run.unread == ()


def test_figures_beside_a_progress_bar_count_when_it_is_full(tmp_path):
    figures = "act_loss=-0.5, reward={}, kl=0.01, act_lr=5e-7"
    bar = "Train epoch [1/1]: {}%|██| {}/16 [01:23<00:00,  5.22s/it, " + figures + "]\n"
    text = bar.format(50, 8, 9.0) + bar.format(100, 16, 0.25) + bar.format(100, 16, 0.5)
    run = read(tmp_path, text)
    assert (run.framework, logged(run, SCORE)) == ("openrlhf", {1: 0.25, 2: 0.5})


# --- steps -------------------------------------------------------------------------------------------


def bar(step, total=90):
    return f"  1%|▏         | {step}/{total} [00:01<01:30,  1.1s/it]"


@pytest.mark.parametrize("line", [VERL, '{{"step": {step}, "actor/entropy": {x}, "perf/mfu/actor": 0.5}}'])
def test_utf_16_as_a_shell_redirects_it(tmp_path, line):
    path = tmp_path / "some.log"
    path.write_text("".join(line.format(step=step, x=step / 10) + "\r\n" for step in (1, 2)), "utf-16")
    assert logged(read_run(path, EVERYTHING), ENTROPY) == {1: 0.1, 2: 0.2}


@pytest.mark.parametrize(
    "output", ["x{'" * 200_000, "{'a': " * 100_000, "step 1 " * 100_000, "| a " * 100_000]
)
def test_long_lines_of_a_model_are_passed_over(tmp_path, output):
    run = read(tmp_path, f"{output}\n{VERL.format(step=1, x=0.5)}\n{output}\n")
    assert logged(run, ENTROPY) == {1: 0.5}


def test_printed_dictionaries_have_the_steps_of_the_bar_above_them(tmp_path):
    shards = "Loading checkpoint shards: 100%|██████████| 2/2 [00:01<00:00,  1.9s/it]"
    parts = [
        f"{shards}{bar(0)}",
        *(f"{bar(step)}\r{' ' * 9}\r{trl(step / 100, step / 90)}" for step in (20, 40, 60)),
    ]
    run = read(tmp_path, "\r".join(parts))
    assert logged(run, SCORE) == {20: 0.2, 40: 0.4, 60: 0.6}
    assert run.notes == (FROM_BAR,)


def test_or_of_the_bar_below_them(tmp_path):
    for start in ("", bar(0) + "\n"):
        text = start + "".join(f"{trl(step / 100, step / 90)}\n{bar(step)}\n" for step in (1, 2, 3))
        assert logged(read(tmp_path, text), SCORE) == {1: 0.01, 2: 0.02, 3: 0.03}


def test_a_bar_that_stands_still_gives_no_steps(tmp_path):
    run = read(tmp_path, bar(7) + "\n" + "".join(trl(x, x) + "\n" for x in (0.25, 0.5)))
    assert (logged(run, SCORE), run.notes) == ({1: 0.25, 2: 0.5}, (COUNTED,))


def test_a_run_that_begins_again_in_the_same_log(tmp_path):
    first = [trl(0.1, 0.1), trl(0.2, 0.2), trl(0.3, 0.3)]
    run = read(tmp_path, "\n".join([*first, trl(0.7, 0.1), trl(0.8, 0.2)]))
    assert logged(run, SCORE) == {1: 0.7, 2: 0.8}
    resumed = read(tmp_path, "\n".join([*first, trl(0.8, 0.2), trl(0.9, 0.3)]))
    assert logged(resumed, SCORE) == {1: 0.1, 2: 0.8, 3: 0.9}


def test_counted_rows_that_are_out_of_order(tmp_path):
    run = read(tmp_path, "\n".join(trl(x, x) for x in (0.5, 0.3, 0.4, 0.1, 0.2)))
    assert logged(run, SCORE) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}


# --- other contents of a log ----------------------------------------------------------------------------

TRACEBACK = """Traceback (most recent call last):
  File "/opt/verl/trainer/main.py", line 94, in run
    trainer.fit()
  File "/opt/verl/workers/actor.py", line 585, in update_policy
    loss.backward()
"""


def test_the_exception_at_the_end(tmp_path):
    end = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\nwandb: uploading output.log\n"
    )
    found = read(tmp_path, f"{VERL.format(step=3, x=0.5)}\n{TRACEBACK}{end}").exception
    assert found.text == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert (found.where, found.line, found.is_stop) == ("actor.py, line 585, in update_policy", 7, False)


@pytest.mark.parametrize("above", ["", '{"step": 9, "actor/entropy": 0.5}\n'])
def test_the_step_before_the_exception_is_that_of_the_table(tmp_path, above):
    """The steps of printed dictionaries are only known at the end: from the progress bars, or counted."""
    rows = above or "".join(f"{bar(step)}\n{trl(step / 100, step / 90)}\n" for step in (20, 40))
    [finding] = examine(read(tmp_path, f"{rows}{TRACEBACK}ValueError: x\n")).findings
    assert finding.what == f"the log ends after step {9 if above else 40} with ValueError: x"


def test_through_ray_the_cause_is_named_and_not_the_launcher(tmp_path):
    ray = "ray.exceptions.RayTaskError(IndexError): ray::Worker.update() (pid=334, ip=172.17.0.2)\n"
    error = "IndexError: list index out of range\n"
    text = f"{VERL.format(step=3, x=0.5)}\n{ray}{TRACEBACK.partition(chr(10))[2]}{error}"
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    found = read(tmp_path, text + TRACEBACK + launcher).exception
    assert (found.text, found.where) == (
        "IndexError: list index out of range",
        "actor.py, line 585, in update_policy",
    )


def test_exceptions_that_training_survived_or_that_are_far_from_the_end(tmp_path):
    row, error = VERL.format(step=3, x=0.5), f"{TRACEBACK}ValueError: no answer in the response\n"
    assert read(tmp_path, f"{error}{row}\n").exception is None
    assert read(tmp_path, f"{error}{row}\n{error}").exception is None  # handled before, so handled again
    assert read(tmp_path, f"{error}{row}\n{TRACEBACK.replace('585', '7')}KeyError: 'x'\n").exception
    assert read(tmp_path, f"{row}\n{error}" + "a rollout\n" * 500).exception is None
    for json_row in ('{"step": 4, "actor/entropy": 0.5}\n', '{"loss": 0.5, "grad_norm": 0.5}\n'):
        assert read(tmp_path, f"{json_row}{error}{json_row}").exception is None
        assert read(tmp_path, f"{error}{json_row}{TRACEBACK.replace('585', '7')}KeyError: 'x'\n").exception
    assert read(tmp_path, f"{row}\nValueError: step 0 - no action in <think>Got it\n").exception is None
    stopped = read(tmp_path, f"{row}\n{TRACEBACK}KeyboardInterrupt\n").exception
    assert (stopped.text, stopped.is_stop) == ("KeyboardInterrupt", True)


@pytest.mark.parametrize(
    "rows",
    [
        [VERL.format(step=step, x=0.5) for step in (8, 9, 8, 9)],
        [trl(0.5, epoch) for epoch in (0.1, 0.2, 0.1, 0.2)],
        [f'{{"step": {step}, "actor/entropy": 0.5}}' for step in (8, 9, 8, 9)],
        [f"step {s}: {{'train/step': {s}, 'train/pg_loss': 0.5}}\nrollout 3: {{'rollout/raw_reward': 0.5}}"
         for s in (8, 9, 8, 9)],
    ],
)  # fmt: skip
def test_an_exception_that_ends_the_run_again_after_a_restart(tmp_path, rows):
    error = f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory\n"
    first, last = ("".join(f"{row}\n" for row in part) for part in (rows[:2], rows[2:]))
    assert read(tmp_path, first + error + last + error).exception.text.startswith("torch.OutOfMemoryError")
    assert read(tmp_path, first + error + last).exception is None
    handled = f"{TRACEBACK}ValueError: no answer in the response\n"
    text = f"{rows[0]}\n{handled}{rows[1]}\n{error}{last}{handled}"
    assert read(tmp_path, text).exception is None


def test_a_log_without_rows_is_read_for_its_error(tmp_path):
    run = read(tmp_path, f"Loading the model\n{TRACEBACK}KeyError: 'x'\n")
    assert (run.exception.text, run.exception.line) == ("KeyError: 'x'", 7)
    assert (run.framework, len(run.table.steps)) == ("unknown", 0)
    assert run.notes == ("the log contains no step, only an error",)
    [finding] = examine(run).findings
    assert finding.what == "the log ends before its first step with KeyError: 'x'"


WRAPPERS = """Error executing job with overrides: ['trainer.total_training_steps=700']
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunner.run() (pid=46086, ip=10.0.0.2)
ray.exceptions.RayTaskError(RuntimeError): ray::WorkerDict.save_checkpoint() (pid=46408, ip=10.0.0.2)
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # The first error, not the last, nor a wrapper's.
        (f"{TRACEBACK}{WRAPPERS}RuntimeError: write failed\nRuntimeError: unexpected pos 3\n",
         "RuntimeError: write failed"),
        (f"{TRACEBACK}ValueError: a\n\nDuring handling of the above exception, another exception occurred:\n"
         f"\n{TRACEBACK.replace('585', '7')}KeyError: 'b'\n", "ValueError: a"),
        (f"{TRACEBACK}ray.exceptions.ActorDiedError: The actor died unexpectedly.\n",
         "ray.exceptions.ActorDiedError: The actor died unexpectedly."),
        # Deaths that Python does not report.
        ("OSError: [Errno 28] No space left on device\n", "OSError: [Errno 28] No space left on device"),
        ("[rank3]:[E1126 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=7) ran for 600000 milliseconds before timing out.\n" + TRACEBACK
         + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
         "[rank3]:[E1126 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=7) ran for 600000 milliseconds before timing out."),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n",
         "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0."),
        ("E1126 api.py:869] failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python\n",
         "E1126 api.py:869] failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python"),
        ("run.sh: line 9: 4321 Killed\n", "run.sh: line 9: 4321 Killed"),
        ("Segmentation fault (core dumped)\n", "Segmentation fault (core dumped)"),
        ("2026-01-01 ERROR engine: request timed out after 600 s\n",
         "2026-01-01 ERROR engine: request timed out after 600 s"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("above", ["", VERL.format(step=3, x=0.5) + "\n"])
def test_what_ended_the_run_is_the_first_error(tmp_path, above, lines, expected):
    assert read(tmp_path, f"{above}{lines}").exception.text == expected
    assert read(tmp_path, f"{lines}{VERL.format(step=4, x=0.5)}\n").exception is None  # it went on


def test_a_scheduler_that_ends_a_run_is_no_failure(tmp_path):
    line = "slurmstepd: error: *** JOB 17 ON node3 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    assert read(tmp_path, f"{VERL.format(step=3, x=0.5)}\n{line}\n").exception.is_stop


def test_settings_in_a_launch_line_and_where_each_fact_comes_from(tmp_path):
    launch = (
        "python train.py --num_generations 8 --beta 0.04 \\\n    --max_completion_length=1408 --bf16 true\n"
    )
    run = read(tmp_path, launch + trl(0.5, 0.1))
    assert (run.facts.group_size, run.facts.kl_coef, run.facts.max_response_length) == (8, 0.04, 1408)
    assert run.fact_origins["kl_coef"] == "a setting in the log"
    assert run.fact_origins["has_critic"] == "fixed in trl"
    hydra = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.rollout.n=4 \\\n" + (
        "  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\\n"
    )
    facts = read(tmp_path, hydra + VERL.format(step=1, x=0.5)).facts
    assert (facts.batch_size, facts.group_size, facts.kl_coef) == (256, 4, 0.001)
    # Defaults are not assumed: only settings that are stated count.
    assert (facts.bypass_mode, facts.rollout_is, facts.rollout_rs) == (None, None, None)


@pytest.mark.parametrize(
    "setting", ["beta: 0.04", "beta=0.04,", '"beta": 0.04,', "  --beta 0.04", "beta ......... 0.04"]
)
def test_one_setting_a_line(tmp_path, setting):
    run = read(tmp_path, f"training config\n{setting}\nlogging_steps: 1\n{trl(0.5, 0.1)}\n")
    assert run.facts.kl_coef == 0.04


def test_what_a_model_writes_between_rows_is_no_setting(tmp_path):
    run = read(tmp_path, f"{trl(0.5, 0.1)}\nWe solve for beta:\nbeta = 3\n{trl(0.6, 0.2)}\n")
    assert run.facts.kl_coef is None


def test_a_printed_configuration_is_no_row(tmp_path):
    config = "{'learning_rate': 1e-06, 'beta': 0.04, 'num_generations': 8, 'loss_type': 'grpo', 'epochs': 3}"
    run = read(tmp_path, f"{config}\n{trl(0.5, 0.1)}\n")
    assert logged(run, "actor/lr") == {1: 1e-06}
    with pytest.raises(UsageError, match="not a known log format"):
        read(tmp_path, config)


# --- damage ------------------------------------------------------------------------------------------


def test_nul_bytes_between_the_lines_are_left_out(tmp_path):
    """As in a log that was truncated while a process was writing to it."""
    lines, _ = lines_of("verl")
    run = read(tmp_path, "\0" * 70_000 + "\n".join(lines) + "\0\n")
    assert logged(run, ENTROPY) == {3: 0.25, 4: 0.5, 5: 0.75}
    assert any("NUL" in note for note in run.notes)
    rows = [json.dumps({"step": step, ENTROPY: 0.5}) for step in (1, 2)]
    assert logged(read(tmp_path, f"{rows[0]}\n\0\0{rows[1]}\n"), ENTROPY) == {1: 0.5, 2: 0.5}


def test_a_cut_trainer_state_is_read_as_far_as_it_goes(tmp_path):
    history = [{"step": step, "reward": step / 10, "completion_length": 9.0} for step in (1, 2, 3)]
    text = json.dumps({"epoch": 0.5, "log_history": history}, indent=2)
    run = read(tmp_path, text[: text.index("0.3") + 2])
    assert logged(run, SCORE) == {1: 0.1, 2: 0.2}
    assert run.notes == ("the JSON document ends early: the rows before were read",)


@pytest.mark.parametrize(
    "line",
    [
        "9" * 60_000,
        "x" * 60_000 + ": 5",
        " " * 60_000 + "5",
        "a " * 30_000 + "1",
        "9 | " * 20_000,
        "step: " * 20_000 + "= 5",
        "%|" * 30_000,
        "9%|" + "|" * 30_000,
        "{'a': " * 2_000,
        "'loss': 9" + "9" * 60_000 + "}",
        "a.b" * 20_000 + "(",
        "--a" * 20_000,
        "> " * 30_000,
        "[36m" * 20_000,
    ],
)
def test_a_hostile_line_costs_no_row_and_no_time(tmp_path, line):
    """Were a search more than linear, one of these would take minutes."""
    rows = [trl(0.25, 0.1), trl(0.5, 0.2)]
    run = read(tmp_path, f"{rows[0]}\n{line}\n{rows[1]}\n")
    assert logged(run, SCORE) == {1: 0.25, 2: 0.5}


@pytest.mark.parametrize(
    "content", [b"", b"\n\n \n", b"\0" * 100, b"{", b"[", b'{"log_history": [{"st', b"\xff\xfe\x00"]
)
def test_nothing_to_read_is_one_clear_sentence(tmp_path, content):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(UsageError, match=r"the log is empty|not a known log format"):
        read_run(tmp_path / "log", EVERYTHING)


def test_names_that_stand_for_no_known_metric_are_kept(tmp_path):
    run = read(tmp_path, "step:1 - actor/entropy:0.5 - perf/mfu/actor:0.5 - my/own:1.0 - timing_s/x:2\n")
    assert run.unread == ("my/own",)


# --- W&B ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["output", "output_raw"])
def test_a_wandb_file_with_console_output_only(tmp_path, kind):
    from wandb.proto.wandb_internal_pb2 import Record

    lines, _ = lines_of("verl")
    text = "\n".join(["\x1b[0m(T pid=1) loading", *lines, TRACEBACK, "ValueError: no GPU"])
    records = []
    for place in range(0, len(text), 50):  # pieces end anywhere
        record = Record()
        getattr(record, kind).line = text[place : place + 50]
        records.append(record.SerializeToString())
    formats.wandb_records(records, tmp_path / "run.wandb")
    run = read_run(tmp_path / "run.wandb", EVERYTHING)
    assert (run.framework, logged(run, ENTROPY)) == ("verl", {3: 0.25, 4: 0.5, 5: 0.75})
    assert run.exception.text == "ValueError: no GPU"


def test_output_log_with_the_configuration_next_to_it(tmp_path):
    config = "num_generations:\n  value: 8\nbeta:\n  value: 0.04\n_wandb:\n  value: {}\n"
    (tmp_path / "config.yaml").write_text(config)
    run = read(tmp_path, trl(0.5, 0.1), "output.log")
    assert (run.facts.group_size, run.facts.kl_coef) == (8, 0.04)
    assert "next to it" in run.fact_origins["kl_coef"]
    (tmp_path / "config.yaml").write_text("services: [web, db]\n")
    assert read(tmp_path, trl(0.5, 0.1), "output.log").facts.kl_coef is None


# --- snapshots ---------------------------------------------------------------------------------------


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """`rlctl diagnose -` with that text on standard input: exit code, both outputs on one line each."""

    def run_with(text, *options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = run(["diagnose", "-", *options])
        return code, *(" ".join(shown.split()) for shown in capsys.readouterr())

    return run_with


PASTED = "{'loss': 0.0, 'grad_norm': 0.0, 'reward': 0.5, 'my_own': 1.0, 'global_step/max_steps': '5/90'}"


def test_one_pasted_step(diagnose):
    """Who wrote it, which step, and which names are not known."""
    code, shown, _ = diagnose(f"> My gradient is 0:\n> ```\n> {PASTED}\n> ```\n")
    assert code == 0
    assert "step 5, logged by ms-swift" in shown
    assert "unknown metric names: my_own" in shown
    _, shown, _ = diagnose(PASTED, "--format", "json")
    assert json.loads(shown)["runs"][0]["steps"] == {"first": 5, "last": 5, "count": 1}


def test_a_paste_without_a_row_says_what_to_paste(diagnose):
    code, _, error = diagnose("Why is my reward so low? It is about 0.2 at step 100.\n")
    assert code == 2
    assert "paste a line of metrics" in error
