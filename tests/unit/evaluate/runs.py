"""A run directory as training leaves it, without training."""

import shutil
from dataclasses import replace

from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec, load_spec
from rlctl.run_spec.model import RECIPE
from rlctl.tiny.embedded import ensure_embedded

#: The embedded model, all but untrained: built in a second.
QUICK = replace(RECIPE, taught_accuracy=0.0, target_accuracy=0.0, num_val_prompts=150)


def quick_task(cache):
    return ensure_embedded(1, cache, recipe=QUICK)


def make_run(run_dir, task, *overrides, steps=(4, 8)):
    """A run of the embedded model with checkpoints of these steps, validated on `task`'s prompts."""
    run_dir.mkdir()
    spec = load_spec([], [], [f"data.val_files={task.val_file}", *overrides]).spec
    (run_dir / RUN_SPEC_FILE).write_text(dump_spec(spec), encoding="utf-8")
    for step in steps:
        root = run_dir / CHECKPOINTS
        partial = begin(root, step)
        shutil.copytree(task.model_dir, partial / "model", dirs_exist_ok=True)
        (partial / "engine" / "state").write_bytes(b"state")
        publish(root, partial, TrainerState(step, step, 1), keep=None)
    return run_dir
