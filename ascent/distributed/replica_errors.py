"""How a replica fails."""


class ReplicaLostError(Exception):
    """A replica has died, or has not the weights. `over`: it does not come back."""

    def __init__(self, why: str, over: bool = False):
        super().__init__(why, over)
        self.why, self.over = why, over

    def __str__(self) -> str:
        return self.why.partition("\n")[0]


class ReplicaUnreachableError(ReplicaLostError):
    """A replica lives, and weights did not reach it."""
