"""Prompts as tasks, and which of them a step gets."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlctl.data.prompts import PromptDataset, Renderer
from rlctl.data.records import parse_messages
from rlctl.data.schema import Message, Row
from rlctl.errors import UsageError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(chat_template=None, *, adds_bos=False):
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_rows(*contents):
    return [
        Row("src", (Message("user", text),), str(i), where=f"f:{i + 1}") for i, text in enumerate(contents)
    ]


def dataset(rows, tokenizer=None, limit=100, filter_overlong=True):
    return PromptDataset(
        rows, tokenizer or make_tokenizer(), max_prompt_length=limit, filter_overlong=filter_overlong
    )


def numbered(count):
    return dataset(make_rows(*(f"prompt {i}" for i in range(count))))


def test_tokens_and_what_travels_along():
    data = dataset(make_rows("1", "123", "12"))
    one = data.token_ids[0][0]
    first, second = data.tasks([1, 0], group_ids=[8, 9])
    assert (first.prompt_ids, second.prompt_ids) == ([one, one + 1, one + 2], [one])
    assert (first.group_id, second.group_id) == (8, 9)
    assert (first.row, second.row) == (1, 0)
    assert (first.text, second.text, first.ground_truth, second.ground_truth) == ("123", "1", "1", "0")
    assert (first.data_source, first.weight) == ("src", 1.0)


def test_what_user_functions_ask_for_travels_along():
    extra = {"difficulty": 0.5}
    row = Row("s", (Message("system", "a"), Message("user", "b")), "1", extra=extra)
    first, second = dataset([row, *make_rows("c")]).tasks([1, 0], [0, 1])
    assert (first.extra_info, second.extra_info) == ({}, extra)
    assert first.messages == ({"role": "user", "content": "c"},)
    assert second.messages == ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})


def test_chat_template_with_generation_prompt_and_one_start_token():
    data = dataset(make_rows("hi"), make_tokenizer(TEMPLATE, adds_bos=True))
    assert data.tasks([0], [0])[0].text == "<bos>[user]hi[assistant]"
    assert data.token_ids[0].count(1) == 1


def test_two_start_tokens_are_refused():
    with pytest.raises(UsageError, match="two start-of-sequence") as caught:
        dataset(make_rows("hi"), make_tokenizer("<bos>" + TEMPLATE))
    assert caught.value.where == "f:1"


def test_without_template_contents_are_joined_after_the_tokenizers_own_start():
    row = Row("s", (Message("system", "a"), Message("user", "b")), "1")
    assert dataset([row]).tasks([0], [0])[0].text == "a\n\nb"
    data = dataset([row], make_tokenizer(adds_bos=True))
    assert data.tasks([0], [0])[0].text == "<bos>a\n\nb"
    assert data.token_ids[0].count(1) == 1


def test_a_template_that_refuses_names_the_row():
    with pytest.raises(UsageError, match="no system role") as caught:
        dataset(make_rows("x"), make_tokenizer("{{ raise_exception('no system role') }}"))
    assert caught.value.where == "f:1"


def test_overlong_prompts_are_counted_or_refused():
    rows = make_rows("short", "much too long", "fits ten..")
    data = dataset(rows, limit=10)
    assert data.num_dropped == 1
    assert [row.ground_truth for row in data.rows] == ["0", "2"]
    with pytest.raises(UsageError, match="13 tokens") as caught:
        dataset(rows, limit=10, filter_overlong=False)
    assert caught.value.where == "f:2"
    assert "raise data.max_prompt_length to 13" in caught.value.fix
    with pytest.raises(UsageError, match="no prompt remains"):
        dataset(rows, limit=2)


def test_no_texts_are_rendered_to_no_ids():
    assert Renderer(make_tokenizer()).encode([]) == []


def test_the_response_continues_a_message_of_the_assistant():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = Row("s", (Message("user", "1+1?"), Message("assistant", "It is")), "2")
    renderer = Renderer(make_tokenizer(template))
    assert renderer.text(row) == "<user>1+1?</user><assistant>It is"
    assert renderer.text(replace(row, prompt=row.prompt[:1])) == "<user>1+1?</user><assistant>"


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_gives_every_row_once(shuffle):
    data = numbered(12)
    epochs = [
        [i for step in range(3 * e, 3 * e + 3) for i in data.batch_indices(step, 4, seed=7, shuffle=shuffle)]
        for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert (epochs[0] != epochs[1]) == shuffle


def test_order_needs_no_history_only_the_seed():
    whole = [numbered(10).batch_indices(step, 4, seed=3, shuffle=True) for step in range(7)]
    assert [numbered(10).batch_indices(step, 4, seed=3, shuffle=True) for step in (6, 2)] == [
        whole[6],
        whole[2],
    ]
    assert numbered(10).batch_indices(0, 4, seed=4, shuffle=True) != whole[0]
    assert whole[0] == [1, 5, 9, 0], "the order of a seed never changes between versions"


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [3, 4, 7, 10])
def test_a_batch_continues_over_the_end_of_an_epoch(shuffle, size):
    """Every row is used once per epoch, whatever the batch size leaves over at the end of an epoch."""
    data = numbered(10)
    steps = [data.batch_indices(step, size, seed=7, shuffle=shuffle) for step in range(10)]
    order = [row for step in steps for row in step]
    epochs = [order[start : start + 10] for start in range(0, 10 * size, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) != shuffle


def test_fewer_prompts_than_a_batch():
    with pytest.raises(UsageError, match="takes 4 prompts, the data has 3") as caught:
        numbered(3).check_batch_size(4)
    assert "train_batch_size to 3" in caught.value.fix


THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}[no thoughts]{% endif %}"


def test_arguments_of_the_template_reach_it_and_unknown_ones_are_refused():
    def texts(template, **kwargs):
        options = {"max_prompt_length": 100, "filter_overlong": False, "chat_template_kwargs": kwargs}
        return PromptDataset(make_rows("1"), make_tokenizer(template), **options).texts

    assert texts(THINKING) == ["<bos>[user]1[assistant]"]
    assert texts(THINKING, enable_thinking=False) == ["<bos>[user]1[assistant][no thoughts]"]
    assert texts(TEMPLATE, enable_thinking=None) == ["<bos>[user]1[assistant]"]
    for template in (TEMPLATE, None):
        with pytest.raises(UsageError) as caught:
            texts(template, enable_thinking=False)
        assert caught.value.where == "data.chat_template_kwargs"


def test_tools_and_the_environment_of_a_row():
    tool = {"type": "function", "function": {"name": "add"}}
    extra = {"environment": "words.py:Words", "tools": [tool]}
    row = Row("s", (Message("user", "b"),), "1", extra=extra, where="f:1")
    shown = make_tokenizer("{{ tools[0].function.name }} " + TEMPLATE)
    (task,) = dataset([row], shown).tasks([0], [0])
    assert task.text == "add <bos>[user]b[assistant]"
    assert task.environment == "words.py:Words"
    with pytest.raises(UsageError, match="the model's chat template shows none"):
        dataset([row], make_tokenizer(TEMPLATE))


CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}:{{ c.function.arguments.a }}>{% endfor %}{% endfor %}"
)


def test_tool_calls_of_prompts_go_through_the_template():
    calls = [{"function": {"name": "add", "arguments": '{"a": 7}'}}]
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "8", "name": "add"},
    ]
    row = Row("s", parse_messages(turns), "8", where="f:1")
    assert Renderer(make_tokenizer(CALLS)).text(row) == "[user]?[assistant]<add:7>[tool]8"
    (task,) = dataset([row], make_tokenizer(CALLS)).tasks([0], [0])
    assert task.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 7}}
    with pytest.raises(
        UsageError, match="has tool calls, but the model's chat template shows none"
    ) as caught:
        Renderer(make_tokenizer(TEMPLATE)).text(row)
    assert caught.value.where == "f:1"
    assert '"name":"add"' in Renderer(make_tokenizer()).text(row).replace(" ", ""), (
        "no template: as JSON text"
    )
