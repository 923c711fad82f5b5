"""The benchmark of augmentation augments where it says."""

import keras
import tensorflow as tf

from benchmarks import augmentation


class Black(keras.layers.Layer):
    def call(self, images, training=False):
        return tf.zeros_like(images)


def test_images_are_augmented_in_the_update_or_in_the_input():
    losses = []
    for layers in (([], []), ([Black()], []), ([], [Black()])):
        keras.utils.set_random_seed(0)
        losses.append(augmentation.trainer_of(*layers).train(1)["loss"])
    plain, in_update, in_input = losses
    assert in_update == in_input != plain
