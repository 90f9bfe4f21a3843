"""Self-contained HTML page about one or more runs: headline, responses, curves, findings, spec."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.diagnose.diagnosis_page import TEMPLATE, page_values
from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import RunLog, Table
from rlctl.errors import UsageError, visible
from rlctl.html_page import render
from rlctl.report.headline import differences, headline, logged_rows
from rlctl.run_spec.keys import changes, known_leaves
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.sources import all_presets
from rlctl.tiny.embedded import DATA_SOURCE, WRITTEN
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.open_run import RunRecord, log_ratios, open_run, read_state, spans
from rlctl.track.texts import Decoder, decoder_of, pieces

_HERE = Path(__file__).parent
#: Maximum steps on a page, responses per step, tokens per response, and characters per other text.
STEPS, PER_STEP, TOKENS, CHARACTERS = 6, 4, 300, 3000
#: Maximum bytes of HTML for the responses of all runs; those of the earliest steps are left out first.
RESPONSE_BYTES = 300_000
#: Responses of each kind that are shown first: highest reward, lowest reward, largest |log ρ|.
HIGHLIGHTS = 2
HIGHEST, LOWEST, SURPRISING = "highest reward", "lowest reward", "largest log-ratio"
#: Title of the responses that are shown first → what a page says where there is none.
NONE_OF = {
    HIGHEST: "No response was graded.",
    LOWEST: "No response has a lower reward.",
    SURPRISING: "The log-ratio of every response is 0 to four digits: both policies agree.",
}
#: Smallest |log ρ| of a response, in nats, that counts as surprising: less is rounding of float32.
LEAST_SURPRISE = 5e-5
#: Thresholds of |log ρ| in nats for the shading levels of a token.
SHADES = (0.02, 0.1, 0.5, 2.0)


def run_page(runs: Sequence[Path], version: str = "") -> str:
    """Renders the page as HTML text; each plot shows all runs.

    Args:
        runs: run directories.
        version: of the runs' files, for a page that `rlctl.report.serve` keeps up to date; empty: a page that
            loads nothing.

    Raises:
        UsageError: a path is not a run directory, or its log is damaged.
    """
    records = [open_run(path) for path in runs]
    diagnoses = [examine(_log_of(record)) for record in records]
    values = page_values(diagnoses) | {"curves_first": True}
    values["style"] += (_HERE / "run_page.css").read_text(encoding="utf-8")
    if version:
        values["scripts"].append((_HERE / "follow.js").read_text(encoding="utf-8"))
    details: list[dict[str, Any]] = []
    for record, diagnosis, name in zip(records, diagnoses, values["names"], strict=True):
        than, rows = spec_rows(record)
        left = RESPONSE_BYTES // len(records)
        best = highlights(record)
        steps = _within(
            sample_steps(record), left - sum(_num_bytes(sample) for _, each in best for sample in each)
        )
        sources = {sample["source"] for step in steps for sample in step["samples"]}
        details.append(
            {
                "name": name,
                "headline": headline(record, diagnosis),
                "model": visible(read_state(record.path).model),
                "highlights": best,
                "no_highlights": "" if best else _why_none(record),
                "than": visible(than),
                "spec": rows,
                "validation": validation_rows(logged_rows(record)),
                "steps": steps,
                "note": WRITTEN if DATA_SOURCE in sources else "",
            }
        )
    return render(
        _HERE / "run_page.html.j2",
        folders=[TEMPLATE.parent],
        details=details,
        differences=differences(values["names"], records),
        shades=SHADES,
        none_of=NONE_OF,
        version=version,
        connects=bool(version),
        **values,
    )


def _log_of(record: RunRecord) -> RunLog:
    """The log of a run as the rules read it; without steps before the run has logged one."""
    log = record.path / METRICS_FILE
    if logged_rows(record):
        return read_run(log, metrics_read(with_others=True))
    return RunLog(log, Table.of_rows([], lambda _: True), facts=facts_of(record.spec), spec=record.spec)


def _why_none(record: RunRecord) -> str:
    """Why a page shows no response."""
    if record.spec.trainer.rollouts_per_step == 0:
        return "This run saves no responses: trainer.rollouts_per_step=0."
    return "No responses were saved yet: a run writes them with its checkpoints."


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a response."""

    text: str  # text that the token adds to the response
    #: style classes: `p1` to `p4` if the training policy gives it a higher probability than the rollout
    #: policy, `n1` to `n4` if lower, and `out` if the token was rejected; `unsampled` if the policy did not
    #: sample it; `turn` for the name of a turn
    shade: str
    about: str  # its log ρ, rollout log-prob and weight


def spec_rows(record: RunRecord) -> tuple[str, list[tuple[str, str, str]]]:
    """The base of the comparison, and (key, base value, own value) per difference.

    The base are the shipped presets of the run's command, or the defaults.
    """
    spec = record.spec
    # Files that the command names are not read: they may be of someone else, and name code.
    presets = [name for name in read_state(record.path).preset.split("+") if name in all_presets()]
    before = load_spec(  # unchecked, because a preset alone is no complete spec
        presets, overrides={"model.path": spec.model.path}, left_open=frozenset(known_leaves())
    ).spec
    than = " + ".join(presets) or "the defaults"
    rows = [
        (key, _shown(old), _shown(new))
        for key, (old, new) in changes(before, spec).items()
        if key != "trainer.run_dir"
    ]
    return than, rows


def _shown(value: Any) -> str:
    """A spec value in YAML notation; `—` for null."""
    if value is None:
        return "—"
    return visible(str(value).lower() if isinstance(value, bool) else str(value))


def validation_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Validation metric, and its first, best and last value with their steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("val/") and math.isfinite(float(value)):
                found.setdefault(key.removeprefix("val/"), []).append((int(row["step"]), float(value)))
    table = []
    for key, values in found.items():
        has_best = key.endswith("/reward_mean") or "@" in key
        best = max(values, key=lambda pair: pair[1]) if has_best else None
        cells = [values[0], best, values[-1]]
        table.append((key, [f"{cell[1]:.4g} (step {cell[0]})" if cell else "" for cell in cells]))
    return table


def sample_steps(record: RunRecord) -> list[dict[str, Any]]:
    """Evenly spaced steps with some responses each, token by token, equal ones once; empty if none saved."""
    kept = _spaced_steps(record)
    decode = decoder_of(record) if kept else None
    steps = []
    for number in kept:
        table = record.rollouts(number)
        texts = table.select(["prompt", "response", "reward", "truncated"]).to_pylist()
        keys = [tuple(text.values()) for text in texts]
        times = Counter(keys)
        first = [keys.index(key) for key in list(times)[:PER_STEP]]
        rows = zip(first, table.take(first).to_pylist(), strict=True)
        samples = [_sample(row, decode) | {"times": times[keys[index]]} for index, row in rows]
        steps.append({"step": number, "samples": samples})
    return steps


def highlights(record: RunRecord) -> list[tuple[str, list[dict[str, Any]]]]:
    """Responses under each title of `NONE_OF`: highest and lowest reward in the last saved step, largest
    |log ρ|; empty without saved steps.

    The latter are of the steps that `sample_steps` shows. Equal responses to a prompt count once.
    """
    kept = _spaced_steps(record)
    if not kept:
        return []
    surprising: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for step in kept:
        rows = _distinct(record.rollouts(step).to_pylist())
        apart = [row for row in rows if _surprise(row) >= LEAST_SURPRISE]
        surprising = sorted([*surprising, *apart], key=_surprise, reverse=True)[:HIGHLIGHTS]
    graded = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
    highest, lowest = (graded[0]["reward"], graded[-1]["reward"]) if graded else (0.0, 0.0)
    best = [row for row in graded[:HIGHLIGHTS] if row["reward"] > lowest or highest == lowest]
    worst = [row for row in reversed(graded) if row["reward"] < highest and row not in best]
    titled = {HIGHEST: best, LOWEST: worst[:HIGHLIGHTS], SURPRISING: surprising}
    decode = decoder_of(record)
    return [(title, [_sample(row, decode) | {"times": 1} for row in each]) for title, each in titled.items()]


def _spaced_steps(record: RunRecord) -> list[int]:
    """At most `STEPS` steps with responses, evenly spaced, with the first and the last; ascending."""
    try:
        kept = record.rollout_steps()
    except UsageError:
        return []
    places = {round(i * (len(kept) - 1) / max(STEPS - 1, 1)) for i in range(STEPS)} if kept else set()
    return [kept[place] for place in sorted(places)]


def _distinct(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of the rows with the same prompt and response."""
    distinct: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        distinct.setdefault((row["prompt"], row["response"]), row)
    return list(distinct.values())


def _surprise(row: Mapping[str, Any]) -> float:
    """|log ρ| of a response in nats; infinite where it is not a number."""
    size = abs(math.fsum(log_ratios(row)))
    return math.inf if math.isnan(size) else size


def _within(steps: Sequence[dict[str, Any]], left: int) -> list[dict[str, Any]]:
    """The newest of these steps whose responses take at most `left` bytes of HTML together."""
    kept: list[dict[str, Any]] = []
    for step in reversed(steps):
        left -= sum(map(_num_bytes, step["samples"]))
        if left < 0:
            break
        kept.insert(0, step)
    return kept


def _num_bytes(sample: Mapping[str, Any]) -> int:
    """Approximate size of a response in HTML."""
    words = (sample["prompt"], sample["truth"], *(token.text + token.about for token in sample["tokens"]))
    return 400 + sum(len(word.encode("utf-8", "replace")) for word in words) + 40 * len(sample["tokens"])


def _cut(text: str) -> str:
    """The visible text, without what exceeds `CHARACTERS`."""
    rest = len(text) - CHARACTERS
    return visible(text[:CHARACTERS]) + (f" … and {rest:,} more characters" if rest > 0 else "")


def _joined(tokens: Sequence[Token]) -> list[Token]:
    """The tokens, with neighbours that have no style as one token without `about`."""
    joined: list[Token] = []
    for token in tokens:
        if joined and not token.shade and not joined[-1].shade:
            joined[-1] = Token(joined[-1].text + token.text, "", "")
        else:
            joined.append(token)
    return joined


def _sample(row: Mapping[str, Any], decode: Decoder | None) -> dict[str, Any]:
    ratios = log_ratios(row)
    tokens = [Token(_cut(row["response"]), "", "")]
    left = 0
    parts = spans(row)
    if decode:
        shown = []
        places = [place for _, span in parts for place in span]
        texts = dict(
            zip(places, pieces([row["token_ids"][x] for x in places[:TOKENS]], decode), strict=False)
        )
        for turn, span in parts:
            if row["num_turns"] > 1 and span[0] in texts:
                shown.append(Token(f"turn {turn + 1}" if turn >= 0 else "observation", "turn", ""))
            shown += [_token(row, place, visible(texts[place])) for place in span if place in texts]
        tokens = _joined(shown)
        left = max(0, len(places) - TOKENS)
    return {
        "step": row["step"],
        "source": visible(row["data_source"]),
        "prompt": _cut(row["prompt"]),
        "truth": _cut(row["ground_truth"]),
        "reward": "ungraded" if row["reward"] is None else f"{row['reward']:g}",
        "terms": [f"{visible(label)} {score:g}" for label, score in row.get("terms") or ()],
        "log_ratio": f"{math.fsum(ratios):+z.4f}",
        "num_tokens": sum(row["sampled"]),
        "num_turns": row["num_turns"],
        "truncated": row["truncated"],
        "tokens": tokens,
        "left": left,
    }


def _token(row: Mapping[str, Any], index: int, text: str) -> Token:
    if not row["sampled"][index]:
        return Token(text, "unsampled", "not sampled by the policy")
    log_prob = row["rollout_log_probs"][index]
    trained = row["training_log_probs"][index]
    if trained is None:
        return Token(text, "", f"rollout log-prob {log_prob:.3f}, not trained on")
    ratio = trained - log_prob
    kept = row["keep_mask"][index]
    return Token(
        text, _shade(ratio, kept=kept), _about(ratio, log_prob, row["rollout_is_weights"][index], kept=kept)
    )


def _shade(ratio: float, *, kept: bool) -> str:
    level = sum(abs(ratio) >= bound for bound in SHADES) if math.isfinite(ratio) else len(SHADES)
    shade = f"{'p' if ratio > 0 else 'n'}{level}" if level else ""
    return shade if kept else f"{shade} out".strip()


def _about(ratio: float, log_prob: float, weight: float, *, kept: bool) -> str:
    rejected = "" if kept else ", rejected"
    return f"log ρ {ratio:+z.4f}, rollout log-prob {log_prob:.3f}, weight {weight:.3f}{rejected}"
