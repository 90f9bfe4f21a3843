"""Launch scripts are read as bash would run them, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.convert.shell import commands, is_unresolved


def started(
    text: str, tmp_path: Path, *, arguments: list[str] | None = None, **environment: str
) -> list[list[str]]:
    found = commands(
        text, path=tmp_path / "run.sh", environment=environment, arguments=arguments or [], notes=[]
    )
    return [[arg.text for arg in args] for args in found]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("n=4\nrun a=$n b=${n}x", ["a=4", "b=4x"]),
        ("run ${unset:-7} ${unset-8}", ["7", "8"]),
        ("n=\nrun x${n:-7} y${n-8} z${n:+set}", ["x7", "y", "z"]),
        ("a=2; b=$((a * 3 + 1)); run $b $((b/2))", ["7", "3"]),
        ("run one \\\n  two \\\n  three", ["one", "two", "three"]),
        ("run 'a b' \"c d\" e\\ f", ["a b", "c d", "e f"]),
        ("x='1 2'\nrun $x \"$x\"", ["1", "2", "1 2"]),
        ("A=(--lr 1e-6 # comment\n # --off\n --n '8 9')\nrun ${A[@]}", ["--lr", "1e-6", "--n", "8 9"]),
        ('A=()\nB=(x)\nB+=(y)\nrun "${A[@]}" "${B[@]}" ${#B[@]}', ["x", "y", "2"]),
        ("p=/data/set/train.parquet\nrun ${p##*/} ${p%.parquet} ${p/set/other}", None),
        ("if [ $# -lt 1 ]; then n=1; else n=2; fi\nrun $n", ["1"]),
        ("m=b\nif [ $m == a ]; then n=1; elif [[ $m == b && 3 -gt 2 ]]; then n=2; fi\nrun $n", ["2"]),
        ('[ -z "$n" ] && n=5\n[ -n "$n" ] || n=6\nrun $n', ["5"]),
        ("f() { run $1 $2; }\nf a b", ["a", "b"]),
        ("for s in 3 4; do run $s; done", ["3"]),
        ("while [[ $# -gt 0 ]]; do case $1 in a) x=1;; esac; shift; done\nrun ok", ["ok"]),
        ("run a > log.txt 2>&1 | tee b & ", ["a"]),
        ("run x${10} y", ["x", "y"]),
        ("d=$HOME/a/$n_m/$k_l; n_m=1\nd=$HOME/a/$n_m/$HOME\nrun $d", ["~/a/1/~"]),
        (
            "A=(--m [0]*$N_D+[1]*$M http://h:$N_D/x)\nN_D=2 M=3\nrun ${A[@]}",
            ["--m", "[0]*$N_D+[1]*$M", "http://h:$N_D/x"],
        ),
        ("cat <<EOF > x\nrun hidden\nEOF\nrun seen", ["seen"]),
        ("run 'actor=${model.path}'", ["actor=${model.path}"]),
        ("export N=3 M=4\nX=1 run $N$M", ["34"]),
        ("run $HOME/data $(basename /a/b.txt)", ["~/data", "b.txt"]),
        ("run $PWD/a $(pwd)/b `pwd`/c", ["./a", "./b", "./c"]),
    ],
)
def test_words_are_those_of_bash(script: str, expected: list[str] | None, tmp_path: Path) -> None:
    expected = expected or ["train.parquet", "/data/set/train", "/data/other/train.parquet"]
    runs = [args[1:] for args in started(script, tmp_path) if args[0] == "run"]
    assert runs == [expected]


def test_a_comment_between_continued_lines_ends_the_command(tmp_path: Path) -> None:
    """As in bash: what follows is another command, so that importing it would be wrong."""
    assert started("run a=1 \\\n  # b=2 \\\n  c=3", tmp_path)[0] == ["run", "a=1"]


def test_arguments_and_environment_come_from_outside(tmp_path: Path) -> None:
    script = 'run $1 ${GPUS:-8} "$@"'
    assert started(script, tmp_path, arguments=["x", "y z"], GPUS="2") == [["run", "x", "2", "x", "y z"]]


def test_what_only_a_run_would_tell_stays_as_written(tmp_path: Path) -> None:
    [args] = started("run a=$(nproc) b=$MODEL c=3", tmp_path)
    assert [is_unresolved(arg) for arg in args] == [False, True, True, False]
    assert args[2] == "b=$MODEL"


def test_sourced_files_are_read_from_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("MODEL_ARGS=(--layers 4)\n")
    here = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"'
    script = f'{here}\nsource "${{DIR}}/model.sh"\nrun ${{MODEL_ARGS[@]}}'
    assert started(script, tmp_path) == [["run", "--layers", "4"]]


def test_lines_are_those_of_array_elements(tmp_path: Path) -> None:
    script = "A=(\n  --lr 1\n\n  --n 2\n)\nrun \\\n  ${A[@]} \\\n  --z 3\n"
    [args] = commands(script, path=tmp_path / "run.sh", environment={}, arguments=[], notes=[])
    assert [(arg.text, arg.line) for arg in args[1:]] == [
        ("--lr", 2),
        ("1", 2),
        ("--n", 4),
        ("2", 4),
        ("--z", 8),
        ("3", 8),
    ]


@pytest.mark.parametrize(
    "script",
    [
        "run '",
        'run "$(a',
        "A=(x",
        "if true; then",
        "case x in",
        "((",
        "<<",
        "f() {",
        "function\n",
        "run $(([]))",
        "run $((1e999))",
        "run ${" + "9" * 5000 + "}",
        "A=(x); run ${A[" + "9" * 5000 + "]} ${A[0" + "9" * 5000 + "]}",
        "run $((" + "9" * 5000 + " + 1))",
        "run ${A:" + "9" * 5000 + ":" + "9" * 5000 + "}",
        "${",
        "`",
        "run \\",
        "[[ " + "( " * 5000 + "a ]]",
        "run " + "${a:-" * 5000,
        "run $(" * 5000,
        "if true; then " * 5000,
    ],
    ids=lambda script: script[:20],
)
def test_a_broken_script_does_not_crash(script: str, tmp_path: Path) -> None:
    started(script, tmp_path)


def test_a_script_that_calls_itself_ends(tmp_path: Path) -> None:
    started("f() { f; f; }\nf", tmp_path)
    (tmp_path / "run.sh").write_text("source run.sh\nsource run.sh\n")
    started("source run.sh", tmp_path)


def test_the_script_is_argument_zero_however_it_is_written(tmp_path: Path) -> None:
    assert started("run $0 ${00}", tmp_path) == [["run", *2 * [str(tmp_path / "run.sh")]]]
