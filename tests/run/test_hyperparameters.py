"""The session of a run in TensorBoard's HParams tab, read back from its event files."""

import os

import pytest
import tensorflow as tf
from ddl.run.event_files import session
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status

from ddl.errors import TrainingDiverged, TrainingInterrupted

MACROS = {
    "SEED": 3,
    "LEARNING_RATE": 0.1,
    "DATA": "digits",
    "SHUFFLES": True,
    "SHAPE": (8, 8),
    "CLIP_NORM": None,
}


def sessions(folder):
    """Returns the hyperparameters, and the statuses of ends, of all event files in a folder."""
    starts, ends = [], []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            for value in tf.compat.v1.Event.FromString(record).summary.value:
                content = value.metadata.plugin_data.content
                if value.tag == metadata.SESSION_START_INFO_TAG:
                    start = metadata.parse_session_start_info_plugin_data(content)
                    starts.append(
                        {k: getattr(v, v.WhichOneof("kind")) for k, v in start.hparams.items()}
                    )
                elif value.tag == metadata.SESSION_END_INFO_TAG:
                    ends.append(metadata.parse_session_end_info_plugin_data(content).status)
    return starts, ends


def test_macros_and_the_end_are_written(tmp_path):
    with session(tmp_path, MACROS, pytest.fail):
        assert sessions(tmp_path)[1] == []
    starts, ends = sessions(tmp_path)
    assert starts == [
        {"SEED": 3, "LEARNING_RATE": 0.1, "DATA": "digits", "SHUFFLES": True, "SHAPE": "(8, 8)"}
    ]
    assert ends == [Status.STATUS_SUCCESS]


@pytest.mark.parametrize(
    ("error", "statuses"),
    [
        (TrainingDiverged(""), [Status.STATUS_FAILURE]),
        (TrainingInterrupted(""), []),
        (KeyboardInterrupt(), []),
    ],
)
def test_a_run_that_fails_is_told_from_one_that_is_stopped(tmp_path, error, statuses):
    with pytest.raises(type(error)), session(tmp_path, MACROS, pytest.fail):
        raise error
    assert sessions(tmp_path)[1] == statuses


def test_a_resumed_run_replaces_its_session_and_keeps_other_events(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default(5):
        tf.summary.scalar("loss", 1.0)
    (others,) = tmp_path.iterdir()
    with pytest.raises(TrainingDiverged), session(tmp_path, {"TRAIN_STEPS": 10}, pytest.fail):
        raise TrainingDiverged("")
    with session(tmp_path, {"TRAIN_STEPS": 20}, pytest.fail):
        pass
    assert sessions(tmp_path) == ([{"TRAIN_STEPS": 20}], [Status.STATUS_SUCCESS])
    assert others.exists()


def test_a_folder_that_cannot_be_written_is_reported_and_ends_no_run(tmp_path):
    reported = []
    (tmp_path / "eval").write_text("a file")
    with session(tmp_path / "eval", MACROS, reported.append):
        pass
    assert len(reported) == 2
    assert "hyperparameters are not written" in reported[0]
    assert os.listdir(tmp_path) == ["eval"]
