from __future__ import annotations

import pytest
import torch

from rlctl.engine.ranks import join_ranks
from rlctl.errors import UsageError


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="there are 2") as caught:
        join_ranks()
    assert caught.value.where == "trainer.n_gpus_per_node"
