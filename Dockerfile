# syntax=docker/dockerfile:1
# rlctl for CPUs and for CUDA GPUs; `make image` builds both. A container runs the command that it is given:
#
#   docker run --rm -v "$PWD:/work" rlctl:cpu rlctl train --preset rloo-seq-is
#
# docs/how-to/scale.md, “Docker”, has the flags for GPUs and for several nodes.
# A compiler stays in both images: DeepSpeed builds operators on first use, vLLM and Triton kernels.

FROM python:3.11-slim AS cpu
# Debian removes older versions of a package: a pinned one could not be installed for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /src/
COPY rlctl /src/rlctl
COPY presets /src/presets
# uv has the index of torch's CPU builds, which need no CUDA packages.
RUN pip install --no-cache-dir "uv~=0.9" \
    && uv pip install --system --no-cache --torch-backend cpu "/src[train]"
WORKDIR /work
CMD ["rlctl", "--help"]

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
# NCCL loads the libraries of RDMA when it starts; without them it uses TCP.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build python3-dev python3-venv \
       libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/rlctl
ENV PATH=/opt/rlctl/bin:$PATH
COPY pyproject.toml README.md LICENSE /src/
COPY rlctl /src/rlctl
COPY presets /src/presets
RUN pip install --no-cache-dir "/src[vllm,liger]"
WORKDIR /work
CMD ["rlctl", "--help"]
