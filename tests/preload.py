"""What the fork server imports once, for every job of the tests: all that a run imports sooner or later."""

# ruff: noqa: F401
import contextlib
import io
import logging

logging.disable(logging.WARNING)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import deepspeed.ops
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    import rlctl.cli.app
    import rlctl.train.loop
    import rlctl.train.setup
    import rlctl.train.start
    import tests.models

    with contextlib.suppress(ImportError):
        import pandas  # by pyarrow, where it is installed
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # compiles hundreds of patterns
logging.disable(logging.NOTSET)
