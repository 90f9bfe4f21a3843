"""rlctl's own names, wherever they were logged."""

from __future__ import annotations

import re

from rlctl.diagnose.readers.framework import Config, Dialect
from rlctl.diagnose.table import Facts, facts_of


def _facts(config: Config) -> Facts:
    """From the resolved spec, as it is sent to trackers."""
    from pydantic import ValidationError

    from rlctl.spec.run import RunSpec

    sections = {key: value for key, value in config.items() if key in RunSpec.model_fields}
    try:
        return facts_of(RunSpec.model_validate(sections)) if sections else Facts()
    except ValidationError:  # of another version
        return Facts()


DIALECT = Dialect(
    framework="rlctl",
    marks=re.compile(
        r"rollout_corr/(?:rollout_is_raw_.*|\w+_size_token|\w+ed_(?:sequences|updates))"
        r"|reward/(?:num_errors|num_timeouts|error_fraction|zero_spread_groups|.+/num_errors)|timing_s/sync_weights"
    ),
    names={},
    uses_ours=True,
    always=Facts(ess_after_truncation=True, weights_are="applied"),
    facts=_facts,
)
