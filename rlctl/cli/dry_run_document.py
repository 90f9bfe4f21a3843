"""`rlctl train --dry-run --format json`: the plan as plain types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.cli.dry_run_summary import speed_of
from rlctl.errors import Problem
from rlctl.run_spec.memory import MemoryPart, memory_total
from rlctl.run_spec.placement import Placement
from rlctl.run_spec.step_time import Seconds


def plan_document(placement: Placement, problems: Sequence[Problem]) -> dict[str, Any]:
    """Problems, memory, stages and suggestions of a plan; bytes, and seconds of a step as `low` and `high`.

    Seconds are null where they are unknown, or the stage is not part of a step; `not_known` says what is
    missing or assumed. `own_design` has the seconds of a step with work that other software does and rlctl
    leaves out.
    """
    machine = placement.machine
    size = placement.size
    whole = placement.intervals.get("whole step")
    return {
        "machine": {
            "name": machine.name,
            "gpu": machine.gpu,
            "gpus_per_node": machine.gpus,
            "nodes": machine.nodes,
            "gpu_bytes": machine.gpu_bytes if machine.gpus else None,
            "host_bytes": machine.host_bytes,
        },
        "model": {"parameters": size.num_parameters, "source": size.source},
        "problems": [
            {"severity": each.severity, "where": each.key or each.where, "what": each.what, "fix": each.fix}
            for each in problems
        ],
        "gpu_memory": _memory(placement.gpu_parts),
        "host_memory": _memory(placement.host_parts),
        "stages": [
            {
                "name": stage.name,
                "gpu_bytes": stage.gpu,
                "host_bytes": stage.host,
                "moved_bytes": stage.moved,
                "seconds": _ends(stage.seconds),
            }
            for stage in placement.stages()
        ],
        "step": {
            "seconds": _ends(whole),
            "tokens": placement.tokens() * placement.spec.world_size,
            "tokens_per_second": _ends(speed_of(placement) if whole else None),
            "mean_response": placement.lengths.response,
            "seconds_if_all_responses_are_longest": _ends(placement.at_the_limit if whole else None),
        },
        "own_design": [
            {"what": own.what, "step_seconds_with": _ends(own.seconds_with)} for own in placement.own_design()
        ],
        "not_known": list(placement.not_known()),
        "suggestions": [
            {"setting": each.setting, "step_seconds": _ends(each.seconds), "why": each.why}
            for each in placement.suggestions()
        ],
    }


def _ends(seconds: Seconds | None) -> dict[str, float] | None:
    return None if seconds is None else {"low": seconds.low, "high": seconds.high}


def _memory(parts: Sequence[MemoryPart]) -> dict[str, Any]:
    """The peak, and all parts; a peak with a part of unknown size is a lower bound."""
    listed = [{"name": part.name, "bytes": part.num_bytes, "phases": list(part.phases)} for part in parts]
    return {
        "peak_bytes": memory_total(parts),
        "peak_is_lower_bound": any(part.num_bytes is None for part in parts),
        "parts": listed,
    }
