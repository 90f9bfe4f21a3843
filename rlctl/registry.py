"""Registries of named parts: losses, estimators, corrections, graders, engines, trackers, diagnosis rules.

A part is registered where it is defined:

    @POLICY_LOSSES.register(label="REINFORCE", formula="−w · A · log π_θ", source="Williams 1992")
    def reinforce(…): …

The spec validates names against the registry; the JSON Schema, the dry run, the tables of the docs and the
tests of every part use it too. In addition to the built-in parts, a name can be

- an entry point of an installed package, in the registry's group, e.g. `rlctl.policy_losses`;
- `path/to/file.py:function`, a user's function, with or without the decorator.

This module does not import torch; modules that define parts import it through `rlctl.lazy`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from rlctl.errors import RunFailure, UsageError
from rlctl.files import sha256_of
from rlctl.user_code import (
    USER_MODULES,
    absolute_name,
    call_problem,
    is_file_function,
    load_function,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import BaseModel

Function = TypeVar("Function", bound=Callable[..., Any])
Unit = Literal["token", "turn", "sequence", "episode"]


@dataclass(frozen=True, slots=True)
class ClipBand:
    """Words of the dry run about a loss that clips its ratio to [1 − clip_ratio_low, 1 + clip_ratio_high]."""

    name: str  # of the clip
    bounds: str = "each token's ratio"  # the clipped quantity
    outside: str = "no gradient if it would move the ratio further out"


@dataclass(frozen=True, slots=True)
class Part:
    """One registered part."""

    name: str  # in the spec
    function: Callable[..., Any]  # the implementation; the registry defines its signature
    label: str = ""  # short description for users; default: of the function's docstring, or its name
    formula: str = ""  # what it computes, in the notation of docs/reference/algorithms.md
    source: str = ""  # the paper or the code that the formula comes from
    #: inputs that it reads beyond those in every batch; for a grader, its requirements in words; for a
    #: tracker, packages that must be installed
    needs: frozenset[str] = frozenset()
    #: dotted spec keys that it reads; the spec warns about other such keys that are set
    options: frozenset[str] = frozenset()
    #: class of its parameters, which are validated and passed to it; None: it has none
    params: type[BaseModel] | None = None
    capabilities: Any = None  # for a rollout engine, its `EngineCapabilities`
    unit: Unit = "token"  # for a correction weight or rejection criterion: what has one value
    #: for a weight or criterion: typical thresholds as written in a spec, for `--what-if` and the tests
    thresholds: tuple[str, ...] = ()
    #: for a loss of the whole mini-batch: (`WholeBatch`, `LossRule`) → `LossRule.batch_statistics`
    batch_statistics: Callable[..., Any] | None = None
    #: its expected on-policy gradient is that of the expected reward; for a correction weight, the off-policy
    #: gradient without a bound (tested by enumeration)
    unbiased: bool = False
    #: for a loss: tokens with advantage 0 have no gradient (tested): their rows skip the backward pass
    vanishes_without_advantage: bool = False
    clip: ClipBand | None = None  # for a loss that clips its ratio
    experimental: bool = False  # not yet validated on real runs
    #: for a grader: response → its answer as text that is equal for equal answers
    answer_of: Callable[[str], str | None] | None = None
    #: for a grader: answers can be ground truths, and answers with different texts may be equal
    compares_answers: bool = False
    #: for a grader: ground truth → a response that must score 1 and one that must score 0, each None if there
    #: is none; or None if the scores are not 0 and 1. ValueError: the ground truth is unreadable. Default:
    #: the ground truth, and the ground truth with its first number increased
    known_responses: Callable[[str], tuple[str | None, str | None] | None] | None = None
    #: for a grader, names of data sources as a regular expression, by which `reward.name: auto` chooses; it
    #: must match a part of the name between `/`, `_`, `.`, `-` and spaces
    data_sources: str = ""
    #: for a grader: its least and greatest score; None: not known, so equal scores have no interval
    score_range: tuple[float, float] | None = None
    in_process: bool = False  # for a built-in grader: it takes no time, so it needs no process with limits
    #: for a loss term: column that it reads → (`TokenBatch`) → its values (M,), once before the updates
    columns: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)  # for a loss term: its metrics → what they are
    is_decorated: bool = True  # False: a function of a file or package without `register`

    @property
    def title(self) -> str:
        """The label, and whether the part is experimental."""
        return f"{self.label} (experimental)" if self.experimental else self.label


class PartInputs:
    """Base of the inputs of parts; an attribute of an earlier version is an error that says what to do."""

    __slots__ = ()
    #: name of such an attribute → what to do instead
    removed: ClassVar[dict[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        fix = self.removed.get(name)
        message = f"{type(self).__name__} has no attribute {name}"
        raise AttributeError(f"{message}: {fix} (see docs/how-to/extend.md)" if fix else message)


class Registry(Mapping[str, Callable[..., Any]]):
    """Mapping name → function for one kind of part; `part` returns the full record.

    Iteration yields built-in parts and those of installed packages, but not those of users' files.

    Args:
        kind: kind of part, for messages, e.g. `policy loss`.
        key: the spec key that names a part, for messages.
        module: modules that define the built-in parts, or packages of which every module is imported;
            separated by spaces.
        plural: of `kind`, if it is irregular.
        takes: names of the arguments that every part takes, separated by spaces; empty: not the same for all.
        inputs: values that `Part.needs` may have, separated by spaces; None: any.
        takes_params: whether the spec has a key for parameters of such parts.
        capabilities: name of the class of `Part.capabilities`; empty: such parts have none.
    """

    #: every registry: a user's file may define parts of several
    all: ClassVar[list[Registry]] = []
    #: all decorated functions; the spec names those of users' files, metadata those of packages
    _decorated: ClassVar[list[tuple[Registry, Part]]] = []
    _is_importing: ClassVar[bool] = False  # a user's file or a package
    #: warnings that were shown
    _warned: ClassVar[set[str]] = set()

    def __init__(
        self,
        kind: str,
        *,
        key: str,
        module: str,
        plural: str = "",
        takes: str = "",
        inputs: str | None = None,
        takes_params: bool = True,
        capabilities: str = "",
    ) -> None:
        self.capabilities = capabilities
        self.kind = kind
        self.key = key
        self.module = module
        self.takes = takes
        self.inputs = inputs
        self.takes_params = takes_params
        self._a_kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        plural = plural or kind + ("es" if kind.endswith("s") else "s")
        self.group = "rlctl." + plural.lower().replace(" ", "_")
        self._parts: dict[str, Part] = {}
        self._is_loaded = False
        Registry.all.append(self)

    def register(self, name: str | None = None, **arguments: Any) -> Callable[[Function], Function]:
        """Decorator that registers a function; arguments as in `Part`, the default name is the function's.

        A function that is defined again, as in a notebook cell that is run again, replaces the earlier one.

        Raises:
            TypeError: there is no such argument, or it has another name now.
            ValueError: the name is taken, an argument has the wrong type, or such parts cannot have this
                input or parameters.
            UsageError: such a part is called with other arguments than the function takes.
        """
        if callable(name):
            raise ValueError("write the decorator with parentheses: @….register()")
        for old in _RENAMED.keys() & arguments.keys():
            raise TypeError(f"{old} is called {_RENAMED[old]} now")
        described = self._described(Part("", _undefined, **arguments))

        def decorate(function: Function) -> Function:
            if not callable(function):
                raise ValueError(f"{function!r} is not a function")
            known = name or function.__name__
            label = described.label or _first_line(function) or known
            registered = replace(described, name=known, function=function, label=label)
            self._decorated.append((self, registered))
            if not is_builtin(function):
                USER_MODULES.add(function.__module__)
                if self._is_importing:
                    return function
                self._check(function, known)
                self._load()  # so that a built-in part of this name is known
            earlier = self._parts.get(known)
            if earlier and _identity(earlier.function) != _identity(function):
                raise ValueError(f"{self.kind} {known} is registered twice")
            self._parts[known] = registered
            return function

        return decorate

    def _described(self, registered: Part) -> Part:
        """The part, with its arguments checked and its lists as sets and tuples."""
        for names, (kind, expected) in _ARGUMENTS.items():
            for name in names.split():
                value = getattr(registered, name)
                if not isinstance(value, kind):
                    raise ValueError(f"{name}={value!r}: give {expected}")
        if registered.unit not in get_args(Unit):
            raise ValueError(f"unit={registered.unit!r}: write {' or '.join(map(repr, get_args(Unit)))}")
        if registered.params is not None and not hasattr(registered.params, "model_fields"):
            raise ValueError(f"params={registered.params!r}: give a subclass of pydantic.BaseModel")
        if registered.params is not None and not self.takes_params:
            raise ValueError(f"params: {self._a_kind} has no parameters in a spec; use constants of its file")
        if (
            self.capabilities
            and registered.capabilities
            and type(registered.capabilities).__name__ != self.capabilities
        ):
            raise ValueError(f"capabilities={registered.capabilities!r}: give {self.capabilities}(…)")
        try:
            re.compile(registered.data_sources)
        except re.error as error:
            message = f"data_sources={registered.data_sources!r} is no regular expression: {error}"
            raise ValueError(message) from error
        thresholds = _texts("thresholds", registered.thresholds)
        options = _texts("options", registered.options)
        wrong = [text for text in thresholds if not _THRESHOLD.fullmatch(text)]
        if wrong:
            raise ValueError(f'thresholds={wrong}: write positive numbers as in a spec, "2.0" or "0.5_2.0"')
        wrong = [key for key in options if "." not in key]
        if wrong:
            raise ValueError(f'options={wrong}: write keys of the spec, "actor.clip_ratio_low"')
        needs = frozenset(
            [registered.needs] if isinstance(registered.needs, str) else _texts("needs", registered.needs)
        )
        if self.inputs is not None and (unknown := sorted(needs - set(self.inputs.split()))):
            known_inputs = ", ".join(self.inputs.split()) or "nothing"
            raise ValueError(f"needs={unknown}: {self._a_kind} can need {known_inputs}")
        return replace(registered, thresholds=thresholds, options=frozenset(options), needs=needs)

    def part(self, name: str) -> Part:
        """The part of that name; a user's file is imported at the first call.

        Raises:
            UsageError: there is none, or the user's file or the package cannot be imported.
        """
        if name not in self._parts and not is_file_function(name):
            self._load()
        if name in self._parts:
            return self._parts[name]
        kind = self._with_argument(name)
        if kind:
            return replace(self._parts[kind], name=name)
        name = absolute_name(name)
        if name not in self._parts:
            self._import(name)
        if name not in self._parts:
            raise UsageError(f"no {self.kind} `{name}`", where=self.key, fix=f"one of {', '.join(self)}")
        return self._parts[name]

    def knows(self, name: str) -> bool:
        """Whether a built-in part or one of an installed package has this name, maybe with an argument."""
        return bool(self._with_argument(name)) or name in set(self)

    def _with_argument(self, name: str) -> str:
        """The registered name, which ends with a colon, of a part with an argument behind it; empty: none."""
        kind, colon, argument = name.partition(":")
        return f"{kind}:" if argument and f"{kind}{colon}" in self._parts else ""

    def parts(self) -> list[Part]:
        """All parts that iteration yields; a part that cannot be imported is left out, with a warning."""
        parts = []
        for name in self:
            try:
                parts.append(self.part(name))
            except UsageError as error:
                self._warn(f"{self.kind} `{name}` is left out: {error.what} ({error.fix})")
        return [part for part in parts if part.name in self._parts]  # not the names before a renaming

    def stable(self) -> list[str]:
        """Names of the parts that are not experimental."""
        return [part.name for part in self.parts() if not part.experimental]

    def check_returned(self, name: str, value: object, *shapes: tuple[int, ...]) -> None:
        """Checks the tensor that a part returned.

        Raises:
            RunFailure: it is no tensor, or has none of these shapes.
        """
        is_tensor = hasattr(value, "detach")
        shape = tuple(getattr(value, "shape", ()))
        if not is_tensor or shape not in shapes:
            returned = f"a tensor of shape {shape}" if is_tensor else f"{type(value).__name__}, not a tensor"
            fix = f"return a tensor of shape {' or '.join(map(str, shapes))}"
            raise RunFailure(f"{self.kind} {name} returned {returned}", where=self.key, fix=fix)

    def check_gradient(self, name: str, value: Any, log_probs: Any, source: str) -> None:
        """Checks that gradients flow through `value` if they flow through `log_probs`, called `source`.

        Raises:
            RunFailure: they do not.
        """
        if log_probs.requires_grad and not value.requires_grad:
            fix = f"compute it from {source} without detach()"
            raise RunFailure(f"{self.kind} {name} has no gradient", where=self.key, fix=fix)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.part(name).function

    def __iter__(self) -> Iterator[str]:
        self._load()
        known = [name for name in self._parts if not is_file_function(name)]
        yield from known
        for name, points in self._entry_points().items():
            if name not in known:
                yield name
            elif is_builtin(self._parts[name].function):
                message = f"{self.kind} `{name}` of {_owners(points)} is ignored: the name is taken"
                self._warn(f"{message}; rename the entry point")

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _load(self) -> None:
        """Import the modules that define the built-in parts."""
        if self._is_loaded:
            return
        self._is_loaded = True  # the modules may use the registry
        try:
            for name in self.module.split():
                module = importlib.import_module(name)
                for module_info in pkgutil.iter_modules(getattr(module, "__path__", [])):
                    importlib.import_module(f"{name}.{module_info.name}")
        except BaseException:
            self._is_loaded = False
            raise

    def _entry_points(self) -> Mapping[str, list[EntryPoint]]:
        """Name → the entry points that have it."""
        return _entry_points(tuple(sys.path)).get(self.group, {})

    def _import(self, name: str) -> None:
        """Adds the function of a user's file, or the entry point of this name, if there is one."""
        if is_file_function(name):
            with _importing():
                self._add(name, load_function(name, key=self.key), name)
            return
        points = self._entry_points().get(name, [])
        if not points:
            return
        if len(points) > 1:
            message = f"{self.kind} `{name}` is an entry point of {_owners(points)}"
            raise UsageError(message, where=points[0].value, fix="uninstall one of them")
        try:
            with _importing():
                function = points[0].load()
        except (Exception, SystemExit) as error:
            message = f"importing {self.kind} `{name}` failed: {type(error).__name__}: {error}"
            fix = f"fix or uninstall {_owners(points)}"
            raise UsageError(message, where=points[0].value, fix=fix) from error
        self._add(name, function, points[0].value)

    def _add(self, name: str, function: Callable[..., Any], where: str) -> None:
        """Registers an imported function under `name`, with the arguments of its decorator if it has one."""
        self._check(function, where)
        made = [(owner, part) for owner, part in self._decorated if part.function is function]
        made_here = next((part for owner, part in made if owner is self), None)
        if made_here is not None:
            if self._parts.get(made_here.name) is made_here:
                del self._parts[made_here.name]  # the user has imported the package, whose metadata name it
            self._parts[name] = replace(made_here, name=name)
        elif made:
            owner, made_here = made[0]
            message = f"{made_here.name} is registered as {owner._a_kind}, not as {self._a_kind}"
            raise UsageError(message, where=where, fix=f"name it in {owner.key}")
        else:
            USER_MODULES.add(_identity(function)[0])
            label = _first_line(function) or name.rpartition(":")[2]
            self._parts[name] = Part(name, function, label, is_decorated=False)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, PartWarning, stacklevel=3)

    def _check(self, function: Callable[..., Any], where: str) -> None:
        names = self.takes.split()
        if not names:
            return
        problem = call_problem(function, *names)
        if problem:
            message = (
                f"{self._a_kind} is called with {len(names)} argument{'s' * (len(names) > 1)}: {problem}"
            )
            fix = f"def {getattr(function, '__name__', 'function')}({', '.join(names)})"
            raise UsageError(message, where=where, fix=fix)
        if inspect.iscoroutinefunction(function):
            raise UsageError(f"{self._a_kind} cannot be an async function", where=where, fix="write `def`")


@contextmanager
def _importing() -> Iterator[None]:
    """Decorators register no names meanwhile, except those of built-in parts."""
    outer = Registry._is_importing
    Registry._is_importing = True
    try:
        yield
    finally:
        Registry._is_importing = outer


class PartWarning(UserWarning):
    """A part of an installed package is not used, or a package is missing."""


#: A positive number, or two of them joined with `_`.
_THRESHOLD = re.compile(r"(?=.*[1-9])[0-9.e+-]+(_[0-9.e+-]+)?")


#: Arguments of `register` → their type, and what to give, for messages.
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "label formula source data_sources": (str, "a text"),
    "unbiased vanishes_without_advantage experimental in_process compares_answers": (bool, "True or False"),
    "clip": (ClipBand | None, "a ClipBand"),
    "batch_statistics answer_of known_responses": (Callable | None, "a function"),
    "columns metrics": (Mapping, "a mapping from names"),
}


#: Arguments of `register` in earlier versions → their name now.
_RENAMED = {"needs_advantage": "vanishes_without_advantage", "of_batch": "batch_statistics"}


def _undefined() -> None:
    """The function of a part until its decorator is applied."""


def _texts(name: str, values: Iterable[str]) -> tuple[str, ...]:
    texts = () if isinstance(values, str) else tuple(values)
    if isinstance(values, str) or not all(isinstance(value, str) for value in texts):
        raise ValueError(f"{name}={values!r}: give a list of texts")
    return texts


def is_builtin(function: Callable[..., Any]) -> bool:
    """Whether rlctl defines the function of a part, or the function of a diagnosis rule."""
    return _identity(function)[0].startswith("rlctl.")


def _identity(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name: equal for two definitions of one function. For a diagnosis rule, of its function."""
    function = getattr(function, "detect", function)
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", None) or "", name


def source_sha256(function: Callable[..., Any]) -> str | None:
    """SHA-256 of the imported file that defines the function of a part; None: a built-in part."""
    module = sys.modules.get(_identity(function)[0])
    file = getattr(module, "__file__", None)
    if file is None or is_builtin(function):
        return None
    return getattr(module, "__sha256__", None) or sha256_of(Path(file))


@cache
def _entry_points(path: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:
    """Group → name → entry points of the packages on `path`; reading them takes tens of milliseconds."""
    from importlib.metadata import entry_points  # slow to import

    installed = entry_points()
    of_groups: dict[str, dict[str, list[EntryPoint]]] = {}
    for group in installed.groups:
        for point in installed.select(group=group) if group.startswith("rlctl.") else ():
            points = of_groups.setdefault(group, {}).setdefault(point.name, [])
            if point not in points:  # a package may be on the path twice
                points.append(point)
    return of_groups


def _owners(points: Iterable[EntryPoint]) -> str:
    """The packages that have the entry points."""
    return " and ".join(dict.fromkeys(point.dist.name if point.dist else point.value for point in points))


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")


ROLLOUT_ENGINES = Registry(
    "rollout engine",
    key="rollout.name",
    module="rlctl.rollout.engines",
    takes="context",
    capabilities="EngineCapabilities",
)
TRAINING_ENGINES = Registry(
    "training engine",
    key="engine.name",
    module="rlctl.engine.engines",
    takes="context",
    takes_params=False,
)
ENVIRONMENTS = Registry(
    "environment",
    key="environment.name",
    module="rlctl.environment.build rlctl.environment.guess_number",
)
GRADERS = Registry(
    "grader",
    key="reward.name",
    module="rlctl.reward.graders rlctl.reward.code rlctl.reward.maths rlctl.reward.model rlctl.reward.build"
    " rlctl.reward.judge rlctl.reward.form rlctl.reward.ifeval",
)
TRACKERS = Registry(
    "tracker",
    key="trainer.logger",
    module="rlctl.track.tracker",
    takes="inputs",
    takes_params=False,
)
POLICY_LOSSES = Registry(
    "policy loss",
    key="algorithm.rollout_correction.loss_type",
    module="rlctl.algos.losses rlctl.algos.more_losses rlctl.algos.batch_losses",
    takes="rule inputs",
    inputs="old_log_probs",
)
CORRECTION_WEIGHTS = Registry(
    "correction weight",
    key="algorithm.rollout_correction.rollout_is",
    module="rlctl.algos.weights_and_criteria",
    takes="log_ratio params",
    inputs="advantages age",
)
REJECTION_CRITERIA = Registry(
    "rejection criterion",
    plural="rejection criteria",
    key="algorithm.rollout_correction.rollout_rs",
    module="rlctl.algos.weights_and_criteria",
    takes="log_ratio params",
    inputs="advantages age",
)
KL_ESTIMATORS = Registry(
    "KL estimator",
    key="actor.kl_loss_type",
    module="rlctl.algos.kl",
    takes="log_probs ref_log_probs rollout_log_probs unit",
    inputs="rollout_log_probs",
    takes_params=False,
)
ADVANTAGE_ESTIMATORS = Registry(
    "advantage estimator",
    key="algorithm.adv_estimator",
    module="rlctl.algos.estimators",
    takes="inputs",
    inputs="group_ids values baseline_scores score_norms sequence_weights",
)
LOSS_TERMS = Registry(
    "loss term",
    key="actor.terms",
    module="",
    takes="tokens",
    inputs="entropy",
    takes_params=False,
)
#: Functions without arguments that return a `Benchmark`; those of rlctl are in `prepare/benchmarks.toml`.
NAMED_BENCHMARKS = Registry("benchmark", key="--data", module="", inputs="", takes_params=False)
#: Functions without arguments that return a `Layout`; those of rlctl are in `prepare/recipes.py`.
DATA_RECIPES = Registry("data recipe", key="--recipe", module="", inputs="", takes_params=False)
DIAGNOSIS_RULES = Registry(
    "diagnosis rule",
    key="--rules",
    module="rlctl.diagnose.rules_samples rlctl.diagnose.rules_engines rlctl.diagnose.rules_update"
    " rlctl.diagnose.rules_weights rlctl.diagnose.rules_rejection rlctl.diagnose.rules_reward"
    " rlctl.diagnose.rules_episodes rlctl.diagnose.rules_ratio rlctl.diagnose.rules_length"
    " rlctl.diagnose.rules_policy rlctl.diagnose.rules_dumps",
    takes="run",
    takes_params=False,
)
