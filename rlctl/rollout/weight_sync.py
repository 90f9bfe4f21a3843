"""Gives vLLM servers new weights, and the newest ones to a server that was restarted."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rlctl.errors import RunFailure, UsageError, failing_together
from rlctl.rollout.completions import MERGE_LORA
from rlctl.rollout.protocol import EngineContext, Policy, SavedAdapter
from rlctl.rollout.replicas import Replicas
from rlctl.rollout.server_access import ONE_TOKEN
from rlctl.rollout.server_client import RETRY_S, SYNC_S, ServerClient, readable
from rlctl.rollout.weight_broadcast import WeightBroadcast
from rlctl.rollout.weights import PublishedWeights, VersionedDir


@dataclass(frozen=True, slots=True)
class PublishedPaths:
    """The newest weight version and its directories, which every server can read.

    Attributes:
        weights: directory of a model, with LoRA of the frozen base; "": the weights were broadcast.
        adapter: directory of the LoRA adapter, also its name in requests, so that versions are not confused;
            "": there is none.
        tag: unique version string that each server reports for its weights.
    """

    weights: str = ""
    adapter: str = ""
    tag: str = ""


class WeightSync:
    """Sends each version of the policy's weights to all servers.

    With adapters, servers receive the base once, and A and B after each update.

    Args:
        published: writes weights where the servers can read them; None on ranks that are neither the main one
            nor start servers.
        replicas: the servers that this process starts, if any; they start with the first weights.
        adapters: as `published`, for adapters; None without adapters, and on all ranks but the main one.
        broadcast: sends weights without files; None: weights are sent as files. None on all ranks but the
            main one.
        starts_empty: servers start with dummy weights and a loader that reads no files.

    Attributes:
        newest: what the servers have, or are being given.
        versions: number of updates by tag of this run.
        salt: in flight, the tag of the weights whose cached blocks a new request may share.
        lost: servers that do not have the last broadcast weights.
        notes: messages to the user.
    """

    def __init__(
        self,
        client: ServerClient,
        context: EngineContext,
        *,
        published: PublishedWeights | None,
        replicas: Replicas | None = None,
        adapters: VersionedDir | None = None,
        broadcast: WeightBroadcast | None = None,
        starts_empty: bool = False,
    ) -> None:
        rollout = context.spec.rollout
        self._client = client
        self._rank = context.rank
        self._agree = context.agree
        self._published = published
        self._replicas = replicas
        self._adapters = adapters
        self._takes_adapter = context.spec.syncs_adapter
        self._starts_empty = starts_empty
        self.broadcast = broadcast
        self._needs_broadcast = rollout.server.weight_transfer == "broadcast"
        self._in_flight = rollout.in_flight
        self.cache = rollout.stale_cache
        self._renewing = {url: asyncio.Lock() for url in client.urls}
        self.newest = PublishedPaths()
        self.salt = ""
        self.versions: dict[str, int] = {}
        self.lost: set[str] = set()
        self.notes: list[str] = []

    def sync(self, policy: Policy, policy_version: int) -> None:
        """See `VLLMServerRollout.sync_weights`."""
        client = self._client
        self._agree("")  # waits until all ranks have their batches: the shared servers may still be sampling
        with failing_together(self._agree):
            # An engine that hangs is found before it should load. In flight, this would wait for open ones.
            if self._rank == 0 and self.newest.tag and not self._in_flight:
                probe = partial(client.send, path="/v1/completions", body=ONE_TOKEN)
                client.run(client.everywhere(probe, client.answer_timeout))
        loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._replicas:  # broadcasts have a time limit per chunk
            loading = self._replicas.loading(math.inf if self._starts_empty else SYNC_S)
        with loading:
            self._sync(policy, policy_version)

    def _sync(self, policy: Policy, policy_version: int) -> None:
        adapter = policy.adapter() if self._takes_adapter else None
        weights = None  # the base of an adapter does not change
        if adapter is None or not self.newest.weights:
            weights = policy.weights(merged=adapter is None)
        with failing_together(self._agree):
            if self._starts_empty and not self.newest.tag and self._published and self._replicas:
                self._published.write_config()  # they receive their weights afterwards
                self._replicas.start()
        last = self.newest
        newest = self.newest
        has_files = False
        with failing_together(self._agree):
            try:
                if self._rank == 0:
                    newest, has_files = self._publish(weights, adapter, policy_version)
            finally:
                for _ in weights or ():  # gathering is a collective, also on ranks that discard the weights
                    pass
        # Known on all ranks before a server has it: a server that one of them finds restarted gets it, too.
        self.newest = PublishedPaths(*map(self._agree, (newest.weights, newest.adapter, newest.tag)))
        self.versions[self.newest.tag] = policy_version
        with failing_together(self._agree):
            if self._rank == 0:
                load = partial(self._load, last=last, with_weights=has_files)
                self._client.run(self._client.everywhere(load))
        self.salt = self.newest.tag
        self.lost.clear()

    def _publish(
        self, weights: Iterator[tuple[str, Tensor]] | None, adapter: SavedAdapter | None, policy_version: int
    ) -> tuple[PublishedPaths, bool]:
        """Broadcasts or writes a weight version; its directories, and whether servers must read weights."""
        tag = f"{policy_version}-{uuid.uuid4().hex[:12]}"
        weights_path = self.newest.weights
        adapter_path = self.newest.adapter
        starts = self._replicas if self._replicas and not self._replicas.is_started else None
        if weights is not None and self.broadcast and self._forms_group(self.broadcast):
            if self._in_flight:  # chunk by chunk: until the last one, the weights are a mixture
                self._client.run(self._client.everywhere(self.pause))
            self.broadcast.send(weights)
            weights = None
            weights_path = ""
        if weights is not None:
            assert self._published is not None
            weights_path = str(self._published.write(weights, policy_version))
        if adapter and self._adapters:  # its name is unique: caches use it as a key
            adapter_path = str(self._adapters.publish(f"adapter-{tag}", adapter.save))
        if starts:
            starts.start()  # each server loads the newest weights on start
        return PublishedPaths(weights_path, adapter_path, tag), not (weights is None or starts)

    def _forms_group(self, broadcast: WeightBroadcast) -> bool:
        """Whether every server is in the group; if none can be formed, weights are sent as files from now on.

        Raises:
            RunFailure: the group cannot be formed, and a broadcast is required.
        """
        client = self._client
        try:
            # A restarted server is not in the group any more.
            if not broadcast.is_connected or not all(client.run(client.everywhere(self.is_current))):
                broadcast.connect()
        except RunFailure as error:
            if self._needs_broadcast:
                raise
            self.notes.append(f"vLLM servers get new weights as files, which takes longer: {error.what}")
            self.broadcast = None
        return self.broadcast is not None

    async def is_current(self, url: str) -> bool:
        """Whether a server has the newest weights; otherwise it was restarted."""
        return await self._tag(url) == self.newest.tag

    async def renew(self, url: str) -> None:
        """Gives a server the newest weights if it has others; if they were broadcast, it is `lost`."""
        async with self._renewing[url]:  # by one of the requests that noticed it
            if await self.is_current(url):
                return
            if self.newest.weights:
                await self._load(url, last=PublishedPaths(), with_weights=True)
            else:
                self.lost.add(url)

    async def _tag(self, url: str) -> str:
        answer = await self._client.send(url, "/weight_info")
        with readable(url, "/weight_info"):
            return str(answer.json()["weight_version"])

    async def _load(self, url: str, *, last: PublishedPaths, with_weights: bool) -> None:
        """Gives a server the newest weights; it has the `last` ones, unless it was restarted."""
        send = partial(self._client.send, url)
        newest = self.newest
        has_last = bool(last.adapter) and await self._tag(url) == last.tag
        if self._in_flight:
            await self.pause(url)
        # A server without the last adapter was restarted, possibly without the current base.
        if with_weights or (last.adapter and not has_last):
            if self._starts_empty:
                overrides = {"overrides": {"load_config": {"load_format": "auto"}}}
                await send("/collective_rpc", {"method": "update_config", "kwargs": overrides})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": newest.weights}}
            await send("/collective_rpc", reload)
        if not self._in_flight:
            await self._reset_cache(url)
        if newest.adapter:
            await self._adapt(url, newest.adapter)
        if has_last:
            await send("/v1/unload_lora_adapter", {"lora_name": last.adapter})
        await send("/update_weight_version", {"new_version": newest.tag})
        if self._in_flight:
            await send("/resume", {})

    async def _reset_cache(self, url: str) -> None:
        """Drops what older weights computed; a server refuses that while open requests use it.

        Raises:
            RunFailure: it still refuses after `SYNC_S`.
        """
        deadline = time.monotonic() + SYNC_S
        while (answer := await self._client.send(url, "/reset_prefix_cache", {})).content:
            with readable(url, "/reset_prefix_cache"):
                is_reset = answer.json().get("success", True)
            if is_reset:
                return
            if time.monotonic() > deadline:
                message = (
                    f"the server kept cached blocks of older weights: requests used them for {SYNC_S:.0f} s"
                )
                raise RunFailure(message, where=url, fix="let no other client send requests to it")
            await asyncio.sleep(RETRY_S)

    async def pause(self, url: str) -> None:
        """Open requests wait for `/resume`; with `recompute` new weights then read them again."""
        clears = str(self.cache == "recompute").lower()
        await self._client.send(url, f"/pause?mode=keep&clear_cache={clears}", {})

    async def _adapt(self, url: str, adapter: str) -> None:
        try:
            await self._client.send(
                url, "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": adapter}
            )
        except RunFailure as error:
            answer = await self._client.send(url, "/v1/models")
            with readable(url, "/v1/models"):
                names = [model["id"] for model in answer.json()["data"]]
            if adapter in names:  # loaded by another rank in the meantime
                return
            raise UsageError(
                f"the adapter was not loaded: {error.what}", where=url, fix=MERGE_LORA
            ) from error
