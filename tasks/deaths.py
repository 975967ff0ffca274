"""The end of an actor's process in words: which one it was, and why, without the rest of Ray's text."""

from __future__ import annotations

import re
from typing import Final

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from infra.run_actors import role_of

_FIELD: Final = re.compile(r"^\t(\w+): (.*)$", re.MULTILINE)
"""Ray's text of a death has a first sentence, such lines about the actor, and then what it knows of the cause."""


def told(error: RayActorError, whose: str | None = None) -> str:
    """In a line, as far as Ray's cause is one: `trainer rank 0's process died (pid 7 on 10.0.0.1): ...`.

    `whose` stands before what the actor's name says.
    """
    text = str(error)
    fields = dict(_FIELD.findall(text))
    whose = whose or f"{role_of(fields.get('name', '')) or 'the engine'}'s"
    what = "cannot be reached" if isinstance(error, ActorUnavailableError) else "died"
    place = [f"pid {fields['pid']}"] if "pid" in fields else []
    place += [f"on {fields['ip']}"] if "ip" in fields else []
    where = f" ({' '.join(place)})" if place else ""
    if fields:
        # Without them it may be the traceback of an actor that failed while it was made.
        text = " ".join(_FIELD.sub("", text).removeprefix(ActorDiedError.BASE_ERROR_MSG).split())
    return f"{whose} process {what}{where}: {text}"
