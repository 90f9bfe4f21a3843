"""Texts of the tokens of dumped sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from rlctl.extras import first_missing
from rlctl.registry import PartWarning
from rlctl.track.open_run import RunRecord

#: Text of some token ids.
Decoder = Callable[[Sequence[int]], str]


def decoder_of(record: RunRecord) -> Decoder | None:
    """Decoder of the tokenizer of a checkpoint or the model directory; None without a `tokenizer.json`.

    None, with a warning, also without the package that reads it.
    """
    folders = [path / "model" for path in reversed(record.checkpoints)] or [Path(record.spec.model.path)]
    file = next(filter(Path.is_file, (folder / "tokenizer.json" for folder in folders)), None)
    if file is None:
        return None
    missing = first_missing("tokenizers")
    if missing:
        warnings.warn(f"responses are not divided into tokens: {missing}", PartWarning, stacklevel=2)
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(ids: Sequence[int], decode: Decoder) -> list[str]:
    """Text that each token adds. A token that ends within a character adds ""; the next one adds it all."""
    texts = []
    start = 0
    shown = ""
    for index in range(len(ids)):
        text = decode(ids[start : index + 1])
        if text.endswith("\ufffd"):
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        shown = text
        if index - start >= 16:  # keep the last token as context: decoding may depend on the previous token
            start = index
            shown = decode(ids[index : index + 1])
    return texts
