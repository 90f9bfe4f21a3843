"""A report on data as it is: everything found at once, in one pass, whatever wrote the files.

Memory holds one block of rows, and about 40 bytes of hashes and numbers per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlctl.data.sources import find_sources
from rlctl.prepare.file_check import FileCheck, FileReport, Probes
from rlctl.prepare.findings import EXAMPLES_SHOWN, DataFinding, agree, rows, worst_first
from rlctl.prepare.histogram import Histogram
from rlctl.prepare.leakage import LeakageComparison, Reference
from rlctl.prepare.leaks import questions_of
from rlctl.prepare.lengths import PromptLengths
from rlctl.prepare.request import Progress
from rlctl.prepare.tokenizer import template_findings


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What to check.

    Attributes:
        files: files, directories, or anything else `prepare` reads.
        model: whose tokenizer and chat template measure the prompts; None: characters are counted.
        against: files whose questions must not occur in `files`.
        max_prompt_length: tokens a prompt may have; characters where there is no model.
        trust_remote_code: the model's tokenizer may run code of its own.
    """

    files: tuple[str, ...]
    model: str | None = None
    against: tuple[str, ...] = ()
    max_prompt_length: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything found.

    Attributes:
        files: in the order given.
        findings: worst first.
        lengths: of all usable prompts.
        model: what the lengths depend on; None: no model was given.
        leakage: how many rows of each file occur in each file of `against`.
    """

    files: list[FileReport]
    findings: list[DataFinding]
    lengths: Histogram
    model: dict[str, Any] | None = None
    leakage: tuple[LeakageComparison, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "files": [file.to_json() for file in self.files],
            "findings": [finding.to_json() for finding in self.findings],
            "lengths": self.lengths.to_json() if self.lengths.total else None,
            "model": self.model,
            "leakage": [comparison.to_json() for comparison in self.leakage],
        }


def check(request: CheckRequest, progress: Progress | None = None) -> CheckReport:
    """Read every file once and report.

    Raises:
        UsageError: a file is missing, or cannot be read at all; the model has no tokenizer.
        EnvironmentFailure: the hub is needed and cannot be reached.
    """
    progress = progress or Progress()
    sources = find_sources(request.files)
    probes = _probes(request)
    progress.phase("reading", sum(source.path.stat().st_size for source in sources))
    checks = []
    for source in sources:
        checks.append(FileCheck(source, probes))
        checks[-1].read(progress)
    found = [finding for one in checks for finding in one.findings()] + _shared_questions(checks)
    if probes.lengths is not None:
        found += template_findings(probes.lengths.renderer)
    described = probes.lengths.describe() if probes.lengths else None
    compared = tuple(comparison for one in checks for comparison in one.comparisons())
    reports = [one.report() for one in checks]
    return CheckReport(reports, worst_first(found), probes.histogram, described, compared)


def _probes(request: CheckRequest) -> Probes:
    lengths = None
    if request.model is not None:
        lengths = PromptLengths(request.model, trust_remote_code=request.trust_remote_code)
    reference_files = [(str(source.path), source) for source in find_sources(request.against)]
    reference = Reference.build(
        (file, text) for file, source in reference_files for text in questions_of(source)
    )
    return Probes(
        lengths, reference, request.max_prompt_length, Histogram("tokens" if lengths else "characters")
    )


def _shared_questions(checks: Sequence[FileCheck]) -> list[DataFinding]:
    """Rows of a file that ask what a row of an earlier file asks."""
    found = []
    for place, later in enumerate(checks):
        keys, _, numbers = later.questions.arrays()
        for earlier in checks[:place]:
            shared = np.flatnonzero(np.isin(keys, earlier.questions.arrays()[0]))
            if not len(shared):
                continue
            ask = agree(len(shared), "ask")
            differ = later.splits.split != earlier.splits.split
            examples = [f"{later.path}:{number}" for number in numbers[shared[:EXAMPLES_SHOWN]]]
            found.append(
                DataFinding(
                    "shared-questions",
                    "error" if differ else "warning",
                    f"{rows(len(shared))} of {later.path} {ask} what a row of {earlier.path} asks",
                    len(shared),
                    tuple(examples),
                    "one is not a test of training on the other" if differ else "drop one of them",
                )
            )
    return found
