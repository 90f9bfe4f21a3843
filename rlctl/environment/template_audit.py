"""Audits what a chat template makes of several turns: is its prefix kept, and what is trained on?"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from rlctl.batch import Task, TokenSequence, Turn
from rlctl.chat_template import rendered
from rlctl.environment.conversation import Conversation
from rlctl.environment.recording import Recorder
from rlctl.environment.renderer import ChatRenderer
from rlctl.errors import UsageError

#: Kind of a piece of a sequence.
Kind = Literal["prompt", "sampled", "observation"]

_ASKED, _SAID, _HEARD = "How much is 2 + 2?", "I think\nfour.", 'Say "4" & <b>\nélan'
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}},
    },
}
_CALL = '<tool_call>{"name": "add_numbers", "arguments": {"a": 2}}</tool_call>'
_THOUGHT = "<think>\nLet me see.\n</think>\n\n"
#: What happens between two turns of the policy → its first reply, the role of the message after it.
_SCENES = {
    "a message of the user": (_SAID, "user"),
    "output of a tool": (_CALL, "tool"),
    "thoughts, then output of a tool": (_THOUGHT + _CALL, "tool"),
    "thoughts, then a message of the user": (_THOUGHT + _SAID, "user"),
}
#: Kind → `severity`, `what` and `fix`, which the file explains.
_FINDINGS = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
_MARK = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>")


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A fault that the audit found."""

    name: str
    severity: Literal["warning", "critical"]
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """Two turns of the policy, and what came between them."""

    name: str
    num_sequences: int
    pieces: list[tuple[str, Kind]]  # the text of its sequences


@dataclass(kw_only=True)
class Findings:
    """What an audit found."""

    findings: list[AuditFinding] = field(default_factory=list)

    def add(self, kind: str, **values: Any) -> None:
        """Appends a finding: `kind` is a key of `findings.toml`, and `values` fill in its sentence."""
        entry = _FINDINGS[kind]
        message = entry["what"].format(**values)
        finding = AuditFinding(entry.get("code", kind), entry["severity"], message, entry.get("fix", ""))
        self.findings.append(finding)


@dataclass
class TemplateAudit(Findings):
    """What a template makes of several turns."""

    scenes: list[Scene] = field(default_factory=list)


def audit_template(
    tokenizer: Any, ends: Sequence[int], kwargs: Mapping[str, Any] | None = None
) -> TemplateAudit:
    """Plays conversations of two turns through the code that training uses.

    Args:
        ends: tokens that end a turn; the first one is sampled.
        kwargs: further arguments of the chat template.
    """
    audit = TemplateAudit()
    renderer = ChatRenderer(tokenizer, kwargs)
    try:
        _check_texts(audit, renderer, ends)
        for name, (said, role) in _SCENES.items():
            _play(audit, renderer, ends[0], name, said, role)
    except UsageError as error:
        audit.add("refuses_turns", error=error.what)
    return audit


def _check_texts(audit: TemplateAudit, renderer: ChatRenderer, ends: Sequence[int]) -> None:
    """Checks renderings."""
    tokenizer = renderer.tokenizer
    asked = [{"role": "user", "content": _ASKED}]
    start = renderer.text(asked)
    ids = renderer.encode(start)
    if not tokenizer.chat_template:
        audit.add("no_template")
    elif renderer.tool_role == "user":
        audit.add("no_tool_role")
    if len({renderer.text(asked) for _ in range(8)}) > 1 or "strftime_now" in str(tokenizer.chat_template):
        audit.add("changing")
    if len(ids) > 1 and ids[:2] == [tokenizer.bos_token_id] * 2:
        audit.add("two_starts")
    if "add_numbers" not in renderer.text(asked, [_TOOL]):
        audit.add("tools_unseen")
    now = renderer.text([*asked, {"role": "assistant", "content": _SAID}, *asked])
    if _SAID not in now:
        audit.add("reply_unseen")
    elif now.startswith(start) and not now[len(start) :].lstrip().startswith(_SAID):
        audit.add("no_generation_prompt", text=now[len(start) :].partition(_SAID)[0])
    token = unknown_end(tokenizer, ends)
    if token:
        audit.add("end_of_turn", token=token)
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    texts = sorted(set(_MARK.findall(now)) - known)
    if texts:
        audit.add("marks_are_text", texts=", ".join(texts))


def unknown_end(tokenizer: Any, ends: Sequence[int]) -> str | None:
    """First special token that the chat template writes after a reply, if it writes none of `ends` there.

    None if one of them ends a response, or if the template does not show how a reply ends.
    """
    if not tokenizer.chat_template:
        return None
    reply = "REPLY"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    try:
        text = rendered(tokenizer, turns)
    except Exception:  # the template accepts no replies
        return None
    after = tokenizer(text.rpartition(reply)[2], add_special_tokens=False)["input_ids"]
    known = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    special = [token for token in after if token in known]
    if not special or set(special) & set(ends):
        return None
    return str(tokenizer.convert_ids_to_tokens(special[0]))


def _play(audit: TemplateAudit, renderer: ChatRenderer, end: int, name: str, said: str, role: str) -> None:
    """Plays one scene."""
    sampler = _Sampler([[*renderer.encode(text), end] for text in (said, "4")])
    asked = _ASKED
    messages = ({"role": "user", "content": asked},)
    task = Task(renderer.encode(renderer.text(messages)), asked, messages=messages)

    async def play() -> None:
        conversation = Conversation(renderer, sampler, task, [_TOOL])
        await conversation.reply()
        conversation.add(renderer.tool_role if role == "tool" else role, _HEARD)
        await conversation.reply()

    asyncio.run(play())
    sequences = sampler.recorder.sequences()
    audit.scenes.append(Scene(name, len(sequences), [*_pieces(renderer.tokenizer, sequences)]))
    has_thoughts = said.startswith(_THOUGHT)
    names = {finding.name for finding in audit.findings}
    if len(sequences) > 1 and not (has_thoughts and (role == "user" or "splits" in names)):
        audit.add("splits_thoughts" if has_thoughts else "splits", scene=name, count=len(sequences))
    heard = renderer.tokenizer.decode(sampler.read)
    if _HEARD not in heard and "observation_changed" not in names:
        audit.add("observation_changed", scene=name)


class _Sampler:
    """Samples the turns of a list.

    Attributes:
        read: what the last turn read.
    """

    def __init__(self, turns: list[list[int]]) -> None:
        self.recorder = Recorder()
        self._turns = turns
        self.read: list[int] = []

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Turn:
        self.read = list(token_ids)
        ids = torch.tensor(self._turns[self.recorder.num_turns])
        turn = Turn(ids, torch.zeros(len(ids)), torch.zeros_like(ids), "stop")
        self.recorder.add(token_ids, turn)
        return turn

    def watch(self, pid: int) -> None:
        """Nothing is timed."""


def _pieces(tokenizer: Any, sequences: Sequence[TokenSequence]) -> Iterator[tuple[str, Kind]]:
    """The text of the sequences, by kind."""
    for sequence in sequences:
        kind: Kind = "prompt"
        tokens = zip(sequence.token_ids.tolist(), sequence.sampled.tolist(), strict=True)
        for is_sampled, run in groupby(tokens, key=lambda pair: pair[1]):
            if is_sampled:
                kind = "sampled"
            elif kind != "prompt":
                kind = "observation"
            yield tokenizer.decode([token for token, _ in run]), kind
