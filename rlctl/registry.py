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
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from rlctl.errors import RunFailure, UsageError
from rlctl.user_code import USER_MODULES, is_file_function, load_function

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import BaseModel

Function = TypeVar("Function", bound=Callable[..., Any])
Unit = Literal["token", "sequence"]


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
    label: str  # short description for users
    formula: str = ""  # what it computes, in the notation of docs/reference/algorithms.md
    source: str = ""  # the paper or the code that the formula comes from
    #: inputs that it reads beyond those in every batch; for a grader, its requirements in words
    needs: frozenset[str] = frozenset()
    #: dotted spec keys that it reads; the spec warns about other such keys that are set
    options: frozenset[str] = frozenset()
    #: class of its parameters, which are validated and passed to it; None: it has none
    params: type[BaseModel] | None = None
    capabilities: Any = None  # for a rollout engine, its `EngineCapabilities`
    unit: Unit = "token"  # for a correction weight or rejection criterion: what has one value
    #: for a weight or criterion, typical thresholds as written in a spec; `--what-if` and the tests of every
    #: part use them
    thresholds: tuple[str, ...] = ()
    #: for a loss that needs statistics of the whole mini-batch, a function (`rlctl.algos.losses.WholeBatch`,
    #: `LossRule`) → value of `LossRule.of_batch` for the loss
    of_batch: Callable[..., Any] | None = None
    #: its expected on-policy gradient is that of the expected reward; for a correction weight, the off-policy
    #: gradient without a bound (tested by enumeration)
    unbiased: bool = False
    #: for a loss, tokens with advantage 0 have no gradient (tested), so rows with only such tokens need no
    #: backward pass
    needs_advantage: bool = False
    clip: ClipBand | None = None  # for a loss that clips its ratio
    experimental: bool = False  # not yet validated on real runs
    #: for a grader: response → its answer as text that is equal for equal answers
    answer_of: Callable[[str], str | None] | None = None
    #: for a grader, names of data sources as a regular expression, by which `reward.name: auto` chooses; it
    #: must match a part of the name between `/`, `_`, `.`, `-` and spaces
    data_sources: str = ""
    in_process: bool = False  # for a built-in grader: it computes too little to need a separate process

    def example_params(self) -> BaseModel | None:
        """Parameters with their defaults, or the first example for required ones; None: it has none."""
        if self.params is None:
            return None
        fields = self.params.model_fields.items()
        return self.params(**{name: (f.examples or [None])[0] for name, f in fields if f.is_required()})


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
    """

    # Set while a user's file is imported; shared by all registries, as a file may define parts of several.
    _prefix = ""

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
    ) -> None:
        self.kind, self.key, self.module, self.takes, self.inputs = kind, key, module, takes, inputs
        self.takes_params = takes_params
        self._a_kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        plural = plural or kind + ("es" if kind.endswith("s") else "s")
        self.group = "rlctl." + plural.replace(" ", "_")
        self._parts: dict[str, Part] = {}
        self._is_loaded = False

    def register(
        self,
        name: str | None = None,
        *,
        label: str = "",
        formula: str = "",
        source: str = "",
        needs: Iterable[str] = (),
        options: Iterable[str] = (),
        params: type[BaseModel] | None = None,
        capabilities: Any = None,
        unit: Unit = "token",
        thresholds: Iterable[str] = (),
        of_batch: Callable[..., Any] | None = None,
        unbiased: bool = False,
        needs_advantage: bool = False,
        clip: ClipBand | None = None,
        experimental: bool = False,
        answer_of: Callable[[str], str | None] | None = None,
        data_sources: str = "",
        in_process: bool = False,
    ) -> Callable[[Function], Function]:
        """Decorator that registers a function; arguments as in `Part`, the default name is the function's.

        Raises:
            ValueError: the name is taken, an argument has the wrong type, or such parts cannot have this
                input or parameters.
        """
        if callable(name):
            raise ValueError("write the decorator with parentheses: @….register()")
        if unit not in get_args(Unit):
            raise ValueError(f"unit={unit!r}: write {' or '.join(map(repr, get_args(Unit)))}")
        if params is not None and not hasattr(params, "model_fields"):
            raise ValueError(f"params={params!r}: give a subclass of pydantic.BaseModel")
        needs = frozenset([needs] if isinstance(needs, str) else needs)
        if self.inputs is not None and (unknown := sorted(needs - set(self.inputs.split()))):
            known_inputs = ", ".join(self.inputs.split()) or "nothing"
            raise ValueError(f"needs={unknown}: {self._a_kind} can need {known_inputs}")
        if params is not None and not self.takes_params:
            raise ValueError(f"params: {self._a_kind} has no parameters in a spec; use constants of its file")

        def decorate(function: Function) -> Function:
            known = self._prefix + (name or function.__name__)
            if known in self._parts and not self._prefix:
                raise ValueError(f"{self.kind} {known} is registered twice")
            if not function.__module__.startswith("rlctl."):
                USER_MODULES.add(function.__module__)
            self._parts[known] = Part(
                name=known,
                function=function,
                label=label or _first_line(function) or known,
                formula=formula,
                source=source,
                needs=needs,
                options=frozenset(options),
                params=params,
                capabilities=capabilities,
                unit=unit,
                thresholds=tuple(thresholds),
                of_batch=of_batch,
                unbiased=unbiased,
                needs_advantage=needs_advantage,
                clip=clip,
                experimental=experimental,
                answer_of=answer_of,
                data_sources=data_sources,
                in_process=in_process,
            )
            return function

        return decorate

    def part(self, name: str) -> Part:
        """The part of that name; a user's file is imported at the first call.

        Raises:
            UsageError: there is none, or the user's file cannot be imported.
        """
        self._load()
        if name not in self._parts and is_file_function(name):
            self._load_file(name)
        if name not in self._parts:
            self._load_entry_point(name)
        if name not in self._parts:
            raise UsageError(f"no {self.kind} `{name}`", where=self.key, fix=f"one of {', '.join(self)}")
        return self._parts[name]

    def parts(self) -> list[Part]:
        """All parts that iteration yields."""
        return [self.part(name) for name in self]

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
            found = f"a tensor of shape {shape}" if is_tensor else f"{type(value).__name__}, not a tensor"
            fix = f"return a tensor of shape {' or '.join(map(str, shapes))}"
            raise RunFailure(f"{self.kind} {name} returned {found}", where=self.key, fix=fix)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.part(name).function

    def __iter__(self) -> Iterator[str]:
        self._load()
        known = [name for name in self._parts if not name.rpartition(":")[0].endswith(".py")]
        yield from known
        for point in self._entry_points():
            if point.name not in known:
                yield point.name
            elif self._parts[point.name].function.__module__.startswith("rlctl."):
                what = f"{self.kind} `{point.name}` of {_owner(point)} is ignored: the name is taken"
                warnings.warn(f"{what}; rename the entry point", stacklevel=2)

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
                for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
                    importlib.import_module(f"{name}.{found.name}")
        except BaseException:
            self._is_loaded = False
            raise

    def _entry_points(self) -> Iterable[EntryPoint]:
        return _entry_points(tuple(sys.path)).get(self.group, ())

    def _load_entry_point(self, name: str) -> None:
        for point in self._entry_points():
            if point.name == name:
                try:
                    function = point.load()
                except Exception as error:
                    what = f"importing {self.kind} `{name}` failed: {type(error).__name__}: {error}"
                    fix = f"fix or uninstall {_owner(point)}"
                    raise UsageError(what, where=point.value, fix=fix) from error
                self._check(function, point.value)
                if name not in self._parts:
                    self.register(name)(function)

    def _load_file(self, name: str) -> None:
        file, _, function_name = name.rpartition(":")
        Registry._prefix = f"{file}:"
        try:
            function = load_function(name, key=self.key)
            self._check(function, name)
            if name not in self._parts:
                self.register(function_name)(function)
        finally:
            Registry._prefix = ""

    def _check(self, function: Callable[..., Any], where: str) -> None:
        names = self.takes.split()
        try:
            if names:
                inspect.signature(function).bind(*names)
            if names and inspect.iscoroutinefunction(function):
                raise UsageError(
                    f"{self._a_kind} cannot be an async function", where=where, fix="write `def`"
                )
        except TypeError as error:
            what = f"{self._a_kind} is called with {len(names)} argument{'s' * (len(names) > 1)}: {error}"
            fix = f"def {getattr(function, '__name__', 'function')}({', '.join(names)})"
            raise UsageError(what, where=where, fix=fix) from error


@cache
def _entry_points(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Group → entry points of the packages installed on `path`; reading them takes tens of milliseconds."""
    from importlib.metadata import entry_points  # slow to import

    found = entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith("rlctl.")}


def _owner(point: EntryPoint) -> str:
    """The name of the package that has the entry point."""
    return point.dist.name if point.dist else point.value


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")


ROLLOUT_ENGINES = Registry(
    "rollout engine", key="rollout.name", module="rlctl.rollout.engines", takes="context"
)
GRADERS = Registry(
    "grader",
    key="reward.name",
    module="rlctl.reward.graders rlctl.reward.code rlctl.reward.maths rlctl.reward.model"
    " rlctl.reward.sources",
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
    module="rlctl.algos.correction_weights",
    takes="log_ratio params",
    inputs="advantages age",
)
REJECTION_CRITERIA = Registry(
    "rejection criterion",
    plural="rejection criteria",
    key="algorithm.rollout_correction.rollout_rs",
    module="rlctl.algos.rejection_criteria",
    takes="log_ratio params",
    inputs="advantages age",
)
METRIC_CONVENTIONS = Registry(
    "metric convention", key="algorithm.rollout_correction.dialect", module="rlctl.algos.verl_metrics"
)
KL_ESTIMATORS = Registry(
    "kl estimator",
    key="actor.kl_loss_type",
    module="rlctl.algos.kl",
    takes="log_probs ref_log_probs rollout_log_probs",
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
DIAGNOSIS_RULES = Registry("diagnosis rule", key="--rules", module="rlctl.diagnose.rules", takes_params=False)
