"""Environments by name, and what the spec names built from it.

A user's environment is `path/to/file.py:Name`: a factory decorated with `ENVIRONMENTS.register`, or a class
or function as it is. Does not import torch, because the spec reads names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.registry import ENVIRONMENTS

if TYPE_CHECKING:
    from rlctl.environment.protocol import Environment, EnvironmentContext


@ENVIRONMENTS.register(label="One question, one answer, one grade")
def single_turn(context: EnvironmentContext) -> Environment:
    """See `rlctl.environment.single_turn`, which samples whole batches at once."""
    raise NotImplementedError  # `sample_episodes` is called instead
