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
def ends(moment):
    moment.end("enough")


@gin.register
class Inverted(ddl.Classification):
    def inverted(self, features):
        return 16.0 - tf.cast(features["image"], tf.float32)
