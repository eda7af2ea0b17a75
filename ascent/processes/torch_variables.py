"""Environment variables that torch reads when it is imported, and the values that suit training.

The command `ascent` sets them before it imports torch, and the processes that Ascent starts inherit them. `import
ascent` sets nothing.
"""

import os


def torch_variables() -> dict[str, str]:
    """Return the variables with the values that Ascent recommends, without those that the user has set."""
    # torch's wheels for Arm allocate with mimalloc, which by default returns freed memory to the kernel within
    # milliseconds. Getting it back costs a tenth of an update. With 0 the kernel takes it only when memory is short.
    variables = {"MIMALLOC_PURGE_DECOMMITS": "0"}
    # An idle thread of libgomp spins 300,000 times before it sleeps: 15 ms of a core on x86. Beside another process
    # that computes, a run then takes four times as long. 5,000 times (0.3 ms) do not slow down a run that is alone.
    if os.uname().machine == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
        variables["GOMP_SPINCOUNT"] = "5000"
    return {name: value for name, value in variables.items() if name not in os.environ}


def set_torch_variables() -> None:
    """Set the variables for this process and its children. Without effect on a torch that is imported already."""
    os.environ.update(torch_variables())
