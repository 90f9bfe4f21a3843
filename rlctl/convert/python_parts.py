"""Spec values of what a Python file hands to a trainer: reward functions, environments, tools.

The functions are called by the formulas of the tables, see `rlctl.convert.table.compute`. What has no
counterpart raises `NoCounterpart` with the reason: a spec never gets another reward than the file's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlctl.convert.expressions import NoCounterpart, Open
from rlctl.convert.extract import ToolClass
from rlctl.convert.python_file import Definition, LibraryName, Pretrained, PythonFile, Unresolved

#: Rewards of TRL that have a grader here.
_TRL_GRADERS = {"accuracy_reward": "maths", "reasoning_accuracy_reward": "maths"}
_TRL_OVERLONG = "get_soft_overlong_punishment"
#: Arguments of that reward under `trl grpo`, which calls it itself.
_TRL_OVERLONG_ARGUMENTS = (1280, 256)
_TRL = frozenset({"trl"})


def reward_terms(
    functions: Any, weights: Any, model: Any, longest: Any, environment: Any
) -> list[dict[str, Any]] | str:
    """The value of `reward.terms`: of TRL's `reward_funcs` with `reward_weights`, names and weights.

    Args:
        model: TRL's `reward_model_name_or_path`, which comes before the functions.
        longest: its `max_completion_length`.
        environment: its `environment_factory`.

    Raises:
        NoCounterpart: a function has no name that rlctl can import, or another meaning here.
    """
    terms: list[dict[str, Any]] = []
    for function, weight in _weighted(functions, weights, model):
        if isinstance(function, Pretrained):
            terms.append({"name": "model", "weight": weight})
        elif isinstance(function, LibraryName):
            grader = _library_grader(function, longest)
            terms += [{"name": grader, "weight": weight}] if grader else []
        elif is_environments_reward(function):
            if weight != 1 or not environment:
                raise NoCounterpart(f"{function.label} gives the environment's own reward, whose weight is 1")
        else:
            terms.append({"name": _importable(function), "weight": weight})
    if sum(term["name"] == "model" for term in terms) > 1:
        raise NoCounterpart("two reward models: there is one, reward.model.path")
    return terms


def reward_model(functions: Any, own: Any, model: Any, older: Any) -> str:
    """The value of `reward.model.path`: the only model among the reward functions.

    Args:
        own: PPOTrainer's `reward_model`.
        model: TRL's `reward_model_name_or_path`.
        older: its older `reward_model_path`.

    Raises:
        NoCounterpart: PPOTrainer's model has no name in the file.
    """
    for item in _listed(own):
        if not isinstance(item, Pretrained):
            raise NoCounterpart(f"the file does not determine {_short(item)}")
    paths = [item for item in [*_listed(functions), *_listed(own)] if isinstance(item, Pretrained)]
    paths += [item for item in (model, older) if item]
    return str(paths[0]) if paths else "leave out"


def overlong_penalty(functions: Any, weights: Any, model: Any, longest: Any) -> list[Any]:
    """Length of the buffer and factor of TRL's `get_soft_overlong_punishment`; without it `leave out`."""
    for function, weight in _weighted(functions, weights, model):
        if isinstance(function, LibraryName) and function.name.endswith(f".{_TRL_OVERLONG}"):
            return [_overlong_arguments(function, longest)[1], weight]
    return ["leave out", "leave out"]


def environment_name(factory: Any, tools: Any) -> str:
    """The value of `environment.name`: TRL's `environment_factory`, with its `tools`.

    Raises:
        NoCounterpart: it is no class that rlctl can import, or there are tools beside its methods.
    """
    classes = _listed(factory)
    functions = _listed(tools)
    if not classes and not functions:
        return "leave out"
    if len(functions) == 1 and isinstance(functions[0], ToolClass):
        return str(functions[0])
    if functions:
        names = ", ".join(_short(function) for function in functions)
        message = "tools are the public methods of a class with `reset`: write one, and name it"
        raise NoCounterpart(f"{names}: {message}")
    if len(classes) > 1:
        names = ", ".join(_short(kind) for kind in classes)
        raise NoCounterpart(f"several: name one of {names}, and the others in environment.others")
    [kind] = classes
    if isinstance(kind, dict) and "" in kind:
        raise NoCounterpart("an object of a class: name a class without arguments")
    if not isinstance(kind, Definition) or isinstance(kind.node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise NoCounterpart(f"{_short(kind)} is no class that can be imported: name one as file.py:Name")
    return _checked(kind)


def _weighted(functions: Any, weights: Any, model: Any) -> list[tuple[Any, float]]:
    """Each reward with its weight."""
    items = [*([Pretrained(model)] if model else []), *map(_registered, _listed(functions))]
    if isinstance(weights, Open):
        raise NoCounterpart(f"the weights of {', '.join(map(_short, items))} are {weights.text}")
    factors = [1.0] * len(items) if weights is None else [float(weight) for weight in _listed(weights)]
    if len(factors) != len(items):
        raise NoCounterpart(f"{len(items)} rewards and {len(factors)} weights")
    return list(zip(items, factors, strict=True))


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Open):
        raise NoCounterpart(f"not determined by the file: {value.text}")
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _registered(item: Any) -> Any:
    """What a name on the command line of `trl` means: one of TRL's rewards, or an import path."""
    if type(item) is not str:
        return item
    module, _, name = item.rpartition(".")
    here = PythonFile(Path.cwd() / "trl", None, {}, _TRL)
    try:
        return here._imported(module or "trl.rewards", name, 0)
    except ValueError as error:
        raise NoCounterpart(f"{item}: {error}") from error


def _library_grader(function: LibraryName, longest: Any) -> str | None:
    """The grader of a library's reward; None: it is the penalty for long responses."""
    name = function.name.rpartition(".")[2]
    if name == _TRL_OVERLONG:
        _overlong_arguments(function, longest)
        return None
    if function.call is None and name in _TRL_GRADERS and function.name.startswith("trl."):
        return _TRL_GRADERS[name]
    message = f"{function} has no counterpart: write it as a function of a file"
    raise NoCounterpart(f"{message}, as `from {function.name.rpartition('.')[0]} import {name}`")


def _overlong_arguments(function: LibraryName, longest: Any) -> tuple[int, int]:
    """Limit and buffer of the penalty, in tokens."""
    values: list[Any] = list(_TRL_OVERLONG_ARGUMENTS)
    if function.call is not None:
        arguments = dict(zip(("max_completion_len", "soft_punish_cache"), function.call.args, strict=False))
        arguments |= {word.arg or "": word.value for word in function.call.keywords}
        values = [
            getattr(arguments.get(key), "value", None) for key in ("max_completion_len", "soft_punish_cache")
        ]
    limit, buffer = values
    if limit != longest or not isinstance(buffer, int):
        raise NoCounterpart(f"{function} ends at {limit} tokens; reward.overlong at data.max_response_length")
    return limit, buffer


def _importable(function: Any) -> str:
    """`file.py:name` of a reward function that rlctl calls as TRL does."""
    if isinstance(function, dict) and "" in function:
        raise NoCounterpart(f"{_short(function)} is an object: write a function that calls it")
    if isinstance(function, Unresolved) and function.startswith("lambda"):
        raise NoCounterpart(f"`{function}` has no name: write it as a function of a file")
    if isinstance(function, Unresolved) and ".py:" in function:
        raise NoCounterpart(str(function))
    if isinstance(function, Unresolved):
        raise NoCounterpart(f"the file does not determine `{function}`: name functions of a file")
    if not isinstance(function, Definition):
        raise NoCounterpart(f"`{_short(function)}` is no function that can be imported: write one in a file")
    if isinstance(function.node, ast.ClassDef):
        raise NoCounterpart(f"{function} is a class: write a function")
    if function.node is not None:
        names = _parameters(function.node)
        if "environments" in names:
            message = f"{function.label} reads the environments: compute the reward in their method"
            raise NoCounterpart(f"{message} `get_reward`, and leave the function out")
        if "completions" not in names:
            raise NoCounterpart(
                f"{function} has no parameter `completions`: name it, for rlctl to call it as TRL"
            )
    return _checked(function)


def _checked(definition: Definition) -> str:
    """The name of a definition that an import of its file gives, and that starts no training."""
    if not definition.at_top:
        raise NoCounterpart(f"{definition} is defined inside a function: move it out of it")
    if definition.file.trains_on_import:
        raise NoCounterpart(f"an import of {definition} would train: move it to a file of its own")
    return str(definition)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def is_environments_reward(function: Any) -> bool:
    """Whether a function only returns the attribute `reward`, or `get_reward()`, of each environment."""
    node = function.node if isinstance(function, Definition) else None
    if not isinstance(node, ast.FunctionDef) or "environments" not in _parameters(node):
        return False
    statements = [part for part in node.body if not isinstance(getattr(part, "value", None), ast.Constant)]
    match statements:
        case [ast.Return(value=ast.ListComp(elt, [ast.comprehension(target=ast.Name(id=name), ifs=[])]))]:
            text = ast.unparse(elt)
            rewards = [f"{name}.reward", f"{name}.get_reward()"]
            return text in (*rewards, *(f"float({reward})" for reward in rewards))
    return False


def _short(value: Any) -> str:
    """A name as a message gives it."""
    if isinstance(value, dict) and "" in value:
        return f"{value[''].label}(…)"
    return value.label if isinstance(value, Definition) else str(getattr(value, "text", value))


def verl_reward(has_model: Any, path: Any, name: Any, manager: Any) -> str:
    """The value of `reward.name` of verl's reward model or function.

    Raises:
        NoCounterpart: the reward manager calls functions in another way.
    """
    if has_model:
        return "model"
    if manager not in ("naive", "dapo", "prime"):
        raise NoCounterpart(
            f"the reward manager {manager} calls functions its own way: write one per response"
        )
    return f"{path}:{name}" if path else "leave out"


def verl_environment(
    has_turns: Any, loop: Any, loops: Any, tools: Any, functions: Any, interaction: Any
) -> str:
    """The value of `environment.name` of verl's conversations with tools and agent loops.

    Raises:
        NoCounterpart: there is one; its classes are verl's own.
    """
    if not has_turns and loop == "single_turn_agent":
        return "leave out"
    files = ", ".join(str(file) for file in (loops, tools, functions, interaction) if file)
    raise NoCounterpart(f"verl's classes{files and f' of {files}'} are its own: {_OWN_CLASS}")


_OWN_CLASS = "write a class with `reset`, whose methods are the tools, or an agent function, and name it"


def verl_distillation(is_on: Any, mode: Any) -> str:
    """The value of `algorithm.teacher.kl_type`.

    Raises:
        NoCounterpart: there is a teacher; losses and their clamps differ.
    """
    if not is_on:
        return "leave out"
    raise NoCounterpart(
        f"verl's distillation by {mode} clamps its terms: choose rlctl's with kl_in and kl_type"
    )


def openrlhf_reward(model: Any, url: Any) -> str:
    """The value of `reward.name` of OpenRLHF's reward model, server or function.

    Raises:
        NoCounterpart: it is a server, a function, or several models.
    """
    if url:
        message = f"OpenRLHF calls reward_func(queries, prompts, labels) of {url}, or a server there"
        raise NoCounterpart(f"{message}: write `def f(response, ground_truth)` in a file, and name file.py:f")
    if model and "," in str(model):
        raise NoCounterpart(f"several reward models: {model}")
    return "model" if model else "leave out"


def openrlhf_agent(path: Any) -> str:
    """The value of `environment.name` of OpenRLHF's agent.

    Raises:
        NoCounterpart: there is one.
    """
    if not path:
        return "leave out"
    raise NoCounterpart(f"the classes of {path} are OpenRLHF's own: {_OWN_CLASS}")


def slime_reward(kind: Any, function: Any, url: Any) -> str:
    """The value of `reward.name` of slime's rewards.

    Raises:
        NoCounterpart: it is a function, a server, or a grader without counterpart.
    """
    if function or url:
        message = f"slime calls {function or url} with its samples"
        raise NoCounterpart(f"{message}: write `def f(response, ground_truth)` in a file, and name file.py:f")
    graders = {"math": "maths", "deepscaler": "maths", "dapo": "maths", None: "leave out"}
    if kind not in graders:
        raise NoCounterpart(f"no grader does what {kind} does")
    return graders[kind]


def slime_filter(path: Any) -> Any:
    """The value of `algorithm.filter_groups.enable` of slime's filter of groups.

    Raises:
        NoCounterpart: it is another filter than that of groups whose rewards are all equal.
    """
    if not path:
        return "leave out"
    if str(path).endswith("check_reward_nonzero_std"):
        return True
    raise NoCounterpart(f"{path}: groups are dropped where all rewards are equal, by no other rule")


def only(values: Any, allowed: list[Any]) -> list[Any]:
    """The values that are allowed."""
    return [value for value in _listed(values) if value in allowed]


FORMULAS: dict[str, Callable[..., Any]] = {
    "only": only,
    "drops": lambda values, allowed: len(only(values, allowed)) < len(_listed(values)),
    "is_parquet": lambda name: str(name).endswith(".parquet"),
    "reward_terms": reward_terms,
    "reward_model": reward_model,
    "overlong_penalty": overlong_penalty,
    "environment_name": environment_name,
    "verl_reward": verl_reward,
    "verl_environment": verl_environment,
    "verl_distillation": verl_distillation,
    "openrlhf_reward": openrlhf_reward,
    "openrlhf_agent": openrlhf_agent,
    "slime_reward": slime_reward,
    "slime_filter": slime_filter,
}
