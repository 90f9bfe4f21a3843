"""Data sets of the Hugging Face hub in `data.train_files`: prepared as `prepare-data` does, and cached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from rlctl.errors import UsageError
from rlctl.files import cache_failure, cache_root, matches
from rlctl.prepare.sources import HUB, is_readable

#: organisation/name, and perhaps /configuration, @revision and :split.
_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+){1,2}(?:@[\w./-]+)?(?::[\w.-]+)?", re.ASCII)


def hub_name(name: str) -> str | None:
    """The name of a data set of the hub, with `hf:`; None for a file, a directory or a pattern.

    What exists here is never looked up on the hub.
    """
    if name.startswith(HUB):
        return name
    is_name = _NAME.fullmatch(name) and not matches(name) and not is_readable(Path(name))
    return f"{HUB}{name}" if is_name else None


def local_files(names: Sequence[str], *, split: str) -> list[str]:
    """Prepared files: the names as they are, and files of the cache for data sets of the hub.

    `split`: of data sets that name none.

    Raises:
        UsageError: a data set has rows that cannot be used, or no such split.
        EnvironmentFailure: it cannot be loaded, or the cache cannot be written.
    """
    files = []
    for name in names:
        hub = hub_name(name)
        files += [name] if hub is None else _prepared(hub, split)
    return files


def _prepared(name: str, split: str) -> list[str]:
    from rlctl.prepare.pipeline import prepare
    from rlctl.prepare.request import PrepareRequest

    if ":" not in name.removeprefix(HUB):
        name = f"{name}:{split}"
    slug = re.sub(r"\W+", "-", name.removeprefix(HUB))
    out = cache_root() / "datasets" / f"{slug}-{sha256(name.encode()).hexdigest()[:8]}"
    request = PrepareRequest(
        (name,), out, val_fraction=0.0, near_duplicates="off", leakage="off", overwrite=True
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{out}.lock"):
            summary = prepare(request)
    except UsageError as error:
        fix = f"prepare it: `rlctl prepare-data parquet {name} --out DIR`, and name the files in DIR"
        raise UsageError(error.what, where=error.where or name, fix=fix) from error
    except OSError as error:
        raise cache_failure(f"{name} cannot be cached", out.parent, error) from error
    return [str(out / file) for file in summary.outputs["train"]]
