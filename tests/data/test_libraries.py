"""Data sets of other libraries, from small ones that the libraries themselves wrote."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source

IMAGES = np.arange(7 * 48, dtype=np.uint8).reshape(7, 4, 4, 3)


def check(source):
    rows = source.rows(np.array([6, 0]))
    np.testing.assert_array_equal(rows["image"], IMAGES[[6, 0]])
    assert rows["label"].tolist() == [6, 0]


def test_a_hugging_face_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    columns = {"image": list(IMAGES), "label": list(range(7))}
    made = datasets.Dataset.from_dict(columns, features=features)
    made.save_to_disk(tmp_path / "rows")
    check(Source(datasets.load_from_disk(tmp_path / "rows").with_format("numpy")))


def test_a_data_source_of_tfds(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    rows = tf.data.Dataset.from_tensor_slices({"image": IMAGES, "label": np.arange(7)})
    tfds.dataset_builders.store_as_tfds_dataset(
        name="rows",
        version="1.0.0",
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Tensor(shape=(4, 4, 3), dtype=np.uint8),
                "label": tfds.features.Scalar(np.int64),
            }
        ),
        split_datasets={"train": rows},
        data_dir=tmp_path,
        file_format="array_record",
    )
    check(Source(tfds.data_source("rows", split="train", data_dir=tmp_path)))
