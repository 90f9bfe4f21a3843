import json
import shutil

import pytest
from transformers import AutoTokenizer

from rlctl.cli.app import run
from tests.unit.evaluate.runs import make_run, quick_task


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    return make_run(place / "run", quick_task(place / "cache"))


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "responses"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_a_run_is_evaluated_on_its_own_validation_prompts(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["evaluate", str(run_dir), "--n", "4", "--limit", "20", "--k", "4,1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    score = results["scores"][0]
    assert score["num_samples"] == 80
    assert "embedded/addition: 20 questions × 4 responses" in printed
    for name in ("avg", "pass@1", "pass@4"):
        figures = score[name]
        shown = (
            f"{figures['value']:.3f}   {figures['stderr']:.3f}  {figures['low']:.3f} – {figures['high']:.3f}"
        )
        [line] = [x for x in printed.splitlines() if x.startswith("avg@4" if name == "avg" else name)]
        assert shown in line
    assert "step 8" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "does not exist here"),
        (["RUN", "--k", "9"], "pass@9 cannot be estimated from 8"),
        (["RUN", "--k", "1;4"], "not a list of numbers"),
        (["RUN", "--n", "0"], "Invalid value for '--n'"),
        (["RUN", "--top-p", "0"], "leaves no token"),
        (["RUN/checkpoints/step_000008/model"], "is not a run directory"),
        (["RUN", "--data", "nowhere.parquet"], "no such file or directory"),
        (["RUN", "--out", "RUN"], "not empty"),
        (["no/such/model", "--data", "VAL"], "no such directory"),
        (["RUN", "--reward", "nonesuch"], "no such reward: nonesuch"),
        (["RUN", "--regrade"], "not an evaluation: holds no results.json"),
        (["RUN", "--regrade", "--n", "4"], "--n applies to sampling"),
        (["RUN", "--regrade", "--max-response-length", "4"], "--max-response-length applies to sampling"),
        (["compare", "RUN", "RUN"], "not an evaluation: holds no results.json"),
        (["compare", "RUN"], "Missing argument 'B'"),
        (["compare", "RUN", "RUN", "--k", "x"], "not a list of numbers"),
    ],
)
def test_mistakes_exit_2_and_say_what_to_do(run_dir, arguments, words, capsys):
    [val_file] = run_dir.parent.glob("cache/embedded/*/val.parquet")
    told = [part.replace("RUN", str(run_dir)).replace("VAL", str(val_file)) for part in arguments]
    assert run(["evaluate", *told]) == 2
    captured = capsys.readouterr()
    assert words in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
    assert not (run_dir / "evaluations").exists()


def test_regrade_and_compare(run_dir, tmp_path, capsys, monkeypatch):
    reward = tmp_path / "reward.py"
    reward.write_text("def short(response):\n    return float(len(response) < 5)\n")
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(["evaluate", str(run_dir), "--n", "2", "--limit", "20", "--out", str(first)]) == 0
    assert "none" not in capsys.readouterr().out.lower()
    assert run(["evaluate", str(first), "--regrade", "--json", "--out", str(tmp_path / "as_json")]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["num_samples"] == 40
    told = ["--regrade", "--reward", f"{reward}:short", "--out", str(second)]
    assert run(["evaluate", str(first), *told]) == 0
    assert "grades changed: " in capsys.readouterr().out
    assert run(["evaluate", "compare", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "20 shared questions" in printed
    assert "B is better by" in printed
    assert "graded differently" in printed
    assert run(["evaluate", "compare", str(first), str(second), "--k", "2", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [figure["name"] for figure in document["comparisons"][0]["figures"]][:2] == ["avg", "pass@2"]
    assert run(["evaluate", "compare", str(first), str(second), "--k", "2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["evaluate", "compare", str(first), str(second)]) == 0
    [avg] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("avg")]
    figure = document["comparisons"][0]["figures"][0]
    assert f"{figure['difference']['low']:+.3f} to" in avg, "one line, however narrow the terminal"
    page = tmp_path / "compared.html"
    assert run(["evaluate", "compare", str(first), str(second), "--format", "html", "--out", str(page)]) == 0
    assert document["comparisons"][0]["conclusion"] in page.read_text()


def test_prompts_of_other_template_variables_are_said_by_compare(run_dir, tmp_path, capsys):
    """Thinking on and off: `compare` names it, and repeated evaluations are compared without a word."""
    [val_file] = run_dir.parent.glob("cache/embedded/*/val.parquet")
    model = shutil.copytree(run_dir / "checkpoints/step_000008/model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += "{% if enable_thinking %}1{% endif %}"
    tokenizer.save_pretrained(model)
    for name, is_thinking in (("on", "true"), ("again", "true"), ("off", "false")):
        variables = f'{{"enable_thinking": {is_thinking}}}'
        told = ["--data", str(val_file), "--chat-template-kwargs", variables, "--limit", "3", "--n", "1"]
        out = ["--max-response-length", "4", "--out", str(tmp_path / name)]
        assert run(["evaluate", str(model), *told, *out]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert run(["evaluate", "compare", str(tmp_path / "on"), str(tmp_path / "off")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 shared questions were asked in different prompts" in printed
    assert "chat_template_kwargs" in printed
    assert run(["evaluate", "compare", str(tmp_path / "on"), str(tmp_path / "again")]) == 0
    assert "different prompts" not in capsys.readouterr().out


def test_responses_that_are_stored_are_told_and_used(run_dir, tmp_path, capsys):
    for name in ("first", "second"):
        out = str(tmp_path / name)
        assert run(["evaluate", str(run_dir), "--n", "2", "--limit", "5", "--out", out]) == 0
    assert "10 responses were already stored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "--help"], ["Usage: rlctl evaluate [OPTIONS]", "--regrade", "compare  Compare two"]),
        (["evaluate", "compare", "--help"], ["Usage: rlctl evaluate compare [OPTIONS]", "--format"]),
    ],
)
def test_help(arguments, words, capsys):
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for each in words:
        assert each in printed


def test_a_run_without_checkpoint_or_data_exits_2(run_dir, tmp_path, capsys):
    task = quick_task(run_dir.parent / "cache")
    empty = make_run(tmp_path / "empty", task, steps=())
    assert run(["evaluate", str(empty)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    trained_on = f"data.train_files={task.train_file}"
    no_data = make_run(
        tmp_path / "no_data", task, f"model.path={task.model_dir}", trained_on, "data.val_files=[]"
    )
    assert run(["evaluate", str(no_data)]) == 2
    assert "add --data FILE" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "thinking", "[1]", '{"enable_thinking": false'])
def test_variables_of_the_template_are_a_json_object(text, capsys):
    assert run(["evaluate", "some-model", "--data", "gsm8k", "--chat-template-kwargs", text]) == 2
    assert "--chat-template-kwargs" in capsys.readouterr().err
