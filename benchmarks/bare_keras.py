"""A bare Keras script, for benchmarks.first_step: the network of configs/mnist_mlp.gin."""

import os
import sys
import time

import keras

times = {"imports": time.time()}

(images, labels), _ = keras.datasets.fashion_mnist.load_data()
images = images.reshape(-1, 28, 28, 1)
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
model.compile(
    keras.optimizers.Adam(0.001),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
times["build"] = time.time()


class FirstStep(keras.callbacks.Callback):
    """A callback that records the time of the first step."""

    def on_train_batch_end(self, batch, logs=None):
        """Records the time at the first call."""
        times.setdefault("first loop", time.time())


model.fit(
    images,
    labels,
    batch_size=25,
    steps_per_epoch=int(sys.argv[1]),
    verbose=0,
    callbacks=[FirstStep()],
)
with open(os.environ["FIRST_STEP_TIMES"], "w") as file:
    file.writelines(f"{name}={moment}\n" for name, moment in times.items())
