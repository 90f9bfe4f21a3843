"""Ranks that a launcher has started otherwise than the spec says are refused before anything is loaded."""

from __future__ import annotations

import pytest

from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec
from rlctl.train.start import _check_ranks


@pytest.mark.parametrize(
    ("rank", "local_rank", "refused"),
    [
        (0, "0", False),
        (3, "1", False),
        (3, "0", False),  # each rank sees one GPU
        (2, "1", True),  # ranks 0 and 2 on one node, 1 and 3 on another
        (3, None, False),
    ],
)
def test_the_ranks_of_a_node_are_consecutive(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: str | None, refused: bool
) -> None:
    spec = load_spec([], [], ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"]).spec
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if not refused:
        _check_ranks(spec)
        return
    with pytest.raises(UsageError, match="rank 2 is number 1 of its node") as caught:
        _check_ranks(spec)
    assert "--distribution=block" in (caught.value.fix or "")
