"""Data sets of other libraries, read from small ones that the libraries themselves wrote."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import DataError
from tests.data.test_records import taken

COUNT = 7
IMAGES = np.arange(COUNT * 48, dtype=np.uint8).reshape(COUNT, 4, 4, 3)


class TestHuggingFace:
    @pytest.fixture
    def dataset(self):
        datasets = pytest.importorskip("datasets")
        columns = {
            "img": list(IMAGES),
            "label": list(range(COUNT)),
            "text": [f"row {n}" for n in range(COUNT)],
            "x": [[n / 2, 1.0] for n in range(COUNT)],
        }
        features = datasets.Features(
            img=datasets.Image(),
            label=datasets.Value("int64"),
            text=datasets.Value("string"),
            x=datasets.Sequence(datasets.Value("float32"), length=2),
        )
        return datasets.Dataset.from_dict(columns, features=features)

    def check(self, source):
        assert len(source) == COUNT
        (batch,) = taken(source, 1, batch=COUNT, shuffle=False)
        np.testing.assert_array_equal(batch["image"], IMAGES)
        assert batch["image"].dtype == np.uint8
        assert batch["label"].tolist() == list(range(COUNT))

    def test_in_memory_and_from_disk(self, dataset, tmp_path):
        columns = {"image": "img", "label": "label"}
        self.check(ddl.data.hugging_face(dataset, features=columns))
        dataset.save_to_disk(tmp_path / "one")
        self.check(ddl.data.hugging_face(tmp_path / "one", features=columns))
        parts = sys.modules["datasets"].DatasetDict(train=dataset, test=dataset.take(2))
        parts.save_to_disk(tmp_path / "parts")
        parted = ddl.data.hugging_face(str(tmp_path / "parts"), split="train", features=columns)
        self.check(parted)

    def test_all_columns(self, dataset):
        source = ddl.data.hugging_face(dataset)
        found = {n: (s.dtype.name, s.shape.as_list()) for n, s in source.element_spec.items()}
        assert found == {
            "img": ("uint8", [4, 4, 3]),
            "label": ("int64", []),
            "text": ("string", []),
            "x": ("float32", [2]),
        }
        (batch,) = taken(source, 1, batch=2, shuffle=False)
        assert batch["text"].tolist() == [b"row 0", b"row 1"]

    def test_errors(self, dataset, tmp_path):
        parts = sys.modules["datasets"].DatasetDict(train=dataset)
        for data, arguments, message in (
            (tmp_path / "absent", {}, r"absent' could not be read .*save_to_disk"),
            (
                parts,
                {"split": "test"},
                "has the splits train. Set hugging_face.split .* got 'test'",
            ),
            (dataset, {"split": "train"}, "has no splits"),
            (dataset, {"features": {"x": "imgs"}}, "names 'imgs', but .* Did you mean img"),
            (dataset.to_iterable_dataset(), {}, "got IterableDataset. For an"),
        ):
            with pytest.raises(DataError, match=f"(?s){message}"):
                ddl.data.hugging_face(data, **arguments)


class TestTFDS:
    @pytest.fixture(scope="class")
    def data_dir(self, tmp_path_factory):
        """A data set of TensorFlow Datasets, prepared in the format of random access."""
        tfds = pytest.importorskip("tensorflow_datasets")
        pytest.importorskip("array_record")
        folder = tmp_path_factory.mktemp("tfds")
        features = tfds.features.FeaturesDict(
            {"image": tfds.features.Image(shape=(4, 4, 3)), "label": np.int64}
        )
        examples = {"image": IMAGES, "label": np.arange(COUNT)}
        tfds.dataset_builders.store_as_tfds_dataset(
            name="tiny",
            version="1.0.0",
            features=features,
            split_datasets={"train": tf.data.Dataset.from_tensor_slices(examples)},
            data_dir=folder,
            file_format="array_record",
        )
        return str(folder)

    def test_by_name(self, data_dir):
        source = ddl.data.tfds("tiny", split="train", data_dir=data_dir)
        assert len(source) == COUNT
        batches = taken(source, 1, batch=COUNT, shuffle=False)
        order = batches[0]["label"]
        assert sorted(order) == list(range(COUNT))
        np.testing.assert_array_equal(batches[0]["image"], IMAGES[order])
        part = ddl.data.tfds("tiny", split="train[:3]", features={"y": "label"}, data_dir=data_dir)
        assert len(part) == 3
        assert list(part.element_spec) == ["y"]

    def test_errors(self, data_dir, tmp_path):
        for name, arguments, message in (
            ("tiny_", {}, "no data set 'tiny_'"),
            ("tiny", {"split": "test"}, "test"),
            ("tiny", {"features": {"x": "imag"}}, "names 'imag', but .* Did you mean image"),
            (
                "mnist",
                {"data_dir": str(tmp_path)},
                "'mnist' was not found at .*download_and_prepare",
            ),
        ):
            given = {"split": "train", "data_dir": data_dir, **arguments}
            with pytest.raises(DataError, match=f"(?s){message}"):
                ddl.data.tfds(name, **given)


@pytest.mark.parametrize(
    ("package", "read", "extra"),
    [
        ("datasets", lambda: ddl.data.hugging_face("absent"), "huggingface"),
        ("tensorflow_datasets", lambda: ddl.data.tfds("mnist", split="train"), "tfds"),
        (
            "array_record.python",
            lambda: ddl.data.record_files(["x.array_record"], {"x": ("x", "int64", ())}),
            "arrayrecord",
        ),
    ],
)
def test_a_missing_package_is_named(package, read, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"pip install '\.\[{extra}\]'"):
        read()
