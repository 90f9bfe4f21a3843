"""Who hashes a checkpoint: the rank that writes a shard, right after it; of the rest each rank its share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from rlctl.engine import checkpoint
from rlctl.engine.checkpoint import CHECKPOINTS, Checkpoint, newest_intact
from rlctl.engine.ranks import Ranks
from rlctl.run_spec.load import load_spec
from rlctl.train.background import BackgroundWriter
from rlctl.train.saving import save_checkpoint
from tests.models import tiny_model
from tests.processes import on_ranks
from tests.unit.engine.engine_jobs import FSDP, actor_of, take_step
from tests.unit.engine.lora_jobs import SETTINGS
from tests.unit.engine.option_jobs import option_engine


def save(ranks: Ranks, root: str, stage: int) -> list[str]:
    """Saves a run of a ZeRO stage, or of FSDP2, as step 3, and the same as step 4 while it is trained on.

    Returns:
        The files of step 3 that this rank read again to hash them.
    """
    read: list[str] = []
    hash_again = checkpoint.hash_and_sync

    def noted(path: Path) -> str:
        read.append(str(path.relative_to(checkpoint.partial_path(Path(root) / CHECKPOINTS, 3))))
        return hash_again(path)

    checkpoint.hash_and_sync = noted
    nothing = SimpleNamespace(
        is_ahead=False,
        drain=lambda: None,
        save=lambda *_: None,
        save_pretrained=lambda directory: (directory / "t").write_text(""),
    )
    run = SimpleNamespace(
        spec=load_spec([], [], ["trainer.n_gpus_per_node=2"]).spec,
        ranks=ranks,
        run_dir=Path(root),
        stream=nothing,
        draws=None,
        capabilities=(),
        rollout_writer=None,
        tokenizer=nothing,
        actor=actor_of(tiny_model(), ranks, FSDP, dtype=torch.float32, **SETTINGS)
        if stage == FSDP
        else option_engine(ranks, (stage, "fp32", 0, False, "none")),
        critic=None,
        policy_version=3,
    )
    save_checkpoint(run, 3)
    checkpoint.hash_and_sync = hash_again
    writer = BackgroundWriter()
    held = save_checkpoint(run, 4, holds=True)
    take_step(run.actor, 1, 4)  # what is copied does not follow
    writer.start(held, ranks.world_size)
    take_step(run.actor, 2, 4)
    writer.finish(ranks)
    return ranks.exchange([(ranks.rank, name) for name in read])


def test_no_rank_reads_another_ranks_shard_again(tmp_path: Path) -> None:
    read = on_ranks(2, save, str(tmp_path), 2, where=tmp_path)[0]
    names = {rank: {name for reader, name in read if reader == rank} for rank in (0, 1)}
    assert not any(name.endswith(".pt") for name in names[0] | names[1]), names
    assert not names[0] & names[1]
    assert min(map(len, names.values())) >= 1
    found = published(tmp_path, 3)
    written = {str(path.relative_to(found.path)) for path in found.path.rglob("*") if path.is_file()}
    _, manifest = checkpoint._read_manifest(found.path)
    assert set(manifest) == written - {"manifest.json"}
    shards = sorted((found.path / "engine").rglob("*optim_states.pt"))
    assert len(shards) == 2
    assert all(torch.load(shard, weights_only=False) for shard in shards)
    assert_written_alike(tmp_path)


def test_ranks_of_fsdp_hash_what_they_write(tmp_path: Path) -> None:
    """Else the main rank's node would hash the states of all nodes."""
    read = on_ranks(2, save, str(tmp_path), FSDP, where=tmp_path)[0]
    assert not [name for _, name in read if name.endswith(".distcp")]
    found = published(tmp_path, 3)
    _, manifest = checkpoint._read_manifest(found.path)
    assert len([name for name in manifest if name.endswith(".distcp")]) == 2
    assert_written_alike(tmp_path)


def published(run_dir: Path, step: int) -> Checkpoint:
    found, notes = newest_intact(run_dir / CHECKPOINTS, step, set_aside=True)
    assert found is not None
    assert notes == []
    return found


def assert_written_alike(run_dir: Path) -> None:
    """The files that were written during training are, byte for byte, those that training waited for."""
    waited, during = (published(run_dir, step).path for step in (3, 4))
    names = [
        sorted(str(path.relative_to(at)) for path in at.rglob("*") if path.is_file())
        for at in (waited, during)
    ]
    assert names[0] == names[1]
    differing = {name for name in names[0] if (waited / name).read_bytes() != (during / name).read_bytes()}
    # the manifest has the step, the metadata of torch's distributed checkpoints a number of its own
    assert differing - {"engine/fsdp/.metadata"} == {"manifest.json"}
    assert (during / "model/model.safetensors").stat().st_mode == (
        waited / "model/config.json"
    ).stat().st_mode
