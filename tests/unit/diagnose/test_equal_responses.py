"""Equal responses to a prompt that get different rewards."""

import random
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.diagnose.equal_responses import reward_noise
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import DumpEvidence, RewardNoise
from rlctl.report.run_dumps import with_dumps
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log, write_run
from tests.unit.diagnose.test_rules_judged import advice, found, skipped

RULE = "unsteady-reward"
NOISE = RewardNoise(300, 40, 30, share=0.97, low=0.9, high=1.0, first_step=1)


def dump(path, episodes):
    """Writes episodes (step, group, tokens of each sequence, reward, terms) as rollouts."""
    rows = []
    for number, (step, group, sequences, reward, *terms) in enumerate(episodes):
        for tokens in sequences:
            rows.append({
                "step": step, "group_id": group, "episode_id": f"{step}/{group}/{number}",
                "token_ids": list(tokens), "reward": reward,
                "terms": list(terms[0].items()) if terms else None,
            })  # fmt: skip
    names = {"step": pa.int64(), "group_id": pa.int64(), "episode_id": pa.string(),
             "token_ids": pa.list_(pa.int32()), "reward": pa.float32(),
             "terms": pa.map_(pa.string(), pa.float32())}  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    file = path / "rollouts-000001-000040.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(names.items()))), file)
    return [file]


def sampled(reward_of, *, steps=40, groups=4, members=8, words=6, seed=1):
    """Episodes of responses of one of so many words; `reward_of(word, draw)`."""
    draw = random.Random(seed)
    return [
        (step, group, [[100 + group, int(word)]], reward_of(word, draw))
        for step in range(1, steps + 1)
        for group in range(groups)
        for word in [draw.randrange(words) for _ in range(members)]
    ]


def is_right(word, draw):
    return float(word < 3)


def coin(word, draw):
    return float(draw.random() < 0.5)


def judge(word, draw):
    """Right, but for one in ten."""
    return float((word < 3) != (draw.random() < 0.1))


def test_a_reward_of_the_response_alone_has_no_noise(tmp_path):
    noise = reward_noise(dump(tmp_path, sampled(is_right)))
    assert (noise.share, noise.high, noise.first_step) == (0.0, 0.0, None)
    assert noise.num_prompts == 160


@pytest.mark.parametrize(
    ("reward_of", "share"),
    # A judge that errs in one of ten has the variance 0.1 · 0.9; half of the responses are right.
    [(coin, 1.0), (judge, 0.09 / 0.25), (lambda word, draw: is_right(word, draw) + draw.gauss(0, 0.5), 0.5)],
)
def test_the_interval_contains_the_share_that_was_planted(tmp_path, reward_of, share):
    inside = 0
    for seed in range(60):
        noise = reward_noise(dump(tmp_path, sampled(reward_of, steps=15, seed=seed)))
        inside += noise.low <= share <= noise.high
    assert inside >= 51  # 95 % of 60 are 57, with a standard deviation of 1.7


def test_few_prompts_have_a_wide_interval(tmp_path):
    widths = []
    for steps in (4, 64):
        noise = reward_noise(dump(tmp_path, sampled(judge, steps=steps)))
        widths.append(noise.high - noise.low)
    assert widths[0] > 2 * widths[1]


@pytest.mark.parametrize("rows", [1, 2, -3])
def test_rewards_of_another_row_are_found_with_their_distance(tmp_path, rows):
    episodes = sampled(is_right)
    moved = []
    for place, (step, group, tokens, _) in enumerate(episodes):
        moved.append((step, group, tokens, episodes[(place + rows) % len(episodes)][3]))
    noise = reward_noise(dump(tmp_path, moved))
    assert noise.shift == rows
    assert noise.low > 0.5


def test_noise_is_not_taken_for_rewards_of_another_row(tmp_path):
    for seed in range(40):
        for reward_of in (coin, lambda word, draw: float(draw.random() < 0.03)):
            noise = reward_noise(dump(tmp_path, sampled(reward_of, steps=8, seed=seed)))
            assert noise.shift == 0


def test_a_reward_that_changes_from_step_to_step_is_no_noise(tmp_path):
    episodes = [(step, group, tokens, reward * step) for step, group, tokens, reward in sampled(is_right)]
    assert reward_noise(dump(tmp_path, episodes)).first_step is None


def test_failed_gradings_are_left_out(tmp_path):
    episodes = [(*one[:3], None if index % 5 == 0 else one[3]) for index, one in enumerate(sampled(is_right))]
    assert reward_noise(dump(tmp_path, episodes)).share == 0.0


def test_episodes_of_several_sequences_are_equal_in_all_of_them(tmp_path):
    first = [1, 2, 3]
    same = [(1, 0, [first, [4, 5]], 0.0), (1, 0, [first, [4, 5]], 1.0), (1, 0, [first, [4, 6]], 0.5)]
    noise = reward_noise(dump(tmp_path, same))
    assert (noise.num_repeats, noise.first_step) == (1, 1)
    apart = [(1, 0, [first, [4, 5]], 0.0), (1, 0, [first, [4, 6]], 1.0), (1, 0, [[1, 2], [3, 4, 5]], 1.0)]
    assert reward_noise(dump(tmp_path, apart)) is None


def test_without_repeated_responses_or_differing_rewards_there_is_nothing_to_compare(tmp_path):
    assert reward_noise(dump(tmp_path, [(1, 0, [[1, word]], float(word)) for word in range(20)])) is None
    assert reward_noise(dump(tmp_path, sampled(lambda word, draw: 1.0))) is None


def test_the_term_of_a_sum_that_is_noise_is_named(tmp_path):
    episodes = []
    for step, group, tokens, right in sampled(is_right):
        taste = coin(0, random.Random(len(episodes)))
        episodes.append((step, group, tokens, right + taste, {"exact": right, "taste": taste}))
    assert reward_noise(dump(tmp_path, episodes)).term == "taste"


def with_noise(noise, *overrides, **columns):
    rows = [row | {key.replace("__", "/"): value for key, value in columns.items()} for row in healthy_rows()]
    return examine(replace(run_log(rows, *overrides), dumps=DumpEvidence(reward_noise=noise)))


def test_rewards_at_random_are_the_first_event_and_explain_what_the_policy_does():
    columns = {"response_length__clip_ratio": 0.4, "critic__score__mean": 0.5}
    diagnosis = with_noise(NOISE, "reward.name=exact", **columns)
    first, *others = [one for one in diagnosis.findings if one.severity != "info"]
    assert (first.rule, first.severity) == (RULE, "critical")
    assert {one.because_of for one in others} == {RULE}
    assert first.fixes[0].settings == {"reward.name": "auto"}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"share": 0.1, "low": 0.05, "high": 0.2}, "info"),
        ({"share": 0.6, "low": 0.4, "high": 0.8}, "info"),
        ({"share": 0.7, "low": 0.55, "high": 0.9}, "warning"),
        ({"num_differing": 4}, "info"),
        ({"num_prompts": 301}, "info"),  # of a grader that rarely fails
    ],
)
def test_the_level_is_that_of_the_share_which_is_certain(changes, severity):
    assert found(with_noise(replace(NOISE, **changes)))[RULE].severity == severity


def test_a_judge_is_asked_for_more_votes():
    judged = ("reward.name=judge", "reward.judge.url=http://localhost:1", "reward.judge.model=m")
    assert found(with_noise(NOISE, *judged))[RULE].fixes[0].settings == {"reward.judge.votes": "4"}


def test_an_environment_may_reward_at_random_on_purpose():
    finding = found(with_noise(NOISE, "environment.name=guess_number"))[RULE]
    assert (finding.severity, finding.confidence, finding.explains) == ("warning", "low", ())


def test_rewards_of_other_rows_are_said_with_their_distance():
    finding = found(with_noise(replace(NOISE, shift=-2)))[RULE]
    assert "2 rows earlier" in finding.what
    assert "2 rows earlier" in advice(finding)


def test_a_grader_that_rarely_fails_is_a_remark_where_all_the_variance_is_its_own(tmp_path):
    episodes = sampled(lambda word, draw: float(draw.random() > 0.004), steps=200)
    noise = reward_noise(dump(tmp_path, episodes))
    assert noise.low > 0.5
    assert 5 <= noise.num_differing < 0.1 * noise.num_prompts
    assert found(with_noise(noise))[RULE].severity == "info"


def test_what_is_left_to_vary_in_a_learned_run_is_a_remark():
    assert found(with_noise(NOISE, critic__score__mean=0.97))[RULE].severity == "info"


@pytest.mark.parametrize("noise", [None, RewardNoise(300, 40, 0, 0.0, 0.0, 0.0)])
def test_rewards_that_are_alike_or_unknown_are_quiet(noise):
    diagnosis = with_noise(noise)
    assert RULE not in found(diagnosis)
    assert (RULE in skipped(diagnosis)) is (noise is None)


@pytest.mark.parametrize("is_noise", [True, False])
def test_diagnose_compares_the_dumps_of_a_run_itself(tmp_path, is_noise):
    rows = [row | {f"{CORR}log_wealth": 0.0, f"{CORR}k3_kl": 1e-4} for row in healthy_rows()]
    run_dir = write_run(tmp_path / "run", rows)
    dump(run_dir / "rollouts", sampled(coin if is_noise else is_right))
    diagnosis = examine(with_dumps(read_run(run_dir, metrics_read())))
    assert (RULE in found(diagnosis)) is is_noise


def test_damaged_dumps_are_said(tmp_path):
    run_dir = write_run(tmp_path / "run", healthy_rows())
    file = dump(run_dir / "rollouts", sampled(coin))[0]
    file.write_bytes(file.read_bytes()[:500])
    run = with_dumps(read_run(run_dir, metrics_read()))
    assert any("equal responses" in note for note in run.notes)
