"""Timeouts between the processes of a cluster."""

import dataclasses

from ddl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ClusterTimeouts:
    """Timeouts between the processes of a cluster, in seconds.

    Attributes:
      join: Time for all processes to join at the start.
      peer: Time after which a process is lost if its machine does not answer.
      stall: Time after which a process is lost if it gives no sign of life, for instance because it
        is stopped.

    Raises:
      ConfigError: If a timeout is not positive.
    """

    join: float = 60.0
    peer: float = 30.0
    stall: float = 300.0

    def __post_init__(self) -> None:
        if min(self.join, self.peer, self.stall) <= 0:
            raise ConfigError(
                "--worker_timeout (ClusterTimeouts.join, peer and stall) must be greater than 0 "
                f"seconds, got {self.join}, {self.peer} and {self.stall}. Leave it out to take its "
                "default."
            )
