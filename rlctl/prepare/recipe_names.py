"""Names of the recipes in `recipes`. Imports nothing, so that the command line can list them."""

from typing import Literal

RecipeName = Literal[
    "gsm8k",
    "math",
    "aime",
    "dapo-math",
    "countdown",
    "multiple-choice",
    "humaneval",
    "mbpp",
    "apps",
    "livecodebench",
    "orz",
    "verl",
    "trl",
    "openrlhf",
    "generic",
]
#: `auto`: the first row determines the recipe.
RecipeChoice = Literal["auto", RecipeName]
