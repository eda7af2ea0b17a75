"""Where code that nobody trusts runs: without a network, without the host's files, and ended with its job.

    box = Sandbox("ascent.sandbox.python_session:serve_session", BoxLimits(seconds=5))
    with box.job() as job:
        job.ask({"code": "print(1 + 1)"})

`walls.py` says what this machine has, `box.py` is a sandbox seen from outside and `warm.py` from inside. The rest runs
in one: programs and their tests (`peer.py`), a session (`session.py`), attempts to get out (`attempts.py`). It imports
nothing of Ascent, and no torch.
"""
