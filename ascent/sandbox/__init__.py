"""Isolated execution of untrusted code: without network, without the host's files, and ended with its job.

    sandbox = Sandbox("ascent.sandbox.python_session:serve_session", SandboxLimits(seconds=5))
    with sandbox.job() as job:
        job.ask({"code": "print(1 + 1)"})

`isolation.py` chooses what works on this machine, `sandbox.py` is the owner's side and `sandbox_server.py` the fork
server inside. The rest runs in jobs: programs and their tests (`program_trial.py`, `object_proxies.py`), a Python
session, sandboxed rewards and escape tests. It imports only `ascent.core` and `ascent.processes`, and no torch.
"""
