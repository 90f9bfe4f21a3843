"""`--fix`: the spec that comes out, what was left out of it and why."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlctl.diagnose.finding import Evidence, Finding, Fix
from rlctl.diagnose.rule import Diagnosis
from rlctl.diagnose.spec_patch import as_yaml, propose_patch, write_patch
from rlctl.diagnose.table import RunLog, Table
from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec

RC = "algorithm.rollout_correction."


def finding(rule, *fixes, severity="critical", what="something is wrong"):
    made = tuple(one if isinstance(one, Fix) else Fix(one) for one in fixes)
    return Finding(severity, what, (Evidence("actor/lr", "1"),), "cause", "source", made, rule=rule)


def diagnosis(*findings, spec=True, framework="rlctl"):
    table = Table(np.array([1]), {"actor/lr": np.array([1.0])})
    loaded = load_spec([], [], ["actor.lr=0.001", "trainer.seed=7"]).spec if spec else None
    run = RunLog(Path("runs/some run/metrics.jsonl"), table, loaded, framework=framework)
    return Diagnosis(run, tuple(findings), (), ())


def test_the_fixed_spec_loads_and_differs_in_the_changed_keys_only(tmp_path):
    changes = ("actor.lr=0.0005", f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.6_1.6")
    seen = diagnosis(finding("gap", changes))
    path = tmp_path / "out.yaml"
    write_patch(path, propose_patch(seen))
    loaded = load_spec([], [path], [])
    expected = seen.run.spec.model_copy(deep=True).model_dump()
    expected["actor"]["lr"] = 0.0005
    expected["algorithm"]["rollout_correction"] |= {
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.6_1.6",
    }
    assert loaded.spec.model_dump() == expected
    assert "# actor.lr=0.0005 (was 0.001): gap, something is wrong" in path.read_text().splitlines()


def test_only_the_first_cause_changes_the_spec():
    found = propose_patch(
        diagnosis(
            finding("first", ("actor.lr=0.0005",)),
            finding("second", ("data.max_response_length=2048",)),
            finding("third", ("actor.grad_clip=0.5",), severity="warning"),
            finding("remark", ("actor.lr=0.5",), severity="info"),
        )
    )
    assert found.changes == {"actor.lr": "0.0005"}
    left = {each.finding.rule: each.why for each in found.not_applied}
    assert "without first" in left["second"]
    assert "without first" in left["third"]
    assert left["remark"] == "only a remark"
    assert "# Not applied: second (critical): first see" in as_yaml(found)


def test_a_fix_that_the_checks_refuse_gives_way_to_the_next():
    refused = (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=nonsense")
    found = propose_patch(diagnosis(finding("one", refused, ("actor.lr=0.0005",))))
    assert found.changes == {"actor.lr": "0.0005"}
    [left] = propose_patch(diagnosis(finding("two", refused))).not_applied
    assert "rollout_rs_threshold=nonsense" in left.why


@pytest.mark.parametrize(
    ("fix", "why"),
    [
        (
            Fix(why="look at the engine's logs"),
            "no config key fixes this; what to do: look at the engine's logs",
        ),
        (("actor.lr=0.001",), "the spec has this value already"),
    ],
)
def test_a_first_cause_without_a_setting_changes_nothing(fix, why):
    found = propose_patch(diagnosis(finding("hand", fix), finding("other", ("actor.grad_clip=0.5",))))
    assert found.applied == ()
    assert found.not_applied[0].why == why


def test_a_log_without_a_spec_gives_an_overlay_that_layers(tmp_path):
    one = Fix(("actor.lr=5e-07", f"{RC}rollout_is=token"), others={"trl": "learning_rate=5e-07"})
    path = tmp_path / "out.yaml"
    write_patch(path, propose_patch(diagnosis(finding("gap", one), spec=False, framework="trl")))
    text = path.read_text()
    assert yaml.safe_load(text) == {
        "actor": {"lr": 5e-07},
        "algorithm": {"rollout_correction": {"rollout_is": "token"}},
    }
    assert "Only the changes" in text
    assert "# in trl: learning_rate=5e-07" in text
    assert load_spec(["rloo-seq-is"], [path], []).spec.actor.lr == 5e-07


def test_comments_cannot_be_left(tmp_path):
    evil = finding("gap", ("actor.lr=0.0005",), what="x\nmodel: {path: evil}\u2028trainer: 1\x00\ufffe")
    path = tmp_path / "out.yaml"
    seen = diagnosis(evil)
    seen = replace(seen, run=replace(seen.run, path=Path("a\nactor: 1\x85b/metrics.jsonl")))
    write_patch(path, propose_patch(seen))
    assert load_spec([], [path], []).spec.actor.lr == 0.0005


def test_nothing_is_replaced(tmp_path):
    path = tmp_path / "out.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        write_patch(path, propose_patch(diagnosis(finding("gap", ("actor.lr=0.0005",)))))
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match="no such directory"):
        write_patch(tmp_path / "no" / "out.yaml", propose_patch(diagnosis()))


def test_a_log_without_a_spec_gets_changes_to_rlctls_defaults_too():
    """What rlctl does by default, the run that is diagnosed may not do."""
    found = propose_patch(diagnosis(finding("gap", ("engine.dtype=fp32",)), spec=False, framework="verl"))
    assert found.changes == {"engine.dtype": "fp32"}
    assert propose_patch(diagnosis(finding("gap", ("engine.dtype=fp32",)))).changes == {}
