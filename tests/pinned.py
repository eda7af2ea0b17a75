"""Pinned values: what a test compares with a file of tests/data, number by number.

python -m tests.lab.test_pinned_views     writes its file anew; look at the difference before you commit it
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def shortened(value: Any) -> Any:
    """The same with long lists of numbers summed up, so that a file of pinned values stays small."""
    if isinstance(value, dict):
        return {str(key): shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        numbers = [item for item in value if isinstance(item, int | float) and math.isfinite(item)]
        if len(value) > 12 and len(numbers) == len(value):
            sums = {"sum": sum(numbers), "weighted": sum(i * number for i, number in enumerate(numbers))}
            return {"count": len(value), "first": value[0], "last": value[-1], **sums}
        return [shortened(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return value


def difference(value: Any, pinned: Any, path: str = "") -> str:
    """Where a value first differs from the pinned one by more than rounding, in words; "" if nowhere."""
    if isinstance(value, dict) and isinstance(pinned, dict):
        if value.keys() != pinned.keys():
            return f"{path}: {sorted(value.keys() ^ pinned.keys())} is in one of them alone"
        found = (difference(value[key], pinned[key], f"{path}.{key}") for key in value)
        return next(filter(None, found), "")
    if isinstance(value, list) and isinstance(pinned, list):
        if len(value) != len(pinned):
            return f"{path}: {len(value)} items, pinned {len(pinned)}"
        pairs = enumerate(zip(value, pinned, strict=True))
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    if isinstance(value, float) and isinstance(pinned, int | float):
        return "" if math.isclose(value, pinned, rel_tol=1e-5, abs_tol=1e-7) else f"{path}: {value}, pinned {pinned}"
    return "" if value == pinned and type(value) is type(pinned) else f"{path}: {value!r}, pinned {pinned!r}"


def page_text(html: str) -> list[str]:
    """The words of a page without its styles, scripts and pictures."""
    html = re.sub(r"(?s)<(style|script|svg)\b.*?</\1>", " ", html)
    return [line for line in (re.sub(r"\s+", " ", part).strip() for part in re.split(r"<[^>]*>", html)) if line]


def pinned_values(name: str) -> dict[str, Any]:
    path = DATA / name
    return json.loads(path.read_text()) if path.exists() else {}


def write_pinned(name: str, values: dict[str, Any]) -> None:
    lines = [f"{json.dumps(case)}: {json.dumps(values[case], sort_keys=True, ensure_ascii=False)}" for case in values]
    (DATA / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
