"""Measures every registered rule in enumerated and learned worlds.

A measurement is one rule in one world with groups of n responses, and one line of the results file, so that a
measurement run can be resumed. Enumerated worlds differ from a default world along one axis at a time: size
of the mismatch, length, entropy, staleness, group size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.studies.gradients.exact import BenchRule, EnumeratedWorld
from benchmarks.studies.gradients.learned import LearnedWorld
from benchmarks.studies.gradients.worlds import VOCABULARY
from rlctl.algos import correction
from rlctl.errors import UsageError, first_line
from rlctl.files import sha256_of
from rlctl.registry import CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA
from rlctl.run_spec.resolve import registered_criteria
from rlctl.user_code import files_of
from rlctl.what_if.settings import NO_UPPER, frameworks, weight_keys

#: Mini-batch sizes in the tables, in groups.
BATCHES = (8, 64, 512)
#: Defaults in addition to those of `what_if.settings`: AReaL's `behave_imp_weight_cap`, prime-rl's three
#: losses, and the values that NeMo-RL's asynchronous recipes set.
MORE_DEFAULTS: dict[str, dict[str, Any]] = {
    "AReaL token mask": weight_keys("token", "mask", "1e-9_5.0"),
    "NeMo-RL recipes": weight_keys("token", "truncate", "5.0")
    | {"rollout_rs": "mult_prob_error", "rollout_rs_threshold": "2.0"},
} | {
    f"prime-rl {name}": {
        "rollout_is": None,
        "loss_type": "sampler_penalty",
        "loss_params": {"region": region},
    }
    for name, region in (("default", "dppo"), ("ipo", "ipo"), ("kpop", "kpop"))
}


@dataclass(frozen=True, slots=True)
class BenchPlace:
    """A world and a group size. `axis` names the quantity in which it differs from the default world."""

    axis: str
    mismatch: str = "noise"
    size: float = 0.3
    horizon: int = 5
    sharpness: float = 1.0
    n: int = 8
    is_learned: bool = False

    @property
    def key(self) -> str:
        """Unique name."""
        kind = "learned" if self.is_learned else f"sharpness {self.sharpness:g}"
        return f"{self.mismatch} {self.size:g}, {self.horizon} tokens, {kind}, n {self.n}"

    @lru_cache(maxsize=2)  # noqa: B019 - two worlds at most are kept
    def world(self, seed: int) -> EnumeratedWorld | LearnedWorld:
        """The policies and rewards; of enumerated ones the first in which every prompt has both rewards."""
        if self.is_learned:
            return LearnedWorld(seed, self.mismatch, self.size, self.horizon)
        shape = {"prompts": 2, "horizon": self.horizon}
        for number in range(seed, seed + 100_000, 1000):
            world = EnumeratedWorld(
                number, "hidden", self.mismatch, self.size, "sparse", **shape, sharpness=self.sharpness
            )
            if (world.rewards.min(1) < world.rewards.max(1)).all():
                return world
        raise AssertionError("no world has both rewards")


def places(*, small: bool = False) -> list[BenchPlace]:
    """Returns every place once; with `small`, the four places that tests measure."""
    if small:
        return [
            BenchPlace("KL", horizon=3),
            BenchPlace("KL", size=0.8, horizon=3),
            BenchPlace("group size", horizon=3, n=2),
            BenchPlace("learned", size=0.2, horizon=16, is_learned=True),
        ]
    found = [BenchPlace("KL", size=size) for size in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)]
    found += [BenchPlace("length", horizon=horizon) for horizon in (2, 3, 4, 6)]
    found += [BenchPlace("entropy", sharpness=sharpness) for sharpness in (0.5, 2.0, 3.0)]
    found += [BenchPlace("staleness", mismatch="stale", size=size) for size in (1, 2, 4, 8, 16)]
    found += [BenchPlace("group size", n=n) for n in (2, 4, 16)]
    for horizon in (16, 32, 64):
        found += [BenchPlace("learned", "noise", size, horizon, is_learned=True) for size in (0.05, 0.1, 0.2)]
        found += [BenchPlace("learned", "stale", size, horizon, is_learned=True) for size in (1, 4, 16)]
    return found


def rules(*, small: bool = False) -> dict[str, BenchRule]:
    """Rules by name: no correction, exact weights, every registered part, other frameworks' defaults."""
    found = {
        "no correction": BenchRule.of(rollout_is=None),
        "exact": BenchRule.of(**weight_keys("sequence", "truncate", NO_UPPER)),
    }
    for part in CORRECTION_WEIGHTS.parts():
        if part.name != "sequence":
            found[f"{part.name}, no bound"] = BenchRule.of(**weight_keys(part.name, "truncate", NO_UPPER))
        for threshold in part.thresholds[:1] if small else part.thresholds:
            for bound in ("truncate",) if small else ("truncate", "clip", "mask"):
                rule = BenchRule.of(**weight_keys(part.name, bound, threshold))
                found[f"{part.name} {bound} {threshold}"] = rule
    for name in registered_criteria():
        if "age" not in REJECTION_CRITERIA.part(name).needs:
            for threshold in REJECTION_CRITERIA.part(name).thresholds:
                given = {"rollout_is": None, "rollout_rs": name, "rollout_rs_threshold": threshold}
                found[f"reject {name} {threshold}"] = BenchRule.of(**given)
    for part in POLICY_LOSSES.parts():
        if part.name != "reinforce":
            found[f"loss {part.name}"] = BenchRule.of(rollout_is=None, loss_type=part.name)
    truncated = weight_keys("token", "truncate", "2.0")
    found["score centering"] = BenchRule.of(rollout_is=None, score_centering=VOCABULARY)
    found["centered token truncate 2.0"] = BenchRule.of(**truncated, score_centering=VOCABULARY)
    if not small:
        found |= {f"default: {setting.name}": BenchRule(setting.spec) for setting in frameworks()}
        found |= {f"default: {name}": BenchRule.of(**given) for name, given in MORE_DEFAULTS.items()}
    return found


def measured(
    directory: Path, chosen: dict[str, BenchRule], where: list[BenchPlace], seeds: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields every measurement with the fields of its place, and whether it is new.

    New measurements are appended to `results.jsonl`; existing ones are read from it. Measurements by another
    rlctl version, or of a rule whose file has changed, are repeated.

    Raises:
        UsageError: the directory cannot be written, or `results.jsonl` is not a file of measurements.
    """
    path = directory / "results.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text and not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]  # without the truncated last line
            path.write_text(text, encoding="utf-8")
        known = {_key(row): row for row in map(json.loads, text.splitlines())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot hold the measurements: {getattr(error, 'strerror', None) or first_line(error)}"
        raise UsageError(what, where=str(path), fix="choose another directory with --out") from error
    codes = {name: _code(rule) for name, rule in chosen.items()}
    with path.open("a", encoding="utf-8") as file:
        for place in where:
            for seed in range(seeds):
                for name, rule in chosen.items():
                    spec = rule.spec.model_dump(mode="json")
                    row = {"rule": name, "code": codes[name], "spec": spec, "place": place.key, "seed": seed}
                    if found := known.get(_key(row)):
                        yield found | asdict(place), False
                        continue
                    world = place.world(seed)
                    row |= {"ess": world.ess} | world.moments(rule, place.n).as_json()
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    yield row | asdict(place), True


def _key(row: dict[str, Any]) -> tuple[str, str, str, str, int]:
    return row["rule"], row.get("code", ""), json.dumps(row["spec"]), row["place"], row["seed"]


def _code(rule: BenchRule) -> str:
    """Identifies the code that a measurement depends on: rlctl's version and formulas, the user's files."""
    spec = rule.spec
    files = files_of(spec.rollout_is, spec.rollout_rs, spec.loss_type)
    return " ".join([version("rlctl"), _formulas(), *sorted(sha256_of(file) for file in files)])


@cache
def _formulas() -> str:
    """SHA-256 over the files of `rlctl/algos` and of this directory."""
    here = Path(__file__).parent
    files = sorted([*Path(correction.__file__).parent.glob("*.py"), *here.glob("*.py")])
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


def digest(rows: list[dict[str, Any]]) -> str:
    """Hash of the values to 5 digits, independent of the order of the rows."""
    lines = []
    for row in rows:
        figures = [f"{row[name]:.4e}" for name in ("ess", "inner", "norm", "signal", "distance", "noise")]
        lines.append(" ".join([row["rule"], row["place"], str(row["seed"]), *figures]))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
