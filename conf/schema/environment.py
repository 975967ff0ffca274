"""What surrounds a run without shaping its results: cluster, tracking, checkpoint storage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from conf.schema.base import Problem, Refusal, Section

_ADDRESS: Final = re.compile(r"auto|[A-Za-z0-9._-]+:[0-9]{1,5}")
_ADDRESS_FORMS: Final = "HOST:PORT or auto, on a machine of the cluster"
_EXECUTABLE: Final = re.compile(r"/[A-Za-z0-9._+/-]+")
_TRACKING_SCHEMES: Final = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
_PROTOCOL: Final = re.compile(r"[A-Za-z][\w+.-]+:")
_URL_FORMS: Final = "a local path, file://PATH or s3://BUCKET/PREFIX"
_SECRET: Final = re.compile(r"(^|_)(key|secret|token|password|passwd|access_key_id)$")


class Cluster(Section):
    """The Ray cluster that holds the engines."""

    kind: Literal["local", "existing"] = "local"
    """local: started for the run on loopback, stopped with it. existing: joined, left running."""

    address: str | None = None
    """Address of the existing cluster, as its own machines have it; null for a local one. A run sits on one of them:
    Ray's client (ray://) has no streaming actor methods, through which samples arrive."""

    worker_python: str | None = None
    """Python executable of the engines' actors (absolute path, the same on each node), so that they need not have the
    driver's packages, nor it theirs. Its Python (major and minor) and Ray must be the driver's. null: the driver's own
    for a local cluster, and for an existing one that with which each node's Ray was started."""

    @field_validator("worker_python")
    @classmethod
    def _one_executable(cls, value: str | None) -> str | None:
        # Ray puts it into a shell's command line as it is.
        if value is not None and not _EXECUTABLE.fullmatch(value):
            allowed = "an absolute path of letters, digits and . _ + - /, such as /opt/engines/bin/python; or null"
            raise Refusal(Problem("worker_python", value, "not the path of an executable", allowed))
        return value

    num_cpus: int = Field(default=2, ge=1)
    """CPU slots of a local Ray (>= 1)."""

    object_store_mb: int = Field(default=256, ge=80)
    """Shared memory of a local Ray's object store (MiB, >= 80: Ray takes no less than 75)."""

    startup_timeout_s: float = Field(default=300.0, gt=0.0)
    """Longest wait for Ray and for the engines' actors to start (seconds, > 0)."""

    share_gpus: bool = False
    """Whether the rollout engine shares a GPU with a rank of the trainer also where there are enough for both. Phases
    hand the memory over (rollout.sleep_level, trainer.offload). Engines that compute on CPU have nothing to share."""

    rollout_gpus: float | None = Field(default=None, ge=0.0)
    """GPUs that Ray reserves for the rollout engine (>= 0; a fraction shares one); null: 1 for vLLM, if any."""

    @field_validator("rollout_gpus")
    @classmethod
    def _gpus_ray_can_reserve(cls, value: float | None) -> float | None:
        if value is not None and not (value == int(value) or 0.0001 <= value < 1):
            allowed = "a whole number, a share from 0.0001 to below 1, or null"
            raise Refusal(Problem("rollout_gpus", value, "not an amount of GPUs that Ray reserves", allowed))
        return value

    trainer_gpus: float | None = Field(default=None, ge=0.0, le=1.0)
    """GPUs that Ray reserves for each rank of the trainer (0 to 1; a fraction shares one, more than half of it where
    there are several ranks); null: 1 for Megatron on GPUs. With both null and too few GPUs for that, the rollout engine
    has 0.4 and a rank 0.6 of one."""

    @field_validator("trainer_gpus")
    @classmethod
    def _share_ray_can_reserve(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 0.0001:
            allowed = "0, 0.0001 to 1, or null"
            raise Refusal(Problem("trainer_gpus", value, "not an amount of GPUs that Ray reserves", allowed))
        return value

    kernel_cache: str | None = None
    """Folder on each node (from / or ~) for kernels that vLLM compiles; null leaves each library its own."""

    @field_validator("kernel_cache")
    @classmethod
    def _same_folder_on_each_node(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("/", "~")):
            raise Refusal(Problem("kernel_cache", value, "a node has no such place", "a folder from / or ~, or null"))
        return value

    sync_buffer_mb: int = Field(default=128, ge=1)
    """Largest chunk in which weights travel to the rollout engine; two are under way at once (MiB, >= 1)."""

    @field_validator("address")
    @classmethod
    def _address_fits_kind(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if kind == "local" and value is not None:
            raise Refusal(
                Problem(
                    "address",
                    value,
                    "a local cluster is started by the run itself",
                    "null, or cluster=existing with this address",
                )
            )
        if value is not None and value.startswith("ray://"):
            what = "Ray's client cannot stream samples from an actor"
            raise Refusal(Problem("address", value, what, _ADDRESS_FORMS))
        if kind == "existing" and (value is None or not _ADDRESS.fullmatch(value)):
            raise Refusal(Problem("address", value, "not the address of a Ray cluster", _ADDRESS_FORMS))
        return value


class Tracking(Section):
    """MLflow."""

    experiment: str = Field(default="fp8-grpo", min_length=1)
    """Name of the MLflow experiment."""

    uri: str | None = None
    """Tracking URI; null takes MLFLOW_TRACKING_URI, and without that a SQLite file under runs_dir."""

    outage_patience_s: float = Field(default=60.0, ge=0.0)
    """How long a run's end waits for an unreachable store; points left stay journalled (seconds, >= 0)."""

    top_tokens: int = Field(default=10, ge=0)
    """Tokens of each step with the largest mismatch that are kept with their text (tokens, >= 0; 0 keeps none)."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run in MLflow beside its own, such as sweep_id, which puts it into a sweep's comparison."""

    @field_validator("uri")
    @classmethod
    def _uri_is_storable(cls, value: str | None) -> str | None:
        if value is None:
            return value
        scheme, colon, _ = value.partition(":")
        if not colon or scheme.partition("+")[0] not in _TRACKING_SCHEMES:
            raise Refusal(
                Problem(
                    "uri",
                    value,
                    "not an MLflow tracking URI",
                    f"null, or a URI that begins with one of {', '.join(s + ':' for s in _TRACKING_SCHEMES)}",
                )
            )
        if "@" in urlsplit(value).netloc and ":" in urlsplit(value).netloc.rpartition("@")[0]:
            raise Refusal(
                Problem(
                    "uri",
                    f"{scheme}://...",
                    "holds a password, which would be stored with the run's parameters",
                    "a URI without one, or null with the URI in the environment variable MLFLOW_TRACKING_URI",
                )
            )
        return value


class Storage(Section):
    """Where checkpoints go."""

    url: str = Field(min_length=1)
    """Folder of the checkpoints: a local path, file://PATH or s3://BUCKET/PREFIX."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the fsspec file system, such as endpoint_url; credentials come from the environment."""

    keep_last: int = Field(default=3, ge=1)
    """Newest checkpoints that are kept (>= 1)."""

    keep_kernels: bool = False
    """Whether the kernels of cluster.kernel_cache are kept here too, for machines with the same GPU and libraries.

    They are code that will run there: the store has to be trusted like the checkout."""

    @field_validator("url")
    @classmethod
    def _protocol_is_supported(cls, value: str) -> str:
        protocol, separator, rest = value.partition("://")
        supported = protocol in ("file", "s3") if separator else not _PROTOCOL.match(value)
        if not supported:
            raise Refusal(Problem("url", value, "a protocol that is not supported", _URL_FORMS))
        if separator and not rest.lstrip("/"):
            raise Refusal(Problem("url", value, "names no bucket or folder", _URL_FORMS))
        if protocol == "s3" and separator and rest.startswith("/"):
            raise Refusal(Problem("url", value, "names no bucket", _URL_FORMS))
        return value

    @field_validator("options")
    @classmethod
    def _no_credentials(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        problems = [
            Problem(
                f"options.{key}",
                "(hidden)",
                "a credential, which would be stored with the run's parameters",
                "the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or a profile",
            )
            for key in _secret_keys(value)
        ]
        if problems:
            raise Refusal(*problems)
        return value


def _secret_keys(options: Mapping[str, JsonValue], prefix: str = "") -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_keys(value, f"{prefix}{key}.")
        elif value is not None and _SECRET.search(key.lower()):
            yield f"{prefix}{key}"
