"""Self-contained HTML page about one or more runs: curves, findings, spec, validation, samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.diagnose.diagnosis_page import TEMPLATE, page_values
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.errors import RlctlError, UsageError, visible
from rlctl.html_page import render
from rlctl.spec.keys import changes, known_leaves
from rlctl.spec.load import load_spec
from rlctl.tiny.embedded import DATA_SOURCE, WRITTEN
from rlctl.track.open_run import RunRecord, log_ratios, open_run, read_state, spans
from rlctl.track.texts import Decoder, decoder_of, pieces

_HERE = Path(__file__).parent
#: Maximum steps on a page, responses per step, and tokens per response.
STEPS, PER_STEP, TOKENS = 10, 4, 400
#: Thresholds of |log ρ| in nats for the shading levels of a token.
SHADES = (0.02, 0.1, 0.5, 2.0)


def run_page(runs: Sequence[Path]) -> str:
    """Renders the page as HTML text; each plot shows all runs.

    Raises:
        UsageError: a path is not a run directory, or the run has logged nothing.
    """
    records = [open_run(path) for path in runs]
    wanted = metrics_read(with_others=True)
    values = page_values([examine(read_run(path, wanted)) for path in runs])
    values["style"] += (_HERE / "run_page.css").read_text(encoding="utf-8")
    details: list[dict[str, Any]] = []
    for record, name in zip(records, values["names"], strict=True):
        state = read_state(record.path)
        than, rows = spec_rows(record)
        steps = sample_steps(record)
        sources = {sample["source"] for step in steps for sample in step["samples"]}
        details.append(
            {
                "name": name,
                "state": f"{state.state} after step {state.step} of {state.total_steps or '?'}",
                "model": visible(state.model),
                "reason": visible(state.reason or ""),
                "than": visible(than),
                "spec": rows,
                "validation": validation_rows(record.rows()),
                "steps": steps,
                "note": WRITTEN if DATA_SOURCE in sources else "",
            }
        )
    return render(
        _HERE / "run_page.html.j2",
        folders=[TEMPLATE.parent],
        details=details,
        shades=SHADES,
        **values,
    )


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
    """The base of the comparison (presets or defaults), and (key, base value, own value) per difference."""
    spec = record.spec
    state = read_state(record.path)
    presets = [name for name in state.preset.split("+") if name]
    unchecked = partial(  # because a preset alone is no complete spec
        load_spec, overrides={"model.path": spec.model.path}, left_open=frozenset(known_leaves())
    )
    try:
        before, than = unchecked(presets).spec, " + ".join(presets) or "the defaults"
    except RlctlError:  # preset files were removed
        before, than = unchecked().spec, "the defaults"
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
        table.append((key, [f"{one[1]:.4g} (step {one[0]})" if one else "" for one in cells]))
    return table


def sample_steps(record: RunRecord) -> list[dict[str, Any]]:
    """Evenly spaced steps with some responses each, token by token, equal ones once; empty if none saved."""
    try:
        kept = record.rollout_steps()
    except UsageError:
        return []
    places = {round(i * (len(kept) - 1) / max(STEPS - 1, 1)) for i in range(STEPS)} if kept else set()
    decode = decoder_of(record)
    steps = []
    for place in sorted(places):
        table = record.rollouts(kept[place])
        texts = table.select(["prompt", "response", "reward", "truncated"]).to_pylist()
        keys = [tuple(text.values()) for text in texts]
        times = Counter(keys)
        first = [keys.index(key) for key in list(times)[:PER_STEP]]
        rows = zip(first, table.take(first).to_pylist(), strict=True)
        samples = [_sample(row, decode) | {"times": times[keys[index]]} for index, row in rows]
        steps.append({"step": kept[place], "samples": samples})
    return steps


def _sample(row: Mapping[str, Any], decode: Decoder | None) -> dict[str, Any]:
    ratios = log_ratios(row)
    tokens, left = [Token(visible(row["response"]), "", "")], 0
    parts = spans(row)
    if decode:
        shown, places = [], [place for _, span in parts for place in span]
        texts = dict(
            zip(places, pieces([row["token_ids"][x] for x in places[:TOKENS]], decode), strict=False)
        )
        for turn, span in parts:
            if row["num_turns"] > 1 and span[0] in texts:
                shown.append(Token(f"turn {turn + 1}" if turn >= 0 else "observation", "turn", ""))
            shown += [_token(row, place, visible(texts[place])) for place in span if place in texts]
        tokens, left = shown, max(0, len(places) - TOKENS)
    return {
        "source": visible(row["data_source"]),
        "prompt": visible(row["prompt"]),
        "truth": visible(row["ground_truth"]),
        "reward": "ungraded" if row["reward"] is None else f"{row['reward']:g}",
        "log_ratio": f"{math.fsum(ratios):+z.4f}",
        "num_tokens": sum(row["sampled"]),
        "num_turns": row["num_turns"],
        "truncated": row["truncated"],
        "tokens": tokens,
        "left": left,
    }


def _token(row: Mapping[str, Any], place: int, text: str) -> Token:
    if not row["sampled"][place]:
        return Token(text, "unsampled", "not sampled by the policy")
    log_prob, trained = row["rollout_log_probs"][place], row["training_log_probs"][place]
    if trained is None:
        return Token(text, "", f"rollout log-prob {log_prob:.3f}, not trained on")
    ratio, kept = trained - log_prob, row["keep_mask"][place]
    return Token(
        text, _shade(ratio, kept=kept), _about(ratio, log_prob, row["rollout_is_weights"][place], kept=kept)
    )


def _shade(ratio: float, *, kept: bool) -> str:
    level = sum(abs(ratio) >= bound for bound in SHADES) if math.isfinite(ratio) else len(SHADES)
    shade = f"{'p' if ratio > 0 else 'n'}{level}" if level else ""
    return shade if kept else f"{shade} out".strip()


def _about(ratio: float, log_prob: float, weight: float, *, kept: bool) -> str:
    rejected = "" if kept else ", rejected"
    return f"log ρ {ratio:+z.4f}, rollout log-prob {log_prob:.3f}, weight {weight:.3f}{rejected}"
