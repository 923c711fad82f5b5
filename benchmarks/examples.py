"""What the examples learn: python -m benchmarks examples.

Each file of examples/ is trained by the command in the header of its config, in a process of its
own, on one CPU device, with seed 0. The seconds are those of the whole command, with the import of
TensorFlow, tracing, evaluations and checkpoints. The second table compares each example with a
plain alternative, on the 360 test digits where nothing else is said. Where it names several seeds,
both are trained with each, and the brackets hold the lowest and the highest value.

BYOL, SimCLR and VICReg learn without labels, and triplets which digits are equal. Their encoders
are judged with one labelled training digit for each class: each test digit gets the label of the
most similar one, by the cosine of the encoder's outputs, each standardized over the training
digits. The figure is the mean over 200 draws of the ten digits. CLIP is judged by how often it
finds the right half of a test digit among those of its batch.

Sharpness-aware minimization (SAM) lowers the loss at the weights where it is highest nearby. The
second figure of SAM is that loss, after a move of the weights by 0.05 along the gradient.

The last table judges generated digits by the CNN of configs/digits_cnn.gin, which is trained on
real ones. The Fréchet distance compares the outputs of its last hidden layer for 1,437 generated
digits with those for the test digits; the training digits show what is within reach. The number of
digits drawn is the exponential of the entropy of the predicted classes: 10 if all are drawn equally
often. The picture shows the first thirty of each.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command, generated_digits, repeats
from benchmarks.example_runs import ROOT, Run, Runs
from benchmarks.report import Bar, Cell, Report, Spread, Table
from ddl.figures import is_measured

EXAMPLES = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if path.with_suffix(".gin").exists()
)
SECONDS = 60
SEEDS = 3
DRAWS = 200
CNN = "configs/digits_cnn.gin"

# The generator or decoder that each example exports, and the name of the example.
GENERATORS = {
    "gan": ("GAN", "generator"),
    "wgan_gp": ("WGAN-GP", "generator"),
    "vae": ("VAE", "decoder"),
}


class Finding(NamedTuple):
    """A figure of an example, and that of an alternative.

    Attributes:
      figure: Name of the figure.
      value: The figure of the example.
      alternative: Name of the alternative.
      of_alternative: The figure of the alternative.
      is_target: Whether the example should exceed the alternative.
      lower_is_better: Whether the example should be below the alternative instead.
      constant: Accuracy of the best constant answer, in percent. If given, the value is an accuracy
        in percent, and the example should make at most half as many errors.
    """

    figure: str
    value: Cell
    alternative: str = ""
    of_alternative: Cell = ""
    is_target: bool = False
    lower_is_better: bool = False
    constant: float | None = None


class Examples:
    """The findings of each example."""

    def __init__(self, runs: Runs, seeds: int):
        """Keeps the arguments."""
        self._runs = runs
        self._seeds = seeds

    def run(self, example: str, *params: str) -> Run:
        """Returns the run of an example."""
        return self._runs(f"examples/{example}.gin", *params)

    def findings(self, example: str) -> list[Finding]:
        """Returns what an example learned; by default the metrics of its last evaluation."""
        found: Callable[[], list[Finding]] | None = getattr(self, f"_{example}", None)
        return found() if found else self._metrics(example)

    def classifier(self) -> keras.Model:
        """Returns the CNN that judges generated digits."""
        return self._runs(CNN).model()

    def _metrics(self, example: str) -> list[Finding]:
        run = self.run(example)
        last = (run.lines("eval") or run.lines("train"))[-1]
        others = ("step", "epoch", "examples_per_second")
        names = [name for name in last if name not in others and not is_measured(name)]
        return [Finding(name.replace("_", " "), last[name]) for name in names]

    def _over_seeds(self, figure: Callable[[Run], float], config: str, *params: str) -> Cell:
        """Returns a figure of the runs of a config with each seed."""
        seeds = [(), *((f"SEED = {seed}",) for seed in range(1, self._seeds))]
        return repeats.over_processes([figure(self._runs(config, *params, *s)) for s in seeds])

    def _percent(self, config: str, metric: str, *params: str) -> Cell:
        """Returns a metric of the last evaluation in percent, over the seeds."""
        return self._over_seeds(lambda run: 100 * run.lines("eval")[-1][metric], config, *params)

    def _beside(
        self, example: str, metric: str, figure: str, alternative: str, *params: str
    ) -> Finding:
        """Compares a metric with that of the same example with other parameters."""
        config = f"examples/{example}.gin"
        value = self._percent(config, metric)
        return Finding(
            f"{figure}, %, {self._seeds} seeds",
            *(value, alternative, self._percent(config, metric, *params)),
        )

    def _encoder(self, example: str, name: str = "encoder") -> list[Finding]:
        """Returns the accuracy with ten labels, beside that of the untrained encoder."""
        trained = self.run(example).model(name)
        keras.utils.set_random_seed(0)
        untrained = keras.models.clone_model(trained)
        figure = "accuracy with ten labels, %"
        value = with_ten_labels(lambda images: trained.predict(images, verbose=0))
        raw = with_ten_labels(lambda images: images.reshape(len(images), -1))
        of_untrained = with_ten_labels(lambda images: untrained.predict(images, verbose=0))
        return [
            Finding(figure, value, "untrained encoder", of_untrained, is_target=True),
            Finding(figure, value, "the pixels", raw),
        ]

    def _byol(self) -> list[Finding]:
        return self._encoder("byol")

    def _clip(self) -> list[Finding]:
        found = self.run("clip").lines("eval")[-1]["found"]
        figure = "right halves found among a batch of test digits, %"
        return [Finding(figure, 100 * found, "one at random", self._chance(), is_target=True)]

    def _chance(self) -> float:
        """Returns how often a random half of the same batch is the right one, in percent."""
        number, batch = len(ddl.data.digits("test")[1]), 128
        return 100 * -(-number // batch) / number

    def _distillation(self) -> list[Finding]:
        figure, teacher = "accuracy of the student", "the student on the same 100 digits alone"
        end = self.run("distillation").lines("eval")[-1]
        parameter = "Distillation.share = 0.0"
        return [
            self._beside("distillation", "accuracy", figure, teacher, parameter)._replace(
                is_target=True
            ),
            Finding("accuracy of the teacher, %", 100 * end["teacher_accuracy"]),
        ]

    def _dp_sgd(self) -> list[Finding]:
        value = self._percent("examples/dp_sgd.gin", "accuracy")
        alternative = "without clipping and noise"
        plain = ("DpSgd.noise = 0.0", "DpSgd.limit = 1e9")
        of_plain = self._percent("examples/dp_sgd.gin", "accuracy", *plain)
        figure = f"accuracy, %, {self._seeds} seeds"
        return [Finding(figure, value, alternative, of_plain, constant=constant_answer())]

    def _fine_tuning(self) -> list[Finding]:
        value = self._percent("examples/fine_tuning.gin", "accuracy")
        scratch = self._percent("examples/from_scratch.gin", "accuracy")
        figure = f"accuracy of even or odd from 40 images, %, {self._seeds} seeds"
        return [Finding(figure, value, "from scratch", scratch, is_target=True)]

    def _gan(self) -> list[Finding]:
        logged = [100 * line["accuracy"] for line in self.run("gan").lines("train")]
        figure = "real digits that the discriminator scores above a generated one, %, in training"
        return [Finding(figure, logged[-1], "at its highest", max(logged))]

    def _multi_task(self) -> list[Finding]:
        figure, alternative = "accuracy of the digit from 50 labels", "without the rotations"
        parameter = "MultiTask.weight = 0.0"
        beside = self._beside("multi_task", "accuracy", figure, alternative, parameter)
        return [beside._replace(is_target=True)]

    def _pcgrad(self) -> list[Finding]:
        return [
            self._beside(
                "pcgrad", metric, figure, "sum of the gradients", "PCGrad.project = False"
            )._replace(constant=constant_answer(classes))
            for metric, figure, classes in (
                ("digit_accuracy", "accuracy of the digit", 10),
                ("even_accuracy", "accuracy of even or odd", 2),
            )
        ]

    def _rare_class(self) -> list[Finding]:
        end = self.run("rare_class").lines("eval")[-1]
        figure = "area under the ROC curve, %"
        return [
            Finding(figure, 100 * end["auc"], "a constant", 50.0, is_target=True),
            Finding("accuracy, %", 100 * end["accuracy"], "a constant", 98.0),
        ]

    def _sam(self) -> list[Finding]:
        sam, seeds = "examples/sam.gin", f"{self._seeds} seeds"
        accuracy, of_plain = (self._percent(config, "accuracy") for config in (sam, CNN))
        figure = f"highest loss of the training digits nearby, nats, {seeds}"
        loss, plain_loss = (
            self._over_seeds(lambda run: loss_nearby(run.model()), config) for config in (sam, CNN)
        )
        constant = constant_answer()
        return [
            Finding(f"accuracy, %, {seeds}", accuracy, CNN, of_plain, constant=constant),
            Finding(figure, loss, CNN, plain_loss, is_target=True, lower_is_better=True),
        ]

    def _simclr(self) -> list[Finding]:
        return self._encoder("simclr")

    def _triplets(self) -> list[Finding]:
        return self._encoder("triplets", "")

    def _u_net(self) -> list[Finding]:
        lines = self.run("u_net").lines("eval")
        figure = "mean intersection over union, %"
        first, last = (100 * line["mean_iou"] for line in (lines[0], lines[-1]))
        return [Finding(figure, last, "at the first evaluation", first, is_target=True)]

    def _vae(self) -> list[Finding]:
        end = self.run("vae").lines("eval")[-1]
        figure = "negative evidence lower bound, nats"
        of_pixels = nats_of_independent_pixels()
        return [
            Finding(
                *(figure, end["loss"], "independent pixels", of_pixels),
                is_target=True,
                lower_is_better=True,
            )
        ]

    def _vicreg(self) -> list[Finding]:
        return self._encoder("vicreg")

    def _wgan_gp(self) -> list[Finding]:
        distances = [line["distance"] for line in self.run("wgan_gp").lines("train")]
        figure = "distance of real and generated digits, in training"
        return [Finding(figure, distances[-1], "at its highest", max(distances))]


def with_ten_labels(features: Callable[[np.ndarray], np.ndarray]) -> float:
    """Returns the accuracy of the most similar of ten labelled digits, in percent.

    Args:
      features: Maps images, float32 [n, 8, 8, 1] from 0 to 16, to features [n, width].
    """
    given, held_out = ddl.data.digits("train"), ddl.data.digits("test")
    labelled, other = (features(images.astype(np.float32)) for images, _ in (given, held_out))
    mean, deviation = labelled.mean(axis=0), labelled.std(axis=0) + 1e-6
    labelled, other = ((values - mean) / deviation for values in (labelled, other))
    similarity = (other / np.linalg.norm(other, axis=-1, keepdims=True)) @ (
        labelled / np.linalg.norm(labelled, axis=-1, keepdims=True)
    ).T
    random = np.random.default_rng(0)
    rows = [np.flatnonzero(given[1] == digit) for digit in range(10)]
    drawn = np.stack([random.choice(of_digit, DRAWS) for of_digit in rows])
    predicted = similarity[:, drawn].argmax(axis=1)
    return float(100 * np.mean(predicted == held_out[1][:, None]))


def nats_of_independent_pixels() -> float:
    """Returns the test loss of a model with one binomial distribution for each pixel."""
    mean = np.clip(generated_digits.digits("train").mean(axis=0), 1e-3, 1 - 1e-3)
    real = generated_digits.digits("test")
    loss = -(real * np.log(mean) + (1 - real) * np.log(1 - mean))
    return float(16 * loss.sum(axis=(1, 2, 3)).mean())


def constant_answer(classes: int = 10) -> float:
    """Returns the share of the most frequent class of the test digits, in percent.

    Args:
      classes: 10, or 2 for even and odd.
    """
    counts = np.bincount(ddl.data.digits("test")[1] % classes)
    return float(100 * counts.max() / counts.sum())


def loss_nearby(model: keras.Model, distance: float = 0.05) -> float:
    """Returns the training loss at the weights where it is highest nearby, to first order.

    Sharpness-aware minimization lowers it. The loss is that of configs/digits_cnn.gin on the
    training digits, in nats.

    Args:
      model: Maps images, float32 [n, 8, 8, 1] from 0 to 16, to logits [n, 10]; its weights move.
      distance: Norm of the change of the weights along the gradient.
    """
    images, labels = ddl.data.digits("train")
    targets = keras.ops.one_hot(labels, 10)
    cross_entropy = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

    def loss() -> tf.Tensor:
        return cross_entropy(targets, model(images.astype(np.float32), training=False))

    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        here = loss()
    gradients = tape.gradient(here, [v.value for v in variables])
    norm = tf.linalg.global_norm(gradients)
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_add(distance / norm * gradient)
    return float(loss())


def report(times: Sequence[Sequence[Cell]], learned: Sequence[tuple[str, Finding]]) -> Report:
    """Returns the report of the examples so far."""
    columns = ["example", "figure", "measured", "compared with", "measured"]
    tables = [
        Table("Trainings", ["example", "updates", "seconds"], times),
        Table("Results", columns, [[example, *finding[:4]] for example, finding in learned]),
    ]
    slowest = max(seconds for *_, seconds in times)
    bars = [Bar("seconds of the slowest example", slowest, SECONDS, "at most")]
    for example, finding in learned:
        if finding.is_target:
            what = f"{example}: {finding.figure}, minus that of {finding.alternative}"
            difference = middle(finding.value) - middle(finding.of_alternative)
            lower = finding.lower_is_better
            bars.append(Bar(what, difference, 0, "at most" if lower else "at least"))
        if finding.constant is not None:
            what = f"{example}: {finding.figure}: errors / those of the best constant answer"
            errors = (100 - middle(finding.value)) / (100 - finding.constant)
            bars.append(Bar(what, errors, 0.5, "at most"))
    return Report(tables, bars)


def bars_of_generators(judged: Table) -> list[Bar]:
    """Returns the targets of the generators: each must be nearer to the digits than pixels are.

    Args:
      judged: The table of `generated_digits.table`: training digits first, independent pixels last.
    """
    _, *generators, (_, independent, *_) = judged.rows
    what = "Fréchet distance of its digits / that of independent pixels"
    return [
        Bar(f"{name}: {what}", middle(distance) / middle(independent), 1, "at most")
        for name, distance, *_ in generators
    ]


def middle(cell: Cell) -> float:
    """Returns a figure, or the median of a spread."""
    return cell.median if isinstance(cell, Spread) else float(cell)


def measure(quick: bool) -> Iterator[Report]:
    """Trains the examples, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), quick)
        examples = Examples(runs, 2 if quick else SEEDS)
        times: list[list[Cell]] = []
        learned: list[tuple[str, Finding]] = []
        for example in EXAMPLES:
            run = examples.run(example)
            times.append([example, int(run.lines("train")[-1]["step"]), run.seconds])
            learned += [(example, finding) for finding in examples.findings(example)]
            yield report(times, learned)
        sources = {
            "training digits": generated_digits.digits("train"),
            **{
                name: generated_digits.generated(examples.run(example).model(model))
                for example, (name, model) in GENERATORS.items()
            },
            "independent pixels": generated_digits.independent_pixels(),
        }
        found = report(times, learned)
        judged = generated_digits.table(sources, examples.classifier())
        bars = [*found.bars, *bars_of_generators(judged)]
        shown = [generated_digits.shown(*source) for source in sources.items()]
        yield Report([*found.tables, judged], bars, images=shown[:-1])


if __name__ == "__main__":
    command.main(measure)
