"""What the fork server imports once, for every job of the tests: all that a run imports sooner or later."""

import contextlib
import io
import logging

logging.disable(logging.WARNING)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

    import tests.models  # noqa: F401
logging.disable(logging.NOTSET)
