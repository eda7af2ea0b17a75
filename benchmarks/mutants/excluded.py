"""Mutants that are left out of a draw, each with the reason: no test on this machine could tell them from the original.

A rule names files, functions and a pattern of the changed text; the first that fits decides. `EQUIVALENT` holds single
mutants that a person has looked at, by `Mutant.key`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.mutants.operators import Mutant

OPS = "ascent/ops"
TRITON = Path(".engines/triton/triton")
TRITON_FILES = tuple(
    f"{OPS}/triton_{name}.py"
    for name in ("adamw", "decoding", "elementwise", "lm_head", "norms", "paged_attention", "matmul")
)


@dataclass(frozen=True)
class Rule:
    """Leave out mutants of these files and functions.

    With `old` or `line`, only those whose original text, or the line that it is in, matches the pattern.
    """

    reason: str
    path: str = "*"
    function: str = "*"
    old: str = ""
    operator: str = "*"
    line: str = ""

    def fits(self, mutant: Mutant, line: str) -> bool:
        named = fnmatch(mutant.path, self.path) and fnmatch(mutant.function, self.function)
        worded = re.search(self.old, mutant.old) is not None and re.search(self.line, line) is not None
        return named and worded and fnmatch(mutant.operator, self.operator)


GPU = "runs on a GPU alone"
RULES = (
    Rule(GPU, f"{OPS}/__init__.py", "_triton_works"),
    Rule(GPU, f"{OPS}/triton_matmul.py", "pdl_options"),
    Rule(GPU, f"{OPS}/triton_lm_head.py", "add_matmul"),
    Rule(GPU, f"{OPS}/triton_matmul.py", "_has_enough_shared_memory"),
    Rule(GPU, f"{OPS}/triton_matmul.py", "cublas_split_k"),
    Rule(GPU, f"{OPS}/triton_decoding.py", "*linear"),
    Rule(GPU, "ascent/ops/cuda_graphs.py"),
    Rule(GPU, "ascent/inference/runners/decode_loop.py", old=r"\bevent\.|on_gpu"),
    Rule(GPU, line=r"get_device_capability|torch\.cuda\."),
    Rule(GPU, f"{OPS}/triton_matmul.py", line=r"^MIN_SHARED_MEMORY = "),
    Rule(GPU, "ascent/training/language_learner.py", line=r"^    captures = "),
    Rule("chooses sizes of tiles, which decide speed alone", f"{OPS}/triton_*.py", "*tile*"),
    Rule("chooses by the presence or the kind of a GPU", old=r"cuda|is_cpu|\.device\b"),
    Rule("a number of warps or stages decides speed alone", f"{OPS}/triton_*", old="num_warps|num_stages|warps"),
    Rule("needs Ray, which `make cluster-test` installs", "ascent/distributed/ray*.py"),
    Rule("needs Ray, which `make cluster-test` installs", "ascent/rollout/ray_replicas.py", "RayReplicas*"),
    Rule("needs Ray, which `make cluster-test` installs", "ascent/workflows/ray_cluster.py"),
    Rule("runs inside vLLM, which `make engines-test` installs", "ascent/inference/remote/inside/*"),
    Rule("needs verifiers or OpenEnv, which `make bridges-test` installs", "ascent/environments/agents/inside/*"),
    Rule("the order of arguments decides nothing", old=r"^(max|min|math\.gcd|hmac\.compare_digest|torch\.equal)\(",
         operator="swap arguments"),
    Rule("an escape that is tried inside the sandbox: part of a test", "ascent/sandbox/escape_tests.py"),
    Rule("a method that every subclass replaces", old=r"^raise NotImplementedError"),
    Rule("the argument checks what callers guarantee", line=r"strict=(True|False)\)", old="^(True|False)$"),
    Rule(
        "the argument checks what callers guarantee",
        old=r"strict=|stacklevel=|slots=|kw_only=",
        operator="drop argument",
    ),
    Rule(
        "the argument changes neither results nor files",
        old=r"flush=|daemon=|\bname=|encoding=|errors=|non_blocking=",
        operator="drop argument",
    ),
    Rule("a warning or a line on the screen: wording and display", old=r"^(warnings\.)?warn\(|^print\(|\.print\("),
    Rule("collects garbage or empties a cache: memory alone", old=r"gc\.|empty_cache|malloc_trim|cache_clear"),
    Rule("draws pictures: styling", "ascent/runs/display/plots.py", operator="constant"),
    Rule("draws pictures: styling", "ascent/lab/*chart*.py", operator="constant"),
    Rule("draws pictures: styling", line=r"pyplot\.rc\(|\.legend\(|\.set_[xy]lim\(|tight_layout"),
    Rule("a point at NaN is not drawn either", "ascent/runs/display/plots.py", "_plot_costs", "^continue$"),
    Rule("a folder inside another one is shown twice", "ascent/sandbox/isolation.py", "system_paths", r"^any\("),
    Rule("the deviation of one value is NaN, too", "ascent/runs/confidence_intervals.py", "mean_and_half_width", "^2$"),
    Rule("only a power cut shows the difference", old=r"^(file\.flush|os\.fsync)\("),
    Rule("balances ranks: speed alone", "ascent/distributed/ranks.py", "assign_prompts", line=r"load\[rank\]"),
    Rule("room for later positions: memory alone", "ascent/inference/runners/packed_cpu_model.py", old=r"2 \* cached"),
    Rule("dividing by 1 changes nothing", "ascent/ops/token_sampling.py", "sample_tokens", r"^1\.0$"),
    Rule("sums order as means", "ascent/models/decoder_model.py", "_find_weight_offset", r"sum\(\)$", "other function"),
    Rule("messages among ranks: speed alone", "ascent/distributed/rank_group.py", "make_buckets", "^bucket and"),
    Rule(GPU, "ascent/training/captured_updates.py", line="^MAX_CAPTURE_FRACTION = "),
    Rule("torch sorts stably on a CPU", "ascent/core/values.py", old=r"stable=True", operator="drop argument"),
    Rule("descriptor 0 is stdin", "ascent/sandbox/kernel_isolation.py", "make_ruleset", "^0$", line=r"if rules < 0:"),
    Rule("Linux has it", old="^0$", line=r'getattr\(select, "POLLRDHUP", 0\)'),
    Rule("version of a package for its metadata", "ascent/__init__.py"),
)  # fmt: skip
PERFORMANCE = {
    "BLOCK", "BUCKET_NUMEL", "CHUNK", "CHUNK_BYTES", "CHUNK_NUMEL", "CLOSE_SECONDS", "CLOSE_TIMEOUT",
    "COMMAND_TIMEOUT", "COMPILER_TIMEOUT", "END_SECONDS", "ENVIRONMENT_POLL_INTERVAL", "GRACE_SECONDS",
    "GROUP_DEADLINE", "GROUP_GRACE_SECONDS", "HEADS_PER_PROGRAM", "HEALTH_CHECK_INTERVAL", "HEARTBEAT_INTERVAL",
    "KEYS_PER_PROGRAM", "LEAST", "LOGITS_BLOCK", "LOGITS_TILE", "LONG", "MANY", "MANY_PROGRAMS", "MAX_CACHED_CHATS",
    "MAX_CACHED_STOPS", "MAX_EPISODES_PER_PROCESS", "MAX_IDLE_PROCESSES", "MAX_LORA_RANK", "MAX_PAUSE_SECONDS",
    "MAX_PREFETCHED_WEIGHTS", "MAX_TIMELINE_SPANS", "MIN_CUBLAS_SPLIT_DEPTH", "MIN_KEYS_PER_SPLIT", "MIN_POLL_SECONDS",
    "MIN_READERS_PER_LEVEL", "MIN_SPLIT_KV_LENGTH", "NCCL_TIMEOUT_FACTOR", "PEER_SECONDS", "POLL_INTERVAL",
    "POLL_SECONDS", "READ_CHUNK_BYTES",
    "READMIT_INTERVAL", "READY_POLL_INTERVAL", "READ_BLOCK", "REAP_SECONDS", "REPLICA_STARTUP_TIMEOUT", "RETRY_DELAY",
    "SHUTDOWN_GRACE", "STARTUP_TIMEOUT", "START_SECONDS", "STEPS_PER_LAUNCH", "STREAM_BUFFER_SIZE",
    "SWITCH_INTERVAL_SECONDS", "TERMINATE_TIMEOUT", "TIMEOUT_CHECK_INTERVAL", "UNTIMED_SECONDS", "UPDATE_INTERVAL",
    "UPLOAD_CHUNK_BYTES", "WAIT_SCRIPT", "WRITE_BLOCK",
}  # fmt: skip
"""Constants of modules that decide time or memory alone: sizes of chunks, deadlines, pauses."""
_BOUNDS = "ascent/core/losses.py::Loss.clipped: self.low is None or self.high is None"
_BOTH = "both bounds are set, or neither: SequenceRatio refuses one alone, and other losses have both"
EQUIVALENT: dict[str, str] = {
    f"{_BOUNDS} -> ({new}) in `if self.low is None or self.high is None:`": _BOTH
    for new in ("(self.low is None)", "(self.high is None)", "self.low is None and self.high is None")
}
"""By key, single mutants that compute the same, and why."""


def reason_to_exclude(mutant: Mutant, line: str) -> str | None:
    """Why a mutant is left out; None: it is not. `line`: the source line that it is in."""
    if mutant.key in EQUIVALENT:
        return EQUIVALENT[mutant.key]
    if mutant.path in TRITON_FILES and not TRITON.exists():
        return "Triton is not installed for its interpreter: make kernels-test"
    assigned = re.match(r"([A-Z][A-Z_0-9]*(?:, [A-Z][A-Z_0-9]*)*) = ", line)
    if assigned and not mutant.function and set(assigned[1].split(", ")) & PERFORMANCE:
        return "a constant that decides time or memory alone"
    if not mutant.function and mutant.operator == "constant" and re.fullmatch(r"[\d_]{3,}", mutant.old):
        return "a limit or a number of samples in the hundreds that differs by one"
    return next((rule.reason for rule in RULES if rule.fits(mutant, line)), None)
