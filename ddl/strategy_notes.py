"""What a person should know of a run for the strategy that it was given, told once at its start."""

import keras

from ddl.model_checks import layers_of
from ddl.parameter_servers import has_parameter_servers
from ddl.tpu import is_tpu
from ddl.trainer import Trainer


def notes(trainer: Trainer) -> list[str]:
    """A sentence or two about each thing that differs from one device."""
    found = []
    if has_parameter_servers(trainer.strategy):
        found.append(
            "Updates are asynchronous: each is made by one worker from a whole global batch, with "
            "weights that the others may have moved meanwhile. Two such runs differ, and so does "
            "one that is gone on with. The learning rate is that of the step, whoever makes it."
        )
        if any(isinstance(x, keras.layers.BatchNormalization) for x in layers_of(trainer.task)):
            found.append(
                "BatchNormalization takes its moments from the batch of the update; the moving "
                "ones are written by all workers, and what two write at once counts as one."
            )
    if is_tpu(trainer.strategy) and keras.config.dtype_policy().name != "mixed_bfloat16":
        found.append(
            "TPUs multiply in bfloat16: PRECISION = 'mixed_bfloat16' is fastest there, and "
            "needs no loss scale. This strategy has not been run on hardware yet."
        )
    return found
