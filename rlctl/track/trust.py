"""Whether this user has allowed the code that a directory of results names.

A spec can name code: a user's `file.py:function`, code that a model ships, arguments of an engine. That a
directory names code is no permission to run it, because its author may be someone else. A run writes
`code.json`: the values that name code and their parameters, the SHA-256 of the code files, and a signature.
The key is in the user's state directory, or on clusters in an environment variable, so nobody else can sign.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from platformdirs import user_state_path

from rlctl.capabilities.sections import sections
from rlctl.errors import SpecError, UsageError
from rlctl.files import sha256_of, write_text
from rlctl.processes import SERVER_KEY, TRUST_KEY, is_this_machine
from rlctl.run_spec.keys import flat
from rlctl.run_spec.load import RUN_SPEC_FILE, load_spec, recorded_spec
from rlctl.track.redaction import redact_tree
from rlctl.track.run_dir import read_mapping
from rlctl.user_code import COMMANDS, absolute_name, files_of, is_file_function, split_names

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

#: File in a directory of results: the code that it runs, signed.
CODE_FILE = "code.json"
#: The flag that allows the code of a directory.
FLAG = "--trust"
_SHORTEST_KEY = 16
#: Sections of a spec that a signature covers as a whole if it covers anything, and single keys.
_SIGNED_SECTIONS = ("reward", "environment", "model")
#: Environment variables whose keys go with requests to addresses in a spec, and the key that names another.
_SENT_KEYS, _KEY_VARIABLE = (SERVER_KEY, "OPENAI_API_KEY"), "reward.judge.key_variable"
_SIGNED_KEYS = ("rollout.engine_kwargs", "rollout.engine_params", "rollout.server.urls")
#: Mappings that are passed on to libraries, which may import what a text in them names, or open ports.
_PASSED_ON = ("rollout.engine_kwargs.", "engine.deepspeed.")
#: Numbers and switches among them that only change memory or speed: they name nothing, and open nothing.
_HARMLESS = re.compile(
    r"rollout\.engine_kwargs\.(async_scheduling|block_size|cpu_offload_gb|disable_custom_all_reduce"
    r"|enable_chunked_prefill|enable_prefix_caching|enforce_eager|gpu_memory_utilization|max_model_len"
    r"|max_num_batched_tokens|max_num_seqs|seed|swap_space)|engine\.deepspeed\.zero_optimization\.[a-z0-9_]+"
)
#: Environments that import a package which their parameters name, and the keys that name environments.
_IMPORTING, _ENVIRONMENTS = frozenset({"verifiers"}), frozenset({"environment.name", "environment.others"})

#: Sections of which reading a spec imports the users' files that they name.
_IMPORTED_SECTIONS = frozenset({"actor", "algorithm", "engine", "environment", "rollout", "trainer"})

#: Dotted key → value, as `rlctl.run_spec.keys.flat` gives them.
Values = Mapping[str, Any]


def code_in(values: Values) -> dict[str, str]:
    """Dotted key → what it would run or send, for those values of a spec that do either."""
    runs_code: dict[str, str] = {}
    variables = dict.fromkeys((*_SENT_KEYS, str(values.get(_KEY_VARIABLE))))
    sent = [name for name in variables if os.environ.get(name)]
    for key, value in values.items():
        found = [_runs(key, text, sent) for text in texts_in(value)]
        if key.startswith(_PASSED_ON) and not _is_harmless(key, value):
            found = [f"passes {value} to a library"]
        if key.rpartition(".")[2] == "trust_remote_code" and value is True:
            models = ", ".join(str(values[name]) for name in _models_of(key, values))
            found.append(f"runs code that comes with the model {models}")
        found = list(filter(None, found))
        if found:
            runs_code[key] = "; ".join(found)
    return runs_code


def _is_harmless(key: str, value: Any) -> bool:
    return isinstance(value, bool | int | float) and _HARMLESS.fullmatch(key) is not None


def _runs(key: str, text: str, sent: Collection[str]) -> str:
    """What a text at a dotted key would run or send; empty: nothing.

    `sent`: variables of this process that go with requests.
    """
    if text.startswith(COMMANDS):
        return f"runs {text.partition(':')[2].strip()}"
    names = [name for name in split_names(text) if is_file_function(name)]
    if names:
        return f"runs {', '.join(names)}"
    if text.lower().startswith(("http://", "https://")):
        is_here = is_this_machine(urlsplit(text).hostname or "")
        what = [*sent, *([] if is_here else ["prompts and responses"])]
        return f"sends {', '.join(what)} to {text}" if what else ""
    return "runs the package of a taskset" if key in _ENVIRONMENTS and text in _IMPORTING else ""


def _models_of(key: str, values: Values) -> list[str]:
    """The keys of the models for which `trust_remote_code` at this key holds."""
    own = f"{key.rpartition('.')[0]}.path"
    further = _further_models() if own == "model.path" else ()
    return [name for name in (own, *further) if isinstance(values.get(name), str)]


@cache
def _further_models() -> tuple[str, ...]:
    """Keys of the models that are loaded as `model.path` is."""
    of_capabilities = (key for section in sections().values() for key in section.model_keys)
    return ("ref.path", "critic.path", *of_capabilities)


def require_permission(
    directory: Path,
    values: Values,
    *,
    sections: Collection[str] | None = None,
    trust: bool = False,
    accepts_changes: bool = False,
    model_dir: Path | None = None,
) -> None:
    """Refuses a directory of results whose values would run code that this user has not allowed.

    Args:
        values: of the spec that the directory records; what the user's command names is no part of it.
        sections: the sections whose code the command runs; None: all.
        trust: the user allows the code of this directory.
        accepts_changes: the user allows files that have changed since their own run.
        model_dir: directory of a model in it, whose code is executed under `model.trust_remote_code`.

    Raises:
        UsageError: says what would run, and what allows it.
    """
    used = {key: value for key, value in values.items() if sections is None or key.split(".")[0] in sections}
    code = code_in(used)
    if not code or trust:
        return
    signed = _read(directory)
    shown = "; ".join(f"{key} {what}" for key, what in code.items())
    if signed is None:
        raise UsageError(
            f"no run of yours has written this directory, and it would run code: {shown}",
            where=str(directory),
            fix=f"read that code; to run it, add {FLAG}",
        )
    wanted = _signed_values(used)
    changed = [key for key in wanted if signed.values.get(key) != wanted[key]]
    if changed:
        before = redact_tree(signed.values)
        now = redact_tree(wanted)
        pairs = "; ".join(f"{key}: {before.get(key)!r} → {now[key]!r}" for key in changed)
        raise UsageError(
            f"the spec has changed since your run recorded it, and names code: {pairs}",
            where=str(directory),
            fix=f"restore the values; to run it as it is, add {FLAG}",
        )
    files = _code_files(code, used)
    differing = [str(file) for file in files if signed.files.get(str(file)) != sha256_of(file)]
    if model_dir is not None and "model.trust_remote_code" in code:
        known = set(signed.files.values())  # a checkpoint has copies of the files of the first model
        differing += [str(file) for file in model_dir.glob("**/*.py") if sha256_of(file) not in known]
    if differing and not accepts_changes:
        raise UsageError(
            f"changed since your run used it: {', '.join(differing)}",
            where=str(directory),
            fix=f"restore it; to run it as it is, add {FLAG}",
        )


def require_permission_of_run(
    run_dir: Path,
    *,
    sections: Collection[str] | None = None,
    trust: bool = False,
    accepts_changes: bool = False,
) -> None:
    """`require_permission` for the spec that a run directory records.

    Raises:
        UsageError: as `require_permission`.
        SpecError: `spec.yaml` is missing or is not a spec.
    """
    values = values_of(recorded_spec(run_dir / RUN_SPEC_FILE))
    require_permission(run_dir, values, sections=sections, trust=trust, accepts_changes=accepts_changes)


def spec_or_note(file: Path, *, trust: bool = False) -> tuple[RunSpec | None, list[str]]:
    """Loads the spec of a run; if it is invalid, or would import code that this user has not allowed, returns
    None and a note instead of raising an error."""
    try:
        require_permission(
            file.parent, values_of(recorded_spec(file)), sections=_IMPORTED_SECTIONS, trust=trust
        )
        return load_spec(files=[file]).spec, []
    except SpecError as error:
        first = error.problems[0]
        return None, [f"{file} is left out: {first.key or first.where or ''} {first.what}"]
    except UsageError as error:
        return None, [f"{file} is left out: {error.what}"]


def values_of(spec: RunSpec, engine: str | None = None) -> dict[str, Any]:
    """Dotted key → value (JSON types), for every value of a spec.

    Args:
        engine: the rollout engine that a command names; values that are then not used are left out.
    """
    values = flat(spec.model_dump(mode="json"))
    if engine is None:
        return values
    is_own = absolute_name(engine) == absolute_name(spec.rollout.name)
    unused = "rollout.name" if is_own else "rollout."
    return {key: value for key, value in values.items() if not key.startswith(unused)}


def sign(directory: Path, values: Values) -> str:
    """Records that this user has run the code that the values name; without code removes the record.

    Returns:
        A warning, if there is no key to sign with; else an empty text.
    """
    code = code_in(values)
    if not code:
        (directory / CODE_FILE).unlink(missing_ok=True)
        return ""
    files = {str(file): sha256_of(file) for file in _code_files(code, values)}
    content = {"values": _signed_values(values), "files": files}
    try:
        record = content | {"signature": signature(content)}
    except UsageError as error:
        return f"{error.what} ({error.where}): using this directory again will need {FLAG}; {error.fix}"
    write_text(directory / CODE_FILE, json.dumps(record, indent=1) + "\n")
    return ""


def signature(content: Any) -> str:
    """HMAC-SHA256 of JSON values with this user's key, which is created at its first use.

    Raises:
        UsageError: the key cannot be used.
    """
    text = json.dumps(content, sort_keys=True)
    return hmac.new(_key(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class _Signed:
    """Content of a `CODE_FILE` that this user has signed."""

    values: Mapping[str, Any]
    files: Mapping[str, str]


def _read(directory: Path) -> _Signed | None:
    """The record, if it is this user's."""
    record = read_mapping(directory / CODE_FILE)
    claimed = record.pop("signature", None)
    if not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(), signature(record).encode()):
        return None
    return _Signed(record["values"], record["files"])


def _key() -> bytes:
    given = os.environ.get(TRUST_KEY)
    if given:
        if len(given) < _SHORTEST_KEY:
            fix = "generate one: openssl rand -hex 32"
            raise UsageError(f"it is shorter than {_SHORTEST_KEY} characters", where=TRUST_KEY, fix=fix)
        return given.encode()
    file = user_state_path("rlctl") / "key"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return _own_key(file)
        with os.fdopen(descriptor, "w") as created:
            created.write(secrets.token_hex())
        return _own_key(file)
    except OSError as error:
        raise UsageError(
            f"the key that signs your runs cannot be used: {error.strerror}",
            where=str(file),
            fix=f"set {TRUST_KEY} to a secret of yours, or XDG_STATE_HOME to a directory of yours",
        ) from error


def _own_key(file: Path) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor) as opened:
        about = os.fstat(opened.fileno())
        content = opened.read()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077 or len(content) < _SHORTEST_KEY:
        fix = "remove it; the next run creates another, and your earlier runs then need --trust"
        raise UsageError("others can read or write the key that signs your runs", where=str(file), fix=fix)
    return content.encode()


def _signed_values(values: Values) -> dict[str, Any]:
    """The values that name code, and the parameters of what may be code."""
    code = code_in(values)
    models = {name for key in code for name in _models_of(key, values) if key.endswith("trust_remote_code")}
    return {
        key: value
        for key, value in values.items()
        if key in code
        or key in models
        or key.split(".")[0] in _SIGNED_SECTIONS
        or key.startswith(_SIGNED_KEYS)
        or "_params" in key
    }


def _code_files(code: Mapping[str, str], values: Values) -> list[Path]:
    """The files of code that the values name: users', what these import from beside them, and models'."""
    paths = code_files(text for key in code for text in texts_in(values[key]))
    for key in code:
        for model in _models_of(key, values) if key.endswith("trust_remote_code") else ():
            paths |= set(Path(values[model]).expanduser().glob("**/*.py"))
    return sorted(paths)


def code_files(texts: Iterable[str]) -> set[Path]:
    """Users' files that texts name as `file.py:function`, and what they import from beside them."""
    paths = set(files_of(*texts))
    for file in [file for file in paths if file.suffix == ".py"]:
        finder = ModuleFinder(path=[str(file.parent)], excludes=["rlctl"])
        try:
            finder.run_script(str(file))  # reads it, and does not run it
        except SyntaxError:  # reported when it is imported
            continue
        modules = (getattr(module, "__file__", None) for module in finder.modules.values())
        paths |= {Path(path) for path in modules if path}
    return paths


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(item)
