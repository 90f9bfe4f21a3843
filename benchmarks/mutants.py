"""Mutation test of the mathematics: checks whether small changes of the code make a test fail.

    make mutants                                        a random fifth (seed 1) of every module's mutants
    python benchmarks/mutants.py --share 1              all mutants
    python benchmarks/mutants.py --only losses,update   modules whose name contains one of these
    python benchmarks/mutants.py --report               the results so far

cosmic-ray creates the mutants with the operators below. Its runner starts a new Python for each mutant, which
costs ten seconds of imports; mutmut skips decorated functions, and all registered losses and estimators are
decorated. Therefore this script runs the tests itself: a process imports torch and the tests once and forks
for every mutant; the child replaces the code of the mutated functions. If a mutant changes more than
functions, the child imports the modules again.

Results are appended to `build/mutants.jsonl`. Killed mutants are not run again; surviving mutants are run
again if their tests have changed. `benchmarks/mutants_equivalent.toml` lists mutants that no test can detect,
with reasons.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "mutants.jsonl"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
TIMEOUT_S = 300
SEED = 1
SHARE = 0.2

ALGOS = "tests/unit/algos"
UPDATE = ["tests/unit/train/test_update.py", "tests/unit/train/test_update_terms.py"]
CORRECTION = [
    f"{ALGOS}/test_correction_rules.py",
    "tests/properties/test_correction_oracle.py",
    "tests/properties/test_correction_bad_numbers.py",
    "tests/properties/test_correction_exactness.py",
    "tests/properties/test_verl_agreement.py",
]
VERL = f"{ALGOS}/test_agreement_with_verl.py"
ESTIMATORS = ["tests/unit/train/test_score_batch.py", "tests/unit/train/test_compute_advantages.py"]
#: Module → its tests, most effective first. Other tests may kill more mutants: the score is a lower bound.
MODULES = {
    "rlctl.algos.correction": CORRECTION,
    "rlctl.algos.verl_metrics": CORRECTION,
    "rlctl.algos.segments": CORRECTION,
    "rlctl.algos.estimators": [
        f"{ALGOS}/test_advantages.py",
        f"{ALGOS}/test_token_advantages.py",
        VERL,
        *ESTIMATORS,
        "tests/unit/test_registry.py",
    ],
    "rlctl.algos.kl": [f"{ALGOS}/test_kl.py", "tests/unit/train/test_kl_reward.py"],
    "rlctl.algos.losses": [
        f"{ALGOS}/test_losses.py",
        VERL,
        f"{ALGOS}/test_value_loss.py",
        "tests/properties/test_correction_exactness.py",
        "tests/unit/train/test_update_critic.py",
    ],
    "rlctl.algos.rules": [
        "tests/unit/run_spec/test_spec_resolve.py",
        *CORRECTION[:2],
        f"{ALGOS}/test_losses.py",
    ],
    "rlctl.train.score_batch": [
        "tests/unit/train/test_score_batch.py",
        "tests/unit/train/test_micro_batches.py",
        "tests/unit/train/test_schedule_and_prepare.py",
    ],
    "rlctl.train.update": UPDATE,
    "rlctl.train.mini_batch": UPDATE,
    "rlctl.train.deal": ["tests/unit/train/test_deal.py"],
    "rlctl.train.objective": UPDATE,
}
#: Excludes tests in separate processes, which would not use the mutant, and redundant tests.
SELECTED = (
    "not two_ranks and not however_cut and not every_stage and not does_something "
    "and not (costs_one_sequence and not nan) and not every_combination"
)

_BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul Pow_Mul FloorDiv_Mul Mod_Mul BitAnd_BitOr BitOr_BitAnd"
_COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
_UNARY = "Delete_USub Delete_Invert Delete_Not"
_OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd NumberReplacer "
    "ReplaceBreakWithContinue ReplaceContinueWithBreak ExceptionReplacer RemoveDecorator ZeroIterationForLoop"
)
#: cosmic-ray operators whose mutants are plausible mistakes.
NAMES = [
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISON.split()),
    *(f"ReplaceUnaryOperator_{name}" for name in _UNARY.split()),
    *_OTHERS.split(),
]
_PAIRS = "amax amin, max min, maximum minimum, sum mean, any all, exp expm1, upper lower, high low"
SWAPPED = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), reversed(pair.split()))}


class SwapName(Operator):
    """Replaces a method, function, argument or attribute by its counterpart: amax → amin."""

    def mutation_positions(self, node):
        if node.type == "name" and node.value in SWAPPED:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        return parso.python.tree.Name(SWAPPED[node.value], node.start_pos, prefix=node.prefix)

    @classmethod
    def examples(cls):
        return ()


class SwapBranches(Operator):
    """`where(condition, a, b)` → `where(condition, b, a)`."""

    def mutation_positions(self, node):
        if node.type == "arglist" and len(node.children) == 5:
            before = node.get_first_leaf().get_previous_leaf().get_previous_leaf()
            if before is not None and before.value == "where":
                yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        node.children[2], node.children[4] = node.children[4], node.children[2]
        return node

    @classmethod
    def examples(cls):
        return ()


@dataclass(frozen=True)
class Mutant:
    module: str
    operator: str
    source: str
    #: before, after: the first line that differs
    before: str
    after: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line}: {self.before} → {self.after}"

    @property
    def key(self) -> str:
        return _digest(self.module + self.source)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def tests_key(module: str) -> str:
    return _digest(SELECTED + "".join((ROOT / test).read_text() for test in MODULES[module]))


def path_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


OPERATORS: dict[str, Operator] = {
    **{name: get_operator(f"core/{name}")() for name in NAMES},
    "SwapName": SwapName(),
    "SwapBranches": SwapBranches(),
}


@dataclass(frozen=True)
class Place:
    """A position at which an operator can change a module."""

    module: str
    operator: str
    occurrence: int

    def mutant(self) -> Mutant | None:
        """Returns the mutant; None if the change does not affect the results of the code."""
        source = path_of(self.module).read_text()
        mutated = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        try:
            if mutated is None or _meaning(mutated) == _meaning(source):
                return None
        except SyntaxError:
            return None
        for line, (a, b) in enumerate(zip(source.splitlines(), mutated.splitlines(), strict=False), 1):
            if a != b:
                return Mutant(self.module, self.operator, mutated, a.strip(), b.strip(), line)
        return None


def places_of(module: str) -> list[Place]:
    nodes = list(ast_nodes(get_ast(path_of(module).read_text())))
    return [
        Place(module, name, occurrence)
        for name, operator in OPERATORS.items()
        for occurrence in range(sum(len(list(operator.mutation_positions(node))) for node in nodes))
    ]


def _meaning(source: str) -> str:
    """The syntax tree without parts that do not affect results.

    These are: types; arguments of `@dataclass`; the difference of `x.sum(1)` and `x.sum(-1)`, because x is
    (B, T).
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dataclass":
            node.keywords = []
        elif isinstance(node, ast.Call) and [ast.unparse(a) for a in node.args] == ["-1"]:
            node.args = [ast.Constant(1)]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.test = ast.Constant(None)
    return ast.dump(tree)


def drawn(places: list[Place], share: float, seed: str) -> list[Place]:
    """Draws a random share of the places; places without effect are removed later."""
    return random.Random(seed).sample(places, math.ceil(share * len(places)))


# --- running ----------------------------------------------------------------------------------------


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yields (qualified name, code) of the module's functions and methods, without nested functions."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x2:  # has fast locals: a function, not a class body
                yield inner.co_qualname, inner
            else:
                yield from _functions(inner)


def _shell(code: CodeType) -> tuple:
    """The code of a module that runs at import."""
    consts = [
        _shell(c)
        if isinstance(c, CodeType) and not c.co_flags & 0x2
        else None
        if isinstance(c, CodeType)
        else c
        for c in code.co_consts
    ]
    return code.co_code, repr(consts), code.co_names


def exchange(mutant: Mutant) -> None:
    """Replaces the module by the mutant in this process."""
    path = str(path_of(mutant.module))
    ours = compile(path_of(mutant.module).read_text(), path, "exec", dont_inherit=True)
    theirs = compile(mutant.source, path, "exec", dont_inherit=True)
    if _shell(ours) == _shell(theirs):
        old, new = list(_functions(ours)), list(_functions(theirs))
        changed = {name: code for (name, code), (_, was) in zip(new, old, strict=True) if code != was}
        found = [
            f for f in gc.get_objects() if isinstance(f, FunctionType) and f.__code__.co_filename == path
        ]
        hit = [f for f in found if f.__code__.co_qualname in changed]
        if changed and {f.__code__.co_qualname for f in hit} == set(changed):
            try:
                for function in hit:
                    function.__code__ = changed[function.__code__.co_qualname]
            except ValueError:  # the free variables differ
                pass
            else:
                return
    for name in [n for n in sys.modules if n.partition(".")[0] in {"rlctl", "tests"}]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Loader(mutant))


class _Loader:
    """Import finder and loader for only the mutated module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name, path=None, target=None):
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, path_of(name), loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        code = compile(self.mutant.source, str(path_of(self.mutant.module)), "exec", dont_inherit=True)
        exec(code, module.__dict__)


def pytest_code(tests: list[str]) -> int:
    import pytest

    quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=line"]
    return int(pytest.main([*quiet, "-k", SELECTED, *tests]))


def in_child(action) -> tuple[int | None, float]:
    """Runs `action()` in a fork; returns its exit code (None after the time limit) and seconds."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        out = os.open(ROOT / "build" / "mutants.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    while time.monotonic() - start < TIMEOUT_S:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - start
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, time.monotonic() - start


def prepare(module: str) -> None:
    """Imports the libraries and the tests of a module."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in ("torch", "transformers", "deepspeed", "hypothesis", "pytest"):
        importlib.import_module(name)
    for test in MODULES[module]:
        importlib.import_module(test.removesuffix(".py").replace("/", "."))


def is_known(mutant: Mutant, known: dict[str, dict]) -> bool:
    found = known.get(mutant.key)
    return found is not None and (
        found["outcome"] != "survived" or found["tests"] == tests_key(mutant.module)
    )


def run(module: str, wanted: list[Mutant], known: dict[str, dict], stop_at: float) -> None:
    """Runs the tests for the mutants of one module, in a process that has imported them."""
    todo = [mutant for mutant in wanted if not is_known(mutant, known)]
    if not todo or time.monotonic() > stop_at:
        return
    prepare(module)
    code, seconds = in_child(lambda: pytest_code(MODULES[module]))
    print(
        f"{module}: {len(todo)} mutants; without one its tests end with {code} in {seconds:.0f} s", flush=True
    )
    if code != 0:
        raise SystemExit(f"the tests of {module} fail without a mutant: see build/mutants.log")
    for mutant in todo:
        if time.monotonic() > stop_at:
            return

        def action(mutant: Mutant = mutant) -> int:
            exchange(mutant)
            return pytest_code(MODULES[module])

        code, seconds = in_child(action)
        if code == 5:
            raise SystemExit(f"no test of {module} ran")
        outcome = "survived" if code == 0 else "timeout" if code is None else "killed"
        line = {
            "key": mutant.key,
            "tests": tests_key(module),
            "name": mutant.name,
            "operator": mutant.operator,
            "outcome": outcome,
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(line | {"code": code, "seconds": round(seconds, 2)}) + "\n")
        if outcome == "survived":
            print(f"  survived: {mutant.name}", flush=True)


# --- reporting --------------------------------------------------------------------------------------


@cache
def equivalent() -> dict[tuple[str, str, str], str]:
    """(module, line before, line after) → reason why no test can detect the mutant."""
    if not EQUIVALENT.exists():
        return {}
    entries = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {(e["module"], e["before"], e["after"]): e["why"] for e in entries}


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    share, spread = hits / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return middle - half, middle + half


def report(chosen: list[Mutant], known: dict[str, dict]) -> None:
    """Prints the table for the documentation."""
    rows: dict[str, list[int]] = {}
    survivors = []
    for mutant in chosen:
        if mutant.key not in known:
            continue
        row = rows.setdefault(mutant.module, [0, 0, 0])
        if known[mutant.key]["outcome"] != "survived":
            row[0] += 1
        elif (mutant.module, mutant.before, mutant.after) in equivalent():
            row[2] += 1
        else:
            row[1] += 1
            survivors.append(mutant.name)
    print("\n".join(["", "survivors:", *survivors] if survivors else []))
    print("\n| module | mutants | killed | survived | equivalent | score |\n|---|---|---|---|---|---|")
    whole = [sum(row[i] for row in rows.values()) for i in range(3)]
    for name, (killed, survived, same) in [*sorted(rows.items()), ("all", whole)]:
        if killed + survived:
            score = f"{killed / (killed + survived):.1%}"
            print(f"| `{name}` | {killed + survived + same} | {killed} | {survived} | {same} | {score} |")
    if whole[0] + whole[1]:
        low, high = wilson(whole[0], whole[0] + whole[1])
        print(f"\n{sum(whole)} mutants at random; 95 % interval of the score {low:.1%} to {high:.1%}")


def read_results() -> dict[str, dict]:
    if not RESULTS.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--share", type=float, default=SHARE, help="of each module's mutants, at random")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="modules whose name contains one of these")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many; run again to go on")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    chosen = [
        mutant
        for module in MODULES
        if any(part in module for part in options.only.split(","))
        for place in drawn(places_of(module), options.share, f"{options.seed} {module}")
        if (mutant := place.mutant()) is not None
    ]
    stop_at = time.monotonic() + 60 * options.minutes
    for module in MODULES if not options.report else ():
        mine = [mutant for mutant in chosen if mutant.module == module]
        # One process per module, so that imports of one module's tests do not slow down forks for another.
        pid = os.fork()
        if pid == 0:
            try:
                run(module, mine, read_results(), stop_at)
                code = 0
            except SystemExit as error:
                print(error, flush=True)
                code = 1
            finally:
                os._exit(code)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(1)
    report(chosen, read_results())


if __name__ == "__main__":
    main()
