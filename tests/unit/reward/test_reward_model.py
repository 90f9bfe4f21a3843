"""Reward models: the logit of each text alone, whatever it is batched with."""

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlctl.batch import Episode, Task, TokenSequence, Turn
from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.reward.build import build_reward
from rlctl.reward.model import ModelScorer
from rlctl.reward.protocol import Failure, Sample
from rlctl.run_spec.rollout import RewardModelSpec, RewardSpec

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", *"abcdefgh"]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
SAMPLES = [
    Sample("b c", "", "a"),
    Sample("d", "", "a b c d e f"),
    Sample("", "", "h"),
    Sample("a b c", "", "g g"),
]


def shape(**more):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, initializer_range=0.5, **sizes, **more)


def tokenizer(chat_template=None, pad_token="<pad>"):
    base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    base.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token=pad_token, eos_token="</s>", chat_template=chat_template
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of a model without and with chat template."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(shape(num_labels=1)).eval()
    folders = {}
    for name, template in {"plain": None, "chat": TEMPLATE}.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        tokenizer(template).save_pretrained(folders[name])
    return model, folders


def scorer(path, **settings):
    spec = RewardModelSpec(path=str(path), **{"dtype": "fp32", **settings})
    return ModelScorer(RewardSpec(model=spec), torch.device("cpu"))


def logits(model, words):
    ids = torch.tensor([[WORDS.index(word) for word in words.split()]])
    with torch.no_grad():
        return model(input_ids=ids).logits.item()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_scores_do_not_depend_on_the_batch(saved, batch_size):
    model, folders = saved
    texts = ["<s> ab c </s>", "<s> a b c d e fd </s>", "<s> h </s>", "<s> g ga b c </s>"]
    wanted = [logits(model, " ".join(w if w in WORDS else "<unk>" for w in text.split())) for text in texts]
    assert scorer(folders["plain"], batch_size=batch_size).grade(SAMPLES) == pytest.approx(wanted, abs=1e-5)


def test_a_chat_template_makes_turns_of_prompt_and_response(saved):
    model, folders = saved
    wanted = [logits(model, f"user {s.prompt} </s> assistant {s.response} </s>") for s in SAMPLES]
    assert scorer(folders["chat"], batch_size=2).grade(SAMPLES) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("pad_of_model", [None, 0, 2])
@pytest.mark.parametrize("pad_of_tokenizer", [None, "<pad>", "</s>"])
def test_the_scored_token_is_the_models_own_choice(saved, tmp_path, pad_of_model, pad_of_tokenizer):
    """Turns end with </s>: the last token without a padding token, and padding itself if </s> is that."""
    model, _ = saved
    own = LlamaForSequenceClassification(copy.deepcopy(model.config)).eval()
    own.load_state_dict(model.state_dict())
    own.config.pad_token_id = pad_of_model
    own.save_pretrained(tmp_path)
    tokenizer(TEMPLATE, pad_of_tokenizer).save_pretrained(tmp_path)
    wanted = [logits(own, f"user {s.prompt} </s> assistant {s.response} </s>") for s in SAMPLES]
    assert scorer(tmp_path, batch_size=4).grade(SAMPLES) == pytest.approx(wanted, abs=1e-5)


def test_messages_go_through_the_reward_models_own_template(saved):
    model, folders = saved
    turns = ({"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"})
    asked = Sample("d", "", "<s> other markup", messages=(*turns, {"role": "user", "content": "e"}))
    wanted = logits(model, "user a b </s> assistant c </s> user e </s> assistant d </s>")
    assert scorer(folders["chat"]).grade([asked]) == pytest.approx([wanted], abs=1e-5)


MARKED = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}<|assistant|> "
ASKED = ({"role": "assistant", "content": "h"}, {"role": "user", "content": "a b"})


def scored(model, words: str, folder, policy, **sample):
    found = scorer_of(folder, policy).grade([Sample(ground_truth="", **sample)])
    assert found == pytest.approx([logits(model, words)], abs=1e-5)


def scorer_of(path, policy):
    spec = RewardModelSpec(path=str(path), dtype="fp32")
    found = ModelScorer(RewardSpec(model=spec), torch.device("cpu"))
    found.set_policy(policy)
    return found


@pytest.mark.parametrize("prompt", ["<s> a b ", "a b "])
def test_there_is_one_start_token_and_one_end_token(saved, prompt):
    """Whether or not the policy's text starts with one, and whether or not the policy is known."""
    model, folders = saved
    for policy in (None, tokenizer(), tokenizer(MARKED)):
        scored(model, "<s> a b c </s>", folders["plain"], policy, prompt=prompt, response="c")
    ended = tokenizer(None)
    ended._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    own = scorer_of(folders["plain"], None)
    own._tokenizer = ended
    wanted = logits(model, "<s> a b c </s>")
    assert own.grade([Sample("c", "", prompt)]) == pytest.approx([wanted], abs=1e-5)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_policy_with_the_same_tokens_gives_its_tokens(saved, template):
    """Those sampled, not those of their text: `d d` could be one token, and a cut-off response has no end."""
    model, folders = saved
    policy, folder = tokenizer(template), folders["plain" if template is None else "chat"]
    ids = {word: place for place, word in enumerate(WORDS)}
    given = {"prompt": "<s> user a b </s> assistant ", "messages": ASKED}
    for sampled in ("d <unk> </s>", "d c", "</s>"):
        response = [ids[word] for word in sampled.split()]
        words = f"<s> user a b </s> assistant {sampled}"
        scored(model, words, folder, policy, response="another text", response_ids=response, **given)
    words = "<s> user a b </s> assistant d </s>"  # in an evaluation only the text is known
    scored(model, words, folder, policy, response="d", **given)


def test_a_policy_with_other_tokens_gives_its_messages(saved):
    """The markup of its chat template would be read as text."""
    model, folders = saved
    policy = tokenizer(MARKED)
    policy.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    prompt = policy.apply_chat_template(list(ASKED), tokenize=False)
    given = {"prompt": prompt, "messages": ASKED, "response": "c", "response_ids": [8, 2]}
    turns = "assistant h </s> user a b </s> assistant c </s>"
    scored(model, turns, folders["chat"], policy, **given)
    scored(model, "<s> h a b c </s>", folders["plain"], policy, **given)
    scored(model, turns, folders["chat"], None, **given)
    scored(model, "<s> h a b c </s>", folders["plain"], None, **given)


def test_a_template_of_its_own_is_used_although_the_tokens_are_the_same(saved):
    model, folders = saved
    given = {"prompt": "<|user|> a b <|assistant|> ", "messages": ASKED[1:], "response": "c"}
    words = "user a b </s> assistant c </s>"
    scored(model, words, folders["chat"], tokenizer(MARKED), response_ids=[8, 2], **given)


def test_the_reward_of_a_run_knows_the_policys_tokenizer(saved):
    model, folders = saved
    spec = RewardSpec(name="model", model=RewardModelSpec(path=str(folders["plain"]), dtype="fp32"))
    reward = build_reward(spec, max_response_length=4, device=torch.device("cpu"), tokenizer=tokenizer())
    tokens = torch.tensor([WORDS.index("d"), WORDS.index("c")])
    turn = Turn(tokens, torch.zeros(2), torch.zeros(2), "length")
    episode = Episode(Task((1,), "<s> a"), 0, (TokenSequence.of_turn((1,), turn),), "another text")
    wanted = logits(model, "<s> a d c")
    assert reward.score([episode]).scores.tolist() == pytest.approx([wanted], abs=1e-5)


def test_what_is_too_long_loses_its_start(saved):
    model, folders = saved
    wanted = logits(model, "</s> assistant d </s>")
    assert scorer(folders["chat"], max_length=4).grade(SAMPLES)[1] == pytest.approx(wanted, abs=1e-5)


def test_a_score_that_is_not_finite_is_a_failure(saved):
    broken = scorer(saved[1]["plain"])
    broken._model.score.weight.data.fill_(torch.nan)
    assert broken.grade(SAMPLES[:1]) == [Failure("the reward model's score is nan")]


def test_too_little_memory_says_what_to_lower(saved, monkeypatch):
    model = scorer(saved[1]["plain"], batch_size=2)

    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(model._model, "forward", full)
    with pytest.raises(RunFailure, match="out of memory on cpu with 2 ×") as caught:
        model.grade(SAMPLES)
    assert "reward.model.batch_size" in str(caught.value.fix)


def test_a_model_that_is_no_reward_model_is_refused(saved, tmp_path):
    LlamaForSequenceClassification(shape(num_labels=2)).save_pretrained(tmp_path / "two")
    LlamaForCausalLM(shape(num_labels=1)).save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(UsageError, match="one output, this one has 2"):
        scorer(tmp_path / "two")
    with pytest.raises(UsageError, match=r"lack score\.weight"):
        scorer(tmp_path / "policy")
    with pytest.raises(UsageError, match="no such directory") as caught:
        scorer(tmp_path / "nothing")
    assert "sequence classifier" in caught.value.fix


def test_weights_that_could_run_code_are_refused(saved, tmp_path):
    """A pickle with another object than tensors: the loader refuses it, and the message names the model."""
    LlamaForSequenceClassification(shape(num_labels=1)).config.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    torch.save({"model.norm.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="more than tensors") as caught:
        scorer(tmp_path)
    assert caught.value.where == f"reward.model.path={tmp_path}"


def test_a_device_that_is_not_there_is_refused(saved):
    with pytest.raises(UsageError, match="no such device"):
        scorer(saved[1]["plain"], device="cuuda")
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentFailure, match="cannot be put on cuda:1"):
            scorer(saved[1]["plain"], device="cuda:1")
