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
from rlctl.spec.load import load_spec

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
    seen = diagnosis(
        finding("gap", ("actor.lr=0.0005",)),
        finding("spread", (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.6_1.6")),
    )
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


def test_the_worst_finding_wins_a_conflict_and_the_next_fix_is_taken():
    found = propose_patch(
        diagnosis(
            finding("first", ("actor.lr=0.0005",)),
            finding("second", ("actor.lr=0.0001",), ("actor.grad_clip=0.5",)),
            finding("third", ("actor.lr=0.0002",)),
            finding("fourth", ("actor.lr=0.0005",)),
        )
    )
    assert found.changes == {"actor.lr": "0.0005", "actor.grad_clip": "0.5"}
    left = {each.finding.rule: each.why for each in found.not_applied}
    assert "first sets 0.0005" in left["third"]
    assert left["fourth"] == "already set for first"
    assert "# Not applied: third (critical): actor.lr=0.0002: first sets 0.0005" in as_yaml(found)


def test_a_fix_that_the_checks_refuse_gives_way_to_the_next():
    refused = (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=nonsense")
    found = propose_patch(diagnosis(finding("one", refused, ("actor.lr=0.0005",)), finding("two", refused)))
    assert found.changes == {"actor.lr": "0.0005"}
    assert "rollout_rs_threshold=nonsense" in found.not_applied[0].why


def test_remarks_and_things_to_do_by_hand_change_nothing():
    found = propose_patch(
        diagnosis(
            finding("hand", Fix(why="look at the engine's logs")),
            finding("same", ("actor.lr=0.001",)),
            finding("remark", ("actor.lr=0.5",), severity="info"),
        )
    )
    assert found.applied == ()
    assert [each.why for each in found.not_applied] == [
        "no config key fixes this; what to do: look at the engine's logs",
        "the spec has this value already",
        "only a remark",
    ]


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
