"""Rewards of a batch: terms are added up, failures are counted and left out, never scored."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
import torch

from rlctl.errors import RunFailure
from rlctl.reward.build import overlong_penalty, refuse_errors
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import RewardResult
from rlctl.run_spec.rollout import OverlongSpec
from tests.processes import wait_until_ended
from tests.unit.reward.samples import built, episodes, pairs


@pytest.fixture(scope="module")
def pool():
    """Shared: starting a process costs the import of sympy."""
    pool = GradingPool("maths", deadline_s=1.0, num_workers=2)
    yield pool
    pool.close()


def test_auto_grades_each_row_by_its_source_and_keeps_the_order():
    reward = built(name="auto")
    result = reward.score(
        episodes(
            ("640", "640", "embedded/addition"),
            ("#### 72.0", "72", "openai/gsm8k"),
            ("640.0", "640", "embedded/addition"),
            ("", "72", "openai/gsm8k"),
        )
    )
    reward.close()
    assert result.scores.dtype == torch.float32
    assert result.scores.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert result.valid.dtype == torch.bool
    assert result.valid.all()
    assert result.errors == []
    assert result.errors_by_term == {"auto": 0}


def test_answers_are_read_when_asked_for(tmp_path):
    (tmp_path / "f.py").write_text("def f(): return 1.0\n")
    reward = built(terms=[{"name": f"{tmp_path}/f.py:f"}, {"name": "auto", "weight": 2.0}])
    batch = episodes(
        (" 640\n", "640", "embedded/addition"),
        ("The answer is 1/2.", "0.5", "openai/gsm8k"),
        ("no idea at all", "72", "openai/gsm8k"),
        ("I take (B).", "B", "cais/mmlu"),
        ("#### 1", "€", "openai/gsm8k"),
    )
    assert reward.score(batch).answers == []
    result = reward.score(batch, read_answers=True)
    reward.close()
    assert result.answers == ["640", "1/2", None, "B", None]
    assert result.scores.tolist() == [3.0, 3.0, 1.0, 3.0, 0.0]


def test_a_reward_that_reads_no_answers_has_none(tmp_path):
    (tmp_path / "f.py").write_text("def f(): return 1.0\n")
    reward = built(name=f"{tmp_path}/f.py:f")
    result = reward.score(episodes(("a", "a", "x"), ("b", "a", "x")), read_answers=True)
    reward.close()
    assert result.answers == [None, None]


def test_auto_runs_programs_where_the_source_is_code():
    reward = built(name="auto")
    program = "```python\ndef f(x): return x + 1\n```"
    result = reward.score(
        episodes((program, "assert f(1) == 2", "codecontests"), ("2", "2", "embedded/addition"))
    )
    reward.close()
    assert result.scores.tolist() == [1.0, 1.0]


def test_a_function_gets_its_rows_extra_info(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(solution_str, extra_info): return extra_info['bonus'] * len(solution_str)\n")
    reward = built(name=f"{file}:f")
    extras = ({"bonus": 0.5, "nested": {"a": [1, None]}}, {"bonus": 2, "nested": None})
    result = reward.score(episodes(("ab", "", "x"), ("abc", "", "x"), extra_infos=extras))
    reward.close()
    assert result.scores.tolist() == [1.0, 6.0]


def test_weights_that_sum_up_to_1_make_a_right_response_exactly_1():
    """pass@k asks for 1 or more; in float32 these three sum up to 0.99999994."""
    weights = {"exact": 0.15, "multiple_choice": 0.65, "auto": 0.2}
    reward = built(terms=[{"name": name, "weight": weight} for name, weight in weights.items()])
    result = reward.score(episodes(("A", "A", "embedded/addition")))
    reward.close()
    assert result.scores.tolist() == [1.0]


def test_terms_are_weighted_and_a_failure_of_one_invalidates_the_sum(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(response):\n    return {'a': 0.5, 'b': -3}[response]\n")
    terms = [{"name": "exact", "weight": 2.0}, {"name": f"{file}:half", "weight": -0.5}]
    reward = built(terms=terms)
    result = reward.score(episodes(("a", "a", "x"), ("b", "a", "x"), ("c", "c", "x")))
    reward.close()
    assert result.scores.tolist() == [2.0 * 1.0 - 0.5 * 0.5, 2.0 * 0.0 - 0.5 * -3.0, 0.0]
    assert result.valid.tolist() == [True, True, False]
    assert {name: part.tolist() for name, part in result.parts.items()} == {
        "exact": [1.0, 0.0, 1.0],
        "half": [0.5, -3.0, 0.0],
    }
    assert result.errors_by_term == {"exact": 0, "half": 1}
    assert "KeyError: 'c'" in result.errors[0]
    assert "mine.py" in result.errors[0]
    assert "rlctl/reward" not in result.errors[0]


def test_a_sum_beyond_float32_is_a_failure(tmp_path):
    huge = tmp_path / "huge.py"
    huge.write_text("def huge(response, ground_truth): return 1e300 if response == 'a' else 1.0")
    reward = built(name=f"{huge}:huge")
    result = reward.score(episodes(("a", "a", "x"), ("b", "b", "x")))
    reward.close()
    assert result.valid.tolist() == [False, True]
    assert result.scores.tolist() == [0.0, 1.0]
    assert "float32" in result.errors[0]


def test_overlong_penalty_by_hand():
    """L_max 10, buffer 4, factor 2: 0 up to 6, then 0.5 per token, −2 from 10 on."""
    overlong = OverlongSpec(buffer_length=4, penalty_factor=2.0)
    lengths = torch.tensor([0, 1, 5, 6, 7, 8, 9, 10, 11])
    penalties = overlong_penalty(lengths, overlong, max_length=10)
    assert penalties.tolist() == [
        0.0,
        0.0,
        0.0,
        0.0,
        -0.5,
        -1.0,
        -1.5,
        -2.0,
        -2.0,
    ]


def test_the_penalty_is_added_to_the_sum_and_kept_apart():
    overlong = {"buffer_length": 4, "penalty_factor": 2.0}
    reward = built(terms=[{"name": "exact", "weight": 3.0}], overlong=overlong, max_response_length=10)
    result = reward.score(episodes(("a", "a", "x"), ("b", "a", "x"), ("a", "a", "x"), lengths=[6, 8, 10]))
    assert result.scores.tolist() == [3.0, -1.0, 1.0]
    assert result.parts["overlong"].tolist() == [0.0, -1.0, -2.0]
    assert result.graded.tolist() == [3.0, 0.0, 3.0]


def test_an_ungraded_sample_gets_no_penalty_either(tmp_path):
    (tmp_path / "f.py").write_text("def f(): raise ValueError('always')\n")
    reward = built(name=f"{tmp_path}/f.py:f", overlong={"buffer_length": 4}, max_response_length=8)
    result = reward.score(episodes(("a", "a", "x"), lengths=[8]))
    reward.close()
    assert result.scores.tolist() == result.graded.tolist() == [0.0]
    assert not result.valid.any()


def test_the_environments_reward_is_added_to_the_sum(tmp_path):
    """A response that no term grades counts too, if the environment rewards it."""
    (tmp_path / "f.py").write_text("def f(completions): return [{'a': 1.0}.get(c) for c in completions]\n")
    overlong = {"buffer_length": 4}
    reward = built(terms=[{"name": f"{tmp_path}/f.py:f", "weight": 2.0}], overlong=overlong)
    batch = episodes(*[(text, "a", "x") for text in "aabb"], lengths=[1, 16, 1, 1])
    given = [0.25, None, -0.5, None]
    result = reward.score([replace(e, reward=r) for e, r in zip(batch, given, strict=True)])
    assert result.scores.tolist() == [2.25, 1.0, -0.5, 0.0]
    assert result.graded.tolist() == [2.25, 2.0, -0.5, 0.0]
    assert result.valid.tolist() == [True, True, True, False]
    endless = reward.score([replace(batch[0], reward=float("inf"))])
    reward.close()
    assert not endless.valid.any()
    assert "inf in float32" in endless.errors[0]


def test_an_episode_with_an_error_is_not_graded_and_not_valid(tmp_path):
    (tmp_path / "f.py").write_text("def f(response): return {'a': 0.5}[response]\n")
    terms = [{"name": f"{tmp_path}/f.py:f"}, {"name": "exact"}]
    reward = built(terms=terms, overlong={"buffer_length": 4})
    batch = episodes(("bad", "bad", "x"), ("a", "a", "x"), ("bad", "bad", "x"), lengths=[16, 16, 1])
    broken = replace(batch[0], error="its tool is gone", reward=3.0)
    result = reward.score([broken, *batch[1:]], read_answers=True)
    assert result.scores.tolist() == [0.0, 0.5, 0.0]
    assert result.graded.tolist() == [0.0, 1.5, 0.0]
    assert result.valid.tolist() == [False, True, False]
    assert result.errors_by_term == {"f": 1, "exact": 0}, "a grader's failures only"
    assert len(result.errors) == 1
    assert result.answers == [None, "a", "bad"]
    alone = reward.score([broken])
    assert (alone.valid.tolist(), alone.errors) == ([False], [])
    reward.close()


def test_no_episodes_have_the_same_terms(tmp_path):
    """A rank without groups takes part in sums over ranks, by term."""
    (tmp_path / "f.py").write_text("def f(response): raise ValueError('nothing to grade')\n")
    reward = built(terms=[{"name": f"{tmp_path}/f.py:f"}, {"name": "exact"}], overlong={"buffer_length": 4})
    empty = reward.score([], read_answers=True)
    assert list(empty.parts) == ["f", "exact", "overlong"]
    assert [len(values) for values in (empty.scores, empty.valid, empty.graded, empty.answers)] == [0] * 4
    assert empty.errors == []
    one = reward.score(episodes(("a", "a", "x")))
    reward.close()
    joined = RewardResult.joined([empty, one])
    assert joined.parts.keys() == one.parts.keys()
    assert joined.scores.tolist() == one.scores.tolist()


def test_scores_of_some_episodes_in_any_order():
    reward = built(name="exact", overlong={"buffer_length": 4}, max_response_length=10)
    whole = reward.score(episodes(*[(text, "a", "x") for text in "abab"], lengths=[10, 6, 1, 8]))
    picked = whole.pick([3, 0, 3])
    assert picked.scores.tolist() == [-0.5, 0.0, -0.5]
    assert picked.graded.tolist() == [0.0, 1.0, 0.0]
    assert picked.parts["overlong"].tolist() == [-0.5, -1.0, -0.5]
    assert len(whole.pick([]).scores) == 0


def test_a_failed_grading_is_left_out_and_counted():
    reward = built(name="maths")
    result = reward.score(episodes(("#### 1", "1", "x"), ("#### 1", "€", "x")))
    reward.close()
    assert result.scores.tolist() == [1.0, 0.0]
    assert result.valid.tolist() == [True, False]
    assert result.errors_by_term == {"maths": 1}
    assert "'€' is not a mathematical expression" in result.errors[0]


def test_too_many_failures_are_refused_with_the_first_text():
    refuse_errors(1.0, 2.0, lambda: "boom\n", 0.5)
    refuse_errors(0.0, 0.0, str, 0.0)
    with pytest.raises(
        RunFailure, match=r"failed on 1 of 2 responses; the first failure:\nboom \(fix"
    ) as caught:
        refuse_errors(1.0, 2.0, lambda: "boom\n", 0.4)
    assert "max_error_fraction" in caught.value.fix
    with pytest.raises(RunFailure, match=r"failed on 3 of 4 responses \(fix"):
        refuse_errors(3.0, 4.0, str, 0.4)  # they were all on another rank


def test_a_grading_process_that_dies_is_replaced(pool):
    one = pairs(("#### 1", "1"))
    assert pool.grade(one) == [1.0]
    process = pool._workers[0]._process  # a single grading goes to the first
    os.kill(process.pid, signal.SIGKILL)
    assert not wait_until_ended([process.pid], 10.0)
    assert pool.grade(one) == [1.0]


def test_closing_leaves_no_process(pool):
    pool.grade(pairs(("#### 1", "1"), ("#### 1", "1")))
    processes = [worker._process.pid for worker in pool._workers]
    pool.close()
    assert not any(map(psutil.pid_exists, processes))


def test_a_pool_has_a_process_for_each_core_of_its_rank(monkeypatch):
    from rlctl.reward.code import share_of_cores  # tests of other things start one process

    monkeypatch.setattr("rlctl.reward.pool.share_of_cores", share_of_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for ranks, count in (("1", 8), ("2", 4), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert len(GradingPool("maths")._workers) == count


def test_odd_text_survives_the_way_to_the_process(pool):
    odd = pairs(("\ud800\n\r\u2028\x00 #### 7", "7"), ("naïve €\n#### 7", "7"))
    assert pool.grade(odd) == [1.0, 1.0]
