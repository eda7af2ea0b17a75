"""What every test shares: checked annotations, one thread, bounded hypothesis, and small builders.

Numbers are float64 throughout, so that a golden number is one to 1e-12 and not to 1e-6.
"""

from __future__ import annotations

import copy
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

# Before torch is imported, here and in the processes that tests start: two workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts its background jobs with Ctrl-C ignored, and every process below them inherits that. Tests that
# interrupt need the ordinary signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jaxtyping
from jaxtyping import install_import_hook

# Before anything imports ascent: under pytest, and only there, every shape is checked. beartype has to
# be able to ask whether something meets a protocol, so every protocol allows it here.
Protocol._is_runtime_protocol = True  # type: ignore[attr-defined]
ROOT = Path(__file__).parents[1]
SHAPED = [path for path in ROOT.glob("ascent/**/*.py") if "\nfrom jaxtyping import " in path.read_text()]
"""The modules whose annotations have shapes. The others handle words and files: mypy is enough for them."""
install_import_hook([".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SHAPED], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from torch import Tensor  # noqa: E402

from ascent.build.backend import BoundTask  # noqa: E402
from ascent.core.algorithms import ALGORITHMS, Algorithm  # noqa: E402
from ascent.core.protocols import Learner, Records, RolloutEngine, Task  # noqa: E402
from ascent.core.types import Batch, Prompts, Rollouts, Space, to_batch  # noqa: E402
from ascent.models import PerPosition, Policy, Transformer  # noqa: E402
from ascent.models.small_policies import PerPositionPolicy, PerPositionValue, TransformerValue, ValueFunction  # noqa: E402
from ascent.oracle.exact import EnumerableTask  # noqa: E402
from ascent.rollout.small_policy_engine import SmallPolicyEngine  # noqa: E402
from ascent.tasks.base import TaskWrapper  # noqa: E402
from ascent.training.small_learner import SmallLearner  # noqa: E402
from tests.browser import browser, chromium_of_session, lab  # noqa: E402, F401
from tests.warm_python import warm_python  # noqa: E402, F401

for protocol in (Task, RolloutEngine, Learner, Records, BoundTask):  # Python 3.12 and later want it said of each
    runtime_checkable(protocol)
for protocol in (Task, BoundTask, EnumerableTask):  # and see nothing of what a bound task hands through
    protocol.register(TaskWrapper)  # type: ignore[attr-defined]
torch.set_num_threads(1)
settings.register_profile("ascent", max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ascent")


@pytest.fixture(scope="session", autouse=True)
def state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the state folder of the tests apart from the user's; all workers share it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    (root / "state").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setenv("COLUMNS", "160")  # the same with and without xdist, whose workers have no terminal
        yield


@pytest.fixture(scope="session", autouse=True)
def no_picture() -> Iterator[None]:
    """`ascent train` draws its curves at the end, which takes longer than most runs here. One test has it do that."""
    from ascent.cli import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "plot", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def proven_once() -> Iterator[None]:
    """Each run proves the passes of its model. Here hundreds of runs have the same few, which are proven once each."""
    from ascent.build import language_backend, model_verification

    known: dict[Any, tuple[str | None, bool]] = {}

    def verify_model(lm: Any, *args: Any, **more: Any) -> str | None:
        shapes = [(name, p.shape, p.dtype) for name, p in lm.model.named_parameters()]
        key = repr((type(lm.model), lm.config, shapes, args, more))
        if key not in known:
            known[key] = model_verification.verify_model(lm, *args, **more), lm.can_share_prompts
        why, lm.can_share_prompts = known[key]
        return why

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_backend, "verify_model", verify_model)
        yield


@pytest.fixture(autouse=True)
def checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check shapes, except in tests marked slow, smoke or unchecked (whole trainings)."""
    node = request.node
    repeats = any(node.get_closest_marker(mark) for mark in ("slow", "smoke", "unchecked"))
    jaxtyping.config.update("jaxtyping_disable", repeats)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.backends.mkldnn.set_flags(True)  # torch switches it off for good where it cannot do a half-precision product


F64 = torch.float64
FIXED = Space(prompt_length=3, vocab=4, limit=3)
"""Every response has three tokens."""
ENDED = Space(prompt_length=3, vocab=5, limit=4, end=4)
"""Responses of up to four tokens, of which 4 is the end: lengths differ."""
TINY = Transformer(width=8, layers=1, heads=2)
SAMPLED = [name for name, row in ALGORITHMS.items() if row.loss.data == "samples"]
"""The rows that learn from the policy's own samples: policy gradients."""


def f64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=F64)


def close(actual: Tensor | float, expected: Any, tolerance: float = 1e-12) -> None:
    """Equal to the tolerance, with shapes that agree and no NaN anywhere."""
    torch.testing.assert_close(f64(actual), f64(expected), rtol=tolerance, atol=tolerance)


def batch_of(
    reward: Any, lengths: Any = None, *, width: int | None = None, limit: int | None = None, **more: Any
) -> Batch:
    """A batch from rewards `[prompt][sample]` (or per token), the lengths of its responses and any other field."""
    reward = f64(reward)
    reward = reward.unsqueeze(-1) if reward.dim() == 2 else reward
    shape = reward.shape[:2]
    lengths = torch.full(shape, reward.shape[2]) if lengths is None else torch.as_tensor(lengths)
    width = width or max(int(lengths.max()), reward.shape[2])
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    fields: dict[str, Any] = {
        "prompt": torch.zeros(shape[0], 1, dtype=torch.long),
        "response": torch.zeros(*shape, width, dtype=torch.long),
        "mask": mask,
        "logp_sampler": torch.zeros(*shape, width, dtype=F64),
        "limit": limit or width,
        "truncated": torch.zeros(shape, dtype=torch.bool),
        "reward": reward,
        "valid": torch.ones(shape, dtype=torch.bool),
        "correct": torch.zeros(shape, dtype=torch.bool),
    }
    for name, value in more.items():
        fields[name] = torch.as_tensor(value) if isinstance(value, list) else value
        if isinstance(fields[name], Tensor) and fields[name].is_floating_point():
            fields[name] = fields[name].to(F64)
    return Batch(**fields)


def policy_of(choice: Any, space: Space, seed: int = 0, sharpen: float = 5.0) -> Policy:
    """A policy in float64; the transformer's head is scaled up, for a new one is almost uniform."""
    policy = choice(space, torch.Generator().manual_seed(seed)).double()
    if isinstance(choice, Transformer):
        with torch.no_grad():
            policy.head.weight.mul_(sharpen)
    return policy


def prompts_of(space: Space, count: int, seed: int = 1) -> Tensor:
    highest = space.vocab - (space.end is not None)
    return torch.randint(highest, (count, space.prompt_length), generator=torch.Generator().manual_seed(seed))


def rollouts_of(policy: Policy, count: int = 3, samples: int = 4, temperature: float = 1.0, seed: int = 2) -> Rollouts:
    sampler = SmallPolicyEngine(policy, temperature, torch.Generator().manual_seed(seed))
    return sampler.generate(Prompts.of(prompts_of(policy.space, count)), samples)


def with_rewards(rollouts: Rollouts, seed: int = 3, **more: Any) -> Batch:
    """Rollouts as a batch, with random whole-numbered rewards unless told otherwise."""
    shape = rollouts.mask.shape[:2]
    drawn = torch.randint(5, (*shape, 1), generator=torch.Generator().manual_seed(seed)).to(F64)
    given = {"reward": drawn, "valid": torch.ones(shape, dtype=torch.bool), "correct": drawn[..., 0] == 4} | more
    return to_batch(rollouts, **given)


def learner_of(policy: Policy, algorithm: Algorithm, micro_batch: int = 0) -> SmallLearner:
    choice = algorithm.critic
    critic = critic_of(policy, choice.shared) if choice.enabled else None
    more = (micro_batch, critic, choice.update)
    return SmallLearner(policy, algorithm.update, algorithm.reference.enabled, algorithm.outputs, *more)


def critic_of(policy: Policy, shared: bool = False) -> ValueFunction:
    """A critic that says something: a new one is 0 everywhere."""
    kind = PerPositionValue if isinstance(policy, PerPositionPolicy) else TransformerValue
    critic = kind(policy if shared else copy.deepcopy(policy), shared).double()  # type: ignore[arg-type]
    shake(critic, 0.3, seed=4)
    return critic


@torch.no_grad()
def shake(module: torch.nn.Module, size: float, seed: int = 9) -> None:
    """Move every parameter a little, as some updates would have."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def gradient_of(learner: SmallLearner) -> Tensor:
    """The gradient of the loss, all parameters in one row."""
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learner.trainable()]
    )


@pytest.fixture(params=["per-position", "transformer", "transformer with an end token"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Each kind of policy, small and in float64."""
    if request.param == "per-position":
        return policy_of(PerPosition(dim=4), FIXED)
    return policy_of(TINY, FIXED if request.param == "transformer" else ENDED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test in a real browser on a busy machine gets a second chance, and the last lines name those that took it."""
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """What was imported is no litter, and need not be looked through again and again; nor is most of what follows."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """The last lines say what was left out for want of a browser or of walls."""
    from tests.browser import MISSING
    from tests.sandboxes import MISSING_WALLS

    done = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        for what, why in (("the lab in a browser", MISSING), *(("the sandbox", wall) for wall in MISSING_WALLS)):
            skipped = [r for r in reporter.stats.get("skipped", ()) if why in str(r.longrepr)]
            if skipped:
                reporter.write_line(f"Left out: {len(skipped)} tests of {what}, for {why}.", yellow=True)
    return done


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model with a real tokenizer, for `--model`."""
    from tests.language import write_tiny

    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct, as `make -s smollm2` prints it; made here where it is not there yet."""
    from tests.language import smollm2_folder

    return smollm2_folder()


@pytest.fixture(scope="session")
def smollm2_short(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2's first layers with its tokenizer, for what does not need all of its thirty."""
    from tests.language import shorten

    return made_once(tmp_path_factory, "smollm2-short", lambda folder: shorten(Path(smollm2), folder))


@pytest.fixture(scope="session")
def smollm2_run(smollm2_short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """These layers trained for a step of a few tokens."""
    from tests.language import train_smollm2

    return made_once(tmp_path_factory, "smollm2", lambda folder: train_smollm2(str(smollm2_short), folder)) / "run"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that takes long to make, so all workers share it."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / f"{name}.made").exists():
            make(root / name)
            (root / f"{name}.made").touch()
    return root / name
