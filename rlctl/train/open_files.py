"""The files and connections that a rank may have open at a time: the limit that `ulimit -n` shows."""

from __future__ import annotations

import resource

from rlctl.run_spec.run_spec import RunSpec

#: Open files of a rank besides connections: libraries, graders, trackers, files of weights.
_BASE = 512
#: Connections to every other rank: one each of a group over gloo (measured: ranks + 3), and on rank 0 of the
#: store at which ranks meet. An engine of vLLM in the process forms two further groups of all ranks.
_OWN_GROUPS, _GROUPS_OF_VLLM = 2, 2
#: Open requests to rollout servers, of a batch and in flight: 512 each.
_REQUESTS = 1024


def files_needed(spec: RunSpec) -> int:
    """About how many files and connections a rank has open at most."""
    on_servers = spec.has_rollout_servers
    groups = _OWN_GROUPS + (_GROUPS_OF_VLLM if spec.rollout.name == "vllm" and not on_servers else 0)
    return _BASE + groups * spec.world_size + (_REQUESTS if on_servers else 0)


def allow_open_files(spec: RunSpec) -> list[str]:
    """Raises the limit of this process and of those it starts; warnings if the system allows too few."""
    needed = files_needed(spec)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return []
    allowed = needed if hard == unlimited else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= needed:
        return []
    return [
        f"warning: a rank of this run has up to about {needed:,} files and connections open, and the system "
        f"allows {allowed:,} (ulimit -Hn): raise `nofile` in /etc/security/limits.conf, or LimitNOFILE of "
        "the service that starts it"
    ]
