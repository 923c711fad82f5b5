"""The memory that each replica needs, that its device has, and what would make it fit.

For `--dry_run`.
"""

from ddl.run.memory.of_device import Available, available_to_replica
from ddl.run.memory.of_replica import Held, held_by_replica
from ddl.run.memory.report import memory_of_replica

__all__ = ["Available", "Held", "available_to_replica", "held_by_replica", "memory_of_replica"]
