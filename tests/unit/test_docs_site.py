"""Text of the pages that the code has: committed, current; root files as pages of the site."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import BLOCK, COMMAND, END, with_generated_text
from docs.search_words import IMPORT, METRICS, SPEC, entries, merged, with_anchors
from mkdocs_hooks import PAGES, ROOT, as_page, marked, with_breaks, write_versions
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
        "| `rewards` | (E,) float64 reward of each episode: its score minus any KL penalty",
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


def words(text: str) -> int:
    """Words that somebody wrote."""
    return len(BLOCK.sub("", text).split())


def test_what_is_to_be_read_is_not_too_much() -> None:
    """Start, guides and reference, without generated text; the evidence is off this path."""
    pages = [path for path in DOCS.rglob("*.md") if path.parent.name != "evidence"]
    num_words = {path.name: words(path.read_text(encoding="utf-8")) for path in pages}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sum(num_words.values()) + words(readme) <= 60_000, num_words
    assert words(readme) <= 1_000
    assert words(f"a b\n<!-- generated: x -->\n\nmany words\n\n{END}\nc") == 3


def test_the_search_leads_from_other_names_to_ours() -> None:
    found = {entry["location"]: entry for entry in entries()}
    assert len(found) == len(entries()), "the site shows one entry per address"
    for location, name in (
        (f"{SPEC}#data.max_response_length", "max_completion_length (TRL)"),
        (f"{SPEC}#rollout.n", "num_generations (TRL)"),
        (f"{SPEC}#actor.lr", "actor_rollout_ref.actor.optim.lr (verl)"),
        (f"{METRICS}#response_length/clip_ratio", "completions/clipped_ratio (trl)"),
    ):
        assert name in found[location]["title"].split("; ")
    assert "completion" in found[f"{SPEC}#data.max_response_length"]["text"].rpartition("(")[2]
    megatron = found[f"{IMPORT}#actor_rollout_ref.actor.megatron."]
    assert megatron["title"].endswith("not in rlctl")
    for location in found:
        address, _, key = location.partition("#")
        if address == SPEC:
            assert f"\n| `{key}` |" in page("reference/spec")


def test_a_section_of_no_page_is_refused() -> None:
    index = {"docs": [{"location": "a/", "title": "A", "text": ""}]}
    assert len(merged(index, [{"location": "a/#b", "title": "", "text": ""}])["docs"]) == 2
    with pytest.raises(ValueError, match="c/"):
        merged(index, [{"location": "c/#b", "title": "", "text": ""}])


def test_rows_of_keys_have_an_address_once() -> None:
    row = "<tr>\n<td><code>{}</code></td>\n<td>x</td>\n</tr>"
    html = with_anchors(row.format("actor.lr") + row.format("actor.lr") + row.format("a &lt; b"))
    assert html.count('<tr id="actor.lr">') == 1
    assert html.count("<tr>") == 2


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("actor.lr", "actor.lr"),
        ("rloo-seq-is", '<span class="unbroken">rloo-seq-is</span>'),
        (
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "algorithm.<wbr>rollout_correction.<wbr>rollout_is_batch_normalize",
        ),
        ("a &lt;b&gt; c", "a &lt;b&gt; c"),
    ],
)
def test_code_breaks_at_dots_only(code: str, shown: str) -> None:
    assert with_breaks(f"<p><code>{code}</code></p>") == f"<p><code>{shown}</code></p>"
    block = f"<pre><span></span><code>{code}</code></pre>"
    assert with_breaks(block) == block


def test_generated_text_is_marked() -> None:
    html = f"<!-- generated: spec keys -->\n<table></table>\n{END}\n<p>mine</p>"
    assert marked(html).startswith('<div class="generated">')
    assert marked(html).endswith("</div>\n<p>mine</p>")
    assert "spec keys" in marked(html)


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.1.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    (tmp_path / "assets").mkdir()
    write_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    assert [entry["version"] for entry in listed] == ["0.10.0", "0.9.0", "0.1.0"]
