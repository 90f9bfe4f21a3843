"""The trials, each in a separate process (`attempt`): torch, both rollout engines, DeepSpeed.

Every trial runs training code on a random model with the shape of the embedded model, in seconds. It returns
its result as text, or raises an `RlctlError`. Imports are inside the functions, so that one trial does not
fail because of a package that only another trial needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.leftovers import temporary_directory

if TYPE_CHECKING:
    from rlctl.rollout.protocol import ResponseSampler

_PROMPTS = ("12+34=", "5+67=")
_RESPONSE_LENGTH = 8
#: Share of GPU memory for the vLLM engine of a trial.
_GPU_SHARE = 0.2


def torch_computes() -> str:
    """Multiplies matrices on every GPU and compares the product with that of the CPU."""
    import torch

    from rlctl.engine.ranks import refuse_idle_gpu

    if not torch.cuda.is_available():
        refuse_idle_gpu()
        return f"torch {torch.__version__} on the CPU"
    here = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    names = []
    for index in range(torch.cuda.device_count()):
        there = here.to(torch.device("cuda", index))
        if not torch.allclose((there @ there).cpu(), here @ here, rtol=1e-2, atol=1e-1):
            message = f"GPU {index} computes wrong products"
            raise EnvironmentFailure(message, fix="see the driver's errors: dmesg")
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return f"torch {torch.__version__} on {'; '.join(names)}"


def hf_samples() -> str:
    """Samples a few tokens by Hugging Face generation."""
    from rlctl.batch import torch_device
    from rlctl.rollout.hf import HFRollout

    (model, tokenizer), device = _tiny(), torch_device()
    return f"{_sampled(HFRollout(model, tokenizer, device), tokenizer)} on {device}"


def vllm_samples() -> str:
    """Starts vLLM, syncs weights as in training, samples a few tokens and stops vLLM."""
    from rlctl.rollout.completions import vllm_options
    from rlctl.rollout.expected_weights import ExpectedWeights, PlainWeights
    from rlctl.rollout.vllm import VLLMRollout
    from rlctl.run_spec.model import RECIPE
    from rlctl.tiny.model import save_model

    model, tokenizer = _tiny()
    with temporary_directory("doctor") as directory:
        save_model(model, directory)
        tokenizer.save_pretrained(directory)
        length = RECIPE.max_position_embeddings
        options = vllm_options("bf16", length, gpu_memory_utilization=_GPU_SHARE)
        engine = VLLMRollout(str(directory), tokenizer, options, ExpectedWeights(model))
        engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=0)
        found = f"{_sampled(engine, tokenizer)}; {engine.report().description}"
        engine.close()
    return found


def deepspeed_steps() -> str:
    """Runs one optimizer step in bf16 and checks that it changes the weights."""
    import torch

    from rlctl.engine.deepspeed import DeepSpeedEngine
    from rlctl.engine.ranks import join_ranks, leave_ranks

    model, _ = _tiny()
    ranks = join_ranks()
    engine = DeepSpeedEngine(
        model,
        ranks,
        temperature=1.0,
        zero_stage=2,
        dtype=torch.bfloat16,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=1.0,
    )
    before = {name: weight.clone() for name, weight in engine.weights()}
    engine.backward(-engine.policy(_batch(model, ranks.device)).log_probs.mean(), last=True)
    result = engine.step(lr=1e-2)
    is_changed = any(not torch.equal(weight, before[name]) for name, weight in engine.weights())
    leave_ranks()
    if not (result.applied and is_changed):
        raise RunFailure("an optimizer step changed no weight", fix="reinstall deepspeed and torch together")
    return f"a step of AdamW under ZeRO 2 in bf16 on {ranks.device}"


def _tiny() -> tuple[Any, Any]:
    """A random model with the shape of the embedded model, and its tokenizer."""
    import torch

    from rlctl.run_spec.model import RECIPE
    from rlctl.tiny.model import build_model, build_tokenizer

    torch.manual_seed(0)
    return build_model(RECIPE), build_tokenizer(RECIPE)


def _sampled(engine: ResponseSampler, tokenizer: Any) -> str:
    """Samples two responses to each of two prompts and checks their log-probs."""
    import torch

    from rlctl.batch import torch_device
    from rlctl.rollout.protocol import Request, Sampling

    requests = [Request(ids, seed) for ids in tokenizer(list(_PROMPTS))["input_ids"] for seed in (1, 2)]
    turns = engine.sample(requests, Sampling(max_response_length=_RESPONSE_LENGTH))
    log_probs = torch.cat([turn.log_probs for turn in turns])
    if not (log_probs.isfinite() & (log_probs <= 0)).all():
        raise RunFailure(
            "sampled tokens have log-probs that are not finite or not negative",
            fix="compare engines: see docs/how-to/mismatch",
        )
    return f"{len(log_probs)} tokens sampled on {torch_device()}"


def _batch(model: Any, device: Any) -> Any:
    """A batch of four responses with random tokens."""
    import torch

    from rlctl.batch import ModelInputs

    episodes = 4
    prompt = len(_PROMPTS[0])
    length = prompt + _RESPONSE_LENGTH
    return ModelInputs(
        token_ids=torch.randint(model.config.vocab_size, (episodes * length,), device=device),
        scored=torch.arange(episodes * length, device=device) % length >= prompt,
        lengths=torch.full((episodes,), length, device=device),
    )
