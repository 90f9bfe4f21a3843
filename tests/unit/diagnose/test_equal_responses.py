"""Equal responses to a prompt that get different rewards."""

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.diagnose import equal_responses
from rlctl.diagnose.equal_responses import RewardedEpisodes, noise_among, read_episodes, reward_noise
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import DumpEvidence, RewardNoise
from rlctl.errors import UsageError
from rlctl.report.run_dumps import with_dumps
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log, write_run
from tests.unit.diagnose.test_rules_judged import advice, found, skipped

RULE = "unsteady-reward"
JUDGED = ("reward.name=judge", "reward.judge.url=http://localhost:1", "reward.judge.model=m")
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


def drawn(draw, *, pairs, prompts=12, members=8, per_step=2, probability=0.5):
    """Rewards of a coin, with so many pairs of equal responses, which are dealt to the prompts in turn."""
    count = prompts * members
    responses = np.arange(count)
    for pair in range(pairs):
        first = pair % prompts * members
        places = first + draw.permutation(members)[:2]
        responses[places[0]] = responses[places[1]]
    of_prompt = np.arange(count) // members
    rewards = (draw.random(count) < probability).astype(float)
    return RewardedEpisodes(of_prompt // per_step, of_prompt, responses, rewards, {})


@pytest.mark.parametrize("probability", [0.5, 0.2])
@pytest.mark.parametrize("pairs", [1, 2, 3, 5, 8, 12, 60, 200])
def test_a_coin_with_few_repeats_is_not_taken_for_rewards_of_another_row(pairs, probability):
    draw = np.random.default_rng(pairs)
    named = 0
    for _ in range(100):
        noise = noise_among(drawn(draw, pairs=pairs, prompts=12 + pairs // 4, probability=probability), {})
        named += noise is not None and noise.shift != 0
    assert named == 0


@pytest.mark.parametrize("rows", [1, -2])
def test_rewards_of_another_row_are_found_among_few_prompts(rows):
    named = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        prompts = np.arange(192) // 8
        responses = prompts * 4 + draw.integers(4, size=192)
        values = draw.integers(2, size=96).astype(float)[responses]
        moved = np.roll(values, -rows)
        noise = noise_among(RewardedEpisodes(prompts // 6, prompts, responses, moved, {}), {})
        named += noise.shift == rows
    assert named >= 18


def test_a_share_of_few_prompts_is_not_known():
    draw = np.random.default_rng(1)
    noise = noise_among(drawn(draw, pairs=40, prompts=4), {})
    assert (noise.low, noise.high) == (0.0, 1.0)


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
    files = dump(tmp_path, episodes)
    assert reward_noise(files).term == "taste"


def test_the_noisiest_term_is_that_with_most_noise_in_the_reward(tmp_path):
    episodes = []
    for step, group, tokens, _ in sampled(is_right):
        draw = random.Random(len(episodes))
        wide, narrow = draw.gauss(0, 10), draw.gauss(0, 1)
        episodes.append((step, group, tokens, 0.01 * wide + narrow, {"wide": wide, "narrow": narrow}))
    files = dump(tmp_path, episodes)
    assert reward_noise(files).term == "wide"
    assert reward_noise(files, {"wide": 0.01, "narrow": 1.0}).term == "narrow"


def test_diagnose_weighs_the_terms_as_the_reward_does(tmp_path):
    episodes = [
        (*episode[:3], 0.0, {"judge": draw.gauss(0, 10), "exact": draw.gauss(0, 1)})
        for draw in [random.Random(1)]
        for episode in sampled(coin)
    ]
    episodes = [(*one[:3], one[4]["exact"], one[4]) for one in episodes]
    terms = "reward.terms=[{name: judge, weight: 0.01}, {name: exact}]"
    run_dir = write_run(tmp_path / "run", healthy_rows(), terms, *JUDGED[1:])
    dump(run_dir / "rollouts", episodes)
    assert with_dumps(read_run(run_dir, metrics_read())).dumps.reward_noise.term == "exact"


@pytest.mark.parametrize("column", ["step", "group_id", "episode_id", "token_ids", "reward", "terms"])
def test_null_in_a_column_is_read_or_refused(tmp_path, column):
    file = dump(tmp_path, sampled(coin))[0]
    table = pq.read_table(file)
    values = table[column].to_pylist()
    values[3] = None
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, column, pa.array(values, table.schema.field(column).type)), file)
    if column in ("reward", "terms"):
        assert reward_noise([file]).share > 0.5
    else:
        with pytest.raises(UsageError, match="cannot be read as rollouts"):
            reward_noise([file])


def test_unknown_scores_of_terms_are_left_out(tmp_path):
    episodes = [
        (*one, {"a": None if index % 3 else one[3], "b": None, "c": 0.0})
        for index, one in enumerate(sampled(coin))
    ]
    assert reward_noise(dump(tmp_path, episodes)).term == "a"


def test_tokens_that_are_no_lists_are_refused(tmp_path):
    file = dump(tmp_path, sampled(coin))[0]
    table = pq.read_table(file).drop_columns("token_ids")
    pq.write_table(table.append_column("token_ids", pa.array(["text"] * len(table))), file)
    with pytest.raises(UsageError, match="cannot be read as rollouts"):
        reward_noise([file])


def test_whole_steps_are_read_until_rows_or_tokens_are_enough(tmp_path, monkeypatch):
    long = [(step, 0, [[step] * 50], 1.0) for step in (1, 1, 2, 2, 3, 3)]
    files = [dump(tmp_path / name, long)[0] for name in "abcd"]
    monkeypatch.setattr(equal_responses, "MOST_TOKENS", 150)
    assert read_episodes(files[:1]).steps.tolist() == [1, 1, 2, 2]
    assert len(read_episodes(files).steps) <= 6
    monkeypatch.setattr(equal_responses, "MOST_TOKENS", 10**9)
    assert len(read_episodes(files).steps) == 24
    monkeypatch.setattr(equal_responses, "MOST_ROWS", 2)
    assert read_episodes(files[:1]).steps.tolist() == [1, 1]


def test_a_file_without_rows_is_no_obstacle(tmp_path):
    assert reward_noise(dump(tmp_path, [])) is None


def test_an_episode_across_batches_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(equal_responses, "_BATCH", 3)
    files = dump(
        tmp_path, [(1, 0, [[1, 2], [3]], 0.0), (1, 0, [[1, 2], [3]], 1.0), (1, 0, [[1], [2, 3]], 1.0)]
    )
    assert read_episodes(files).responses.tolist() == [0, 0, 1]


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
    assert found(with_noise(NOISE, *JUDGED))[RULE].fixes[0].settings == {"reward.judge.votes": "4"}


@pytest.mark.parametrize(("term", "is_judge"), [("judge", True), ("dice", False), ("", True)])
def test_a_judge_is_not_asked_for_more_votes_where_another_term_is_noisy(term, is_judge):
    terms = "reward.terms=[{name: 'dice.py:dice'}, {name: judge}]"
    finding = found(with_noise(replace(NOISE, term=term), terms, *JUDGED[1:]))[RULE]
    assert any(fix.settings for fix in finding.fixes) is is_judge


def test_an_environment_may_reward_at_random_on_purpose():
    finding = found(with_noise(NOISE, "environment.name=guess_number"))[RULE]
    assert (finding.severity, finding.confidence, finding.explains) == ("warning", "low", ())


def test_rewards_of_other_rows_are_said_with_their_distance():
    finding = found(with_noise(replace(NOISE, shift=-2)))[RULE]
    assert "2 rows earlier" in finding.what
    assert "2 rows earlier" in advice(finding)


def test_rewards_of_other_rows_keep_the_limits_of_agents_and_of_learned_runs():
    shifted = replace(NOISE, shift=1)
    assert found(with_noise(shifted))[RULE].severity == "critical"
    assert found(with_noise(shifted, "environment.name=guess_number"))[RULE].severity == "warning"
    assert found(with_noise(shifted, critic__score__mean=0.97))[RULE].severity == "info"


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
