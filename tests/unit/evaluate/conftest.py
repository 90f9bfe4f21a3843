import pytest

from rlctl.evaluate.samples import EvalSample
from tests.unit.evaluate.runs import quick_task


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """The embedded model, all but untrained, and its data."""
    return quick_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """What one test samples is not there for the next."""
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make_samples():
    """Samples from rewards (None: the grader failed) of each question."""

    def make(source, rewards, answers=None, first=0, truncated=False, tokens=2):
        return [
            EvalSample(
                question_index=first + question,
                sample_index=place,
                data_source=source,
                prompt=f"question {first + question}?",
                response=f"response {place}",
                ground_truth="1",
                truncated=truncated,
                num_tokens=tokens,
                messages=({"role": "user", "content": f"question {first + question}?"},),
                reward=reward,
                answer=None if answers is None else answers[question][place],
            )
            for question, of_question in enumerate(rewards)
            for place, reward in enumerate(of_question)
        ]

    return make
