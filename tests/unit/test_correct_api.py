"""`rlctl.correct`: the correction as one call, on its own, on two ranks, and inside TRL's trainer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rlctl
from rlctl.engine.ranks import Ranks
from rlctl.tiny.embedded import ensure_embedded
from tests.processes import on_ranks
from tests.properties.padded_batches import make_batch
from tests.reference import verl_helper

ROOT = Path(__file__).parents[2]
HAS_TRL = (verl_helper.SIDE / "trl").is_dir()


def by_hand(batch, low: float, high: float) -> list[float]:
    """Sequence weights, one response at a time: clip(exp(Σ log-ratio)), divided by their mean."""
    weights = []
    for theirs, ours, mask in zip(
        batch.rollout_log_probs.tolist(), batch.log_probs.tolist(), batch.mask.tolist(), strict=True
    ):
        total = sum(b - a for a, b, counts in zip(theirs, ours, mask, strict=True) if counts)
        weights.append(min(max(math.exp(total), low), high))
    mean = sum(weights) / len(weights)
    return [weight / mean for weight in weights]


def example():
    return make_batch(rows=12, horizon=6, seed=5, empty=False)


def test_weights_are_the_formula() -> None:
    batch = example()
    found = rlctl.correct(batch.log_probs, batch.rollout_log_probs, batch.mask, rollout_is_threshold="0.5_3")
    for row, weight in enumerate(by_hand(batch, 0.5, 3.0)):
        at = found.weights[row][batch.mask[row]]
        torch.testing.assert_close(at, torch.full_like(at, weight), rtol=1e-5, atol=1e-6)
    assert found.keep_mask[batch.mask].all()
    assert not found.weights.requires_grad
    assert 0 < found.metrics["rollout_corr/rollout_is_raw_eff_sample_size"] < 1
    shape = " × ".join(map(str, found.weights.shape))
    ess = found.metrics["rollout_corr/rollout_is_eff_sample_size"]
    assert repr(found).startswith(f"CorrectedBatch({shape} tokens, ESS {ess:.4g}, ")
    assert len(repr(found)) < 80


@pytest.mark.parametrize("rejects", [{}, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}])
def test_padded_and_flat_tensors_give_the_same(rejects: dict[str, str]) -> None:
    batch = example()
    mask = batch.mask
    given = (batch.log_probs.where(mask, torch.nan), batch.rollout_log_probs.where(mask, 5.0))
    padded = rlctl.correct(*given, mask, **rejects)
    integer = rlctl.correct(*given, mask.int(), **rejects)
    flat = rlctl.correct(*(x[mask] for x in given), lengths=mask.sum(1), **rejects)
    assert padded.metrics == integer.metrics == flat.metrics
    for name in ("weights", "keep_mask"):
        values = getattr(padded, name)
        assert values.shape == mask.shape
        assert torch.equal(values, getattr(integer, name))
        assert torch.equal(values[mask], getattr(flat, name))
        assert not values[~mask].any()
    assert repr(padded).startswith("CorrectedBatch(12 × 6 tokens, ESS ")
    assert f"{len(flat.metrics)} metrics" in repr(flat)


def test_levels_of_turns_and_episodes() -> None:
    gap = torch.tensor([0.1, 0.2, 0.3, -0.4, 0.5])
    given = (torch.full((5,), -2.0), -2.0 - gap)
    options = {
        "rollout_is_batch_normalize": False,
        "rollout_is_threshold": "9",
        "lengths": torch.tensor([3, 0, 2]),
    }
    turns = torch.tensor([0, 0, 1, 1, 1])  # numbers are those within each response
    found = rlctl.correct(*given, turns=turns, rollout_is="turn", **options).weights.log()
    torch.testing.assert_close(found, torch.tensor([0.3, 0.3, 0.3, 0.1, 0.1]))
    joined = torch.tensor([7, 7, 7])
    for level in ("sequence", "episode"):
        found = rlctl.correct(*given, episodes=joined, rollout_is=level, **options).weights.log()
        torch.testing.assert_close(found, torch.full((5,), 0.7))
    found = rlctl.correct(*given, episodes=torch.tensor([3, 7, 7]), **options).weights.log()
    torch.testing.assert_close(found, torch.tensor([0.6, 0.6, 0.6, 0.1, 0.1]))
    with pytest.raises(ValueError, match="must be adjacent"):
        rlctl.correct(*given, episodes=torch.tensor([1, 2, 1]), **options)
    with pytest.raises(ValueError, match=r"turns must have shape \(5,\)"):
        rlctl.correct(*given, turns=joined, **options)
    for name, values in (("turns", turns / 4), ("episodes", joined / 2)):
        with pytest.raises(ValueError, match=rf"{name} must be integers, not torch.float32"):
            rlctl.correct(*given, **{name: values}, **options)


def test_rejected_tokens_have_weight_zero() -> None:
    batch = example()
    found = rlctl.correct(
        *(batch.log_probs, batch.rollout_log_probs, batch.mask),
        rollout_is=None,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.8_1.25",
    )
    kept = found.keep_mask & batch.mask
    assert (found.weights[batch.mask] == kept[batch.mask].float()).all()
    fraction = 1 - kept.sum() / batch.mask.sum()
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(float(fraction))
    assert 0 < fraction < 1


def test_mistakes_are_named() -> None:
    batch = example()
    given = (batch.log_probs, batch.rollout_log_probs, batch.mask)
    with pytest.raises(rlctl.RlctlError, match="rollout_rs"):
        rlctl.correct(*given, rollout_rs="token_k9", rollout_rs_threshold="2")
    with pytest.raises(rlctl.RlctlError, match="rollout_iss") as unknown:
        rlctl.correct(*given, rollout_iss="token")
    assert unknown.value.fix == "did you mean `rollout_is`?"
    for wrong in (batch.mask.float(), batch.mask.long() * 2):
        with pytest.raises(ValueError, match="response_mask must be bool or integers 0 and 1, not"):
            rlctl.correct(batch.log_probs, batch.rollout_log_probs, wrong)
    with pytest.raises(rlctl.RlctlError, match="neither a mask nor lengths"):
        rlctl.correct(batch.log_probs, batch.rollout_log_probs)
    with pytest.raises(ValueError, match=r"must be \(M,\), not of shape \(12, 6\)"):
        rlctl.correct(batch.log_probs, batch.rollout_log_probs, lengths=batch.mask.sum(1))
    flat = batch.log_probs[batch.mask]
    for lengths in (batch.mask.sum(1) + 1, batch.mask.sum(1).float(), batch.mask.sum()):
        with pytest.raises(ValueError, match="lengths must be"):
            rlctl.correct(flat, flat, lengths=lengths)
    with pytest.raises(ValueError, match=r"rollout_log_probs must be float32, not torch.bfloat16: compute"):
        rlctl.correct(batch.log_probs, batch.rollout_log_probs.bfloat16(), batch.mask)
    for place, name in enumerate(("log_probs", "rollout_log_probs", "response_mask")):
        elsewhere = [x.to("meta") if i == place else x for i, x in enumerate(given)]
        with pytest.raises(ValueError, match=f"devices differ: .*{name} meta"):
            rlctl.correct(*elsewhere)
    with pytest.raises(rlctl.RlctlError, match="rollout_rs_threshold: has no effect: rollout_rs is None"):
        rlctl.correct(*given, rollout_rs_threshold="2")
    for key, value in {"threshold": 3, "bound": "mask"}.items():
        with pytest.raises(rlctl.RlctlError, match=f"rollout_is_{key}: has no effect: rollout_is is None"):
            rlctl.correct(*given, rollout_is=None, **{f"rollout_is_{key}": value})
    assert (
        rlctl.correct(*given, rollout_is=None, rollout_is_batch_normalize=False).keep_mask[batch.mask].all()
    )
    for key, value in {"loss_type": "reinforce", "max_nonfinite_fraction": 0.0}.items():
        with pytest.raises(rlctl.RlctlError, match=key):
            rlctl.correct(*given, **{key: value})


def test_impossible_log_probs_are_named() -> None:
    batch = example()
    with pytest.raises(ValueError, match="rollout_log_probs are above 0"):
        rlctl.correct(batch.log_probs, batch.rollout_log_probs.exp(), batch.mask)
    for bad in (math.nan, math.inf, -math.inf):
        broken = batch.rollout_log_probs.clone()
        broken[0, 0] = bad
        broken[~batch.mask] = 5.0  # never read
        with pytest.warns(UserWarning, match="1 of 12 sequences have NaN or infinite log-probs"):
            found = rlctl.correct(batch.log_probs, broken, batch.mask)
        assert not found.keep_mask[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_advantages_count_by_response(dtype: torch.dtype) -> None:
    """`off_policy` rejects responses of negative advantage in every dtype; other shapes are refused."""
    train, rollout, mask = torch.full((3, 3), -2.0), torch.full((3, 3), -1.0), torch.ones(3, 3).bool()
    rejection = {"rollout_rs": "off_policy", "rollout_rs_threshold": "0.0001"}
    signs = torch.tensor([-1, 1, 1]).to(dtype)
    found = rlctl.correct(train, rollout, mask, advantages=signs[:, None].expand(3, 3), **rejection)
    assert found.keep_mask.tolist() == [[False] * 3, [True] * 3, [True] * 3]
    for wrong in (signs, signs[:, None], torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"advantages must have shape \(3, 3\)"):
            rlctl.correct(train, rollout, mask, advantages=wrong, **rejection)
    with pytest.raises(ValueError, match=r"age must have shape \(3,\)"):
        rlctl.correct(train, rollout, mask, age=torch.ones(3, 1))


@pytest.mark.parametrize("key", ["rollout_is", "rollout_rs"])
def test_a_users_part_that_changes_its_input_changes_no_metric(key: str, tmp_path: Path) -> None:
    batch = example()
    (tmp_path / "mine.py").write_text("def part(log_ratio, params):\n    return log_ratio.token.mul_(0.5)\n")
    options = {"rollout_is": None, key: f"{tmp_path}/mine.py:part"}
    options |= {"rollout_rs_threshold": "5"} if key == "rollout_rs" else {}
    plain, found = (
        rlctl.correct(batch.log_probs, batch.rollout_log_probs, batch.mask, **more).metrics
        for more in ({"rollout_is": None}, options)
    )
    assert {name: found[name] for name in plain if "_is_" not in name} == pytest.approx(
        {name: value for name, value in plain.items() if "_is_" not in name}
    )


def test_a_users_part_with_another_signature_is_an_error_with_a_fix(tmp_path: Path) -> None:
    batch = example()
    (tmp_path / "mine.py").write_text("def part(log_ratio):\n    return log_ratio.token\n")
    with pytest.raises(rlctl.RlctlError, match="too many positional arguments") as wrong:
        rlctl.correct(
            batch.log_probs, batch.rollout_log_probs, batch.mask, rollout_is=f"{tmp_path}/mine.py:part"
        )
    assert wrong.value.fix == "def part(log_ratio, params)"


def test_nan_of_a_users_part_or_of_the_advantages_is_an_error(tmp_path: Path) -> None:
    """NaN compares false with every bound, so it would reject nothing."""
    batch = example()
    given = (batch.log_probs, batch.rollout_log_probs, batch.mask)
    (tmp_path / "mine.py").write_text(
        "def bad(log_ratio, params):\n    return log_ratio.token * float('nan')\n"
    )
    name = f"{tmp_path}/mine.py:bad"
    with pytest.raises(rlctl.RlctlError, match="rejection criterion bad returned NaN"):
        rlctl.correct(*given, rollout_rs=name, rollout_rs_threshold="0.5")
    with pytest.raises(rlctl.RlctlError, match=r"correction weight .*bad returned NaN"):
        rlctl.correct(*given, rollout_is=name)
    with pytest.raises(ValueError, match="advantages are NaN or infinite"):
        rlctl.correct(*given, advantages=torch.full(batch.mask.shape, torch.nan))


def on_each_rank(ranks: Ranks) -> tuple[torch.Tensor, dict[str, float], int]:
    assert dist.is_initialized()
    batch = example()
    mine = slice(0, 5) if ranks.rank == 0 else slice(5, 12)
    given = (batch.log_probs[mine], batch.rollout_log_probs[mine], batch.mask[mine])
    found = rlctl.correct(*given)
    return found.weights.clone(), found.metrics, ranks.rank


def test_two_ranks_share_their_mean(tmp_path: Path) -> None:
    batch = example()
    whole = rlctl.correct(batch.log_probs, batch.rollout_log_probs, batch.mask)
    parts = sorted(on_ranks(2, on_each_rank, where=tmp_path), key=lambda part: part[2])
    weights = torch.cat([part[0] for part in parts])
    torch.testing.assert_close(weights[batch.mask], whole.weights[batch.mask])
    for _, metrics, _ in parts:
        assert metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12, nan_ok=True)


def with_nan_advantages_on_rank_1(ranks: Ranks) -> str:
    batch = example()
    advantages = torch.full(batch.mask.shape, torch.nan if ranks.rank else 1.0)
    with pytest.raises((ValueError, rlctl.RlctlError)) as caught:
        rlctl.correct(batch.log_probs, batch.rollout_log_probs, batch.mask, advantages=advantages)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_on_one_rank_ends_the_call_on_all(tmp_path: Path) -> None:
    own = "advantages are NaN or infinite where response_mask is True"
    assert on_ranks(2, with_nan_advantages_on_rank_1, where=tmp_path) == [
        f"RunFailure: another rank failed: {own}",
        f"ValueError: {own}",
    ]


IN_TRL = """
import json, math, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
from types import SimpleNamespace
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from examples.trl_with_rlctl_correction import CorrectedGRPOTrainer

model_dir, output = sys.argv[2:4]
tokenizer = AutoTokenizer.from_pretrained(model_dir)
sampler = AutoModelForCausalLM.from_pretrained(model_dir)
with torch.no_grad():
    for weight in sampler.parameters():
        weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


def sample(prompts, trainer):
    # Another policy than the trainer's, as an engine with rounded weights is; and its own log-probs.
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    answers, log_probs = [], []
    for prompt in ids:
        out = sampler.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=True, top_k=0, max_new_tokens=4, min_new_tokens=2, return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
        )
        answer = out.sequences[0, len(prompt):].tolist()
        with torch.no_grad():
            whole = sampler(out.sequences).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        answers.append(answer)
        log_probs.append([whole[t, token].item() for t, token in enumerate(answer)])
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": log_probs}


used = []


class Watched(CorrectedGRPOTrainer):
    def _compute_loss(self, model, inputs):
        names = {"ours": "old_per_token_logps", "theirs": "sampling_per_token_logps"}
        names |= {"mask": "completion_mask", "weights": "importance_sampling_ratio"}
        used.append({short: inputs[name].tolist() for short, name in names.items()})
        return super()._compute_loss(model, inputs)


config = GRPOConfig(
    output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=8,
    num_generations=4, max_completion_length=4, beta=0.0, learning_rate=1e-3, max_steps=2, save_strategy="no",
    report_to="none", disable_tqdm=True, logging_steps=1,
)
trainer = Watched(
    model=AutoModelForCausalLM.from_pretrained(model_dir), args=config, processing_class=tokenizer,
    reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
    train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(10, 20) for b in range(20, 24)]),
    rollout_func=sample,
)
trainer.use_vllm = True  # what the trainer does with an engine's log-probs; here a function samples
trainer.vllm_generation, trainer._last_loaded_step = SimpleNamespace(sync_weights=lambda: None), -1
# With these settings TRL does not multiply its loss by the weights.
for name, value, needed in (
    ("vllm_importance_sampling_correction", False, "vllm_importance_sampling_correction=True"),
    ("loss_type", "vespo", "loss_type"),
):
    usual = getattr(trainer, name)
    setattr(trainer, name, value)
    try:
        trainer.train()
    except ValueError as error:
        assert needed in str(error)
    else:
        raise AssertionError(f"{name}={value} was accepted")
    setattr(trainer, name, usual)
trainer.train()
print("RESULT" + json.dumps({"used": used, "logs": trainer.state.log_history}))
"""


@pytest.mark.thorough  # TRL's imports take most of it
@pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed beside the environment (`make verl`)")
def test_in_trls_trainer_the_loss_reads_these_weights(embedded: Path, tmp_path: Path) -> None:
    model = ensure_embedded(1, embedded).model_dir
    paths = json.dumps([str(ROOT), str(verl_helper.SIDE)])
    done = subprocess.run(
        [sys.executable, "-c", IN_TRL, paths, str(model), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("RESULT")[2])
    assert len(found["used"]) == 2
    for batch in found["used"]:
        weights = []
        for ours, theirs, mask in zip(batch["ours"], batch["theirs"], batch["mask"], strict=True):
            total = sum(a - b for a, b, counts in zip(ours, theirs, mask, strict=True) if counts)
            weights.append(min(max(math.exp(total), 0.5), 2.0))
        mean = sum(weights) / len(weights)
        assert max(weights) - min(weights) > 0.05  # the two policies differ
        for weight, row, mask in zip(weights, batch["weights"], batch["mask"], strict=True):
            used = [value for value, counts in zip(row, mask, strict=True) if counts]
            assert used == pytest.approx([weight / mean] * len(used), rel=1e-4)
    logged = [log for log in found["logs"] if "rollout_corr/rollout_is_raw_eff_sample_size" in log]
    assert len(logged) == 2
    assert all(0 < log["rollout_corr/rollout_is_raw_eff_sample_size"] < 1 for log in logged)
