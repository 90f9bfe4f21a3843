"""What rlctl uses of vLLM, DeepSpeed and transformers exists in the lowest and the newest versions allowed.

Their files are read, not imported, so the modules that need a GPU count too. `make contracts` fetches the
archives; without them only what is installed is looked at.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from tests.contracts import (
    ARCHIVES,
    ROOT,
    Sources,
    Use,
    allowed,
    asked_by_name,
    constants,
    keys_given,
    lower_bound,
    state_changes,
    uses_in,
    uses_of,
)

pytestmark = pytest.mark.slow
STATE = ROOT / "tests/process_state.txt"
PACKAGES = ("vllm", "deepspeed", "transformers")
ENDS = ("lowest", "newest")
SERVER = "rlctl/rollout/vllm_server.py"


@cache
def sources(package: str, end: str) -> Sources:
    found = {}
    for path in (*ARCHIVES.glob(f"{package}-*.whl"), *ARCHIVES.glob(f"{package}-*.tar.gz")):
        version = Version(path.name.split("-")[1].removesuffix(".tar.gz"))
        if version in allowed(package).specifier:
            found[version] = path
    lowest = lower_bound(package)
    if end == "lowest":
        if lowest not in found:
            pytest.skip(f"{package} {lowest} has not been fetched: make contracts")
        return Sources(package, found[lowest])
    fetched = {version: path for version, path in found.items() if version != lowest}
    if package == "vllm" and fetched:  # the CUDA build; what is installed may be the CPU's
        return Sources(package, fetched[max(fetched)])
    installed = importlib.util.find_spec(package)
    if installed is None or not installed.submodule_search_locations:
        pytest.skip(f"{package} is neither installed nor fetched: make contracts")
    return Sources(package, Path(installed.submodule_search_locations[0]).parent)


def test_names_are_gathered_from_the_code() -> None:
    vllm, deepspeed = ({use.dotted for use in uses_of(package)} for package in ("vllm", "deepspeed"))
    assert {"vllm.LLM", "vllm.LLM.generate", "vllm.SamplingParams"} <= vllm
    assert {"deepspeed.initialize", "deepspeed.runtime.engine.DeepSpeedEngine.backward"} <= deepspeed


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_exists_and_takes_what_it_is_given(package: str, end: str) -> None:
    wrong = problems(sources(package, end), uses_of(package))
    assert not wrong, "\n".join(wrong)


def problems(given: Sources, uses: Iterable[Use]) -> list[str]:
    """What a package has no longer, or takes in another way."""
    wrong = []
    for use in uses:
        owner, _, name = use.dotted.rpartition(".")
        if given.package == "transformers":  # its names are imported lazily on access
            if not given.mentions(name):
                wrong.append(f"{use.where}: {use.dotted} is not in {given.where.name}")
            continue
        found = given.find(use.dotted)
        if found is None:
            above = given.find(owner)
            is_object = above is None or not isinstance(above[1], ast.ClassDef | ast.Module)
            if is_object and given.mentions(name):  # a member of an object of unknown class
                continue
            if above and isinstance(above[1], ast.ClassDef) and _is_torchs(above[1]):
                continue
            wrong.append(f"{use.where}: {use.dotted} is not in {given.where.name}")
        elif use.call is not None:
            signature = given.signature(*found)
            if signature and (refused := signature.refuses(use.call)):
                wrong.append(f"{use.where}: {use.dotted}: {refused}")
    return wrong


def test_what_a_version_lacks_is_found(tmp_path: Path) -> None:
    """Of a package in which a method has a new name, one a new argument, and one has lost an argument."""
    (tmp_path / "vllm/inner").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("from .inner.llm import LLM\n")
    (tmp_path / "vllm/inner/llm.py").write_text(
        "class Base:\n    def wake(self, tags=None): pass\n"
        "class LLM(Base):\n    def __init__(self, model, seed=0): self.engine = 1\n"
        "    def sleep(self, level, must): pass\n    def generate(self, asked): pass\n"
    )
    code = (
        "from vllm import LLM\nllm = LLM('m', seed=1)\nllm.wake(tags=['x'])\nllm.wake_up(tags=['x'])\n"
        "llm.sleep(level=1)\nllm.generate([], use_tqdm=False)\nllm.engine\nLLM(**given)\n"
    )
    found = problems(Sources("vllm", tmp_path), uses_in(ast.parse(code), "vllm", "code"))
    assert sorted(set(found)) == [
        f"code:4: vllm.LLM.wake_up is not in {tmp_path.name}",
        "code:5: vllm.LLM.sleep: it needs must",
        "code:6: vllm.LLM.generate: it takes no use_tqdm",
    ]


def test_changes_of_the_process_are_found(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/worker.py").write_text(
        "import os, torch\ndef start():\n    torch.set_num_threads(1)\n    os.environ['A'] = '1'\n"
        "    os.environ.setdefault('B', '1')\n    torch.backends.x = 2\n    print(os.environ['C'])\n"
    )
    assert state_changes(Sources("vllm", tmp_path)) == {
        "vllm.worker: torch.set_num_threads",
        "vllm.worker: os.environ[A]",
        "vllm.worker: os.environ[B]",
        "vllm.worker: torch.backends.x =",
    }


def _is_torchs(owner: ast.ClassDef) -> bool:
    """Inherits from a class of torch, whose members are not looked up."""
    return any(ast.unparse(base) in {"Module", "nn.Module", "torch.nn.Module"} for base in owner.bases)


@pytest.mark.parametrize("end", ENDS)
def test_vllm_knows_every_argument_option_path_and_variable(end: str) -> None:
    given = sources("vllm", end)
    engine = set(_fields(given, "EngineArgs")) | set(given.signature(*given.class_named("LLM")).names)
    options = keys_given("rlctl/rollout/vllm.py", "__init__") | keys_given(
        "rlctl/rollout/vllm.py", "_trained"
    )
    options |= keys_given("rlctl/rollout/completions.py", "vllm_options")
    options |= keys_given("rlctl/rollout/build_vllm.py", "training_options")
    of_servers = keys_given("rlctl/rollout/build_vllm.py", "replica_settings")
    assert {"load_format", "max_model_len", "tensor_parallel_size", "worker_cls"} <= options
    assert "weight_transfer_config" in of_servers
    servers = engine | set(_fields(given, "FrontendArgs"))
    servers |= set(_fields(given, "BaseFrontendArgs")) if given.defines("BaseFrontendArgs") else set()
    assert options - {"text_config"} <= engine  # that one stands below hf_overrides
    assert of_servers <= servers
    sampling = keys_given("rlctl/rollout/completions.py", "_parameters")
    assert "top_p" in sampling
    assert sampling <= set(_fields(given, "SamplingParams"))
    asked = _request_keys()
    assert {"prompt", "model"} <= asked
    assert asked | sampling <= set(_fields(given, "CompletionRequest"))
    assert given.mentions("/inference/v1/generate", "vllm.entrypoints")
    in_flight = _fields(given, "GenerateRequest")
    assert {"model", "token_ids", "sampling_params", "cache_salt", "priority"} <= set(in_flight)
    assert given.mentions("weight_versions", "vllm.entrypoints") or end == "lowest"  # the run says so
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "rlctl/rollout").glob("*.py")]

    def written(pattern: str) -> set[str]:
        return {each for file in files for each in constants(file, re.compile(pattern).fullmatch)}

    paths = written(r"(/v1)?/[a-z_]+(/[a-z_]+)*")
    assert {"/v1/completions", "/health"} <= paths
    requested = [path for path in paths if not path.startswith("/proc/")]
    assert [path for path in requested if not given.mentions(path, "vllm.entrypoints")] == []
    flags = written(r"--[a-z][a-z-]+")
    assert "--served-model-name" in flags
    positive = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
    assert positive <= servers
    variables = written(r"VLLM_[A-Z0-9_]+")
    assert "VLLM_SERVER_DEV_MODE" in variables
    assert [name for name in variables if not given.mentions(name, "vllm.envs")] == []
    by_name = asked_by_name("rlctl/rollout/vllm.py")
    assert "vllm_config" in by_name
    assert [name for name in by_name if not given.defines(name)] == [] or end == "lowest"


@pytest.mark.parametrize("end", ENDS)
def test_consecutive_ranks_share_an_engine_and_torchs_process_group(end: str) -> None:
    """As `TensorParallelGroup` forms them; each rank's engine gets the address of its own worker's group."""
    given = sources("vllm", end)
    groups = ast.unparse(given.find("vllm.distributed.parallel_state.initialize_model_parallel")[1])
    assert ".reshape(-1, data_parallel_size, pipeline_model_parallel_size" in groups
    assert "all_ranks.view(-1, tensor_model_parallel_size).unbind(0)" in groups
    joins = ast.unparse(given.find("vllm.distributed.parallel_state.init_distributed_environment")[1])
    assert "if not torch.distributed.is_initialized()" in joins
    launcher = "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher"
    assert all(
        name in ast.unparse(given.find(launcher)[1]) for name in ("'env://'", "'RANK'", "'LOCAL_RANK'")
    )
    assert given.mentions("external_launcher", "vllm.v1.executor.abstract")
    worker = ast.unparse(given.find("vllm.v1.worker.cpu_worker.CPUWorker")[1])
    assert "VLLM_DIST_IDENT" in worker
    assert "split(':')[-1]" in worker  # see `rlctl.rollout.vllm_workers`


def _fields(given: Sources, name: str) -> list[str]:
    module, owner = given.class_named(name)
    names = [
        part.target.id
        for part in owner.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    return [*names, *(each for base in given.bases(module, owner) for each in _fields(given, base[1].name))]


def _request_keys() -> set[str]:
    """Of the body of a completion request."""
    tree = ast.parse((ROOT / SERVER).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if "prompt" in keys:
                return keys
    raise LookupError(f"{SERVER} asks for no completions")


@pytest.mark.parametrize("end", ENDS)
def test_deepspeed_and_transformers_know_every_setting_and_attribute(end: str) -> None:
    given = sources("deepspeed", end)
    settings = keys_given("rlctl/engine/deepspeed_setup.py", "deepspeed_config")
    assert {"stage", "grad_accum_dtype"} <= settings
    assert [name for name in settings if not given.mentions(name)] == []
    others = sources("transformers", end)
    asked = asked_by_name("rlctl/engine/deepspeed.py") | asked_by_name("rlctl/engine/model.py")
    asked |= asked_by_name("rlctl/engine/deepspeed_setup.py")
    asked |= asked_by_name("rlctl/rollout/weights.py")
    assert {"ds_id", "_is_hf_initialized", "fp32_groups_gradients_flat"} <= asked
    # `processor_files` is set where models are loaded, `strerror` is an attribute of OSError.
    asked -= {"config", "processor_files", "strerror"}
    assert [name for name in asked if not given.mentions(name) and not others.mentions(name)] == []
    assert given.mentions("convert_to_zero_parameters")
    assert others.mentions("HF_DEACTIVATE_ASYNC_LOAD")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("package", ["vllm", "deepspeed"])
def test_what_changes_the_whole_process_is_known(package: str, end: str) -> None:
    """A new line: see whether `_STATE` in rollout/vllm.py undoes it, or it cannot be; then list it."""
    known = set(STATE.read_text(encoding="utf-8").splitlines())
    new = state_changes(sources(package, end)) - known
    assert not new, "\n".join(sorted(new))
