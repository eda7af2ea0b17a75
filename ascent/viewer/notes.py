"""A person's words and tags for a run, kept beside it in notes.json. Nothing typed is ever overwritten unseen."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from ascent.records.folder import write_json
from ascent.types import Refused

FILE = "notes.json"
MOST_TEXT = 20_000
MOST_TAGS = 20
LONGEST_TAG = 40
_writing = threading.Lock()


def read(folder: Path) -> dict[str, Any]:
    """Text, tags, and a revision that changes with them."""
    try:
        data = (folder / FILE).read_bytes()
        found = json.loads(data)
    except (OSError, ValueError):
        data, found = b"", {}
    if not isinstance(found, dict):
        found = {}
    tags = found.get("tags")
    return {
        "text": str(found.get("text", "")),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "revision": hashlib.sha256(data).hexdigest()[:16] if data else "",
    }


def write(folder: Path, text: Any, tags: Any, revision: Any) -> dict[str, Any]:
    """Replace text and tags, if they are still those that the writer has seen."""
    if not isinstance(text, str) or len(text) > MOST_TEXT:
        raise Refused(f"a note is text of at most {MOST_TEXT:,} characters")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise Refused("tags are a list of words")
    tags = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise Refused(f"a run has at most {MOST_TAGS} tags, each of at most {LONGEST_TAG} characters")
    with _writing:
        now = read(folder)
        if now["revision"] != revision:
            raise Refused(
                "someone else has changed this note meanwhile, and nothing was written over. It says now: "
                f"{now['text'] or '(nothing)'} (tags: {', '.join(now['tags']) or 'none'})"
            )
        try:
            write_json(folder / FILE, {"text": text, "tags": tags})
        except OSError as error:
            raise Refused(f"the note cannot be written ({error.strerror}): is the folder yours?") from None
        return read(folder)
