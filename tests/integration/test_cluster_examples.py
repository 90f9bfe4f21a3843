"""Examples for schedulers of clusters: they parse, and the run that they start is a sound one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rlctl.cli.app import run
from rlctl.cli.print_command import launches
from rlctl.run_spec.load import load_spec

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
#: File → position of its command, and its target machine.
EXAMPLES = {"skypilot.yaml": (("run",), "2x8h100"), "kuberay.yaml": (("spec", "entrypoint"), "8xh100")}


def test_every_example_is_tried() -> None:
    assert {path.name for path in CLUSTERS.iterdir()} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_dry_run_finds_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "data").mkdir()
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "data_source": "openai/gsm8k",
           "reward_model": {"ground_truth": "2"}}  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row] * 200), tmp_path / "data/train.parquet")
    keys, machine = EXAMPLES[name]
    text = yaml.safe_load((CLUSTERS / name).read_text())
    for key in keys:
        text = text[key]
    words = shlex.split(text.replace("\\\n", " ").replace("/shared", str(tmp_path)))
    arguments = words[words.index("train") :]
    assert run([*arguments, "--dry-run", "--all", "--machine", machine]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "new weights: broadcast over NCCL" in said
    assert "on each node of the run" in said or "on nodes of the Ray cluster with free GPUs or CPUs" in said


def test_the_kubernetes_job_has_the_gpus_of_its_run() -> None:
    job = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    gpus = [int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods]
    options = dict(word.split("=") for word in shlex.split(job["spec"]["entrypoint"]) if "=" in word)
    assert gpus[0] == int(options["trainer.n_gpus_per_node"])
    needed = int(options["rollout.server.replicas"]) * int(options["rollout.tensor_model_parallel_size"])
    assert sum(gpus[1:]) == needed
    for pod in pods:
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }


def test_slurm_is_asked_for_the_gpus_of_ranks_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ranks = ["trainer.nnodes=2", "trainer.n_gpus_per_node=6", "trainer.run_dir=/shared/run"]
    ranks += ["data.train_batch_size=96", "actor.ppo_mini_batch_size=48"]
    servers = ["rollout.name=vllm", "rollout.mode=server", "rollout.server.replicas=2"]
    for more, gpus in (([], 6), (servers, 8), ([*servers, "rollout.server.placement=ray"], 6)):
        spec = load_spec([], [], [*ranks, *more]).spec
        [slurm] = [" ".join(lines) for title, lines in launches(spec, []).items() if title.startswith("srun")]
        assert f"--gpus-per-node {gpus} " in slurm
        assert "--nproc-per-node 6 " in slurm
