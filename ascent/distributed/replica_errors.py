"""Errors of replicas."""


class ReplicaLostError(Exception):
    """A replica has died or does not have the requested weights. `is_permanent`: it will not come back."""

    def __init__(self, reason: str, is_permanent: bool = False):
        super().__init__(reason, is_permanent)
        self.reason, self.is_permanent = reason, is_permanent

    def __str__(self) -> str:
        return self.reason.partition("\n")[0]


class ReplicaUnreachableError(ReplicaLostError):
    """A replica is alive, but a transfer of weights to it failed."""
