"""Checks that vLLM servers started by the user respond and have the options that a run needs."""

from __future__ import annotations

import time
from typing import Any

import httpx

from rlctl.errors import EnvironmentFailure
from rlctl.rollout.completions import LOGPROBS_MODE, MERGE_LORA

_INFO_S = 60.0  # the first response is slow: the server inspects its environment
_RETRY_S = 1.0


def reachable(urls: list[str], seconds: float, *, lora_rank: int = 0) -> list[str]:
    """Waits until every server responds, and checks that each was started with the options a run needs.

    Args:
        urls: URLs of the servers.
        seconds: how long to wait for them.
        lora_rank: rank of the adapters to apply; 0: none.

    Returns:
        For each server, the backend of its weight transfer; "": it accepts weights as files only.

    Raises:
        EnvironmentFailure: a server does not respond in time, or was started with other options.
    """
    deadline = time.monotonic() + seconds
    backends = []
    for url in (given.rstrip("/") for given in urls):
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                    backends.append(_check_settings(url, lora_rank))
                    break
                words = "it is not healthy"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                words = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"no vLLM server answers: {words}",
                    where=f"rollout.server.urls: {url}",
                    fix="start it there, with the options in docs/how-to/rollout-engines.md",
                )
            time.sleep(_RETRY_S)
    return backends


def _check_settings(url: str, lora_rank: int) -> str:
    """Checks a server's options and returns the backend of its weight transfer.

    Log-probs before temperature would look plausible, but weight every sample wrongly.
    """
    where = f"rollout.server.urls: {url}"
    fix = "start it with the options in docs/how-to/rollout-engines.md"
    answer = httpx.get(f"{url}/server_info?config_format=json", timeout=_INFO_S, trust_env=False)
    if not answer.is_success:
        what = "the server does not accept weight updates: vLLM's development mode is off"
        raise EnvironmentFailure(what, where=where, fix=f"{fix}, VLLM_SERVER_DEV_MODE=1 among them")
    info = answer.json()
    mode = info["vllm_config"]["model_config"]["logprobs_mode"]
    if mode != LOGPROBS_MODE:
        what = f"the server reports {mode}, which are not log-probs of the distribution it samples from"
        raise EnvironmentFailure(what, where=where, fix=f"{fix}, --logprobs-mode {LOGPROBS_MODE} among them")
    if lora_rank and not _takes_adapters(info, lora_rank):
        options = (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank of {lora_rank} or more"
        )
        what = f"the server does not accept adapters of rank {lora_rank}"
        raise EnvironmentFailure(what, where=where, fix=f"start it with {options}; or {MERGE_LORA}")
    return str((info["vllm_config"].get("weight_transfer_config") or {}).get("backend", ""))


def _takes_adapters(info: dict[str, Any], rank: int) -> bool:
    lora = info["vllm_config"]["lora_config"]  # null without --enable-lora
    is_open = info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    return bool(is_open and lora and lora["max_lora_rank"] >= rank)
