"""Models that cannot be used are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlctl.engine.model import load_policy
from rlctl.errors import EnvironmentFailure, UsageError
from tests.own_model import save_tiny_qwen2


def load(path: Path | str):
    return load_policy(
        str(path), revision=None, trust_remote_code=False, attn_implementation="sdpa", dtype=torch.float32
    )


def test_a_good_one(tmp_path: Path) -> None:
    model, tokenizer = load(save_tiny_qwen2(tmp_path))
    assert next(model.parameters()).dtype == torch.float32
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"


@pytest.mark.parametrize("path", ["./missing", "/missing/model", "~/missing", "a/b/c"])
def test_missing_directory(path: str) -> None:
    with pytest.raises(UsageError, match="no such directory") as caught:
        load(path)
    assert path in str(caught.value.where)


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        load(tmp_path)


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentFailure) as caught:
        load("nobody/nothing")
    assert caught.value.exit_code == 4
    assert "HF_HUB_OFFLINE" in str(caught.value.fix)


def test_tokenizer_larger_than_embeddings(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="260 tokens, the model has embeddings for 257"):
        load(save_tiny_qwen2(tmp_path, extra_tokens=3))


@pytest.mark.parametrize("damage", ["rubbish", "cut", "gone"])
def test_damaged_weights(tmp_path: Path, damage: str) -> None:
    weights = save_tiny_qwen2(tmp_path) / "model.safetensors"
    if damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes(b"rubbish" if damage == "rubbish" else weights.read_bytes()[:-50])
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    save_tiny_qwen2(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no-such-thing"}))
    with pytest.raises(UsageError):
        load(tmp_path)
