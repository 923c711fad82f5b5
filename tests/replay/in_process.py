"""Runs, and their replays, in this process: it saves the start of TensorFlow."""

from pathlib import Path

import keras

from ddl import config
from ddl.distribution.communication import Communication
from ddl.replay.replayer import Replayer
from ddl.run import train
from ddl.run.placement import Placement
from tests.conftest import make_strategy


def placement(replicas=2, **arguments):
    name = "one_device" if replicas == 1 else "mirrored"
    return Placement(make_strategy(name, replicas), Communication(), **arguments)


def train_run(gin, model_dir: Path, *params: str, replicas=2, **arguments):
    """Makes a run of a config; further arguments are those of its `Placement`."""
    keras.utils.clear_session()
    config.load([str(gin)], params)
    train.run(placement(replicas, **arguments), str(model_dir), mode="train")


class Direct:
    """A player in this process (`ddl.replay.processes.Player`)."""

    def __init__(self, run: Path, folder: Path, in_detail=False, replicas=2, **arguments):
        keras.utils.clear_session()
        folder.mkdir(parents=True)
        config.load([str(run / "operative_config.gin")])
        placed = placement(replicas, **arguments)
        self.replayer = Replayer(run, folder, placed, in_detail=in_detail)
        self.done = []  # the commands
        self._answer = {}

    def send(self, do, **arguments):
        self.done.append(do)
        self._answer = self.replayer.do(do, **arguments)

    def receive(self):
        return self._answer
