"""A person's words and tags for a run, kept beside it in notes.json. Nothing typed is ever overwritten unseen."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.records.folder import write_json
from ascent.records.reading import finite_json, printable, read_regular

FILE = "notes.json"
MOST_TEXT = 20_000
MOST_TAGS = 20
LONGEST_TAG = 40
_writing = threading.Lock()


def read_note(folder: Path) -> dict[str, Any]:
    """Text, tags, and a revision that changes with them; of a file that cannot be read, its bytes' revision."""
    try:
        data = read_regular(folder / FILE)
    except FileNotFoundError:
        return {"text": "", "tags": [], "revision": ""}
    except OSError as error:
        return {"text": "", "tags": [], "revision": "unreadable", "problem": f"{FILE} cannot be read: {error}"}
    about: dict[str, Any] = {"text": "", "tags": [], "revision": hashlib.sha256(data).hexdigest()[:16]}
    try:
        note = finite_json(data)
        tags = [printable(tag) for tag in note.get("tags", [])]
        return about | {"text": printable(note.get("text", "")), "tags": tags}
    except (ValueError, AttributeError, TypeError) as error:
        return about | {"problem": f"{FILE} cannot be read: {error}"}


def write_note(folder: Path, text: Any, tags: Any, revision: Any) -> dict[str, Any]:
    """Replace text and tags, if they are still those that the writer has seen."""
    if not isinstance(text, str) or len(text) > MOST_TEXT or not _speakable(text):
        raise Refused(f"a note is text of at most {MOST_TEXT:,} characters")
    if not isinstance(tags, list) or not all(isinstance(tag, str) and _speakable(tag) for tag in tags):
        raise Refused("tags are a list of words")
    tags = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise Refused(f"a run has at most {MOST_TAGS} tags, each of at most {LONGEST_TAG} characters")
    with _writing:
        now = read_note(folder)
        if "problem" in now:
            raise Refused(f"{now['problem']}. Nothing was written over: mend or move {folder / FILE} first")
        if now["revision"] != revision:
            raise Refused(
                "someone else has changed this note meanwhile, and nothing was written over. It says now: "
                f"{now['text'] or '(nothing)'} (tags: {', '.join(now['tags']) or 'none'})"
            )
        try:
            write_json(folder / FILE, {"text": text, "tags": tags})
        except OSError as error:
            raise Refused(f"the note cannot be written ({error.strerror}): is the folder yours?") from None
        return read_note(folder)


def _speakable(text: str) -> bool:
    """Can it be written down? Half of a surrogate pair cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
