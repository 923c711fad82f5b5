"""Metrics that add up and those that are refused, in all places where figures go."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError
from ddl.metrics import FunctionOfMean, KerasMetric
from tests.conftest import make_strategy, save
from tests.metrics import batch_metrics

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(22, 3))
LABEL = (X.sum(1) + RANDOM.normal(size=22) > 0).astype("i4")
DATA = {"x": X, "label": LABEL}


class Binary:
    """A logistic regression that reports the metrics that it is given, of probabilities."""

    def __init__(self, metrics, activation=tf.sigmoid, weight=None, dtype="float64"):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype=dtype)])
        self.metrics, self.activation, self.weight = metrics, activation, weight

    def per_example(self, features, training):
        logit = self.model(features["x"], training=training)[:, 0]
        loss = tf.nn.sigmoid_cross_entropy_with_logits(
            tf.cast(features["label"], logit.dtype), logit
        )
        outputs = self.activation(logit)
        values = {k: m(features["label"], outputs) for k, m in self.metrics.items()}
        return ddl.PerExample(loss, values, self.weight)

    def predict(self, features):
        return self.model(features["x"])[:, 0]


def trainer_of(task, strategy=None, optimizer=None, **options):
    strategy = strategy or make_strategy("one_device", 1)
    with strategy.scope():
        task = task()
        optimizer = optimizer or keras.optimizers.SGD(0.1)
    options = {"global_batch_size": 8, "eval_data": DATA, **options}
    return ddl.Trainer(task, optimizer, DATA, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "PerBatch",
            r"its state 'total' after 7 examples is .* as the sum of those of the first 2",
        ),
        ("Unweighted", "without the examples of weight 0"),
        ("Positives", "as the difference of those with larger weights"),
        ("Decaying", "as what is added to an earlier state"),
        ("Largest", "as the sum of those of the first 2 and the last 5"),
        ("OutsideOfVariables", "its result changes with the number of updates"),
        ("FromOne", "variables of add_variable that start at 0"),
        ("WithoutWeights", "it fails on random examples: .*sample_weight"),
    ],
)
def test_what_does_not_add_up_is_refused_by_name(kind, message):
    metric = KerasMetric(getattr(batch_metrics, kind)(name="own"))
    with pytest.raises(ConfigError, match=rf"The metric 'of_own' \({kind}\) does not add") as error:
        trainer_of(lambda: Binary({"of_own": metric}))
    assert error.match(message)
    assert error.match("OfAllOutputs")


ROW = {"label": (tf.int32, []), "hinge": (tf.int32, [1]), "p": (tf.float32, [])}
ROW |= {"p1": (tf.float32, [1]), "p3": (tf.float32, [3])}


def state_of(metric, labels, outputs):
    specs = [tf.TensorSpec([4, *ROW[name][1]], ROW[name][0]) for name in (labels, outputs)]
    return metric.state("own", *specs, 1)


@pytest.mark.parametrize(
    ("name", "labels", "outputs", "message"),
    [
        (
            "CategoricalAccuracy",  # takes the argmax of the labels over the batch
            "label",
            "p3",
            r"of those of each example, for labels \[7\] from 0 to . and outputs \[7, 3\]",
        ),
        ("SparseCategoricalAccuracy", "label", "p", "as the sum of those of each example"),
        ("Hinge", "hinge", "p1", "as the sum of those of each example"),
        ("SquaredHinge", "hinge", "p1", "as the sum of those of each example"),
        ("ConcordanceCorrelation", "p1", "p1", r"its state stays 0 for random labels \[7, 1\]"),
    ],
)
def test_what_adds_up_by_chance_is_refused(name, labels, outputs, message):
    """On labels 0 and 1, or as it counts nothing."""
    with pytest.raises(ConfigError, match=message):
        state_of(KerasMetric(name), labels, outputs)


@pytest.mark.parametrize(
    ("metric", "labels", "outputs"),
    [
        (KerasMetric("FalsePositives", {"thresholds": 0.99}), "label", "p"),
        (KerasMetric("FalseNegatives", {"thresholds": 0}), "label", "p"),
        (KerasMetric("Accuracy"), "label", "p"),  # of rounded outputs
        (KerasMetric("F1Score"), "p1", "p1"),
        (KerasMetric("SparseCategoricalCrossentropy"), "label", "p3"),  # takes no label -1
    ],
)
def test_no_false_alarm(metric, labels, outputs):
    assert state_of(metric, labels, outputs).size > 0


def test_a_metric_of_ones_own_that_adds_up():
    """Its result is the variable itself, which stays 0."""
    trainer = trainer_of(lambda: Binary({"errors": KerasMetric(batch_metrics.SumOfErrors())}))
    outputs = 1 / (1 + np.exp(-trainer.predict(DATA)))
    assert trainer.evaluate()["errors"] == pytest.approx(abs(LABEL - outputs).sum(), rel=1e-12)


def test_what_padding_holds_does_not_count():
    spec = tf.TensorSpec([4], tf.float32)
    state = KerasMetric("RootMeanSquaredError").state("rmse", spec, spec, 1)
    weight = tf.constant([0, 1, 0, 3], tf.float64)
    sums = state.sums(tf.constant([np.nan, 1, 2, 3]), tf.constant([1, 2, np.inf, 5]), weight)
    assert sums.numpy().tolist() == [1 + 3 * 4, 4]
    undefined = tf.fill([4], np.nan)
    assert state.sums(undefined, undefined, 0 * weight).numpy().tolist() == [0, 0]


def test_adjusted_r2_counts_padding_and_is_refused():
    metric = KerasMetric("R2Score", {"num_regressors": 3})
    with pytest.raises(ConfigError, match="'num_samples'.* without the examples of weight 0"):
        trainer_of(lambda: Binary({"r2": lambda y, z: metric(y[:, None], z[:, None])}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Acuracy",), "must be the name of .* got 'Acuracy'. Correct .* Did you mean Accuracy"),
        ((3,), "must be the name of a Keras metric or .*, got 3. Name it"),
        (("MeanIoU",), "cannot make the metric MeanIoU .*num_classes"),
        (("AUC", {"curves": "PR"}), "cannot make the metric AUC .*curves"),
        ((keras.metrics.AUC(), {"curve": "PR"}), "belong to the name of a metric, got .* 'auc"),
        ((batch_metrics.WithoutConfig(2),), "cannot make the metric WithoutConfig"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        KerasMetric(*arguments)


AUC = KerasMetric("AUC")
IOU = KerasMetric("MeanIoU", {"num_classes": 2})


@pytest.mark.parametrize(
    ("metric", "weight", "message"),
    [
        (lambda labels, outputs: AUC(labels[:1], outputs), None, "labels .* one row for each"),
        (
            lambda labels, outputs: AUC(labels, outputs, tf.ones([3])),
            None,
            "must be the first dim",
        ),
        (lambda labels, outputs: AUC(tf.as_string(labels), outputs), None, "numbers, got string"),
        (lambda labels, outputs: AUC(labels, tf.stack([outputs] * 3, 1)), None, "it fails on"),
        (IOU, None, "takes class numbers as outputs, got float64. Pass tf.argmax"),
        (FunctionOfMean(lambda mean: mean), "more", "one value of the metric 'own'"),
    ],
)
def test_bad_inputs(metric, weight, message):
    if weight:
        values = metric
        metric = lambda labels, outputs: values(tf.stack([outputs] * 2, 1))  # noqa: E731
    with pytest.raises(ConfigError, match=message):
        trainer_of(lambda: Binary({"own": metric})).evaluate()


def test_a_negative_weight_is_refused():
    class Negative(Binary):  # rows are checked once for each class of tasks
        def per_example(self, features, training):
            output = super().per_example(features, training)
            weighed = AUC(features["label"], tf.sigmoid(output.loss), -output.loss)
            return output._replace(metrics={"own": weighed})

    with pytest.raises(ConfigError, match=r"'own \(weight\)' of an example must be at least 0"):
        trainer_of(lambda: Negative({})).evaluate()


def test_a_function_takes_one_argument():
    with pytest.raises(ConfigError, match=r"must be a function of \(mean\)"):
        FunctionOfMean(lambda: 1)


@pytest.mark.parametrize(
    ("name", "remedy"), [("AUC", "from_logits"), ("Precision", "thresholds=0")]
)
def test_logits_instead_of_probabilities_are_refused(name, remedy):
    """Keras cuts them off at 0 and 1, or compares them with 0.5."""
    trainer = trainer_of(
        lambda: Binary({"own": KerasMetric(name)}, activation=lambda logit: 20 * logit)
    )
    message = rf"The metric 'own' \({name}\) takes probabilities, .* outside of \[0, 1\].*{remedy}"
    with pytest.raises(ConfigError, match=message):
        trainer.evaluate() if name == "AUC" else trainer.train(2)


def test_two_metrics_with_one_figure_are_refused():
    f1 = KerasMetric("F1Score", {"threshold": 0.5})
    metrics = {
        "f1": lambda labels, outputs: f1(labels[:, None], outputs[:, None]),
        "f1/0": lambda labels, outputs: outputs,
    }
    with pytest.raises(ConfigError, match="two metrics have the figure 'f1/0'"):
        trainer_of(lambda: Binary(metrics))


def test_without_any_weight_all_figures_are_undefined():
    layout = trainer_of(lambda: Binary({"auc": AUC}))._parts.update.metrics
    assert np.isnan(list(layout.means(layout.zeros()).values())).all()


class OwnStep(Binary):
    """Two losses, each with an AUC."""

    def other(self, features, training):
        output = self.per_example(features, training)
        return output._replace(
            metrics={
                "other_auc": self.metrics["auc"](features["label"], 1 - tf.sigmoid(output.loss))
            }
        )

    def step(self, update, batch):
        variables = self.model.trainable_variables
        own = update.gradients(self.per_example, batch, variables)
        update.apply(own + update.gradients(self.other, batch, variables))


def test_in_a_step_of_ones_own():
    found = [
        trainer_of(
            lambda: initialized(OwnStep({"auc": AUC})), make_strategy(*where), accumulation_steps=n
        )
        for where, n in ((("one_device", 1), 1), (("mirrored", 2), 2))
    ]
    figures = [trainer.train(3) for trainer in found]
    assert figures[0].keys() == {"loss/per_example", "loss/other", "auc", "other_auc"}
    assert figures[0] == pytest.approx(figures[1], rel=1e-10)


def initialized(task):
    """Sets equal weights, which are no zeros."""
    for variable in task.model.variables:
        variable.assign(
            np.linspace(-1, 1, variable.value.shape.num_elements()).reshape(variable.shape)
        )
    return task


def test_in_half_precision_and_compiled_the_state_is_float64():
    def task():
        metrics = {"auc": AUC, "positives": KerasMetric("TruePositives")}
        return initialized(Binary(metrics, dtype="mixed_float16"))

    trainer, plain = (trainer_of(task, jit_compile=compiled) for compiled in ("on", "off"))
    assert trainer.state.sums.dtype == tf.float64
    found = trainer.train(8)
    assert found == pytest.approx(plain.train(8), rel=1e-3)
    assert found["positives"] > 4  # of all eight batches


def test_a_run_reports_saves_and_stops_by_it(tmp_path):
    """metrics.jsonl, the best checkpoint, early stopping and a resumed run have the figures."""

    random = np.random.default_rng(9)
    x = random.normal(size=(22, 3))
    label = (x @ [1, 0.3, -0.6] + random.normal(size=22) > 0).astype("i4")
    retention = ddl.Retention(last=1, best_metric="auc", best_mode="max")

    def run(steps, folder):
        task = lambda: initialized(Binary({"auc": AUC}))  # noqa: E731
        trainer = trainer_of(task, seed=3, eval_data={"x": x, "label": label})
        ddl.fit(
            trainer,
            folder,
            train_steps=steps,
            eval_every=2,
            log_every=4,
            checkpoint_every=3,
            retention=retention,
            early_stopping=ddl.EarlyStopping(metric="auc", mode="max", patience=2),
        )
        return trainer

    straight = run(20, tmp_path / "straight")
    run(3, tmp_path / "resumed")
    resumed = run(20, tmp_path / "resumed")
    figures = straight.history.figures("eval")
    # The AUC is largest at step 4, while the loss still falls.
    assert (figures["step"][np.argmax(figures["auc"])], straight.step) == (4, 8)
    assert figures["step"][np.argmin(figures["loss"])] == 8
    assert resumed.step == 8
    for folder in ("straight", "resumed"):
        assert Checkpoints(tmp_path / folder / "checkpoints", straight, retention).best().step == 4
    for split in ("train", "eval"):
        ours, theirs = resumed.history.figures(split), straight.history.figures(split)
        np.testing.assert_array_equal(ours["auc"][-1], theirs["auc"][-1])
    line = (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"auc": 0.' in line


def test_by_name_in_the_tasks_that_come_with_ddl():
    x = X.astype("f4")
    layers = [keras.Input((3,)), keras.layers.Dense(1, "sigmoid")]
    supervised = ddl.Supervised(
        keras.Sequential(layers), "binary_crossentropy", metrics=["accuracy", "AUC", "f1_score"]
    )
    trainer = ddl.Trainer(supervised, "sgd", (x, LABEL), global_batch_size=8)
    assert trainer.metric_names == ("loss", "accuracy", "AUC", "f1_score/0")
    found, outputs = trainer.evaluate((x, LABEL)), trainer.predict((x, LABEL))
    keras_auc = keras.metrics.AUC()(LABEL, outputs[:, 0])
    assert found["AUC"] == pytest.approx(float(keras_auc), rel=1e-6)

    layers = [keras.Input((3,)), keras.layers.Dense(2)]
    task = ddl.Classification(
        keras.Sequential(layers), metrics=["AUC", KerasMetric("F1Score", {"average": "macro"})]
    )
    trainer = ddl.Trainer(task, "sgd", (x, LABEL), global_batch_size=8)
    found, logits = trainer.evaluate((x, LABEL)), trainer.predict((x, LABEL))
    f1 = keras.metrics.F1Score(average="macro")(np.eye(2)[LABEL], tf.nn.softmax(logits))
    assert found["F1Score"] == pytest.approx(float(f1), rel=1e-5)
    assert found.keys() == {"loss", "accuracy", "AUC", "F1Score"}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["AUC", "AUC"], "two metrics with the name 'AUC'"),
        ("AUC", r"must be a list, got 'AUC'. Write \['AUC'\]"),
        (["accuracy"], "always reports the accuracy"),
    ],
)
def test_bad_metrics_of_a_classification(metrics, message):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match=message):
        ddl.Classification(model, metrics=metrics)


def test_a_checkpoint_keeps_the_state_of_a_period(tmp_path):
    def trainer():
        return trainer_of(lambda: initialized(Binary({"auc": AUC})), seed=3)

    class StopAt3:
        def next_step(self, step):
            return 3 if step < 3 else None

        def __call__(self, step):
            if step == 3:
                straight.request_stop()

    straight, resumed = trainer(), trainer()
    straight.train(6, [StopAt3()])
    assert straight.state.sums[0] > 0
    save(tmp_path, straight)
    Checkpoints(tmp_path, resumed).restore_latest()
    assert resumed.step == 3
    assert resumed.train(3) == straight.train(3)
