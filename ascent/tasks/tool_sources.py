"""How settings name tools: `calculator`, python:FILE:FUNCTION, or an object of Python."""

from collections.abc import Sequence

from ascent.tasks.base import refuse
from ascent.tasks.files import absolute_path
from ascent.tasks.objects import PREFIX

BUILT_IN_TOOLS = ("calculator",)
"""Those of `environments.tools`."""


def tool_sources(entries: Sequence[str], flag: str = "--tools") -> tuple[str, ...]:
    """Each tool by a name of its own: `calculator`, python:/whole/path.py:search, or an object.

    In python:FILE:search,convert the names behind the first are functions of the same file, unless they are built in.
    """
    sources: list[str] = []
    file = ""
    for entry in map(str.strip, ",".join(entries).split(",")):
        if entry.startswith("python:") and entry.count(":") >= 2:
            path, name = entry.removeprefix("python:").rsplit(":", 1)
            file = f"python:{absolute_path(path)}"
            sources.append(f"{file}:{name}")
        elif entry in BUILT_IN_TOOLS or entry.startswith(PREFIX):
            sources.append(entry)
        elif file and entry.isidentifier():
            sources.append(f"{file}:{entry}")
        else:
            refuse(
                f"{flag} {entry}: a tool is python:FILE:FUNCTION, or one of: {', '.join(BUILT_IN_TOOLS)}.",
                entry,
                BUILT_IN_TOOLS,
            )
    return tuple(sources)
