"""The wheel in an empty environment, with no extras: make wheel.

    python tools/empty_environment.py      # builds it, installs it with what it needs alone, and tries it; some minutes

The demo has to run, and whatever needs an extra has to say which. tests/test_platforms.py asks the same of this package
with the extras' modules blocked; here nothing is blocked, because nothing is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "lm": "transformers peft datasets math_verify huggingface_hub tokenizers accelerate",
    "gym": "reasoning_gym",
    "judge": "httpx httpx2",
    "track": "tensorboard wandb trackio mlflow",
    "lab": "starlette uvicorn markdown_it latex2mathml",
    "notebook": "ipykernel IPython pandas",
    "docs": "mkdocs mkdocstrings material",
}
"""The modules that come with each extra."""
ROWS = "rows.jsonl"
FILES = {ROWS: "".join(f'{{"prompt": "{i}+1?", "answer": "{i + 1}", "response": "{i + 1}"}}\n' for i in range(4))}
NEEDS = [
    ("lm", f"train jsonl:{ROWS} --model nowhere/model"),
    ("lm", "train gsm8k --model nowhere/model"),
    ("lm", f"sft {ROWS} --model nowhere/model"),
    ("lm", "sample --model nowhere/model hello"),
    ("gym", "train reasoning-gym:chain_sum --model nowhere/model"),
    ("lab", "lab --no-open"),
    ("lab", "report run"),
    *(("track", f"train lecture --steps 2 --track {name}") for name in ("tensorboard", "wandb", "trackio", "mlflow")),
]
"""An extra, and a command that says so without it."""
WORKS = [
    "--version",
    "env",
    "list",
    "explain grpo",
    "train lecture --steps 2 --out run",
    "show run",
    "eval run",
]
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def ascent_of(python: Path, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    call = [str(python.parent / "ascent"), *command.split()]
    return subprocess.run(call, cwd=folder, env=CLEAN, capture_output=True, text=True, check=False)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder, wrong = Path(name), list[str]()
        build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
        subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        python = folder / "env" / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)], check=True, env=CLEAN)
        for file, text in FILES.items():
            (folder / file).write_text(text)
        for command in [*WORKS, "demo"]:
            done = ascent_of(python, command, folder)
            print(f"ascent {command}: {'works' if done.returncode == 0 else 'FAILS'}", flush=True)
            wrong += [done.stderr] if done.returncode else []
        for extra, command in NEEDS:
            done = ascent_of(python, command, folder)
            said = f"ascent-rl[{extra}]" in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
            print(f"ascent {command}: {'says' if said else 'DOES NOT SAY'} that it needs {extra}", flush=True)
            wrong += [] if said else [done.stderr]
        print(*wrong, sep="\n")
        return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
