"""Lengths with the model's own tokenizer and template, and templates that are wrong."""

import logging
import pickle

import pytest

from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.errors import UsageError
from rlctl.prepare.lengths import PromptLengths, template_findings
from tests.unit.prepare import small_models as templates
from tests.unit.prepare.small_models import save_model

WORDS = "one two three four five six seven eight nine ten"


def row(question, *, instruction="", system="", where="f:1"):
    content = f"{question}\n{instruction}" if instruction else question
    prompt = (Message("user", content),)
    if system:
        prompt = (Message("system", system), *prompt)
    return Row("src", prompt, "1", question=question, where=where)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_long_prompts_are_measured_without_a_warning(model, caplog):
    lengths = PromptLengths(model)
    lengths.renderer.tokenizer.model_max_length = 4
    logger = logging.getLogger("transformers")  # it keeps its messages from the root
    logger.addHandler(caplog.handler)
    try:
        assert lengths.measure([row(WORDS)])[0].num_tokens > 4
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_lengths_are_those_training_sees(model):
    rows = [row("a b"), row(WORDS, system="Be brief.", instruction="Go."), row("é " * 20)]
    lengths = PromptLengths(model)
    measured = lengths.measure(rows)
    dataset = PromptDataset(rows, lengths.renderer.tokenizer, max_prompt_length=999, filter_overlong=False)
    tasks = dataset.tasks(range(3), range(3))
    assert [one.num_tokens for one in measured] == [len(task.prompt_ids) for task in tasks]
    assert measured[0].num_tokens == 10  # <s> [ user ] a _ b [ assistant ]
    assert all(one.row is other for one, other in zip(measured, rows, strict=True))
    assert [one.problem for one in measured] == [""] * 3


def test_arguments_of_the_template_count_as_in_training(tmp_path):
    thinking = templates.GOOD + "{% if enable_thinking is false %}[ no thinking ]{% endif %}"
    model, rows = save_model(tmp_path, thinking), [row(WORDS)]
    kwargs = {"enable_thinking": False}
    lengths = pickle.loads(pickle.dumps(PromptLengths(model, chat_template_kwargs=kwargs)))
    options = {"max_prompt_length": 999, "filter_overlong": False, "chat_template_kwargs": kwargs}
    dataset = PromptDataset(rows, lengths.renderer.tokenizer, **options)
    assert lengths.measure(rows)[0].num_tokens == len(dataset.tasks([0], [0])[0].prompt_ids)
    assert lengths.measure(rows)[0].num_tokens > PromptLengths(model).measure(rows)[0].num_tokens
    assert lengths.describe() != PromptLengths(model).describe()
    with pytest.raises(UsageError, match="reads no `effort`"):
        PromptLengths(model, chat_template_kwargs={"effort": 1})


def test_it_travels_by_its_arguments(model):
    lengths = PromptLengths(model)
    again = pickle.loads(pickle.dumps(lengths))
    assert len(pickle.dumps(lengths)) < 1000
    assert again.measure([row(WORDS)]) == lengths.measure([row(WORDS)])
    assert again.describe() == lengths.describe()


def test_templates_that_are_wrong_are_said_per_row(tmp_path):
    refuses = PromptLengths(save_model(tmp_path / "a", templates.NO_SYSTEM))
    measured = refuses.measure([row("a", system="Be brief."), row("a")])
    assert "System role not supported" in measured[0].problem
    assert measured[1].problem == ""
    assert measured[0].num_tokens == 0
    doubled = PromptLengths(save_model(tmp_path / "b", templates.DOUBLE_START))
    assert "two start-of-sequence tokens" in doubled.measure([row("a")])[0].problem


@pytest.mark.parametrize(
    ("template", "adds_start", "codes"),
    [
        (templates.GOOD, False, []),
        (templates.GOOD, True, ["start-token"]),
        (templates.NO_GENERATION_PROMPT, False, ["no-generation-prompt"]),
        (templates.DOUBLE_START, False, ["template"]),
        (templates.NO_SYSTEM, False, []),
        ("{{ raise_exception('no') }}", False, ["template"]),
        ("{% for %}", False, ["template"]),
        (None, False, ["no-template"]),
    ],
)
def test_template_findings(tmp_path, template, adds_start, codes):
    lengths = PromptLengths(save_model(tmp_path, template, adds_start=adds_start))
    assert [finding.code for finding in template_findings(lengths.renderer)] == codes


def test_what_lengths_depend_on_is_described(model, tmp_path):
    described = PromptLengths(model).describe()
    assert described["context"] == 64
    copy = PromptLengths(save_model(tmp_path / "copy")).describe()
    assert copy == described, "not where the model lies"
    other = PromptLengths(save_model(tmp_path / "other", templates.NO_SYSTEM)).describe()
    assert other["template_sha256"] != described["template_sha256"]
    assert other["tokenizer_sha256"] == described["tokenizer_sha256"]


def test_models_that_cannot_be_read_are_the_users_mistake(tmp_path):
    with pytest.raises(UsageError, match="no such directory"):
        PromptLengths(str(tmp_path / "nowhere"))
    path = save_model(tmp_path / "broken")
    (tmp_path / "broken/tokenizer.json").write_text("{oops")
    with pytest.raises(UsageError, match="Expecting property name"):
        PromptLengths(path)
