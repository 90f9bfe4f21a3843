"""Text of the pages that the code has: committed, current; root files as pages of the site."""

import re
import subprocess
import sys

import pytest

from docs.generate import COMMAND, END, with_generated_text
from mkdocs_hooks import PAGES, ROOT, as_page
from rlctl import registry
from rlctl.cli.app import app

DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_generated_text_is_current() -> None:
    """In a process of its own: other tests register parts, which the pages would list."""
    code = "from docs.generate import outdated; print(*(path.name for path in outdated()), sep=', ')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = done.stdout.strip()
    assert not names, f"generated text is out of date in {names}; run `{COMMAND}`"


def test_an_old_text_is_overwritten_and_the_rest_of_the_page_kept() -> None:
    old = f"# Page\n\n<!-- generated: examples/custom_kl.py -->\n\nold\n\n{END}\n\nmine\n"
    new = with_generated_text(old)
    example = (ROOT / "examples" / "custom_kl.py").read_text(encoding="utf-8").strip("\n")
    assert f"\n```python\n{example}\n```\n\n{END}\n\nmine\n" in new
    assert "old" not in new
    assert with_generated_text(new) == new


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("spec", ["| `actor.lr` | number ≥ 0 | ", "| `trainer.seed` |"]),
        ("metrics", ["| `actor/ppo_kl` | nats |"]),
        (
            "algorithms",
            ["| `sequence` | the product of a response's ρ | Π_t ρ_t | sequence |", "| `k3` | k3 of"],
        ),
    ],
)
def test_the_reference_shows_what_the_code_has(name: str, rows: list[str]) -> None:
    assert [row for row in rows if f"\n{row}" not in page(f"reference/{name}")] == []


def test_a_comment_that_names_nothing_or_has_no_end_is_refused() -> None:
    with pytest.raises(KeyError, match="no such table"):
        with_generated_text(f"<!-- generated: no such table -->\n{END}\n")
    with pytest.raises(ValueError, match=r"without .* generated: graders -->"):
        with_generated_text(f"<!-- generated: graders -->\n\n<!-- generated: spec keys -->\n{END}\n")


def test_every_command_is_listed_without_terminal_markup() -> None:
    text = page("reference/commands")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    names += [str(group.name) for group in app.registered_groups]
    assert len(names) >= 9
    assert [name for name in names if f"\n## `rlctl {name}`\n" not in text] == []
    assert "[bold]" not in text
    assert "```bash\nrlctl evaluate runs/" in text
    assert "\n### `rlctl diagnose mismatch`\n" in text
    assert "\n### `rlctl evaluate list`\n" in text
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"^\s*rlctl .*", outside, re.MULTILINE) == []  # examples are code


@pytest.mark.parametrize(
    ("at_the_root", "on_the_site"),
    [
        ("[a](docs/how-to/data.md#recipes)", "[a](how-to/data.md#recipes)"),
        ("[a](CHANGELOG.md)", "[a](changes.md)"),
        ("[a](https://example.org/docs/x.md)", "[a](https://example.org/docs/x.md)"),
        ("[a](#exit-codes)", "[a](#exit-codes)"),
        ("write `docs/x.md`", "write `docs/x.md`"),
    ],
)
def test_links_of_root_pages_lead_to_the_same_place(at_the_root: str, on_the_site: str) -> None:
    assert as_page(at_the_root) == on_the_site


def test_links_between_root_pages_and_docs_exist_in_the_repository() -> None:
    """The strict build checks the links of the site; in a checkout the same links are paths."""
    link = re.compile(r"\]\((?!https?:)([^)#\s]+)")
    pages = [ROOT / name for name in PAGES] + list(DOCS.rglob("*.md"))
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in link.findall(re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8")))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_python_api_is_listed_with_arguments_and_errors() -> None:
    import rlctl

    text = page("reference/api")
    assert [name for name in rlctl.__all__ if f"## `rlctl.{name}`\n" not in text] == []
    grade = text.partition("## `rlctl.grade`")[2].partition("## ")[0]
    assert "rlctl.grade(grader: str, responses: Iterable[str]," in grade
    assert "\n**Args**\n\n- `grader`: " in grade
    assert "\n**Raises**\n\n- `UsageError`: " in grade


def test_the_inputs_of_a_users_part_are_listed_with_shapes_and_defaults() -> None:
    text = page("how-to/extend") + page("how-to/diagnose")
    expected = (
        "| `advantages` | (m,), constants |",
        "| `ratio` | (m,): r = π_θ/π_old |",
        "| `rewards` | (E,) float64 reward of each episode, the sum over all its tokens |",
        "| `train` | (M,) log π_train |",
        "| `finish_reason` | stop, length or abort, see `FINISH_REASONS` |",
        "| `needs` | metrics without which the rule is skipped |",
        "| `not_applicable` | returns why the rule does not apply to a run; an empty text where it applies |",
        "| `gap_is_mismatch` | Whether only the two ",
        "| `rank, world_size` | rank of this process",
        "| `run_dir` | directory of the run; it exists |",
        "| `dtypes` | supported values of `rollout.dtype` besides null; default: `bf16, fp32` |",
        "| `samples_while_training` | values of `rollout.mode` in which it supports `rollout.max_staleness`; "
        "default: `none` |",
        "| `slow_on_gpu` | how much slower than vLLM it is on a GPU; the spec check warns with this text |",
    )
    assert [row for row in expected if f"\n{row}" not in text] == []
    assert "but not conclude that nothing is wrong; default: `1` |" in text  # a comment of two lines


def test_the_entry_point_groups_of_the_page_are_those_of_the_registries() -> None:
    text = page("how-to/extend")
    named = set(re.findall(r'entry-points\."(rlctl\.\w+)"', text))
    registries = {one.group for one in vars(registry).values() if isinstance(one, registry.Registry)}
    assert named == registries
