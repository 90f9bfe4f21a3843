"""Who hashes a checkpoint: the rank that writes a shard, right after it; of the rest each rank its share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from rlctl.engine import checkpoint
from rlctl.engine.checkpoint import CHECKPOINTS, newest_intact
from rlctl.engine.ranks import Ranks
from rlctl.run_spec.load import load_spec
from rlctl.train.saving import save_checkpoint
from tests.models import tiny_model
from tests.processes import on_ranks
from tests.unit.engine.engine_jobs import FSDP, actor_of
from tests.unit.engine.lora_jobs import SETTINGS
from tests.unit.engine.option_jobs import option_engine


def save(ranks: Ranks, root: str, stage: int) -> list[str]:
    """Save a run of a ZeRO stage, or of FSDP2; the files that this rank read again to hash them."""
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
    return ranks.exchange([(ranks.rank, name) for name in read])


def test_no_rank_reads_another_ranks_shard_again(tmp_path: Path) -> None:
    read = on_ranks(2, save, str(tmp_path), 2, where=tmp_path)[0]
    names = {rank: {name for reader, name in read if reader == rank} for rank in (0, 1)}
    assert not any(name.endswith(".pt") for name in names[0] | names[1]), names
    assert not names[0] & names[1]
    assert min(map(len, names.values())) >= 1
    found, notes = newest_intact(tmp_path / CHECKPOINTS, set_aside=True)
    assert found is not None
    assert notes == []
    written = {str(path.relative_to(found.path)) for path in found.path.rglob("*") if path.is_file()}
    _, manifest = checkpoint._read_manifest(found.path)
    assert set(manifest) == written - {"manifest.json"}
    shards = sorted((found.path / "engine").rglob("*optim_states.pt"))
    assert len(shards) == 2
    assert all(torch.load(shard, weights_only=False) for shard in shards)


def test_ranks_of_fsdp_hash_what_they_write(tmp_path: Path) -> None:
    """Else the main rank's node would hash the states of all nodes."""
    read = on_ranks(2, save, str(tmp_path), FSDP, where=tmp_path)[0]
    assert not [name for _, name in read if name.endswith(".distcp")]
    found, notes = newest_intact(tmp_path / CHECKPOINTS, set_aside=True)
    assert found is not None
    assert notes == []
    _, manifest = checkpoint._read_manifest(found.path)
    assert len([name for name in manifest if name.endswith(".distcp")]) == 2
