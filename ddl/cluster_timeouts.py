"""How long the processes of a cluster wait for each other."""

import dataclasses

from ddl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ClusterTimeouts:
    """How long processes of a cluster wait for each other, in seconds.

    Attributes:
      join: For each other at the start.
      peer: After which a process whose machine does not answer counts as lost.
      stall: After which one that gives no sign of life, such as one that is stopped, does.
    """

    join: float = 60.0
    peer: float = 30.0
    stall: float = 300.0

    def __post_init__(self) -> None:
        if min(self.join, self.peer, self.stall) <= 0:
            raise ConfigError("join_timeout, peer_timeout and stall_timeout are more than zero")
