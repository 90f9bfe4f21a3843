"""Models that cannot be used are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlctl.engine.model import load_other_model, load_policy
from rlctl.errors import EnvironmentFailure, UsageError
from tests.own_model import save_tiny, save_tiny_qwen2


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


class _RunsCode:
    def __reduce__(self):
        return print, ("weights that run code",)


def test_weights_that_would_run_code_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (save_tiny_qwen2(tmp_path) / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="it is not loaded, because that could run its code") as caught:
        load(tmp_path)
    assert "safetensors" in str(caught.value.fix)
    assert "\n" not in caught.value.what
    assert "weights that run code" not in capsys.readouterr().out


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


def test_an_attention_kernel_that_the_architecture_lacks(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    save_tiny_qwen2(tmp_path)  # its tokenizer
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = GptOssConfig(vocab_size=257, num_local_experts=2, num_key_value_heads=1, head_dim=8, **shape)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="scaled_dot_product_attention") as caught:
        load(tmp_path)
    assert caught.value.where == "model.attn_implementation"


def test_soft_capped_attention_scores_are_capped(tmp_path: Path) -> None:
    """transformers' sdpa ignores the cap, so that it computes another model than an engine that caps."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    save_tiny(tmp_path, Gemma2Config, num_key_value_heads=1, attn_logit_softcapping=0.5, head_dim=8)
    model, _ = load(tmp_path)
    for parameter in model.parameters():
        parameter.data *= 10.0
    model.save_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        found, capped, uncapped = (
            each(input_ids=ids).logits
            for each in (
                load(tmp_path)[0],
                *(
                    AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kernel)
                    for kernel in ("eager", "sdpa")
                ),
            )
        )
    assert torch.equal(found, capped)
    assert (found - uncapped).abs().max() > 0.01


def beside(path: Path | str, tokenizer, key: str = "critic.path"):
    return load_other_model(
        str(path),
        tokenizer,
        key=key,
        revision=None,
        trust_remote_code=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )


def test_a_reward_models_body_without_its_score(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlctl.engine.values import ValueModule

    _, tokenizer = load(save_tiny_qwen2(tmp_path / "policy"))
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config
    config.num_labels = 1
    torch.manual_seed(4)
    judge = AutoModelForSequenceClassification.from_config(config)
    judge.save_pretrained(tmp_path / "judge")
    values = ValueModule(beside(tmp_path / "judge", tokenizer))
    wanted = dict(judge.model.named_parameters())
    assert {name: p.shape for name, p in values.body.named_parameters()} == {
        name: p.shape for name, p in wanted.items()
    }
    assert all(torch.equal(p, wanted[name]) for name, p in values.body.named_parameters())
    assert not values.head.weight.any()


def test_what_is_wrong_with_the_critic_is_said_of_the_critic(tmp_path: Path) -> None:
    _, tokenizer = load(save_tiny_qwen2(tmp_path / "large", extra_tokens=0))
    with pytest.raises(UsageError, match="no such directory") as caught:
        beside(tmp_path / "missing/model", tokenizer)
    assert "critic.path=" in str(caught.value.where)
    (tmp_path / "large/model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UsageError, match="cannot be read") as caught:
        beside(tmp_path / "large", tokenizer)
    assert "critic.path=" in str(caught.value.where)


def test_a_critic_that_cannot_read_the_policys_tokens(tmp_path: Path) -> None:
    _, tokenizer = load(save_tiny_qwen2(tmp_path))
    tokenizer.add_tokens(["one", "two"])
    (tmp_path / "tokenizer.json").unlink()  # otherwise the tokenizers are compared
    with pytest.raises(UsageError, match="tokenizer has 259 tokens") as caught:
        beside(tmp_path, tokenizer)
    assert "critic.path=" in str(caught.value.where)


@pytest.mark.parametrize("key", ["algorithm.teacher.path", "ref.path", "critic.path"])
def test_a_model_of_other_tokens_is_refused(tmp_path: Path, key: str) -> None:
    _, tokenizer = load(save_tiny_qwen2(tmp_path / "policy"))
    theirs = save_tiny_qwen2(tmp_path / "theirs")
    beside(theirs, tokenizer, key)
    content = json.loads((theirs / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (theirs / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"gives 'A' the id [0-9]+: it gives it [0-9]+") as caught:
        beside(theirs, tokenizer, key)
    assert str(caught.value.where).startswith(f"{key}=")
    del vocabulary["B"]
    (theirs / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"it has no such token|it gives it"):
        beside(theirs, tokenizer, key)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # nothing to compare
        (theirs / name).unlink()
    beside(theirs, tokenizer, key)
