# syntax=docker/dockerfile:1
# A GPU worker: a Ray node whose actors hold vLLM, Megatron Core and Transformer Engine. No Prefect, MLflow or Hydra.
#   docker build -f infra/docker/worker.Dockerfile -t fp8-grpo-worker:0.1.0 .
# The torch extension of Transformer Engine comes as source alone: about 17 minutes on 2 cores.
# The devel image stays, since DeepGEMM and FlashInfer compile kernels at run time, and Triton needs Python's headers.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ${CUDA_IMAGE} AS base
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3.12-dev python3.12-venv wget \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3.12 -m venv /opt/fp8-grpo
COPY infra/docker/worker.txt /tmp/worker.txt
RUN --mount=type=cache,target=/root/.cache/pip /opt/fp8-grpo/bin/pip install --no-deps -r /tmp/worker.txt
ARG TRANSFORMER_ENGINE=2.19.0
# Compute capabilities: 90 is Hopper; "90;100" adds Blackwell.
ARG NVTE_CUDA_ARCHS=90
ARG MAX_JOBS=4
RUN --mount=type=cache,target=/root/.cache/pip \
    CUDA_HOME=/usr/local/cuda NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
    CPATH=/usr/local/cuda/include:/usr/local/cuda/include/cccl \
    /opt/fp8-grpo/bin/pip install --no-deps --no-build-isolation "transformer-engine-torch==${TRANSFORMER_ENGINE}"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY infra infra
COPY tasks tasks
# Without flows there is nothing that its script could start.
RUN /opt/fp8-grpo/bin/pip install --no-cache-dir --no-deps --no-build-isolation . && rm /opt/fp8-grpo/bin/fp8-grpo

FROM base
RUN useradd --uid 10001 --create-home fp8
COPY --from=build /opt/fp8-grpo /opt/fp8-grpo
ENV PATH=/opt/fp8-grpo/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /home/fp8
USER 10001
CMD ["python", "-c", "import vllm, megatron.core, transformer_engine.pytorch, tasks.actors"]
