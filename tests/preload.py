"""Imported once by the fork server of the test jobs: all modules that a run imports at some time."""

# ruff: noqa: F401
import contextlib
import gc
import io
import logging
from functools import cache

logging.disable(logging.WARNING)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.ops
    import peft
    import pyarrow.pandas_compat
    import torch.utils.serialization.config
    import typer.main
    from pydantic import type_adapter
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    import rlctl.cli.app
    import rlctl.cli.output
    import rlctl.reward.code  # runs as many programs at once as before
    import rlctl.reward.pool
    import rlctl.train.loop
    import rlctl.train.preflight
    import rlctl.train.setup
    import rlctl.train.start
    import tests.models

    with contextlib.suppress(ImportError):
        import pandas  # imported by pyarrow if installed
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # compiles hundreds of patterns
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(rlctl.cli.app.app)  # otherwise every job would build it
rlctl.reward.pool.share_of_cores = lambda: 1  # as in tests/conftest.py
logging.disable(logging.NOTSET)
# Otherwise garbage collection in a job would write to, and so copy, the memory of half a million objects.
gc.collect()
gc.freeze()
gc.unfreeze = lambda: None  # called when a run ends
