# syntax=docker/dockerfile:1
# The driver: command line, Prefect worker, and with another command the Prefect and MLflow servers. Neither vLLM nor Megatron.
#   docker build -f infra/docker/driver.Dockerfile -t fp8-grpo-driver:0.1.0 .
# Its Python (3.12) and Ray are those of the GPU workers, between which and it Ray pickles.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/fp8-grpo
COPY infra/docker/driver.txt /tmp/driver.txt
RUN --mount=type=cache,target=/root/.cache/pip /opt/fp8-grpo/bin/pip install --no-deps -r /tmp/driver.txt

FROM ${PYTHON_IMAGE}
# KubeRay's probes call wget.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home fp8
COPY --from=build /opt/fp8-grpo /opt/fp8-grpo
ENV PATH=/opt/fp8-grpo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    MLFLOW_DISABLE_TELEMETRY=true \
    PREFECT_SERVER_ANALYTICS_ENABLED=false
WORKDIR /app
# The deployments' runs work in the folder that this names.
ENV PWD=/app
COPY pyproject.toml prefect.yam[l] README.md LICENSE ./
COPY conf conf
COPY infra infra
COPY tasks tasks
COPY flows flows
# In place, since deployments name the flows by file. The folder of runs is the user's own: a new volume takes that over.
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . && mkdir runs && chown fp8: runs
# A run's tags name the commit: --build-arg COMMIT=$(git rev-parse HEAD)
ARG COMMIT=unknown
ENV FP8_GRPO_COMMIT=${COMMIT}
USER 10001
ENTRYPOINT []
CMD ["fp8-grpo", "train", "--dry-run"]
