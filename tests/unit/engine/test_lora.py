"""Adapters are trained, the base is unchanged, and exports have the layout of a model without adapters."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import PeftModel, load_peft_weights
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rlctl.engine.lora import OffloadedBase, add_lora, load_adapter
from rlctl.engine.policy_engine import plain_weights
from rlctl.errors import UsageError
from rlctl.model_files import check_adapter
from rlctl.run_spec.model import ALL_LINEAR, ModelSpec
from tests.models import naive_log_probs, tiny_batch, tiny_model
from tests.processes import on_ranks
from tests.unit.engine import engine_jobs, lora_jobs
from tests.unit.engine.engine_jobs import ROWS
from tests.unit.rollout.test_weights import mixture

FSDP = engine_jobs.FSDP
FILE = "adapter_model.safetensors"
CASES = {
    1: [(0, "fp32"), (2, "bf16"), (3, "fp32")],
    2: [(1, "fp32"), (3, "bf16"), (FSDP, "fp32"), (FSDP, "bf16")],
}


def adapted_names(model) -> set[str]:
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_adapter_changes_nothing(kind: str, tied: bool) -> None:
    plain, model = tiny_model(kind, tied=tied), tiny_model(kind, tied=tied)
    add_lora(model, 2, 4.0, [ALL_LINEAR])
    assert type(model) is type(plain)
    wanted = dict(plain.named_parameters())
    assert [weight.name for weight in plain_weights(model)] == list(wanted)
    assert all(torch.equal(weight.value(), wanted[weight.name]) for weight in plain_weights(model))
    batch = tiny_batch(plain)
    assert torch.equal(naive_log_probs(model, batch)[0], naive_log_probs(plain, batch)[0])


def test_layers_and_what_is_trained() -> None:
    everything, some = tiny_model(), tiny_model()
    add_lora(everything, 2, 4.0, [ALL_LINEAR])
    assert len(adapted_names(everything)) == 2 * 7  # attention's four and the MLP's three, in two layers
    assert not any("lm_head" in name or "embed" in name for name in adapted_names(everything))
    add_lora(some, 2, 4.0, ["q_proj", "down_proj"])
    assert {name.rpartition(".")[2] for name in adapted_names(some)} == {"q_proj", "down_proj"}
    for name, parameter in some.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)


@pytest.mark.parametrize("name", ["query", "lm_head", "embed_tokens", "norm"])
def test_unknown_layers_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"no linear layer named {name}") as caught:
        add_lora(tiny_model(), 2, 4.0, ["q_proj", name])
    assert caught.value.where == "model.target_modules"
    assert "down_proj" in str(caught.value.fix)
    assert ALL_LINEAR in str(caught.value.fix)


def test_layers_that_peft_would_exchange_for_experts_are_refused() -> None:
    pytest.importorskip("peft.utils.transformers_weight_conversion")  # older PEFT does not exchange them
    model = mixture("glm4_moe")
    with pytest.raises(UsageError, match="adapts the experts") as caught:
        add_lora(model, 2, 4.0, [ALL_LINEAR])
    assert caught.value.fix == "choose from k_proj, o_proj, q_proj, v_proj"
    model = mixture("glm4_moe")
    add_lora(model, 2, 4.0, ["q_proj", "o_proj"])
    assert {weight.name for weight in plain_weights(model)} == set(mixture("glm4_moe").state_dict())


def test_layers_whose_weight_is_read_without_the_adapter_are_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(UsageError, match=r"PEFT refuses the adapter: .*out_proj.* incompatible"):
        add_lora(model, 2, 4.0, [ALL_LINEAR])


def test_the_merged_model_of_a_mixture_of_layers_is_the_adapted_one() -> None:
    """Jamba reads the weight of a layer itself: an adapter of that layer would act only when merged."""
    from transformers import JambaConfig, JambaForCausalLM

    shape = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    }
    torch.manual_seed(0)
    model = JambaForCausalLM(JambaConfig(**shape, **heads, num_experts=2, use_mamba_kernels=False)).eval()
    merged, ids = copy.deepcopy(model), torch.arange(9)[None]
    add_lora(model, 2, 4.0, [ALL_LINEAR])
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter)
    merged.load_state_dict({weight.name: weight.value() for weight in plain_weights(model)}, strict=False)
    torch.testing.assert_close(model(input_ids=ids).logits, merged(input_ids=ids).logits)


def test_a_router_that_is_a_kind_of_linear_layer_gets_no_adapter() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    shape = {"hidden_size": 8, "intermediate_size": 8, "intermediate_size_mlp": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    model = Llama4ForCausalLM(Llama4TextConfig(vocab_size=9, num_local_experts=2, **shape, **heads))
    add_lora(model, 2, 4.0, [ALL_LINEAR])
    assert model(input_ids=torch.arange(4)[None]).logits.isfinite().all()


@pytest.fixture
def adapter(tmp_path):
    """An adapter that PEFT itself wrote, with random values, and the model with it merged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=6.0, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    torch.manual_seed(3)
    theirs = get_peft_model(tiny_model(), config)
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", theirs.merge_and_unload()


def model_spec(path, **more) -> ModelSpec:
    fields = {"lora_rank": 2, "lora_alpha": 6.0, "target_modules": ["down_proj", "q_proj"]} | more
    return ModelSpec(path="a/b", lora_adapter_path=str(path), **fields)


def test_training_starts_from_an_adapter_that_peft_wrote(adapter) -> None:
    path, merged = adapter
    model, spec = tiny_model(), model_spec(path)
    add_lora(model, 2, 6.0, spec.target_modules)
    load_adapter(model, spec)
    batch = tiny_batch(merged)
    own, theirs = (naive_log_probs(each, batch)[0] for each in (model, merged))
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=2e-5)
    assert (naive_log_probs(tiny_model(), batch)[0] - theirs).abs().max() > 0.1
    for weight in plain_weights(model):
        torch.testing.assert_close(weight.value(), merged.state_dict()[weight.name])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lora_rank": 3}, "has rank 2, alpha 6"),
        ({"lora_alpha": 2.0}, "has rank 2, alpha 6"),
        ({"target_modules": ["q_proj"]}, "the layers down_proj, q_proj"),
        ({"target_modules": ["all-linear"]}, "have other layers"),
    ],
)
def test_an_adapter_of_another_form_says_what_to_write(adapter, more, said: str) -> None:
    spec = model_spec(adapter[0], **more)
    model = tiny_model()
    add_lora(model, spec.lora_rank, spec.lora_alpha, spec.target_modules)
    with pytest.raises(UsageError, match=said) as caught:
        load_adapter(model, spec)
    assert "model.target_modules=[down_proj,q_proj]" in str(caught.value.fix)
    assert caught.value.where == f"model.lora_adapter_path={adapter[0]}"


@pytest.mark.parametrize("spoil", ["missing", "no weights", "dora", "another size", "json"])
def test_an_adapter_that_cannot_be_used_is_refused(adapter, spoil: str) -> None:
    path, _ = adapter
    config = path / "adapter_config.json"
    said = {"missing": "not a LoRA", "json": "not a LoRA", "dora": "use_dora"}.get(spoil, "")
    if spoil == "no weights":
        (path / FILE).unlink()
        said = "cannot be read"
    elif spoil == "dora":
        config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    elif spoil == "json":
        config.write_text("{")
    elif spoil == "another size":
        tensors = {name: tensor[..., :1] for name, tensor in load_peft_weights(str(path)).items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / FILE)
        said = "in the adapter, "
    model = tiny_model()
    spec = model_spec(path / "nothing" if spoil == "missing" else path)
    add_lora(model, 2, 6.0, spec.target_modules)
    if said.startswith(("not", "use")):  # also found before the model is loaded
        with pytest.raises(UsageError, match=said):
            check_adapter(spec.lora_adapter_path, spec)
    with pytest.raises(UsageError, match="cannot be read" if spoil == "missing" else said):
        load_adapter(model, spec)


#: How PEFT can begin, or what it can add → whether the adapter's weights are then all of the difference.
PEFTS = {
    "default": ({}, True),
    "zero": ({"init_lora_weights": False}, True),
    "gaussian": ({"init_lora_weights": "gaussian"}, True),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, True),
    "pissa": ({"init_lora_weights": "pissa"}, False),
    "pissa_niter_4": ({"init_lora_weights": "pissa_niter_4"}, False),
    "olora": ({"init_lora_weights": "olora"}, False),
    "dora": ({"use_dora": True}, False),
    "rslora": ({"use_rslora": True}, False),
    "bias": ({"bias": "lora_only"}, False),
    "lora_bias": ({"lora_bias": True}, False),
    "rank_pattern": ({"rank_pattern": {"q_proj": 4}}, False),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 4}}, False),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, False),
    "tokens": ({"trainable_token_indices": [1, 2]}, False),
    "replicated": ({"layer_replication": [(0, 2), (1, 2)]}, False),
}


@pytest.mark.parametrize("kind", PEFTS)
def test_an_adapter_is_read_as_peft_reads_it_or_refused(tmp_path, kind: str) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    options, is_plain = PEFTS[kind]
    config = LoraConfig(r=2, lora_alpha=6.0, target_modules=["q_proj", "down_proj"], **options)
    torch.manual_seed(3)
    get_peft_model(tiny_model(), config).save_pretrained(tmp_path)
    model, spec = tiny_model(), model_spec(tmp_path)
    add_lora(model, 2, 6.0, spec.target_modules)
    if not is_plain:
        with pytest.raises(UsageError, match="which cannot be trained here") as caught:
            check_adapter(str(tmp_path), spec)
        (name,) = options
        assert f"{name}=" in str(caught.value.what)
        return
    load_adapter(model, spec)
    reloaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path)).merge_and_unload()
    batch = tiny_batch(reloaded)
    own, theirs = (naive_log_probs(each, batch)[0] for each in (model, reloaded))
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("init_lora_weights", init) for init in ("eva", "corda", "loftq", "lora_ga", "of_2027")),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"corda_method": "ipm"}),
        ("peft_type", "LOHA"),
        ("fan_in_fan_out", True),
        ("an_option_of_2027", "on"),
    ],
)
def test_an_adapter_with_options_that_are_not_known_is_refused(adapter, option: str, value: object) -> None:
    path, _ = adapter
    config = path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {option: value}))
    with pytest.raises(UsageError, match=f"the adapter has {option}="):
        check_adapter(str(path), model_spec(path))


def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1))
    with pytest.raises(UsageError, match="no linear layers"):
        add_lora(model, 2, 4.0, [ALL_LINEAR])


def trained_slowly() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps with W + (α/r)·B·A written out and torch's own AdamW; merged weights and norms."""
    drawn = dict(lora_jobs.adapted_model().named_parameters())
    pairs = {
        name.partition(".lora_A")[0]: (
            tensor.detach().clone().requires_grad_(),
            drawn[name.replace("lora_A", "lora_B")].detach().clone().requires_grad_(),
        )
        for name, tensor in drawn.items()
        if ".lora_A" in name
    }
    model = tiny_model("qwen2", tied=True).requires_grad_(False)
    trained = [tensor for pair in pairs.values() for tensor in pair]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def merged() -> dict[str, torch.Tensor]:
        scale = lora_jobs.ALPHA / lora_jobs.RANK
        weights = {name: p.detach() for name, p in model.named_parameters()}
        changes = {f"{name}.weight": scale * up @ down for name, (down, up) in pairs.items()}
        return {name: w + changes[name] if name in changes else w for name, w in weights.items()}

    norms = []
    for seed in (1, 3):
        batch = tiny_batch(tiny_model(), ROWS, seed=seed)
        log_probs, _ = naive_log_probs(lambda **inputs: functional_call(model, merged(), (), inputs), batch)
        (-(log_probs * batch.advantages).sum() / len(batch.advantages)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in merged().items()}, norms


@pytest.fixture(scope="module")
def slow():
    return trained_slowly()


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("lora")
    return {
        count: on_ranks(count, lora_jobs.adapted, cases, str(where), where=where)
        for count, cases in CASES.items()
    }


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).detach().abs().max().item() for name in a)


def mean_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], names: list[str]) -> float:
    return torch.cat([(a[name] - b[name]).abs().flatten() for name in names]).mean().item()


@pytest.mark.parametrize(
    ("stage", "dtype", "world_size"), [(*case, count) for count, cases in CASES.items() for case in cases]
)
class TestUnderDeepSpeed:
    def test_adapters_learn_as_plain_torch_would(self, by_world_size, slow, stage, dtype, world_size) -> None:
        wanted, norms = slow
        adapted = [name for name in wanted if "q_proj.weight" in name or "down_proj" in name]
        for found in by_world_size[world_size]:
            got = found[stage, dtype]
            assert got["applied"] == [True, False, True]
            assert got["skipped is same"]
            moved = distance(got["start"], wanted)
            assert moved > 1e-2
            if dtype == "fp32":
                assert distance(got["saved"], wanted) < 2e-5
                assert [got["norms"][0], got["norms"][2]] == pytest.approx(norms, rel=1e-3)
            else:  # what is merged is rounded, so a small change is half lost: compare means
                error = mean_distance(got["saved"], wanted, adapted)
                assert error < 0.5 * mean_distance(got["start"], wanted, adapted)
                assert [got["norms"][0], got["norms"][2]] == pytest.approx(norms, rel=0.05)

    def test_the_base_stays(self, by_world_size, stage, dtype, world_size) -> None:
        batch = tiny_batch(tiny_model(), ROWS, seed=1)
        wanted, _ = naive_log_probs(tiny_model("qwen2", tied=True), batch)
        for found in by_world_size[world_size]:
            first, *later = found[stage, dtype]["bases"]
            assert all(torch.equal(first, other) for other in later)
            tolerance = 1e-5 if dtype == "fp32" else 0.1
            torch.testing.assert_close(first.double(), wanted.detach(), rtol=0, atol=tolerance)
            assert (found[stage, dtype]["log_probs"] - first).abs().max() > 0.1
            assert not first.requires_grad

    def test_the_export_is_a_plain_model_that_says_the_same(
        self, by_world_size, stage, dtype, world_size
    ) -> None:
        batch = tiny_batch(tiny_model(), ROWS, seed=1)
        got = by_world_size[world_size][0][stage, dtype]
        model = AutoModelForCausalLM.from_pretrained(got["model"], dtype=torch.float32)
        assert distance(dict(model.named_parameters()), got["saved"]) == 0.0
        tolerance = 2e-5 if dtype == "fp32" else 0.15
        said = naive_log_probs(model, batch)[0].detach()
        torch.testing.assert_close(got["log_probs"].double(), said, rtol=0, atol=tolerance)

    def test_the_adapter_apart_is_the_same_policy_to_peft(
        self, by_world_size, stage, dtype, world_size
    ) -> None:
        batch = tiny_batch(tiny_model(), ROWS, seed=1)
        first, *others = (found[stage, dtype] for found in by_world_size[world_size])
        directory, tensors = first["adapter"]
        assert first["adapter asked for"]  # A and B, and nothing else was gathered
        for other in others:
            assert distance(other["adapter"][1], tensors) == 0.0
        base = tiny_model("qwen2", tied=True)
        rounding = 0.0 if dtype == "fp32" else 1e-2
        assert distance(first["frozen"], dict(base.named_parameters())) <= rounding
        model = PeftModel.from_pretrained(base, directory)
        said = naive_log_probs(model, batch)[0].detach()
        tolerance = 2e-5 if dtype == "fp32" else 0.15
        torch.testing.assert_close(first["log_probs"].double(), said, rtol=0, atol=tolerance)
        config = model.peft_config["default"]
        assert (config.r, config.lora_alpha) == (lora_jobs.RANK, lora_jobs.ALPHA)

    def test_it_goes_on_bit_for_bit_after_loading(self, by_world_size, stage, dtype, world_size) -> None:
        for found in by_world_size[world_size]:
            result = found[stage, dtype]
            assert distance(result["saved"], result["loaded"]) == 0.0
            assert distance(*result["after"]) == 0.0
            assert distance(result["saved"], result["after"][0]) > 1e-3


def test_frozen_weights_give_way_and_come_back() -> None:
    model = tiny_model()
    add_lora(model, rank=2, alpha=4.0, target_modules=["all-linear"])
    before = {name: weight.value().clone() for weight in plain_weights(model) for name in [weight.name]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    places = [parameter.data_ptr() for parameter in trained]
    base = OffloadedBase(model)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    on_device = [parameter.data_ptr() for parameter in frozen]
    base.offload()
    base.offload()
    parked = [parameter.data_ptr() for parameter in frozen]
    assert not set(parked) & set(on_device)
    for weight in plain_weights(model):  # a checkpoint's export, while the engine is awake
        assert torch.equal(weight.value(), before[weight.name])
    base.onload()
    assert not set(parked) & {parameter.data_ptr() for parameter in frozen}
    assert [parameter.data_ptr() for parameter in trained] == places
    for weight in plain_weights(model):
        assert torch.equal(weight.value(), before[weight.name])
