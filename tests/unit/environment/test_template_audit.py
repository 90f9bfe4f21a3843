"""The turn audit names the fault of each template, and none in sound ones."""

from __future__ import annotations

import pytest

from rlctl.environment.template_audit import TemplateAudit, audit_template
from tests.unit.environment.templates import FAULTY, byte_tokenizer, tokenizer_of


def _names(audit: TemplateAudit) -> list[str]:
    return [finding.name for finding in audit.findings]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("chatml", []),
        ("qwen2.5", []),
        ("qwen3", []),
        ("llama3", []),
        ("phi", []),
        ("smollm", []),
        ("mistral", ["no_tool_role"]),
        ("gemma", ["no_tool_role"]),
        ("deepseek", ["splits", "splits"]),  # it opens thoughts, and shows none later
        ("glm", ["splits"]),  # a turn that ended with <|user|> is followed by <|observation|>
    ],
)
def test_sound_templates(family: str, names: list[str]) -> None:
    tokenizer = tokenizer_of(family)
    audit = audit_template(tokenizer, [tokenizer.eos_token_id])
    assert _names(audit) == names
    assert len(audit.scenes) == 4


@pytest.mark.parametrize("fault", FAULTY)
def test_faults_are_named(fault: str) -> None:
    expected, template = FAULTY[fault]
    tokenizer = byte_tokenizer(template, start="<|im_start|>")
    audit = audit_template(tokenizer, [tokenizer.eos_token_id])
    assert expected in _names(audit)
    assert all(finding.what for finding in audit.findings)


def test_the_masks() -> None:
    tokenizer = tokenizer_of("qwen3")
    by_name = {scene.name: scene for scene in audit_template(tokenizer, [tokenizer.eos_token_id]).scenes}
    kept = by_name["thoughts, then output of a tool"]
    assert kept.num_sequences == 1
    assert [kind for _, kind in kept.pieces] == ["prompt", "sampled", "observation", "sampled"]
    assert kept.pieces[1][0].endswith("</tool_call><|im_end|>")
    assert "élan" in kept.pieces[2][0]
    stripped = by_name["thoughts, then a message of the user"]
    assert stripped.num_sequences == 2
    assert [kind for _, kind in stripped.pieces] == ["prompt", "sampled", "prompt", "sampled"]
