"""Figures of the test of the sampler's log-probs: critical values, false alarms, power, runs with faults.

    python benchmarks/sampler_test.py critical [--dumps 100000]    # CRITICAL_Z of rlctl.algos.sampler_test
    python benchmarks/sampler_test.py clean [--runs 1000]          # simulated honest samplers
    python benchmarks/sampler_test.py power [--runs 20]            # simulated faults, early and late
    python benchmarks/sampler_test.py runs [--clean 2] [--faulty 3] [--only KIND …]  # training runs

`docs/evidence/sampler-test.md` shows the output. Intervals are Clopper–Pearson, 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from benchmarks.in_flight import running_server
from benchmarks.runs import fork_server
from benchmarks.studies.planted import RC
from examples.sums import rows as rows_of_sums
from examples.sums import split
from rlctl.algos.sampler_test import UnitMean, Wealth, sampler_sums, unit_mean
from rlctl.data.schema import write_rows

#: Vocabulary, tokens of a response, responses of a batch, batches of a simulated run.
VOCABULARY, LENGTH, RESPONSES, BATCHES = 50, 32, 8, 40
ALARM, WARNING = math.log(1e6), math.log(100)
SPREADS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
SIZES = (100, 1_000, 10_000)


def share(hits: int, total: int) -> str:
    """A rate with its interval."""
    low = float(beta.ppf(0.025, hits, total - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, total - hits)) if hits < total else 1.0
    return f"{hits}/{total} ({low:.1%} to {high:.1%})"


# --- critical values of z -------------------------------------------------------------------------------


def critical(dumps: int) -> None:
    """The z that 1 of 10,000 honest dumps falls below, for log-normal ρ: the lowest over sizes of a dump."""
    draw = np.random.default_rng(0)
    print("spread of log ρ   " + "".join(f"{size:>12,}" for size in SIZES) + "   tokens; 1e-4 quantile of z")
    for spread in SPREADS:
        lowest = []
        for size in SIZES:
            found = []
            for _ in range(max(dumps // max(4_000_000 // size, 1), 1)):
                shape = (4_000_000 // size, size)
                logs = draw.standard_normal(shape, dtype=np.float32) * spread - spread**2 / 2
                gap = np.expm1(logs)
                found.append(gap.sum(1) / np.sqrt((gap * gap).sum(1)))
            lowest.append(float(np.quantile(np.concatenate(found)[:dumps], 1e-4)))
        print(f"{spread:<18}" + "".join(f"{z:12.2f}" for z in lowest), flush=True)


# --- simulated samplers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A sampler: what it draws from, what it reports, and what the trainer scores.

    `of`: logits (n, V) of the policy and a generator → logits that are drawn from, reported, scored.
    """

    name: str
    of: Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor, Tensor]]
    shift: int = 0  # places by which the reported log-probs are moved within a response


def noisy(logits: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Logits of other weights."""
    return logits + size * torch.randn(logits.shape, generator=draw)


def cut(logits: Tensor, top_p: float) -> Tensor:
    """Only the most likely tokens that make up `top_p`; −∞ elsewhere."""
    ordered, order = logits.sort(-1, descending=True)
    mass = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    return torch.full_like(logits, -math.inf).scatter(
        -1, order, ordered.masked_fill(mass >= top_p, -math.inf)
    )


def drawn_as_reported(size: float) -> Case:
    def of(x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, noisy(x, size, g)

    return Case(f"stale, logit noise {size:g}" if size else "same weights", of)


def _rounded(x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    low = x.bfloat16().float()
    return low, low, x


def _tempered(x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return x / 0.9, x / 0.9, x / 0.9


HONEST = (
    drawn_as_reported(0.0),
    Case("bfloat16 logits", _rounded),
    drawn_as_reported(0.1),
    drawn_as_reported(0.4),
    drawn_as_reported(1.0),
    Case("sampled at 0.9 and reported so", _tempered),
)


def _other(size: float) -> Case:
    def of(x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return x, noisy(x, size, g), x

    return Case(f"log-probs of other weights, noise {size:g}", of)


FAULTY = (
    _other(0.1),
    _other(0.4),
    Case("shifted by one token", lambda x, g: (x, x, x), 1),
    Case("shifted by one token, trainer stale by 0.4", lambda x, g: (x, x, noisy(x, 0.4, g)), 1),
    Case("top-p 0.95, renormalised", lambda x, g: (cut(x, 0.95), cut(x, 0.95), x)),
    Case("top-p 0.99, renormalised", lambda x, g: (cut(x, 0.99), cut(x, 0.99), x)),
    Case("top-p 0.95, trainer stale by 0.4", lambda x, g: (cut(x, 0.95), cut(x, 0.95), noisy(x, 0.4, g))),
    Case("sampled at 0.9, raw log-probs", lambda x, g: (x / 0.9, x, x)),
    Case("the trainer's own log-probs", lambda x, g: (x, noisy(x, 0.0, g), x)),
)


def batches(case: Case, draw: torch.Generator) -> Iterator[Tensor]:
    """(RESPONSES · LENGTH,) log-ratios of each batch."""
    while True:
        logits = 2.0 * torch.randn(RESPONSES * LENGTH, VOCABULARY, generator=draw)
        used, reported, scored = case.of(logits, draw)
        tokens = torch.multinomial(used.softmax(-1), 1, generator=draw)

        def of(x: Tensor, tokens: Tensor = tokens) -> Tensor:
            return x.log_softmax(-1).gather(1, tokens).squeeze(1)

        told = of(reported).view(RESPONSES, LENGTH).roll(case.shift, 1).flatten()
        yield of(scored) - told


def _add(total: dict[str, float], sums: dict[str, float]) -> None:
    for name, value in sums.items():
        total[name] = total.get(name, 0.0) + value


def _sums(log_ratio: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in sampler_sums(log_ratio).items()}


def recorded_cases() -> list[Case]:
    """Logits of the built-in model at the places of its rollouts, early and late in a training run.

    Every batch draws places anew. `bfloat16`: the sampler has the trainer's logits, rounded; `stale`: it
    samples with the weights of 24 updates before.
    """
    with tempfile.TemporaryDirectory() as where:
        process = fork_server().Process(target=_record, args=(Path(where),))
        process.start()
        process.join()
        early, late = torch.load(Path(where) / "logits.pt")
    gap = float((early.log_softmax(-1) - late.log_softmax(-1)).abs().mean())
    print(f"built-in model: {len(early):,} places; log-probs 24 updates apart differ by {gap:.3g} nats")

    def rounded(x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        chosen = late[torch.randint(len(late), (len(x),), generator=g)]
        return chosen.bfloat16().float(), chosen.bfloat16().float(), chosen

    def stale(x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.randint(len(early), (len(x),), generator=g)
        return early[chosen], early[chosen], late[chosen]

    return [Case("built-in model, bfloat16", rounded), Case("built-in model, 24 updates old", stale)]


def _record(where: Path) -> None:
    """In the child: trains, and scores the places of the rollouts under two checkpoints."""
    from transformers import AutoModelForCausalLM

    from rlctl.track.open_run import open_run

    more = ("trainer.total_training_steps=20", "trainer.save_freq=8", "trainer.max_ckpt_to_keep=null")
    _run_in_child((*BASE, *more), where)
    record = open_run(where / "run")
    found = []
    for path in (record.checkpoints[0], record.checkpoints[-1]):
        model, rows = AutoModelForCausalLM.from_pretrained(path / "model").float().eval(), []
        with torch.no_grad():
            for step in (16, 20):
                for row in record.rollouts(step).to_pylist():
                    logits = model(input_ids=torch.tensor(row["token_ids"])[None]).logits[0, :-1]
                    rows.append(logits[torch.tensor(row["sampled"])[1:]])
        found.append(torch.cat(rows))
    torch.save(tuple(found), where / "logits.pt")


def clean(runs: int) -> None:
    """Looked at after every batch: how many runs of an honest sampler ever pass 100 and 10⁶, and z."""
    print(
        f"{BATCHES} batches of {RESPONSES * LENGTH} tokens, {runs} runs of each; log wealth, and z of the run"
    )
    for number, case in enumerate((*recorded_cases(), *HONEST)):
        warned = alarmed = cuts = 0
        for run in range(runs):
            draw = torch.Generator().manual_seed(1_000_000 * number + run)
            wealth, total, largest = Wealth(), dict[str, float](), 0.0
            for _, log_ratio in zip(range(BATCHES), batches(case, draw), strict=False):
                sums = _sums(log_ratio)
                wealth = wealth.after(sums)
                largest = max(largest, wealth.log_value)
                _add(total, sums)
            warned, alarmed = warned + (largest > WARNING), alarmed + (largest > ALARM)
            cuts += unit_mean(total).is_cut
        print(
            f"{case.name:34} above 100: {share(warned, runs)}, above 1e6: {share(alarmed, runs)}, "
            f"called cut by z: {share(cuts, runs)}",
            flush=True,
        )


def power(runs: int, late: int) -> None:
    """Tokens from the fault to the alarm: from the start, and after `late` clean batches."""
    print(
        f"wealth above 1e6 within {BATCHES * RESPONSES * LENGTH:,} tokens of the fault; {runs} runs of each"
    )
    for number, case in enumerate(FAULTY):
        for before in (0, late):
            tokens: list[int] = []
            means: list[UnitMean] = []
            for run in range(runs):
                draw = torch.Generator().manual_seed(7_000_000 + 1_000 * number + run)
                wealth, total = Wealth(), dict[str, float]()
                for _, log_ratio in zip(range(before), batches(HONEST[2], draw), strict=False):
                    wealth = wealth.after(_sums(log_ratio))
                found = None
                for place, log_ratio in zip(range(BATCHES), batches(case, draw), strict=False):
                    sums = _sums(log_ratio)
                    wealth = wealth.after(sums)
                    _add(total, sums)
                    if found is None and wealth.log_value > ALARM:
                        found = (place + 1) * RESPONSES * LENGTH
                tokens += [found] if found else []
                means.append(unit_mean(total))
            zs = [each.z for each in means if each.z is not None]
            z = f"{statistics.median(zs):.0f}" if zs else "undefined"
            when = f"median {statistics.median(tokens):,.0f} tokens" if tokens else "—"
            cuts = sum(each.is_cut for each in means)
            print(
                f"{case.name:44} after {before:>4} clean batches: {share(len(tokens), runs)} {when}; "
                f"z {z}, called cut {cuts}/{runs}",
                flush=True,
            )


# --- runs of the built-in model -------------------------------------------------------------------------

BASE = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.lr_warmup_steps=0",
    "actor.lr_scheduler_type=constant",
    "rollout.n=4",
    "trainer.rollouts_per_step=-1",
    "trainer.test_freq=-1",
    "data.val_files=[]",
    "trainer.guardrails.mode=off",
)
#: Runs of honest samplers, by what they differ in. Their settings come after `BASE`.
SOUND: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16 sampler": ("rollout.dtype=bf16",),
    "int8 sampler": ("rollout.dtype=int8",),
    "temperature 0.7": ("rollout.temperature=0.7",),
    "one batch ahead": ("rollout.max_staleness=1",),
    "decoupled": (f"{RC}bypass_mode=false",),
    "weights every second step": ("rollout.sync_every=2",),
    "several turns, int8 sampler": (
        *("environment.name=guess_number", "data.max_response_length=32", "rollout.dtype=int8"),
    ),
    "SmolLM2, int8 sampler": (
        *("model.path=smollm2-135m", "engine.dtype=fp32", "rollout.dtype=int8", "actor.lr=1e-5"),
        *("data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=10"),
        *("actor.ppo_micro_batch_size_per_gpu=16", "reward.name=maths"),
    ),
}
#: The same with a vLLM server, in bfloat16, for episodes of 1 to 40 turns: settings of all, and of each.
SERVER_TRAINING = (
    *("rollout.name=vllm", "rollout.mode=server", "rollout.server.start_timeout=900", "rollout.dtype=bf16"),
    *(f"environment.name={Path(__file__).parent / 'questions.py'}:questions", "environment.max_turns=40"),
    *("reward.terms=[]", f"{RC}rollout_is=token", f"{RC}rollout_is_batch_normalize=false"),
)
SOUND_WITH_SERVER: dict[str, tuple[str, ...]] = {
    "vLLM on the CPU": (),
    "vLLM on the CPU, in flight": ("rollout.in_flight=true", "rollout.max_staleness=1"),
}
#: Fault → overrides. Each changes what the engine reports or draws in the child, see `_plant`.
PLANTED = {
    "shifted by one token": (),
    "of another response": (),
    "of the initial weights": ("actor.lr=3e-3",),
    "unsaid top-p": (),
    "clamped from below at −2": (),
}


def runs(num_clean: int, num_faulty: int, steps: int, only: list[str]) -> None:
    """Trains, and asks the log and the dump. `only`: names of `SOUND`, `SOUND_WITH_SERVER` or `PLANTED`."""
    kinds = {name: (settings, num_clean) for name, settings in (SOUND | SOUND_WITH_SERVER).items()}
    kinds |= {name: (settings, num_faulty) for name, settings in PLANTED.items()}
    asked = [name for name in kinds if not only or name in only]
    results: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "train.parquet"
        write_rows(data, "train", rows_of_sums(split()[0]))
        shared = SERVER_TRAINING if any(name in SOUND_WITH_SERVER for name in asked) else ()
        server = stack.enter_context(running_server(shared, is_llm=False)) if shared else ()
        context = fork_server()  # after the server has set its key
        for name in asked:
            settings, count = kinds[name]
            files = (f"data.train_files={data}",) if name.startswith("SmolLM2") else ()
            served = (*shared, *server) if name in SOUND_WITH_SERVER else ()
            for seed in range(1, count + 1):
                whole = (f"trainer.total_training_steps={steps}", f"trainer.seed={seed}")
                overrides = (*BASE, *served, *settings, *files, *whole)
                document = _trained_and_tested(context, name, overrides)
                if document:
                    results.setdefault(name, []).append(document)
                    print(f"{name} seed {seed}: {_in_words(document)}", flush=True)
    print(f"\n{steps} steps; Clopper–Pearson, 95 %")
    print("| runs | alarms | called cut by z | largest log E | tokens | differ | guarantee |")
    print("|---|---|---|---|---|---|---|")
    for name, documents in results.items():
        alarms = sum(each["alarm_step"] is not None for each in documents)
        cuts = sum(each["is_cut"] for each in documents)
        largest = max(each["largest_log_wealth"] for each in documents)
        tokens = sum(each["num_tokens"] for each in documents)
        differ = sum(each["z"] is not None for each in documents)
        guaranteed = "no" if documents[0]["no_guarantee"] else "yes"
        cells = (share(alarms, len(documents)), share(cuts, len(documents)), f"{largest:.3g}")
        print(f"| {name} | {' | '.join(cells)} | {tokens:,} | {differ} of {len(documents)} | {guaranteed} |")


def _trained_and_tested(context: Any, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """What the test finds in a new run; empty if it failed, which is printed."""
    with tempfile.TemporaryDirectory() as where:
        process = context.Process(target=_train, args=(name, overrides, Path(where)))
        process.start()
        process.join()
        answer, log = Path(where) / "answer.json", Path(where) / "log"
        if answer.exists():
            document: dict[str, Any] = json.loads(answer.read_text())
            return document
        print(f"{name} {overrides} failed: {log.read_text(errors='replace')[-400:]}", flush=True)
        return {}


def _in_words(document: dict[str, Any]) -> str:
    return (
        f"log wealth {document['largest_log_wealth']:.3g} (in training {document['logged']:.3g}), "
        f"mean {document['mean']:.4f}, z {document['z']}: {document['conclusion']}"
    )


def _plant(fault: str) -> None:
    """Changes what the engine of this process reports."""
    from dataclasses import replace

    from rlctl.rollout.hf import HFRollout

    sample = HFRollout.sample
    initial: list[Any] = []

    def wrong(self: Any, requests: Any, sampling: Any) -> Any:
        if fault == "unsaid top-p":  # the set that it is drawn from is not reported
            sampling = replace(sampling, top_p=0.8)
        turns = sample(self, requests, sampling)
        columns = list(torch.split(turns.log_probs, turns.lengths.tolist()))
        if fault == "shifted by one token":
            columns = [column.roll(1) for column in columns]
        if fault == "of another response":
            sizes = turns.lengths.tolist()
            columns = [
                torch.cat([other, column[len(other) :]])[:size]
                for column, other, size in zip(columns, [columns[-1], *columns[:-1]], sizes, strict=True)
            ]
        joined = torch.cat(columns)
        if fault == "of the initial weights":
            joined = _rescored(initial, self, requests, turns, sampling.temperature)
        if fault == "clamped from below at −2":
            joined = joined.clamp(min=-2.0)
        return replace(turns, log_probs=joined)

    HFRollout.sample = wrong  # type: ignore[method-assign]


def _rescored(initial: list[Any], engine: Any, requests: Any, turns: Any, temperature: float) -> Tensor:
    """Log-probs of the tokens under the weights that the engine had at its first call."""
    import copy

    if not initial:
        initial.append(copy.deepcopy(engine._model).float())
    found = []
    rows = zip(requests, torch.split(turns.token_ids, turns.lengths.tolist()), strict=True)
    with torch.no_grad():
        for request, own in rows:
            ids = torch.tensor([*request.token_ids, *own.tolist()])
            logits = initial[0](input_ids=ids[None]).logits[0] / temperature
            log_probs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            found.append(log_probs[len(request.token_ids) - 1 :])
    return torch.cat(found).to(turns.log_probs)


def _train(fault: str, overrides: tuple[str, ...], where: Path) -> None:
    """In the child: trains with the fault and writes what the test finds."""
    from rlctl.mismatch.sampler_report import sampler_report
    from rlctl.track.open_run import open_run

    if fault in PLANTED:
        _plant(fault)
    run_dir = _run_in_child(overrides, where)
    rows = open_run(run_dir).rows()
    logged = max(row.get("rollout_corr/log_wealth", -math.inf) for row in rows)
    document = sampler_report(run_dir).as_document()
    (where / "answer.json").write_text(json.dumps({**document, "logged": logged}))


def _run_in_child(overrides: tuple[str, ...], where: Path) -> Path:
    """Trains the built-in model without output; returns the run's directory."""
    from rlctl.run_spec.load import dump_spec, load_spec
    from rlctl.train.start import run_rank

    torch.set_num_threads(1)
    log = os.open(where / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    spec = load_spec(["rloo-seq-is"], [], list(overrides)).spec
    run_dir = where / "run"
    run_dir.mkdir()
    (run_dir / "spec.yaml").write_text(dump_spec(spec))
    run_rank(dump_spec(spec), str(run_dir), False)
    return run_dir


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["critical", "clean", "power", "runs"])
    parser.add_argument("--dumps", type=int, default=100_000)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--late", type=int, default=1000, help="clean batches before a late fault")
    parser.add_argument("--clean", type=int, default=2, help="runs of each honest kind")
    parser.add_argument("--faulty", type=int, default=3, help="runs of each planted fault")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[], choices=[*SOUND, *SOUND_WITH_SERVER, *PLANTED])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "critical":
        critical(given.dumps)
    elif given.what == "clean":
        clean(given.runs or 1000)
    elif given.what == "power":
        power(given.runs or 20, given.late)
    else:
        runs(given.clean, given.faulty, given.steps, given.only)


if __name__ == "__main__":
    main()
