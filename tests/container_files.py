"""What is wrong with a Dockerfile or a Compose file, as far as the text tells."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PINNED = re.compile(r"[\w./-]+:\d[\w.-]*$|[\w./-]+(:[\w.-]+)?@sha256:[0-9a-f]{64}$")
_SECRET = re.compile(r"(?i)(secret|passw|token|api_?key|access_?key|credential)")
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(:?[-?+][^}]*)?\}")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order; continued lines joined, comments out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in joined)]


def copied(text: str) -> list[str]:
    """Sources in the build's context of all COPY instructions."""
    found = []
    for word, rest in instructions(text):
        if word == "COPY" and "--from=" not in rest:
            found += [part for part in shlex.split(rest) if not part.startswith("--")][:-1]
    return found


def dockerfile_problems(text: str, context: Path, ignored: str) -> list[str]:
    """`context`: the folder that is built from; `ignored`: its .dockerignore, a list of exceptions from `*`."""
    steps = instructions(text)
    return [
        *_base_problems(steps),
        *_user_problems(steps),
        *_copy_problems(text, steps, context, ignored),
        *_run_problems(steps),
        *_form_problems(steps),
    ]


def _base_problems(steps: list[tuple[str, str]]) -> Iterator[str]:
    arguments, stages = {}, set()
    for word, rest in steps:
        if word == "ARG" and "=" in rest:
            name, _, value = rest.partition("=")
            arguments[name] = value
        if word != "FROM":
            continue
        image, _, stage = rest.partition(" AS ")
        image = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], ""), image)
        if image not in stages and not _PINNED.match(image):
            yield f"FROM {rest}: no version is pinned"
        stages.add(stage)


def _user_problems(steps: list[tuple[str, str]]) -> Iterator[str]:
    last = max(i for i, (word, _) in enumerate(steps) if word == "FROM")
    users = [rest for word, rest in steps[last:] if word == "USER"]
    if not users or not users[-1].isdigit() or users[-1] == "0":
        yield f"the image runs as {users[-1] if users else 'root'}; allowed: USER with a number that is not 0"


def _copy_problems(text: str, steps: list[tuple[str, str]], context: Path, ignored: str) -> Iterator[str]:
    yield from (f"ADD {rest}: use COPY" for word, rest in steps if word == "ADD")
    lines = ignored.split()
    kept = {line[1:] for line in lines if line.startswith("!")}
    if "*" not in lines or "**/.env" not in lines:
        yield ".dockerignore: does not leave out everything first, and .env at the end"
    for source in copied(text):
        # A pattern may match nothing: a file that is copied where it is there.
        if "[" not in source and not (context / source).exists():
            yield f"COPY {source}: is not in the repository"
        if source.replace("[", "").replace("]", "").partition("/")[0] not in kept:
            yield f"COPY {source}: .dockerignore leaves it out"


def _run_problems(steps: list[tuple[str, str]]) -> Iterator[str]:
    for word, rest in steps:
        if word != "RUN":
            continue
        if "apt-get install" in rest and not (
            "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        ):
            yield f"RUN {rest}: apt-get leaves lists or recommended packages in the layer"
        if "pip install" in rest:
            if "--no-deps" not in rest:
                yield f"RUN {rest}: pip installs what no file pins"
            if "--mount=type=cache" not in rest and "--no-cache-dir" not in rest:
                yield f"RUN {rest}: pip leaves its cache in the layer"
        if re.search(r"\b(curl|wget)\b.*\|\s*(ba)?sh", rest):
            yield f"RUN {rest}: runs what it downloads"


def _form_problems(steps: list[tuple[str, str]]) -> Iterator[str]:
    for word, rest in steps:
        if word in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            yield f"{word} {rest}: a shell would stand between it and signals; allowed: a JSON list"
        if word in ("ENV", "ARG"):
            yield from (
                f"{word} {name}: a secret in the image" for name in re.findall(r"(\w+)=", rest) if _SECRET.search(name)
            )


def variables(text: str) -> dict[str, set[str]]:
    """Variables of a Compose file, with what stands behind the name: `` (nothing), `:-default` or `:?message`."""
    found: dict[str, set[str]] = {}
    for match in _VARIABLE.finditer("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))):
        found.setdefault(match[1], set()).add(match[2] or "")
    return found


def documented(text: str) -> dict[str, str]:
    """Names and values of an .env file, of those that have a comment above them or above their paragraph."""
    found: dict[str, str] = {}
    explained = False
    for line in text.splitlines():
        if not line.strip():
            explained = False
        elif line.startswith("#"):
            explained = True
        elif explained:
            name, _, value = line.partition("=")
            found[name] = value
    return found


def compose_problems(content: Mapping[str, Any], text: str, env: str, folder: Path) -> list[str]:
    """`content`: the file `text` parsed; `env`: its .env.example; `folder`: where both lie."""
    services: Mapping[str, Any] = content["services"]
    found = [*_variable_problems(text, env), *_unused(content)]
    for name, service in services.items():
        found += [f"{name}: {problem}" for problem in _service_problems(service, content, folder)]
    return found


def _variable_problems(text: str, env: str) -> Iterator[str]:
    used, known = variables(text), documented(env)
    yield from (f"${{{name}}}: is not explained in .env.example" for name in sorted(used.keys() - known.keys()))
    yield from (f".env.example: {name} is not used" for name in sorted(known.keys() - used.keys()))
    for name, forms in used.items():
        secret = bool(_SECRET.search(name))
        if secret and (known.get(name) or any(not form.startswith(":?") for form in forms)):
            yield f"${{{name}}}: a secret needs ${{{name}:?}} everywhere, and no value in .env.example"
        if not secret and forms != {f":-{known.get(name)}"}:
            yield f"${{{name}}}: its default differs from .env.example"


def _unused(content: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("volumes", "networks"):
        used = {source for service in content["services"].values() for source in _sources(service, kind)}
        yield from (f"{kind}: {name} is not used" for name in content.get(kind, {}) if name not in used)


def _sources(service: Mapping[str, Any], kind: str) -> list[str]:
    if kind == "networks":
        return list(service.get("networks", []))
    return [re.sub(r"\$\{[^}]*\}", "./variable", entry).partition(":")[0] for entry in service.get("volumes", [])]


def _service_problems(service: Mapping[str, Any], content: Mapping[str, Any], folder: Path) -> Iterator[str]:
    services = content["services"]
    if not _PINNED.match(service.get("image", "")):
        yield f"image {service.get('image')}: no version is pinned"
    for other, how in service.get("depends_on", {}).items():
        if other not in services:
            yield f"depends_on {other}: no such service"
        elif how["condition"] == "service_healthy" and "healthcheck" not in services[other]:
            yield f"depends_on {other}: it has no health check"
        elif how["condition"] == "service_completed_successfully" and "restart" in services[other]:
            yield f"depends_on {other}: it is started again when it ends"
    if "restart" in service and "healthcheck" not in service:
        yield "has no health check"
    for network in service.get("networks", []):
        if network not in content["networks"]:
            yield f"network {network} is not declared"
    for source in _sources(service, "volumes"):
        if source.startswith("."):
            if source != "./variable" and not (folder / source).exists():
                yield f"volume {source}: no such file"
        elif source not in content["volumes"]:
            yield f"volume {source} is not declared"
    for port in service.get("ports", []):
        if not port.startswith("${BIND_ADDRESS:-127.0.0.1}:"):
            yield f"port {port} is not bound to BIND_ADDRESS"
    if "build" in service:
        context = (folder / service["build"]["context"]).resolve()
        if not (context / service["build"]["dockerfile"]).is_file():
            yield f"build: no {service['build']['dockerfile']}"
