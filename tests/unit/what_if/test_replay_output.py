"""From a run directory to table, page and JSON; what is recommended can be trained with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlctl.cli.diagnose_questions import ask
from rlctl.errors import UsageError
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.load import dump_spec, load_spec
from rlctl.what_if.dumps import Step
from rlctl.what_if.replay import replay
from rlctl.what_if.setting_sums import SettingSums
from rlctl.what_if.settings import Setting, frameworks, grid
from rlctl.what_if.tradeoff import Tradeoff
from rlctl.what_if.what_if_report import name_of
from rlctl.what_if.what_if_run import what_if
from tests.reference import advantages as slow
from tests.unit.what_if.steps import make_step, outcome_of, write_part

OWN = "algorithm.rollout_correction."


def run_directory(where: Path, *overrides: str, steps: int = 8) -> Path:
    """A run with few responses per step: four groups of four."""
    write_part(where, [make_step(seed, groups=4, scale=0.6) for seed in range(steps)])
    spec = load_spec(["rloo-seq-is"], [], ["actor.ppo_mini_batch_size=16", *overrides]).spec
    (where / "spec.yaml").write_text(dump_spec(spec))
    return where


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Tradeoff:
    return what_if(run_directory(tmp_path_factory.mktemp("run")))


def test_every_setting_is_a_spec_that_loads() -> None:
    settings = grid(RolloutCorrectionSpec())
    assert len({setting.name for setting in settings}) == len(settings) > 90
    for setting in settings:
        loaded = load_spec(["rloo-seq-is"], [], list(setting.overrides)).spec
        correction = loaded.algorithm.rollout_correction
        assert {name: getattr(correction, name) for name in setting.spec.model_fields_set} == {
            name: getattr(setting.spec, name) for name in setting.spec.model_fields_set
        }
    assert {setting.family for setting in frameworks()} == {"verl", "TRL", "OpenRLHF", "slime", "SkyRL"}


def test_the_run_s_own_setting_and_mini_batch_are_known(found: Tradeoff) -> None:
    assert outcome_of(found, "this run").setting.family == "run"
    assert found.groups_per_batch == 16
    assert (found.num_steps, found.num_groups) == (8, 32)
    assert found.recommended is not None
    decides = not found.recommended.why.endswith("keep the run's setting")
    assert bool(found.recommended.overrides) == decides
    assert found.notes == ()
    errors = [outcome.error.value for outcome in found.outcomes]
    assert errors == sorted(errors)
    for outcome in found.outcomes:
        assert 0.0 <= outcome.error.low <= outcome.error.high <= 1.0


def test_equal_rules_share_a_row(found: Tradeoff) -> None:
    assert outcome_of(found, "SkyRL token TIS") is outcome_of(found, "slime TIS")
    names = [n for outcome in found.outcomes for n in (outcome.setting.name, *outcome.same_as)]
    assert len(names) == len(set(names)) == len(grid(RolloutCorrectionSpec()))


def test_settings_that_do_the_same_share_a_row_led_by_the_runs_own() -> None:
    """Ratios so near 1 that no threshold binds: few rows are left, and no name is lost."""
    settings = grid(load_spec(["rloo-seq-is"], [], []).spec.algorithm.rollout_correction)
    found = replay([make_step(seed, groups=8, scale=1e-4) for seed in range(4)], settings)
    assert len(found.outcomes) < len(settings) / 3
    names = [n for outcome in found.outcomes for n in (outcome.setting.name, *outcome.same_as)]
    assert sorted(names) == sorted(setting.name for setting in settings)
    own = outcome_of(found, "this run")
    assert own.setting.name == "this run"
    assert "sequence truncate 5.0" in own.same_as
    assert name_of(own).endswith(" more)")


def test_where_no_setting_differs_none_is_recommended() -> None:
    """On-policy: every ratio is 1, so every setting has the same gradient."""
    steps = [replace(step, rollout_log_probs=step.log_probs) for step in map(make_step, range(4))]
    found = replay(steps, grid(RolloutCorrectionSpec()))
    assert found.recommended is None
    assert any(note.startswith("no setting differs") for note in found.notes)
    assert len(found.outcomes) == 1


@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_where_nothing_survives_the_largest_weight_is_zero(level: str | None) -> None:
    spec = RolloutCorrectionSpec(rollout_is=level, rollout_rs="token_k1", rollout_rs_threshold="1_1.0000001")
    found = replay([make_step(scale=0.6)], [Setting("nothing", "rlctl", spec)])
    (outcome,) = found.outcomes
    assert (outcome.kept_tokens, outcome.max_weight) == (0.0, 0.0)


def test_a_loss_with_its_own_ratio_has_no_weights(tmp_path: Path) -> None:
    run = run_directory(tmp_path, f"{OWN}loss_type=ppo_clip", steps=2)
    found = what_if(run)
    with pytest.raises(KeyError):
        outcome_of(found, "this run")
    assert any("loss_type=reinforce" in note for note in found.notes)
    assert found.recommended.overrides


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["adv_estimator=rloo"], lambda r, g, n, ok: slow.rloo(r, g, ok)),
        (["adv_estimator=grpo"], lambda r, g, n, ok: slow.grpo(r, g, ok)),
        (
            ["adv_estimator=grpo", "norm_adv_by_std_in_grpo=false"],
            lambda r, g, n, ok: slow.grpo(r, g, ok, divide_by_std=False),
        ),
        (
            ["adv_estimator=dr_grpo"],
            lambda r, g, n, ok: slow.grpo(r, g, ok, divide_by_std=False),
        ),
        (["adv_estimator=opo"], lambda r, g, n, ok: slow.opo(r, n, g, ok)),
        (["adv_estimator=maxrl"], lambda r, g, n, ok: slow.maxrl(r, g, ok)),
        (["adv_estimator=gpg"], lambda r, g, n, ok: slow.gpg(r, g, ok)),
        (["adv_estimator=reinforce_plus_plus"], lambda r, g, n, ok: slow.rloo(r, g, ok)),  # with a note
    ],
)
def test_advantages_are_the_run_s(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    expected: Callable[..., list[float]],
) -> None:
    seen: list[Step] = []
    monkeypatch.setattr(SettingSums, "add", lambda self, batch: seen.append(batch))
    run = run_directory(tmp_path, *(f"algorithm.{override}" for override in overrides), steps=2)
    with pytest.raises(UsageError):  # nothing was added up
        what_if(run)
    [pooled] = seen
    for number in range(2):
        step = make_step(number, groups=4, scale=0.6)
        there = step.lengths > 0
        values = [x[there].tolist() for x in (step.rewards, step.group_ids, step.lengths)]
        found = pooled.advantages[16 * number : 16 * (number + 1)]
        assert found[there].tolist() == pytest.approx(expected(*values, [True] * sum(there)), abs=1e-5)
        assert not found[~there].any()


def test_parts_of_the_advantages_that_are_not_in_the_dump_are_said(tmp_path: Path) -> None:
    keys = ("use_kl_in_reward", "filter_groups.enable", "filter_groups.curriculum")
    notes = what_if(run_directory(tmp_path, *(f"algorithm.{key}=true" for key in keys), steps=1)).notes
    assert any("penalty of use_kl_in_reward" in note for note in notes)
    assert any("curriculum's probabilities" in note for note in notes)


def test_a_centered_run_is_not_taken_for_one_without_correction(tmp_path: Path) -> None:
    rc = "algorithm.rollout_correction."
    found = what_if(run_directory(tmp_path, f"{rc}rollout_is=null", f"{rc}score_centering=128", steps=1))
    assert any("score centering needs tokens" in note for note in found.notes)
    assert not any(outcome.setting.name == "this run" for outcome in found.outcomes)


def test_a_rule_that_reads_ages_is_omitted(tmp_path: Path) -> None:
    source = (
        "from rlctl.registry import CORRECTION_WEIGHTS\n\n"
        '@CORRECTION_WEIGHTS.register(needs={"age"}, thresholds=["2.0"])\n'
        "def part(log_ratio, params):\n    return log_ratio.token / (1 + log_ratio.age)\n"
    )
    (tmp_path / "mine.py").write_text(source)
    weight = f"{OWN}rollout_is={tmp_path}/mine.py:part"
    for number, rule in enumerate((f"{OWN}rollout_rs=age {OWN}rollout_rs_threshold=1".split(), [weight])):
        run = tmp_path / str(number)
        run.mkdir()
        directory = run_directory(run, *rule, steps=1)
        found = what_if(directory, trust=True)
        assert "the ages of responses are not in the dump: the run's own setting is omitted" in found.notes
        assert not any(outcome.setting.name == "this run" for outcome in found.outcomes)
    assert any("no run of yours" in note for note in what_if(directory).notes)


def test_without_or_with_a_broken_spec(tmp_path: Path) -> None:
    run = run_directory(tmp_path, steps=1)
    (run / "spec.yaml").write_text("actor: {lrr: 1}")
    assert any("spec.yaml is left out: actor.lrr" in note for note in what_if(run).notes)
    (run / "spec.yaml").unlink()
    found = what_if(run)
    assert any("no spec.yaml" in note for note in found.notes)
    assert found.groups_per_batch == 4


@pytest.fixture
def printed(
    found: Tradeoff, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What the command prints of that replay on a terminal of 80 columns."""
    monkeypatch.setattr("rlctl.what_if.what_if_run.what_if", lambda path, trust: found)
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)

    def run(output_format: str) -> str:
        ask("--what-if", [Path("some/run")], output_format, None)
        return capsys.readouterr().out

    return run


def test_json(found: Tradeoff, printed: Callable[..., str]) -> None:
    (document,) = json.loads(printed("json"))
    assert len(document["settings"]) == len(found.outcomes)
    row = next(row for row in document["settings"] if row["name"] == "TRL sequence_mask")
    assert row["overrides"][1] == f"{OWN}rollout_is=sequence"
    assert row["error"].keys() == {"value", "low", "high"}
    assert document["recommended"]["name"] == found.recommended.name


def test_text(found: Tradeoff, printed: Callable[..., str]) -> None:
    said = printed("text")
    assert f"{found.num_sequences} responses" in said
    assert "What if — some/run" in said
    assert found.recommended.why[:40] in said
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    [own] = [line for line in lines if line.startswith("this run (= sequence")]
    error = outcome_of(found, "this run").error
    figures = own.removeprefix("this run (= sequence clip").split()
    assert figures[:2] == [f"{error.value:.3f}", f"{error.low:.3f}–{error.high:.3f}"]
    assert len(own) == 80  # every figure is on the first of its lines
    assert lines[lines.index(own) + 1].strip() == "2.0, turn clip 2.0, 1 more)"


def test_the_usable_length_of_sequence_weights_is_told(found: Tradeoff, printed: Callable[..., str]) -> None:
    """Ratios of a spread of 0.6 leave two tokens at most; responses are longer."""
    usable = found.usable_length
    assert usable.predicted < 3
    assert usable.is_exceeded
    said = " ".join(printed("text").split())
    assert "sequence weights keep half of the sample up to about" in said
    assert "a geometric mean (biased)" in said
    (document,) = json.loads(printed("json"))
    assert document["usable_length"]["predicted"] == pytest.approx(usable.predicted)
    assert document["usable_length"]["prefixes"][0]["length"] == 1
    assert document["usable_length"]["measured"] == usable.measured


def test_what_a_replay_does_not_write_is_said(tmp_path: Path, printed: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match="--what-if writes text or json"):
        printed("html")
    with pytest.raises(UsageError, match="no such directory"):
        ask("--what-if", [tmp_path], "text", tmp_path / "nowhere" / "out.txt")


def test_a_file_is_written(found: Tradeoff, tmp_path: Path, printed: Callable[..., str]) -> None:
    for output_format in ("text", "json"):
        out = tmp_path / output_format
        ask("--what-if", [tmp_path], output_format, out)
        assert found.outcomes[0].setting.name in out.read_text()


def test_names_and_reports_need_no_torch() -> None:
    code = (
        "import sys, rlctl.what_if.what_if_report, rlctl.what_if.what_if_run, rlctl.cli.diagnose;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overrides_are_what_the_yaml_of_a_run_says(found: Tradeoff) -> None:
    """`null`, booleans and numbers-as-text survive the command line."""
    setting = outcome_of(found, "none").setting
    pairs = dict(override.split("=", 1) for override in setting.overrides)
    assert yaml.safe_load(pairs[f"{OWN}rollout_is"]) is None
    assert yaml.safe_load(pairs[f"{OWN}rollout_is_batch_normalize"]) is True


def test_the_grid_varies_the_thresholds_of_parts_of_the_users_files() -> None:
    file = Path(__file__).parents[3] / "examples" / "custom_correction.py"
    weight, criterion = f"{file}:tempered", f"{file}:worst_tokens"
    own = RolloutCorrectionSpec(
        rollout_is=weight,
        rollout_is_params={"exponent": 0.25},
        rollout_rs=f"seq_max_k2,{criterion}",
        rollout_rs_threshold="2.5,0.5",
    )
    found = [setting for setting in grid(own)[1:] if str(file) in setting.name]
    assert {setting.spec.rollout_is for setting in found} >= {weight}
    assert {setting.spec.rollout_rs for setting in found} >= {criterion}
    assert all(setting.rules for setting in found)
    tempered = [setting for setting in found if setting.spec.rollout_is == weight]
    assert all(setting.spec.rollout_is_params == {"exponent": 0.25} for setting in tempered)


def test_settings_of_other_parts_load_over_the_spec_of_a_run_with_parameters(tmp_path: Path) -> None:
    file = Path(__file__).parents[3] / "examples" / "custom_correction.py"
    own = [f"{OWN}rollout_is={file}:tempered", f"{OWN}rollout_is_params.exponent=0.25"]
    spec = load_spec(["rloo-seq-is"], [], own).spec
    (tmp_path / "spec.yaml").write_text(dump_spec(spec))
    for setting in grid(spec.algorithm.rollout_correction):
        loaded = load_spec([], [tmp_path / "spec.yaml"], list(setting.overrides)).spec
        assert loaded.algorithm.rollout_correction.rollout_is_params == setting.spec.rollout_is_params
