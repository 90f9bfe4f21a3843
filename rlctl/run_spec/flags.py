"""`rlctl train --model --data --reward`: short forms of keys of the spec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.errors import UsageError
from rlctl.run_spec.model import EMBEDDED
from rlctl.run_spec.sources import all_presets, read_yaml_file

#: Spec key → its flag.
FLAG_OF = {
    "model.path": "--model",
    "data.train_files": "--data",
    "reward.name": "--reward",
    "reward.terms": "--reward",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """`--model`, `--data`, `--reward`; None and (): not given."""

    model: str | None = None
    data: Sequence[str] = ()
    reward: Sequence[str] = ()  # NAME, or for a weighted sum NAME=WEIGHT

    def __bool__(self) -> bool:
        return self.model is not None or bool(self.data) or bool(self.reward)

    @property
    def preset(self) -> str | None:
        """The preset of the model that `model` names; None: it is a directory, a hub id or a short name."""
        preset = all_presets().get(self.model or "")
        return preset.name if preset and preset.kind == "models" and self.model != EMBEDDED else None

    def words(self) -> list[str]:
        """The flags as arguments of a command line."""
        pairs = [("--model", self.model)] if self.model is not None else []
        pairs += [*(("--data", name) for name in self.data), *(("--reward", text) for text in self.reward)]
        return [word for pair in pairs for word in pair]

    def overrides(self, arguments: Sequence[str] = ()) -> list[str]:
        """`KEY=VALUE` arguments that say the same.

        Args:
            arguments: those that the user gives besides.

        Raises:
            UsageError: one of these sets the key of a flag, too.
        """
        given = {argument.partition("=")[0].strip() for argument in arguments}
        values = self._values()
        for key in values:
            others = {"reward.name", "reward.terms"} if FLAG_OF[key] == "--reward" else {key}
            for other in sorted(others & given):
                message = f"{FLAG_OF[key]} and {other}=… set the same"
                raise UsageError(message, where=FLAG_OF[key], fix="keep one of them")
        if "reward.name" in values:
            values["reward.terms"] = None  # those of a preset or a file
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self.model is not None:
            values["model.path"] = self.model
        if self.preset:
            source = read_yaml_file(all_presets()[self.preset].path, ())
            values["model.path"] = source.leaves["model.path"].value
        if self.data:
            values["data.train_files"] = list(self.data)
        terms = [_term(text) for text in self.reward]
        if len(terms) == 1 and terms[0]["weight"] == 1.0:
            values["reward.name"] = terms[0]["name"]
        elif terms:
            values["reward.terms"] = terms
        return values


def _term(text: str) -> dict[str, Any]:
    """`NAME` or `NAME=WEIGHT` as a term of `reward.terms`."""
    name, equals, weight = text.rpartition("=")
    try:
        return {"name": name, "weight": float(weight)} if equals else {"name": text, "weight": 1.0}
    except ValueError:  # the name has an equals sign
        return {"name": text, "weight": 1.0}
