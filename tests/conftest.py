"""Shared by every test: no hub, no W&B network, one thread per process."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Two cores and many small tensors: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
