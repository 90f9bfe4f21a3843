"""Secrets by key, below a key and by form; and what is none. All values are made up."""

from __future__ import annotations

import json

import pytest

from rlctl.spec.keys import known_leaves
from rlctl.track.redaction import MASK, redact, redact_command, redact_tree

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SECRETS = [
    *(
        f"hf_{LETTERS}",
        f"sk-{LETTERS}",
        f"sk-ant-api03-{LETTERS}",
        f"sk_live_{LETTERS}",
        f"wandb_v1_{LETTERS}",
    ),
    *(f"ghp_{LETTERS}", f"github_pat_{LETTERS}", f"glpat-{LETTERS}", f"gsk_{LETTERS}", f"npm_{LETTERS}"),
    *(f"AIza{LETTERS[:35]}", f"ya29.{LETTERS}", "AKIAABCDEFGHIJKLMNOP", "ASIAABCDEFGHIJKLMNOP"),
    *(f"IQoJb3JpZ2lu{LETTERS}+/=", f"xoxb-{LETTERS}", f"SG.{LETTERS}.{LETTERS}", f"pypi-{LETTERS}"),
    "0123456789abcdef0123456789abcdef01234567",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS}\n{LETTERS}\n-----END RSA PRIVATE KEY-----",
]
KEYS = [
    *("secret_key", "authorization", "authToken", "passphrase", "judge_key", "api_keys", "tokens", "headers"),
    *(
        "apiKey",
        "API-KEY",
        "reward.params.openai_api_key",
        "hub_token",
        "db_password",
        "X-Auth-Token",
        "cookie",
    ),
    *("accessKey", "private_key", "aws_session_token", "client_secret", "credentials", "cookie"),
]
PLAIN_KEYS = [
    *("eos_token", "pad_token", "prompt_key", "label_key", "max_tokens", "num_tokens", "reward_fn_key"),
    *("key", "monkey", "author", "tokenizer", "token_k1", "secretary", "keyword", "loss_agg_mode"),
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_recognised_anywhere_by_its_form(secret: str) -> None:
    core = secret.split("\n")[1] if "\n" in secret else secret
    assert core not in redact(f"login failed for {secret}.")
    assert core not in "".join(redact_command([f"model.path={secret}", "--name", secret]))
    assert core not in str(redact_tree({"a": [secret, {"b": secret}]}))


@pytest.mark.parametrize("key", KEYS)
def test_everything_below_a_secret_key_is_masked(key: str) -> None:
    value = {key: ["first-value", 123456, {"inner": "second-value", "more": [3.25, None]}]}
    text = json.dumps(redact_tree({"reward": {"params": value}}))
    for part in ("first-value", "123456", "second-value", "3.25"):
        assert part not in text
    assert redact_tree({key: "plain words"}) == {key: MASK}
    assert redact_command([f"{key}=plain-words"]) == [f"{key}={MASK}"]
    assert redact_command([f"--{key}", "plain-words"]) == [f"--{key}", MASK]


@pytest.mark.parametrize("key", PLAIN_KEYS)
def test_other_keys_are_kept(key: str) -> None:
    assert redact_tree({key: ["some text", 7]}) == {key: ["some text", 7]}
    assert redact_command([f"data.{key}=text"]) == [f"data.{key}=text"]


def test_no_key_of_the_spec_is_taken_for_a_secret() -> None:
    tree = dict.fromkeys(known_leaves(), "text")
    assert redact_tree(tree) == tree


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:pw123@host/x", "https://***@host/x"),
        ("https://onlytoken@host/x", "https://***@host/x"),
        ("https://h/v1?key=abc123&model=m", "https://h/v1?key=***&model=m"),
        ("https://h/v1?a=1&access_token=abc123", "https://h/v1?a=1&access_token=***"),
        ("https://h/o?X-Amz-Signature=abc&X-Amz-Date=d", "https://h/o?X-Amz-Signature=***&X-Amz-Date=d"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("Bearer abcdefghijklmnop", "Bearer ***"),
    ],
)
def test_addresses_and_headers_lose_their_secret_part_only(text: str, kept: str) -> None:
    assert redact(text) == kept


def test_a_secret_of_several_lines_in_a_command_is_masked_to_its_end() -> None:
    command = ["--private-key=first\nsecond", "x.token=first\n"]
    assert redact_command(command) == ["--private-key=***", "x.token=***"]


def test_what_is_no_secret_stays() -> None:
    command = [
        *("rlctl", "train", "--preset", "rloo-seq-is", "rollout_rs=token_k1", "loss_agg_mode=token-mean"),
        *("model.revision=" + "a1" * 20, "data.max_prompt_length=512", "model.path=Qwen/Qwen2.5-7B"),
        *("git@github.com:a/b", "basic settings", "sk-learn", "a?b=c"),
    ]
    assert redact_command(command) == command
    assert redact("null", "token") == "null"
    assert redact_tree({"token": None, "use_auth": True}) == {"token": None, "use_auth": True}
