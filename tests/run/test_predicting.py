"""Files of predictions: their columns, and calls that resume one that was stopped."""

import os
import signal

import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError, DataError, ModelDirectoryError, TrainingInterrupted
from ddl.run import predicting
from tests.run.small import DATA, make_trainer


@pytest.fixture(scope="module")
def trainer():
    return make_trainer()


def test_outputs_are_rows_in_order_with_features(trainer, tmp_path):
    path = ddl.predict(trainer, tmp_path / "rows.npz", features=["label"])
    found = np.load(path)
    np.testing.assert_array_equal(found["label"], DATA["label"])
    np.testing.assert_allclose(found["output"], trainer.predict(DATA), rtol=1e-6)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.npz"]
    of_inputs = np.load(ddl.predict(trainer, tmp_path / "of_inputs.npz", DATA["image"]))
    np.testing.assert_array_equal(of_inputs["output"], found["output"])


@pytest.fixture
def stopped(trainer, tmp_path, monkeypatch):
    """A prediction that a signal stopped within its second part."""
    monkeypatch.setattr(predicting, "_PART_BYTES", 1)

    def report(text):
        if "Predicted 16" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted, match=r"stopped on SIGTERM after \d+ of 40 rows"):
        ddl.predict(trainer, tmp_path / "rows.npz", report=report)
    assert not (tmp_path / "rows.npz").exists()
    return tmp_path / "rows.npz"


def test_a_stopped_call_resumes_to_the_same_bytes(trainer, stopped, tmp_path):
    lines = []
    ddl.predict(trainer, stopped, report=lines.append)
    assert "Resuming after" in lines[0]
    whole = ddl.predict(trainer, tmp_path / "whole.npz")
    assert stopped.read_bytes() == whole.read_bytes()


def test_other_weights_or_data_do_not_mix(stopped):
    other = make_trainer()
    other.train(1, progress=False)
    with pytest.raises(ModelDirectoryError, match="weights differ"):
        ddl.predict(other, stopped)
    with pytest.raises(ModelDirectoryError, match="weights and data differ"):
        ddl.predict(other, stopped, {"image": DATA["image"][:24]})


def test_a_damaged_or_missing_part_is_named(trainer, stopped):
    first, *_ = sorted((stopped.parent / "rows.npz.partial").glob("rows-*"))
    content = first.read_bytes()
    first.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelDirectoryError, match=f"{first.name} is damaged"):
        ddl.predict(trainer, stopped)
    first.unlink()
    with pytest.raises(ModelDirectoryError, match=r"is damaged: it ends with row 8"):
        ddl.predict(trainer, stopped)


def test_mistakes_are_named(trainer, tmp_path):
    with pytest.raises(ConfigError, match=r"\.jsonl.*got rows.csv"):
        ddl.predict(trainer, "rows.csv")
    with pytest.raises(DataError, match="lable"):
        ddl.predict(trainer, tmp_path / "rows.npz", features=["lable"])


def test_a_file_that_is_there_is_kept(trainer, tmp_path):
    (tmp_path / "rows.npz").write_text("kept")
    with pytest.raises(ModelDirectoryError, match="is there already"):
        ddl.predict(trainer, tmp_path / "rows.npz")
    assert (tmp_path / "rows.npz").read_text() == "kept"


def test_nested_outputs_are_named():
    outputs = {"a": np.zeros(2), "b": (np.zeros(2), [np.zeros(2)])}
    assert [*predicting._columns(outputs, {}, 2)] == ["a", "b/0", "b/1/0"]
    assert [*predicting._columns((np.zeros(2), np.zeros(2)), {}, 2)] == ["output_0", "output_1"]
    with pytest.raises(ConfigError, match="Two columns"):
        predicting._columns({"a": np.zeros(2)}, {"a": np.zeros(2)}, 2)


def test_values_that_json_lacks():
    rows = predicting._json_rows("x", np.array([np.nan, -np.inf, 0.1]))
    assert [*rows] == ['"x": null', '"x": -1e999', '"x": 0.1']
    texts = predicting._columns(np.array([b"\xc3\xa4", b"NaN\xe2\x80\xa8"], object), {}, 2)
    written = [*predicting._json_rows("x", texts["output"])]
    assert written == ['"x": "ä"', '"x": "NaN\\u2028"']
    with pytest.raises(DataError, match="UTF-8"):
        predicting._columns(np.array([b"\xff"], object), {}, 1)
