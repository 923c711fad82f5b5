"""Callbacks and a task that the configs of the tests name."""

import gin
import tensorflow as tf

import ddl


@gin.register
def watched(moment):
    return {"weights": float(abs(moment.trainer.model.variables[0].numpy()).max())}


@gin.register
def fails(moment):
    if moment.step == 6:
        raise KeyError("absent")


@gin.register
class Inverted(ddl.Classification):
    def inverted(self, features):
        return 16.0 - tf.cast(features["image"], tf.float32)


@gin.register
def evaluates_alone(moment):
    try:
        moment.trainer.evaluate()
    except ddl.errors.ConfigError as error:
        print(f"refused: {error}")
    return {"by_chief": 1.0}


@gin.register
def other_ends(moment):
    moment.write.text("seen", "by all")
    if not moment.is_chief and moment.step == 4:
        moment.end("seen enough")
