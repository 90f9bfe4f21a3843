"""Secrets by key, below a key and by form; and what is none. All values are made up."""

from __future__ import annotations

import json

import pytest

from rlctl.run_spec.keys import known_leaves
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
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    *("wJalrXUtnFEMI/K7MDENG+bPxRfiCYzEXAMPLEKEY", "je7MtGbClwBF/2Zp9Utk/h3yCo8nvbEXA5pLEK3Y"),
    "x3K" + "9fQ2mZ7vTb1Lw8RcYd5Nj0GhPs4AeUoIkXqM6Bt" * 2 + "Kx3Qw==",
    *("0123456789ABCDEF0123456789abcdef", "4fT8Q~" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7"),
    "7Hq2Lm9Xc4Vb6Nz1Kp8Rt3Yw5Jd0Gf2Sa7Qe4Uo6Ii9Zx1Cv3Bn5Mm8JQQJ99BAACYeBjFXJ3w3AAABACOGa1B2",
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
    *(
        "pass",
        "key",
        "keys",
        "dsn",
        "connection_string",
        "private_key_pem",
        "db_pass",
        "smtp-pass",
        "passcode",
    ),
    *("ConnectionString", "conn_str", "sentry_dsn", "AccountKey", "signing_key_b64", "ssh_key", "key_pem"),
    *("tokenValue", "secret_text", "shared_key", "API_KEY", "accountkey"),
]
PLAIN_KEYS = [
    *("eos_token", "pad_token", "prompt_key", "label_key", "max_tokens", "num_tokens", "reward_fn_key"),
    *(
        "key_metric",
        "metric_key",
        "monkey",
        "keys_per_row",
        "foreign_key",
        "sort_keys",
        "forward_pass",
        "bypass",
    ),
    *("pass_at_k", "token_metric", "stop_tokens", "bos_token", "keynote", "adsn", "compass", "hex", "value"),
    *("author", "tokenizer", "token_k1", "secretary", "keyword", "loss_agg_mode"),
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


@pytest.mark.parametrize("text", ["3", "128"])
def test_a_number_of_keys_is_no_secret(text: str) -> None:
    assert redact_tree({"keys": int(text), "tokens": text}) == {"keys": int(text), "tokens": text}
    assert redact_command([f"keys={text}"]) == [f"keys={text}"]
    assert redact_tree({"pass": int(text), "key": text}) == {"pass": MASK, "key": MASK}


KEYS_WITH_ENDS = (
    *("password1", "password_2", "api_key_2", "token_old", "secret_v2", "AZURE_KEY_1", "storage_key_primary"),
    *(
        "params.password.value",
        "PGPASSWORD",
        "refreshToken",
        "sessiontoken",
        "clientSecret",
        "openai_key_backup",
    ),
)


@pytest.mark.parametrize("key", KEYS_WITH_ENDS)
def test_what_follows_the_word_of_a_secret(key: str) -> None:
    assert redact_tree({key: "plain"}) == {key: MASK}
    assert redact_command([f"{key}=plain"]) == [f"{key}={MASK}"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"password": "pl41n", "a": 1}',
            "{'api_key': 'pl41n'}",
            '{\\"token\\": \\"pl41n\\"}',
            '"keys": ["pl41n", 1]',
        ),
        *(
            '{"headers": {"X-A": "pl41n"}}',
            '{"auths": {"registry": {"auth": "pl41n"}}}',
            '{"a": {"b": [{"password": "pl41n"}]}}',
            "db_password: pl41n",
            "secret: [pl41n, b]",
            "client_secret = pl41n",
        ),
        *("authorization: Token pl41n", "Proxy-Authorization: Digest pl41n", "-H 'X-Api-Key: pl41n'"),
        *("Cookie: a=pl41n; b=pl41n", "Set-Cookie: sid=pl41n; Path=/", "API_KEY='pl41n'", 'TOKEN="pl41n x"'),
        *(
            "machine h login me password pl41n",
            "machine h\n  login me\n  password pl41n\n",
            "MYSQL_PWD=pl41n",
        ),
        *("curl -u me:pl41n https://h", "curl --user me:pl41n https://h", "https://h/?sig=pl41n%3D&sv=1"),
        *("https://hooks.slack.com/services/T0/B0/pl41n", "https://discord.com/api/webhooks/12345/pl41n_x"),
        *("postgres://u:p%40pl41n%3A@h/db", "https://a@b:pl41n@c@h/x", "https://h/?X-Goog-Signature=pl41n"),
    ],
)
def test_secrets_within_texts(text: str) -> None:
    assert "pl41n" not in redact(text)
    assert "pl41n" not in str(redact_tree({"note": [text]}))
    assert "pl41n" not in " ".join(redact_command(["--note", text]))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "unknown key: prompt",
            "missing keys: prompt, answer",
            "unexpected token: then",
            "key_column: question",
        ),
        *("pass@1: 0.25, pass@8: 0.5", "passes: 3 of 4", '{"pass@1": 0.25, "max_tokens": 8}', "pass_1: 0.25"),
        *('{"api_key": null, "token": ""}', "prompt_key: question", "sort(values)", "eos_token: </s>"),
        *("rloo: cookie-cutter answers", "auth: none", "headers: name, value", "tokens: 12345", "keys: 3"),
    ],
)
def test_ordinary_sentences_stay(text: str) -> None:
    assert redact(text) == text


def test_no_key_of_the_spec_is_taken_for_a_secret() -> None:
    tree = dict.fromkeys(known_leaves(), "text")
    assert redact_tree(tree) == tree


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:pw123@host/x", "https://***@host/x"),
        ("https://onlytoken@host/x", "https://***@host/x"),
        ("postgres://user:p@ss:w@host:5432/db", "postgres://***@host:5432/db"),
        ("redis://:p@ss@host", "redis://***@host"),
        ("https://user:p/ss@host/x", "https://***@host/x"),
        ("proxy user:p@ss:w@host failed", "proxy ***@host failed"),
        ("me:secret@db.example.com:5432/x", "***@db.example.com:5432/x"),
        ("Server=h;AccountKey=abc123;Timeout=5", "Server=h;AccountKey=***;Timeout=5"),
        ("AccountKey=abc123;Timeout=5", "AccountKey=***;Timeout=5"),
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
        *(
            "https://host:8000/a@b",
            "https://h/pkg@1.2/x",
            "mailto:me@example.com",
            "image:tag@sha256:" + "0f" * 32,
        ),
        "data.train_files=/home/me/Datasets/Gsm8k/Version2/TrainWithTools/part",
        *("model.path=/models/Qwen3-0.6B/Snapshots/LongNameOfAModelThatGoesOn12", "x.sha256=" + "0f" * 32),
        *("x.md5=" + "0f" * 16, "model.revision=" + "0f" * 20, "rewards.py:score"),
        *("git@github.com:a/b", "basic settings", "sk-learn", "a?b=c"),
    ]
    assert redact_command(command) == command
    assert redact("null", "token") == "null"
    assert redact_tree({"token": None, "use_auth": True}) == {"token": None, "use_auth": True}


@pytest.mark.parametrize(
    "text",
    [
        "mysql --password pl41n --host h",
        "login with --api-key pl41n",
        "<password>pl41n</password>",
        "<add><ns:apiKey kind='a'>pl41n x</ns:apiKey></add>",
        "password: |\n  pl41n\n  pl41n\nuser: me",
        "a:\n  token: >-\n    pl41n\n  b: 1",
        'env: ["X-Api-Key", "pl41n"]',
        "headers.append(('Authorization', 'pl41n'))",
        "https://h/back#access_token=pl41n&state=1",
        "sshpass -p pl41n ssh h",
        "sshpass -ppl41n ssh h",
        "//registry.npmjs.org/:_authToken=pl41n",
        "https://acme.webhook.office.com/webhookb2/1-2@3/IncomingWebhook/pl41n/4",
        "bearer: pl41n",
        "webhook_url: https://h/pl41n",
        "pass phrase: pl41n",
        "the pass phrase is 'pl41n'",
    ],
)
def test_further_places_of_secrets_within_texts(text: str) -> None:
    assert "pl41n" not in redact(text)
    assert "pl41n" not in str(redact_tree({"note": [text]}))
    assert MASK in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "add --token or set HF_TOKEN",
        "--max-tokens 512 --stop-token x",
        "set --key-column question",
        '["token", "turn", "sequence"]',
        '("key", "value")',
        '["prompt", "answer"]',
        "<think>the answer is 4</think>",
        "<key>x</other>",
        "template: |\n  {{ messages }}\n",
        "see https://h/page#step=4",
    ],
)
def test_what_only_looks_like_these_places_stays(text: str) -> None:
    assert redact(text) == text


def test_the_lines_after_a_masked_block_stay() -> None:
    text = "a:\n  password: |\n    one\n\n    two\n  user: me\nb: 2\n"
    assert redact(text) == f"a:\n  password: |\n    {MASK}\n  user: me\nb: 2\n"


def test_a_pair_of_name_and_value() -> None:
    """As Kubernetes writes the environment of a container."""
    others = [{"name": "MODE", "value": "fast"}, {"name": 3, "value": 4}]
    pair = {"name": "DB_PASSWORD", "value": "pl41n"}
    assert redact_tree({"env": [pair, *others]}) == {"env": [pair | {"value": MASK}, *others]}
