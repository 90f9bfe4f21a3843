"""Each column layout: recognised, read, and refused with words when it is not what it seems."""

import json
from decimal import Decimal

import pytest

from rlctl.data.records import RowError
from rlctl.data.schema import Message
from rlctl.errors import UsageError
from rlctl.prepare.recipes import LAYOUTS, Recipe, last_boxed, recognise
from rlctl.reward.build import grader_for
from tests.unit.prepare.programs import APPS, HUMANEVAL, LCB, MBPP

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put "
    'your answer on its own line after "Answer:".'
)
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1? Answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {
        "split": "train",
        "index": 7,
        "question": "1 + 1?",
        "answer": "#### 2",
        "level": [1, None],
    },
}
#: layout → (record, data source, last message's end, ground truth, question)
RECORDS = {
    "gsm8k": (
        {"question": "Half of 3,000?", "answer": "Easy.\n#### 1,500"},
        ("openai/gsm8k", '"####".', "1500", "Half of 3,000?"),
    ),
    "math": (
        {
            "problem": "Half?",
            "solution": r"It is $\boxed{\frac{1}{2}}$.",
            "level": "Level 1",
            "type": "Algebra",
        },
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{}.", r"\frac{1}{2}", "Half?"),
    ),
    "aime": (
        {"id": 60, "problem": "Find $m+n$.", "answer": "033", "year": 2024},
        ("file", r"\boxed{}.", "033", "Find $m+n$."),
    ),
    "dapo-math": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": DAPO.format("Find\n\n$x$.")}],
            "ability": "MATH",
            "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "34"},
            "extra_info": {"index": "9a9b6eb4-a1cb"},
        },
        ("math_dapo", 'after "Answer:".', "34", "Find\n\n$x$."),
    ),
    "countdown": (
        {"nums": [44, 19, 35], "target": 98},
        (
            "countdown",
            "(1 + 2) / 3 </answer>.",
            '{"numbers": [44, 19, 35], "target": 98}',
            "Using the numbers [44, 19, 35], create an equation that equals 98.",
        ),
    ),
    "multiple-choice": (
        {"question": "Which?", "choices": ["this", "that"], "answer": 1, "subject": "logic"},
        ("multiple_choice", "right choice.", "B", "Which?\n\nA. this\nB. that"),
    ),
    "humaneval": (
        HUMANEVAL,
        (
            "humaneval",
            "starts with ```python.",
            HUMANEVAL["test"] + "\ncheck(double)\n",
            f"Complete this function:\n\n```python\n{HUMANEVAL['prompt'].rstrip()}\n```",
        ),
    ),
    "mbpp": (
        MBPP,
        (
            "mbpp",
            "starts with ```python.",
            "assert double(2) == 4\nassert double(5) == 10",
            f"{MBPP['text']}\n\nIt must pass tests such as:\n\n```python\nassert double(2) == 4\n```",
        ),
    ),
    "apps": (
        APPS,
        (
            "apps",
            "starts with ```python.",
            APPS["input_output"],
            f"{APPS['question']}\n\nRead from standard input and write to standard output.",
        ),
    ),
    "livecodebench": (
        LCB,
        (
            "livecodebench",
            "starts with ```python.",
            '{"inputs": ["2", "5"], "outputs": ["4", "10"]}',
            "Double the number.\n\nRead from standard input and write to standard output.",
        ),
    ),
    "orz": (
        {
            "0": {"from": "human", "value": "7 - 4?"},
            "1": {"from": "assistant", "ground_truth": {"value": "3"}},
        },
        ("orz", r"\boxed{}.", "3", "7 - 4?"),
    ),
    "verl": (VERL, ("openai/gsm8k", "after ####.", "2", "1 + 1?")),
    "trl": (
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "solution": " 4 "},
        ("file", "2 + 2?", "4", "2 + 2?"),
    ),
    "openrlhf": (
        {"input": "2 + 3?", "label": 5, "datasource": "sums"},
        ("sums", "2 + 3?", "5", "2 + 3?"),
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "2 + 5", "output": "7"},
        ("file", "Add.\n\n2 + 5", "7", "Add.\n\n2 + 5"),
    ),
    "conversation": (
        {"conversations": [{"from": "human", "value": "2 + 6?"}, {"from": "gpt", "value": " 8"}]},
        ("file", "2 + 6?", "8", "2 + 6?"),
    ),
    "generic": ({"prompt": "2 + 4?", "answer": "6"}, ("file", "2 + 4?", "6", "2 + 4?")),
}


def read(record, recipe="auto", **options):
    name = recognise(record) if recipe == "auto" else recipe
    return Recipe(name, **options).resolve().to_row(record, "file", 3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_recognised_and_read(name):
    record, expected = RECORDS[name]
    assert recognise(record) == name
    row = read(record)
    assert row.prompt[-1].content.endswith(expected[1])
    assert (row.data_source, row.ground_truth, row.question) == (expected[0], *expected[2:])
    assert row.index == (7 if name == "verl" else 3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_options_hold_for_every_layout(name):
    row = read(RECORDS[name][0], data_source="mine", system_prompt="Sys.", instruction="Do it.")
    assert row.data_source == "mine"
    assert (row.prompt[0].role, row.prompt[0].content) == ("system", "Sys.")
    assert row.prompt[-1].content.endswith("\nDo it.")
    assert read(RECORDS[name][0], instruction="").prompt[-1].content.count("\nDo it.") == 0


def test_a_system_prompt_takes_the_place_of_the_conversations_own():
    turns = [{"role": "system", "content": "Old."}, {"role": "user", "content": "What is 1 + 1?"}]
    record = {"prompt": turns, "solution": "2"}
    row = read(record, system_prompt="Sys.")
    assert [(message.role, message.content) for message in row.prompt] == [
        ("system", "Sys."),
        ("user", "What is 1 + 1?"),
    ]
    assert read(record).prompt[0].content == "Old."


def test_a_system_message_is_no_part_of_the_question():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And twice that?"},
    ]
    assert read({"prompt": turns, "solution": "4"}).question == "What is 1 + 1?\n\n2\n\nAnd twice that?"
    assert read({"prompt": turns[:1], "solution": "4"}).question == "Be brief."


def test_the_multiple_choice_recipe_names_a_source_with_a_grader():
    assert grader_for(read(RECORDS["multiple-choice"][0]).data_source) == "multiple_choice"


def test_extra_info_is_kept_whole():
    assert dict(read(VERL).extra) == VERL["extra_info"]
    assert read(VERL).answer == "#### 2"
    assert dict(read(RECORDS["dapo-math"][0]).extra) == {"original_index": "9a9b6eb4-a1cb"}
    assert read(RECORDS["dapo-math"][0]).style == "rule-lighteval/MATH_v2"
    assert dict(read(RECORDS["math"][0]).extra) == RECORDS["math"][0]


def test_an_answer_in_a_column_of_its_own_comes_before_the_solution():
    solved = {"problem": "q", "solution": r"So $\boxed{033}$.", "answer": "33"}  # as in AIME and MATH-500
    assert (recognise(solved), read(solved).ground_truth) == ("aime", "33")
    assert (recognise(solved | {"answer": None}), recognise(solved | {"solution": "none"})) == (
        "math",
        "aime",
    )


def test_structured_ground_truths_become_json():
    truth = {"numbers": [1, 2], "target": 3}
    for given, expected in [
        (truth, json.dumps(truth)),
        (["72"], "72"),
        (["a", "b"], '["a", "b"]'),
        (72, "72"),
    ]:
        assert read({**VERL, "reward_model": {"ground_truth": given}}).ground_truth == expected


def test_a_column_can_name_the_source():
    record = {"prompt": "p", "answer": "1", "meta": {"from": "amc"}}
    assert read(record, source_key="meta.from").data_source == "amc"
    with pytest.raises(RowError, match="no column 'src'"):
        read(record, source_key="src")
    with pytest.raises(UsageError, match="exclude"):
        read(record, source_key="meta.from", data_source="x")


def test_alternatives_and_dots_find_columns():
    record = {"a": {"b": "q"}, "c.d": "1", "x|y": "2"}
    assert read(record, "generic", prompt_key="nope|a.b", answer_key="c.d").ground_truth == "1"
    assert read(record, "generic", prompt_key="a.b", answer_key="x|y").ground_truth == "2"


@pytest.mark.parametrize(
    ("answer", "choices", "letter"),
    [
        (0, ["x", "y"], "A"),
        ("B", ["x", "y"], "B"),
        ("y", ["x", "y"], "B"),
        ("1", ["x", "y"], "B"),
        ("2", {"text": ["x", "y"], "label": ["1", "2"]}, "B"),
        (1, {"text": ["x", "y"], "label": [1, 2]}, "A"),
        ("C", {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "C"),
        ("D", {"A": "x", "D": "y", "E": None}, "B"),
        ("10", ["9", "10"], "B"),
    ],
)
def test_a_choice_is_named_by_number_label_or_text(answer, choices, letter):
    row = read({"question": "Q?", "options": choices, "answerKey": answer})
    assert row.ground_truth == letter
    assert f"\n{letter}. {row.answer}" in row.prompt[0].content


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("gsm8k", {"question": "q", "answer": "#### seven"}, "not a number"),
        ("gsm8k", {"question": "q", "answer": "7"}, "has no '####'"),
        ("gsm8k", {"question": None, "answer": "#### 7"}, "prompt is null"),
        ("math", {"problem": "q", "solution": "7"}, "no \\boxed"),
        ("math", {"problem": "q", "solution": r"\boxed{\frac{1}{2}"}, "never closed"),
        ("math", {"problem": "q", "solution": r"\boxed{ }"}, "empty"),
        ("countdown", {"nums": [1, "2"], "target": 3}, "whole numbers"),
        ("countdown", {"nums": [], "target": 3}, "whole numbers"),
        ("countdown", {"nums": [1], "target": None}, "target' is null"),
        ("multiple-choice", {"question": "q", "choices": ["a", "b"], "answer": 2}, "of 2"),
        (
            "multiple-choice",
            {"question": "q", "choices": ["a", "b"], "answer": "Z"},
            "not one of the",
        ),
        (
            "multiple-choice",
            {"question": "q", "choices": ["a", "a"], "answer": "a"},
            "not one of the",
        ),
        ("multiple-choice", {"question": "q", "choices": "ab", "answer": 0}, "not a list"),
        ("multiple-choice", {"question": "q", "choices": ["a", None], "answer": 0}, "a choice is null"),
        ("verl", {**VERL, "reward_model": None}, "no column 'reward_model.ground_truth'"),
        ("verl", {**VERL, "data_source": None}, "data_source is null"),
        ("verl", {**VERL, "data_source": " "}, "data_source is empty"),
        ("verl", {**VERL, "extra_info": {"note": "\ud800"}}, "UTF-8"),
        ("trl", {"prompt": "p", "label": {"a": 1}}, "label' has the fields a: name one"),
        ("trl", {"prompt": "p", "label": float("nan")}, "label' is nan"),
        ("trl", {"prompt": []}, "no messages"),
        ("openrlhf", {"input": "p"}, "no column 'label' or 'answer'"),
        ("generic", {"prompt": {"a": 1}, "answer": "1"}, "not text or a list"),
    ],
)
def test_what_is_wrong_is_said(name, record, words):
    with pytest.raises(RowError) as caught:
        read(record, name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a{b}{c}} and {d}", "a{b}{c}"),
        (r"$\boxed 7$.", "7"),
        (r"\fbox{3}", "3"),
        (r"$\boxed{\text{A\}}}$", r"\text{A\}}"),
        (r"\boxed{x} is \boxedly put", "x"),
    ],
)
def test_the_last_box(solution, answer):
    assert last_boxed(solution) == answer


def test_messages_with_the_names_of_sharegpt():
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1+1?"}]
    recipe = Recipe("generic", prompt_key="conversations").resolve()
    row = recipe.to_row({"conversations": turns, "answer": "2"}, "a", 0)
    assert [(message.role, message.content) for message in row.prompt] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
    ]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "2"},
        {"from": "gpt", "value": "2"},
        {"from": "chatgpt", "value": "2"},
        {"from": "bot", "value": "2"},
    ],
)
def test_a_prompt_never_holds_the_reply_to_it(turn):
    recipe = Recipe("generic", prompt_key="messages").resolve()
    record = {"messages": [{"role": "user", "content": "1+1?"}, turn], "answer": "2"}
    with pytest.raises(RowError, match="ends with a reply of the assistant"):
        recipe.to_row(record, "a", 0)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_columns_of_turns_are_read_without_options(column):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    if column == "conversations":
        turns = [{"from": turn["role"].replace("user", "human"), "value": turn["content"]} for turn in turns]
    row = read({column: turns, "answer": "2"})
    assert row.prompt == (Message("system", "Be brief."), Message("user", "1+1?"))
    assert row.ground_truth == "2"


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "How much is"}, {"type": "text", "text": "1+1?"}]
    assert read({"messages": [{"role": "user", "content": parts}], "answer": "2"}).question == (
        "How much is\n1+1?"
    )
    parts[1] = {"type": "image_url", "image_url": {"url": "x.png"}}
    with pytest.raises(RowError, match="part of a message's content is image_url, not text"):
        read({"messages": [{"role": "user", "content": parts}], "answer": "2"})


def test_a_list_of_one_answer_is_that_answer_and_one_of_several_their_list():
    assert read({"problem": "1+1?", "answer": ["2"]}).ground_truth == "2"
    assert read({"question": "1+1?", "answer": [2.0]}).ground_truth == "2"
    assert read({"question": "1+1?", "answer": ["2", "two", 3]}).ground_truth == '["2", "two", "3"]'
    with pytest.raises(RowError, match="of type list"):
        read({"question": "1+1?", "answer": ["2", ["3"]]})


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (["2", "3"], '["2", "3"]'),
        ([2, 3.5], '["2", "3.5"]'),
        (True, "True"),
        ([False], "False"),
        (0, "0"),
        ([], ""),
        (["a", None], "a"),
        ([float("nan")], None),
        (float("inf"), None),
        ({"a": 1}, None),
    ],
)
def test_answers_of_every_type(answer, truth):
    if truth is None:
        with pytest.raises(RowError, match="answer'"):
            read({"question": "1+1?", "answer": answer})
    else:
        assert read({"question": "1+1?", "answer": answer}).ground_truth == truth


def test_a_column_with_the_system_message_is_used_unless_the_conversation_has_one():
    row = read({"system": "Be brief.", "question": "1+1?", "answer": "2"})
    assert row.prompt == (Message("system", "Be brief."), Message("user", "1+1?"))
    assert row.question == "1+1?"
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1?"}]
    assert read({"system": "Be brief.", "messages": own, "answer": "2"}).prompt[0].content == "Mine."
    record = {"system": "Be brief.", "question": "1+1?", "answer": "2"}
    assert read(record, system_prompt="Sys.").prompt[0].content == "Sys."
    assert read({"system": None, "question": "1+1?", "answer": "2"}).prompt == row.prompt[1:]


def test_a_reply_to_continue_keeps_its_place_after_the_instruction():
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    row = read({"messages": turns, "answer": "2"}, continue_final_message=True, instruction="Be brief.")
    assert row.prompt == (Message("user", "1+1?\nBe brief."), Message("assistant", "It is"))


def test_numbers_of_any_size_are_read():
    digits = "1" + 400 * "0"
    assert read({"prompt": "q", "answer": int(digits)}, "generic").ground_truth == digits
    answers = {7.0: "7", -0.0: "0", 1e22: "1" + 22 * "0", 0.1: "0.1", Decimal("0.50"): "0.50"}
    for answer, truth in (answers | {Decimal("1E+2"): "100"}).items():
        assert read({"prompt": "q", "answer": answer}, "generic").ground_truth == truth
    assert read({"question": "Q?", "options": ["x", "y"], "answer": 1.0}).ground_truth == "B"
    for index in (1 << 63, -5, "7", 7.0, True):
        row = read(VERL | {"extra_info": {"index": index}})
        assert (row.index, row.extra) == (3, {"original_index": index})


def test_tools_and_the_environment_of_a_record_are_kept():
    tool = {"type": "function", "function": {"name": "add"}}
    record = {"prompt": "1+1?", "answer": "2", "environment": "words.py:Words", "tools": [tool]}
    row = read(record, "generic", prompt_key="prompt", answer_key="answer")
    assert (row.environment, row.tools) == ("words.py:Words", [tool])
